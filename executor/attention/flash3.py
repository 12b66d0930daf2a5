"""Attention by FlashAttention 3 (the package `flash_attn_interface`, for Hopper).

One function serves decode rows, chunks and mixed batches alike: ragged queries, a page table, any block size.
Slots of a block past a context's end are multiplied by a probability of zero, so they must not hold NaNs.
"""

import importlib
from typing import Any, Final

import torch
from torch import Tensor

from executor.attention.base import AttentionMetadata, AttentionSpec, metadata_of, write_slots
from executor.attention.flash import function, mask_options, missing, unfit, wanted_arguments
from executor.attention.splits import num_splits
from executor.inputs import StepInputs
from executor.kv_cache import LayerCache
from executor.staging import StepArrays

MODULE: Final = "flash_attn_interface"
CONFIG_MODULE: Final = "flash_attn_config"
"""Beside it in newer packages: what was left out when it was built, which its functions say when called."""
FUNCTION: Final = "flash_attn_with_kvcache"
ARGUMENTS: Final = (
    *("q", "k_cache", "v_cache", "cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q"),
    *("softmax_scale", "causal", "num_splits"),
)
COMPILED_DIMS: Final = (64, 96, 128, 192, 256)
"""Sizes of heads that a build may have; a head gets the next larger one that it has."""
HEURISTIC: Final = 0
"""Of splits: the package chooses, by the lengths. Not for what is captured."""


def left_out(spec: AttentionSpec) -> str | None:
    """What this build of the package lacks for `spec`, as a clause; None when nothing, or nobody says."""
    try:
        flags: dict[str, Any] = importlib.import_module(CONFIG_MODULE).CONFIG["build_flags"]
    except Exception:  # noqa: BLE001 - older packages have no such module, and another one may have its name
        return None
    wanted = {"PAGEDKV": "pages", "VARLEN": "ragged queries", "SPLIT": "splits"}
    if spec.has_window:
        wanted["LOCAL"] = "windows"
    if spec.soft_cap is not None:
        wanted["SOFTCAP"] = "soft caps"
    if spec.dtype == torch.float16:
        wanted["FP16"] = "float16"
    lacking = [word for name, word in wanted.items() if flags.get(f"FLASHATTENTION_DISABLE_{name}")]
    if all(flags.get(f"FLASHATTENTION_DISABLE_HDIM{dim}") for dim in COMPILED_DIMS if dim >= spec.head_dim):
        lacking.append(f"heads of {spec.head_dim}")
    return f"this {MODULE} was built without {', '.join(lacking)}" if lacking else None


class Flash3Attention:
    """`AttentionBackend` by FlashAttention 3."""

    name = "flash3"
    block_size = 16
    can_be_captured = True
    needs_clean_tails = True

    @classmethod
    def refusal(cls, spec: AttentionSpec) -> str | None:
        """What it needs: Hopper, a half type, the package with all that this model takes."""
        return (
            unfit(spec, least=9, newest=9)
            or missing(MODULE, FUNCTION, (*ARGUMENTS, *wanted_arguments(spec)))
            or left_out(spec)
        )

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self._attend = function(MODULE, FUNCTION)

    def prepare(self, inputs: StepInputs, arrays: StepArrays) -> AttentionMetadata:
        """The step's metadata, with the number of splits."""
        is_decode = inputs.max_query_len == 1
        splits = num_splits(inputs.num_decodes, self.spec.num_kv_heads) if is_decode else HEURISTIC
        return metadata_of(inputs, arrays, self.spec.block_size, splits)

    write_kv = staticmethod(write_slots)

    def forward(
        self, query: Tensor, cache: LayerCache, metadata: AttentionMetadata, *, window: int | None
    ) -> Tensor:
        """One call for the whole batch."""
        output: Tensor = self._attend(
            q=query,
            k_cache=cache.keys,
            v_cache=cache.values,
            cache_seqlens=metadata.seq_lens,
            page_table=metadata.block_tables,
            cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_q=metadata.max_query_len,
            softmax_scale=self.spec.scale,
            causal=True,
            num_splits=metadata.plan,
            **mask_options(self.spec, window),
        )
        return output
