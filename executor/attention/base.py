"""The door behind which attention back ends stand, and what each of them reads.

The metadata is made once per step and is the same for all layers and for every back end. It has the form that
the flash-attn kernels take: ragged queries (`query_start_loc` is their `cu_seqlens_q`), `seq_lens` (their
`cache_seqlens` or `seqused_k`; its running sum is `cu_seqlens_k`) and int32 block tables whose last dimension
is contiguous. Queries are the last tokens of their sequences: the causal mask is aligned to the bottom right.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
import torch
from torch import Tensor

from executor.inputs import StepInputs
from executor.kv_cache import LayerCache
from executor.model.errors import ModelError

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

    @classmethod
    def refusal(cls, spec: AttentionSpec) -> str | None:
        """Why this back end cannot serve `spec`, as a clause for people; None when it can."""

    def __init__(self, spec: AttentionSpec) -> None: ...

    def prepare(self, inputs: StepInputs) -> AttentionMetadata:
        """The step's metadata, on the device."""

    def write_kv(self, cache: LayerCache, keys: Tensor, values: Tensor, metadata: AttentionMetadata) -> None:
        """Put the new tokens' `keys` and `values`, `[T, num_kv_heads, head_dim]`, into their slots."""

    def forward(
        self, query: Tensor, cache: LayerCache, metadata: AttentionMetadata, *, window: int | None
    ) -> Tensor:
        """Attend `query` `[T, num_heads, head_dim]` to the cached contexts; the result has the same shape.

        With a `window`, a token sees itself and the `window - 1` tokens before it.
        """


def select_backend(candidates: Sequence[type[AttentionBackend]], spec: AttentionSpec) -> AttentionBackend:
    """The first of `candidates` that can serve `spec`; logs it, with why the earlier ones cannot.

    Raises `ModelError` when none can.
    """
    refusals: dict[str, str] = {}
    for candidate in candidates:
        refusal = candidate.refusal(spec)
        if refusal is None:
            log.info("attention_selected", backend=candidate.name, refused=refusals)
            return candidate(spec)
        refusals[candidate.name] = refusal
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    raise ModelError(f"no attention back end can serve this model on {spec.device.type} ({reasons}).")
