"""Attention by FlashAttention 2 (the package `flash_attn`, the extra `gpu`).

It uses two functions: `flash_attn_with_kvcache`, which splits the work over the context, if every row has one
query token, and `flash_attn_varlen_func` with a block table for all other steps. Both take only blocks whose
size is a multiple of 256 tokens.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from executor.attention.base import AttentionMetadata, AttentionSpec, metadata_of, write_slots
from executor.attention.flash import function, mask_options, missing, unfit, wanted_arguments
from executor.attention.splits import num_splits
from executor.inputs import StepInputs
from executor.kv_cache import LayerCache
from executor.staging import StepArrays

MODULE: Final = "flash_attn"
BLOCK_MULTIPLE: Final = 256
DECODE: Final = "flash_attn_with_kvcache"
DECODE_ARGUMENTS: Final = (
    *("q", "k_cache", "v_cache", "cache_seqlens", "block_table", "softmax_scale", "causal", "num_splits"),
)
RAGGED: Final = "flash_attn_varlen_func"
RAGGED_ARGUMENTS: Final = (
    *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    *("softmax_scale", "causal", "block_table"),
)


@dataclass(frozen=True, slots=True)
class Flash2Plan:
    """`cu_seqlens_k` of a step that is ragged, int32 `[R + 1]`; the splits of one that is not."""

    cu_seqlens_k: Tensor | None
    num_splits: int


class Flash2Attention:
    """`AttentionBackend` by FlashAttention 2."""

    name = "flash2"
    block_size = BLOCK_MULTIPLE
    can_be_captured = True
    needs_clean_tails = False

    @classmethod
    def refusal(cls, spec: AttentionSpec) -> str | None:
        """What it needs: Ampere or newer, a half type, large blocks, the package."""
        if (refusal := unfit(spec, least=8)) is not None:
            return refusal
        if spec.block_size % BLOCK_MULTIPLE:
            return f"block_size {spec.block_size} is not a multiple of {BLOCK_MULTIPLE}"
        wanted = wanted_arguments(spec)
        return missing(MODULE, DECODE, (*DECODE_ARGUMENTS, *wanted)) or missing(
            MODULE, RAGGED, (*RAGGED_ARGUMENTS, *wanted)
        )

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self._attend_decodes = function(MODULE, DECODE)
        self._attend_ragged = function(MODULE, RAGGED)

    def prepare(self, inputs: StepInputs, arrays: StepArrays) -> AttentionMetadata:
        """The step's metadata, with what the one or the other function reads."""
        if inputs.max_query_len == 1:
            plan = Flash2Plan(None, num_splits(inputs.num_decodes, self.spec.num_kv_heads))
        else:
            cu_seqlens_k = torch.zeros_like(arrays.query_start_loc)
            torch.cumsum(arrays.seq_lens, 0, dtype=torch.int32, out=cu_seqlens_k[1:])
            plan = Flash2Plan(cu_seqlens_k, 1)
        return metadata_of(inputs, arrays, self.spec.block_size, plan)

    write_kv = staticmethod(write_slots)

    def forward(
        self, query: Tensor, cache: LayerCache, metadata: AttentionMetadata, *, window: int | None
    ) -> Tensor:
        """One call for the whole batch."""
        plan: Flash2Plan = metadata.plan
        spec = self.spec
        if plan.cu_seqlens_k is None:
            decoded: Tensor = self._attend_decodes(
                q=query.unsqueeze(1),
                k_cache=cache.keys,
                v_cache=cache.values,
                cache_seqlens=metadata.seq_lens,
                block_table=metadata.block_tables,
                softmax_scale=spec.scale,
                causal=True,
                num_splits=plan.num_splits,
                **mask_options(spec, window),
            )
            return decoded.squeeze(1)
        output: Tensor = self._attend_ragged(
            q=query,
            k=cache.keys,
            v=cache.values,
            cu_seqlens_q=metadata.query_start_loc,
            cu_seqlens_k=plan.cu_seqlens_k,
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_seq_len,
            softmax_scale=spec.scale,
            causal=True,
            block_table=metadata.block_tables,
            **mask_options(spec, window),
        )
        return output
