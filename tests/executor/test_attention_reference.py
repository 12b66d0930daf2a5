from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.attention.reference import ReferenceAttention
from executor.inputs import build_inputs
from executor.plan import SamplingParams
from executor.rows import Row, SampleRow
from executor.staging import on_device
from tests.executor.attending import cache_for, relative_error, run, spec, step_inputs
from tests.rig import attention_oracle

torch.set_num_threads(1)


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
    plan = ReferenceAttention(spec()).prepare(inputs, on_device(inputs, torch.device("cpu"))).plan
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
        Row(1, [0], 20, np.array([2, 0], dtype=np.int32), (SampleRow(params, 0, ()),)),
        Row(2, [0] * 3, 18, np.array([2, 1], dtype=np.int32), (SampleRow(params, 0, ()),)),
    ]
    inputs = build_inputs(rows, 16).inputs
    backend = ReferenceAttention(shared)
    query = torch.from_numpy(rng.standard_normal((4, shared.num_heads, shared.head_dim))).float()
    result = backend.forward(
        query, layer, backend.prepare(inputs, on_device(inputs, shared.device)), window=None
    )
    expected = attention_oracle.attention(
        query.numpy(), layer.keys.numpy(), layer.values.numpy(), inputs, scale=shared.scale
    )
    assert relative_error(result.numpy(), expected) < 1e-5


def test_on_a_gpu_it_takes_no_kernel_that_is_planned_anew_for_each_shape() -> None:
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(enabled=True)
    try:
        ReferenceAttention(spec())
        assert torch.backends.cuda.cudnn_sdp_enabled()
        ReferenceAttention(replace(spec(), device=torch.device("cuda")))
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)
