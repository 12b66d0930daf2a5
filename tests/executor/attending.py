"""Attends random queries to random contexts, beside float64: what the tests of all back ends share."""

import numpy as np
import torch

from executor.attention.base import AttentionBackend, AttentionSpec
from executor.attention.reference import ReferenceAttention
from executor.inputs import StepInputs, build_inputs
from executor.kv_cache import KVCache
from executor.model.config import LayerKind, ModelConfig, Rope
from executor.plan import SamplingParams
from executor.rows import Row, SampleRow
from executor.staging import on_device
from tests.rig import attention_oracle


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
            Row(
                seq_id,
                [0] * query_len,
                seq_len - query_len,
                block_ids,
                (SampleRow(SamplingParams(max_tokens=1), 0, ()),),
            )
        )
    return build_inputs(rows, block_size).inputs


def run(
    spec: AttentionSpec,
    lengths: list[tuple[int, int]],
    rng: np.random.Generator,
    *,
    unused: float = 0.0,
    window: int | None = None,
    backend: AttentionBackend | None = None,
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
    backend = backend or ReferenceAttention(spec)
    metadata = backend.prepare(inputs, on_device(inputs, spec.device))
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
