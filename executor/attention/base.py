"""The interface of attention back ends, and the metadata that each of them reads.

The metadata is made once per step and is the same for all layers and for every back end. It has the form that
the flash-attn kernels take: ragged queries (`query_start_loc` is their `cu_seqlens_q`), `seq_lens` (their
`cache_seqlens` or `seqused_k`; its running sum is `cu_seqlens_k`) and int32 block tables whose last dimension
is contiguous. Queries are the last tokens of their sequences: the causal mask is aligned to the bottom right.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
import torch
from torch import Tensor

from executor.inputs import StepInputs
from executor.kv_cache import LayerCache
from executor.model.errors import ModelError
from executor.staging import StepArrays

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What attention a model on a device needs."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    """what the products of queries and keys are multiplied with"""
    soft_cap: float | None = None
    """c, where scores are `c * tanh(scores / c)`"""
    has_window: bool = False
    """whether a layer sees a window of its context"""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step's batch: R rows, decode rows (one query token) first. Tensors are on the device.

    `plan` is what the back end itself worked out from the rest, once, for all layers.
    """

    query_start_loc: Tensor
    """int32 `[R + 1]`"""
    seq_lens: Tensor
    """int32 `[R]`, the new tokens included"""
    block_tables: Tensor
    """int32 `[R, max_blocks]`"""
    slot_blocks: Tensor
    """int64 `[T]`: block of each new token's slot"""
    slot_offsets: Tensor
    """int64 `[T]`: place of each new token's slot in its block"""
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    plan: Any


class AttentionBackend(Protocol):
    """Attention over a paged cache."""

    name: str
    spec: AttentionSpec
    block_size: int
    """The smallest block it takes, which is what it gets unless another one is asked for."""
    can_be_captured: bool
    """Whether a decode step's work depends on nothing but tensors and the number of rows: so that it can be
    captured once and done again for other sequences."""
    needs_clean_tails: bool
    """Whether it multiplies what lies in a context's last block behind its end, with a probability of zero:
    a NaN that a block's last owner left there would be carried into another row."""

    @classmethod
    def refusal(cls, spec: AttentionSpec) -> str | None:
        """Why this back end cannot serve `spec`, as a clause for people; None when it can."""

    def __init__(self, spec: AttentionSpec) -> None: ...

    def prepare(self, inputs: StepInputs, arrays: StepArrays) -> AttentionMetadata:
        """The step's metadata, from its arrays on the host and on the device."""

    def write_kv(self, cache: LayerCache, keys: Tensor, values: Tensor, metadata: AttentionMetadata) -> None:
        """Put the new tokens' `keys` and `values`, `[T, num_kv_heads, head_dim]`, into their slots."""

    def forward(
        self, query: Tensor, cache: LayerCache, metadata: AttentionMetadata, *, window: int | None
    ) -> Tensor:
        """Attend `query` `[T, num_heads, head_dim]` to the cached contexts; the result has the same shape.

        With a `window`, a token sees itself and the `window - 1` tokens before it.
        """


def metadata_of(
    inputs: StepInputs, arrays: StepArrays, block_size: int, plan: Any = None
) -> AttentionMetadata:
    """The metadata as every back end has it, and what one worked out itself."""
    return AttentionMetadata(
        query_start_loc=arrays.query_start_loc,
        seq_lens=arrays.seq_lens,
        block_tables=arrays.block_tables,
        slot_blocks=arrays.slot_mapping // block_size,
        slot_offsets=arrays.slot_mapping % block_size,
        num_decodes=inputs.num_decodes,
        max_query_len=inputs.max_query_len,
        max_seq_len=inputs.max_seq_len,
        plan=plan,
    )


def write_slots(cache: LayerCache, keys: Tensor, values: Tensor, metadata: AttentionMetadata) -> None:
    """Put the new tokens' `keys` and `values`, `[T, num_kv_heads, head_dim]`, into their slots."""
    cache.keys[metadata.slot_blocks, metadata.slot_offsets] = keys
    cache.values[metadata.slot_blocks, metadata.slot_offsets] = values


def select_backend(
    candidates: Sequence[type[AttentionBackend]], spec_of: Callable[[int], AttentionSpec]
) -> AttentionBackend:
    """The first of `candidates` that can serve; logs it, with why the earlier ones cannot.

    `spec_of` says what is needed, given the size of a candidate's own blocks. Raises `ModelError` when none
    can.
    """
    refusals: dict[str, str] = {}
    for candidate in candidates:
        spec = spec_of(candidate.block_size)
        refusal = candidate.refusal(spec)
        if refusal is None:
            log.info(
                "attention_selected", backend=candidate.name, block_size=spec.block_size, refused=refusals
            )
            return candidate(spec)
        refusals[candidate.name] = refusal
    device = spec_of(1).device.type
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    raise ModelError(f"no attention back end can serve this model on {device} ({reasons}).")


def named_backend(candidates: Sequence[type[AttentionBackend]], name: str) -> type[AttentionBackend]:
    """The candidate of that name. Raises `ModelError` when there is none."""
    for candidate in candidates:
        if candidate.name == name:
            return candidate
    names = ", ".join(candidate.name for candidate in candidates)
    raise ModelError(f"attention {name!r} is not known; there are {names}.")
