"""Attention in float64, one token at a time, as it is defined: what every back end is measured against."""

import numpy as np

from executor.inputs import StepInputs


def attention(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    inputs: StepInputs,
    *,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
) -> np.ndarray:
    """Attend `query` `[T, num_heads, head_dim]` to the paged `keys` and `values`, as `inputs` lays them out.

    The cache is `[num_blocks, block_size, num_kv_heads, head_dim]`, the new tokens' entries included. Returns
    float64 `[T, num_heads, head_dim]`.
    """
    num_tokens, num_heads, head_dim = query.shape
    block_size, num_kv_heads = keys.shape[1], keys.shape[2]
    output = np.zeros((num_tokens, num_heads, head_dim))
    for row in range(len(inputs.seq_lens)):
        for token in range(inputs.query_start_loc[row], inputs.query_start_loc[row + 1]):
            end = inputs.positions[token] + 1
            context = np.arange(0 if window is None else max(0, end - window), end)
            blocks = inputs.block_tables[row, context // block_size]
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                head_keys = keys[blocks, context % block_size, kv_head].astype(np.float64)
                head_values = values[blocks, context % block_size, kv_head].astype(np.float64)
                scores = head_keys @ query[token, head].astype(np.float64) * scale
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                weights = np.exp(scores - scores.max())
                output[token, head] = weights @ head_values / weights.sum()
    return output
