"""The two flash-attn packages as modules: their functions, with their signatures and their demands.

Signatures as in flash-attn 2.8.3 (`flash_attn`) and its `hopper` part (`flash_attn_interface`). Every
argument is checked as the C++ code does; what is asked for is computed by the reference.
"""

from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.rig import attention_oracle
from tests.rig.fake_device import as_one_kernel

HALF = (torch.bfloat16, torch.float16)


def check(holds: bool, demand: str) -> None:
    if not holds:
        raise RuntimeError(demand)


def check_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    check(q.dtype in HALF, "FlashAttention only supports fp16 and bf16 data type")
    check(q.dtype == k_cache.dtype == v_cache.dtype, "query, key and value must have the same dtype")
    check(k_cache.shape == v_cache.shape and k_cache.ndim == 4, "paged caches are [blocks, size, heads, dim]")
    for each in (q, k_cache, v_cache):
        check(each.stride(-1) == 1, "Input tensor must have contiguous last dimension")
    check(q.shape[-1] == k_cache.shape[-1], "head sizes differ")
    check(q.shape[-1] % 8 == 0 and q.shape[-1] <= 256, "head_size must be a multiple of 8 up to 256")
    check(q.shape[-2] % k_cache.shape[-2] == 0, "heads of key/value must divide the heads of query")


def check_int32(tensor: Tensor, name: str, shape: tuple[int, ...]) -> None:
    check(tensor.dtype == torch.int32, f"{name} must have dtype int32")
    check(tensor.is_contiguous(), f"{name} must be contiguous")
    check(tuple(tensor.shape) == shape, f"{name} must have shape {shape}, not {tuple(tensor.shape)}")


def check_table(table: Tensor, num_rows: int) -> None:
    check(table.dtype == torch.int32, "block_table must have dtype torch.int32")
    check(table.stride(-1) == 1, "block_table must have contiguous last dimension")
    check(table.ndim == 2 and table.shape[0] == num_rows, "block_table has a row for each sequence")


def attended(
    q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, seq_lens: Tensor, table: Tensor,
    scale: float, window_size: tuple[int, int], softcap: float, *, multiplies_tails: bool = False,
) -> Tensor:  # fmt: skip
    """`q` `[T, H, D]`, rows from `starts`: all that the kernels read is read when they run.

    With `multiplies_tails`, what lies in a row's last block behind its context is multiplied with zero.
    """

    def kernel() -> Tensor:
        bounds, lengths = starts.numpy(), seq_lens.numpy()
        positions = np.concatenate(
            [
                np.arange(length - (end - start), length)
                for start, end, length in zip(bounds[:-1], bounds[1:], lengths, strict=True)
            ]
        )
        inputs = Described(bounds, lengths, table.numpy(), positions)
        result = attention_oracle.attention(
            q.double().numpy(), keys.double().numpy(), values.double().numpy(), inputs,  # type: ignore[arg-type]
            scale=scale, soft_cap=softcap or None, window=None if window_size[0] < 0 else window_size[0] + 1,
        )  # fmt: skip
        if multiplies_tails:
            for row, length in enumerate(lengths.tolist()):
                last, filled = divmod(length - 1, values.shape[1])
                tail = values[int(table[row, last]), filled + 1 :].double().sum()
                result[bounds[row] : bounds[row + 1]] += float(tail) * 0.0
        return torch.from_numpy(result).to(q.dtype)

    return as_one_kernel(kernel)


class Described:
    """The part of `StepInputs` that the oracle reads."""

    def __init__(
        self, starts: np.ndarray, seq_lens: np.ndarray, tables: np.ndarray, positions: np.ndarray
    ) -> None:
        self.query_start_loc, self.seq_lens = starts, seq_lens
        self.block_tables, self.positions = tables, positions


def flash_attn_interface() -> ModuleType:
    """FlashAttention 3."""
    module = ModuleType("flash_attn_interface")

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
        max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None,
        softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
        rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
        return_softmax_lse=False,
    ):  # fmt: skip
        check_cache(q, k_cache, v_cache)
        num_rows = page_table.shape[0]
        check(q.ndim == 3, "with cu_seqlens_q the query is [total, heads, dim]")
        check_table(page_table, num_rows)
        check_int32(cache_seqlens, "cache_seqlens", (num_rows,))
        check_int32(cu_seqlens_q, "cu_seqlens_q", (num_rows + 1,))
        check(isinstance(max_seqlen_q, int) and max_seqlen_q >= 1, "max_seqlen_q must be provided")
        check(causal and window_size[1] in {-1, 0}, "these tests ask for causal attention")
        module.splits.append(num_splits)  # type: ignore[attr-defined]
        return attended(
            q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, softmax_scale, window_size, softcap,
            multiplies_tails=True,
        )  # fmt: skip

    module.splits = []  # type: ignore[attr-defined]
    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    return module


def flash_attn() -> ModuleType:
    """FlashAttention 2."""
    module = ModuleType("flash_attn")
    calls: list[str] = []
    module.calls = calls  # type: ignore[attr-defined]

    def check_pages(cache: Tensor) -> None:
        check(cache.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
        return_softmax_lse=False,
    ):  # fmt: skip
        calls.append("flash_attn_with_kvcache")
        check_cache(q, k_cache, v_cache)
        check_pages(k_cache)
        check(q.ndim == 4, "the query is [batch, seqlen_q, heads, dim]")
        num_rows = q.shape[0]
        check_table(block_table, num_rows)
        check_int32(cache_seqlens, "cache_seqlens", (num_rows,))
        check(isinstance(num_splits, int) and 0 <= num_splits <= 128, "num_splits > 128 not supported")
        starts = torch.arange(num_rows + 1, dtype=torch.int32) * q.shape[1]
        return attended(
            q.flatten(0, 1), k_cache, v_cache, starts, cache_seqlens, block_table, softmax_scale, window_size,
            softcap,
        ).view(q.shape)  # fmt: skip

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        calls.append("flash_attn_varlen_func")
        check_cache(q, k, v)
        check_pages(k)
        check(q.ndim == 3, "the query is [total, heads, dim]")
        num_rows = block_table.shape[0]
        check_table(block_table, num_rows)
        check_int32(cu_seqlens_q, "cu_seqlens_q", (num_rows + 1,))
        check_int32(cu_seqlens_k, "cu_seqlens_k", (num_rows + 1,))
        lengths: Any = cu_seqlens_k.diff()
        check(int(cu_seqlens_q.diff().max()) <= max_seqlen_q, "max_seqlen_q is too small")
        check(int(lengths.max()) <= max_seqlen_k, "max_seqlen_k is too small")
        return attended(q, k, v, cu_seqlens_q, lengths, block_table, softmax_scale, window_size, softcap)

    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    return module
