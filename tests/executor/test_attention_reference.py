import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.attention.base import AttentionSpec, select_backend
from executor.attention.reference import ReferenceAttention
from executor.inputs import StepInputs, build_inputs
from executor.kv_cache import KVCache
from executor.model import ModelError
from executor.model.config import LayerKind, ModelConfig, Rope
from executor.sequences import Row, SamplingParams
from tests.rig import attention_oracle

torch.set_num_threads(1)


def spec(
    num_kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    soft_cap: float | None = None,
) -> AttentionSpec:
    return AttentionSpec(
        device=torch.device("cpu"),
        dtype=dtype,
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        scale=head_dim**-0.5,
        soft_cap=soft_cap,
    )


def cache_for(spec: AttentionSpec, num_blocks: int) -> KVCache:
    config = ModelConfig(
        vocab_size=8,
        hidden_size=spec.num_heads * spec.head_dim,
        intermediate_size=8,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_seq_len=1024,
        rms_norm_eps=1e-5,
        layers=(LayerKind(Rope(1e4)),),
        tie_word_embeddings=True,
        attention_scale=spec.scale,
    )
    return KVCache(
        config, num_blocks=num_blocks, block_size=spec.block_size, dtype=spec.dtype, device=spec.device
    )


def step_inputs(
    lengths: list[tuple[int, int]], block_size: int, num_blocks: int, rng: np.random.Generator
) -> StepInputs:
    """Rows of (query tokens, context tokens) on random blocks."""
    free = list(rng.permutation(num_blocks))
    rows = []
    for seq_id, (query_len, seq_len) in enumerate(lengths, start=1):
        block_ids = np.array([free.pop() for _ in range(-(-seq_len // block_size))], dtype=np.int32)
        rows.append(
            Row(seq_id, [0] * query_len, seq_len - query_len, block_ids, SamplingParams(max_tokens=1), 0, ())
        )
    return build_inputs(rows, block_size).inputs


def run(
    spec: AttentionSpec,
    lengths: list[tuple[int, int]],
    rng: np.random.Generator,
    *,
    unused: float = 0.0,
    window: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attend random queries to random contexts; what no context covers is filled with `unused`."""
    num_blocks = sum(-(-seq_len // spec.block_size) for _, seq_len in lengths) + 2
    inputs = step_inputs(lengths, spec.block_size, num_blocks, rng)
    layer = cache_for(spec, num_blocks).layer(0)
    layer.keys.fill_(unused)
    layer.values.fill_(unused)
    starts = np.arange(len(inputs.seq_lens))
    for row in starts:
        context = np.arange(inputs.seq_lens[row])
        blocks = torch.from_numpy(inputs.block_tables[row, context // spec.block_size].astype(np.int64))
        offsets = torch.from_numpy(context % spec.block_size)
        shape = (len(context), spec.num_kv_heads, spec.head_dim)
        for side in (layer.keys, layer.values):
            side[blocks, offsets] = torch.from_numpy(rng.standard_normal(shape)).to(spec.dtype)
    num_tokens = len(inputs.token_ids)
    backend = ReferenceAttention(spec)
    metadata = backend.prepare(inputs)
    fresh = [
        torch.from_numpy(rng.standard_normal((num_tokens, spec.num_kv_heads, spec.head_dim))).to(spec.dtype)
        for _ in range(2)
    ]
    backend.write_kv(layer, *fresh, metadata)
    query = torch.from_numpy(rng.standard_normal((num_tokens, spec.num_heads, spec.head_dim))).to(spec.dtype)
    result = backend.forward(query, layer, metadata, window=window)
    assert result.shape == query.shape
    expected = attention_oracle.attention(
        query.double().numpy(),
        layer.keys.double().numpy(),
        layer.values.double().numpy(),
        inputs,
        scale=spec.scale,
        soft_cap=spec.soft_cap,
        window=window,
    )
    return result.double().numpy(), expected


def relative_error(result: np.ndarray, expected: np.ndarray) -> float:
    return np.linalg.norm(result - expected) / np.linalg.norm(expected)


rows_of_a_step = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 70)).map(lambda row: (row[0], row[0] + row[1])),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40, deadline=None)
@given(
    lengths=rows_of_a_step,
    num_kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 3, 4]),
    head_dim=st.sampled_from([8, 64]),
    block_size=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 2**32 - 1),
)
def test_mixed_batches_equal_float64_and_never_read_unused_slots(
    lengths: list[tuple[int, int]], num_kv_heads: int, group: int, head_dim: int, block_size: int, seed: int
) -> None:
    result, expected = run(
        spec(num_kv_heads, group, head_dim, block_size), lengths, np.random.default_rng(seed), unused=np.nan
    )
    assert relative_error(result, expected) < 1e-5


@settings(max_examples=20, deadline=None)
@given(
    lengths=rows_of_a_step,
    window=st.sampled_from([None, 1, 5, 16, 40]),
    soft_cap=st.sampled_from([None, 0.5, 50.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_sliding_windows_and_soft_caps_equal_float64(
    lengths: list[tuple[int, int]], window: int | None, soft_cap: float | None, seed: int
) -> None:
    result, expected = run(
        spec(soft_cap=soft_cap), lengths, np.random.default_rng(seed), unused=np.nan, window=window
    )
    assert relative_error(result, expected) < 1e-5


def test_bfloat16_stays_within_its_rounding() -> None:
    lengths = [(1, 1), (1, 33), (1, 100), (16, 16), (20, 75)]
    result, expected = run(spec(3, 3, 64, dtype=torch.bfloat16), lengths, np.random.default_rng(0))
    assert relative_error(result, expected) < 5e-3


def test_decode_rows_of_very_different_lengths_share_no_padding() -> None:
    inputs = step_inputs([(1, 1000), (1, 3), (1, 17), (1, 16), (1, 20)], 16, 80, np.random.default_rng(0))
    plan = ReferenceAttention(spec()).prepare(inputs).plan
    groups = {tuple(group.rows.tolist()): group.block_tables.shape[1] for group in plan.groups}
    assert groups == {(0,): 63, (1, 3): 1, (2, 4): 2}


def test_sequences_may_share_blocks_of_a_common_prefix() -> None:
    shared = spec()
    rng = np.random.default_rng(1)
    layer = cache_for(shared, 4).layer(0)
    for side in (layer.keys, layer.values):
        side.copy_(torch.from_numpy(rng.standard_normal(side.shape)))
    params = SamplingParams(max_tokens=1)
    rows = [
        Row(1, [0], 20, np.array([2, 0], dtype=np.int32), params, 0, ()),
        Row(2, [0] * 3, 18, np.array([2, 1], dtype=np.int32), params, 0, ()),
    ]
    inputs = build_inputs(rows, 16).inputs
    backend = ReferenceAttention(shared)
    query = torch.from_numpy(rng.standard_normal((4, shared.num_heads, shared.head_dim))).float()
    result = backend.forward(query, layer, backend.prepare(inputs), window=None)
    expected = attention_oracle.attention(
        query.numpy(), layer.keys.numpy(), layer.values.numpy(), inputs, scale=shared.scale
    )
    assert relative_error(result.numpy(), expected) < 1e-5


class Picky:
    name = "picky"

    @classmethod
    def refusal(cls, spec: AttentionSpec) -> str:
        return "head_dim must be 7"


def test_the_first_back_end_that_can_serve_is_taken() -> None:
    assert isinstance(select_backend([Picky, ReferenceAttention], spec()), ReferenceAttention)


def test_when_none_can_serve_each_one_says_why() -> None:
    with pytest.raises(ModelError, match="picky: head_dim must be 7"):
        select_backend([Picky], spec())
