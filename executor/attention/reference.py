"""Attention in plain torch: gathers a row's blocks into one context and calls scaled dot product attention.

Works on every device and with every number type; the other back ends are tested against it.

Rows with several query tokens (chunks) run one by one: few and large. Decode rows run together, in groups of
similar context length, because a padded batch costs what its longest row costs:

    group of contexts up to 1, 2, 4, 8, … blocks  ->  at most half of a group's gathered slots are padding

Slots past a row's context hold whatever was there before, and even a masked NaN would spread (0 x NaN): they
are zeroed in the gathered copy.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from executor.attention.base import AttentionMetadata, AttentionSpec, metadata_of, write_slots
from executor.inputs import StepInputs
from executor.kv_cache import LayerCache
from executor.staging import StepArrays


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows whose contexts have similar lengths: G rows of at most L slots."""

    rows: Tensor
    """int64 `[G]`: the rows, which are also their tokens' places, for decode rows come first"""
    block_tables: Tensor
    """int64 `[G, L / block_size]`"""
    padding: Tensor
    """bool `[G, 1, L, 1]`: slots past the row's context"""
    mask: Tensor
    """bool `[G, 1, 1, L]`: slots the query attends to"""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A row with Q query tokens, the last of a context of L tokens."""

    start: int
    end: int
    """its tokens are `[start, end)` of the step's"""
    seq_len: int
    block_table: Tensor
    """int64 `[ceil(L / block_size)]`"""
    mask: Tensor
    """bool `[Q, L]`: what each query attends to"""


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """A step's rows, sorted into groups and chunks."""

    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]


class ReferenceAttention:
    """`AttentionBackend` in plain torch."""

    name = "reference"
    block_size = 16
    can_be_captured = False  # its groups depend on the lengths
    needs_clean_tails = False

    @classmethod
    def refusal(cls, spec: AttentionSpec) -> str | None:  # noqa: ARG003 - it serves everything
        """It serves everything."""
        return None

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        if spec.device.type == "cuda":
            # On Hopper torch takes cuDNN first, which builds a plan for each shape: contexts grow, so that
            # nearly every step would wait for several.
            torch.backends.cuda.enable_cudnn_sdp(enabled=False)

    def prepare(self, inputs: StepInputs, arrays: StepArrays) -> AttentionMetadata:
        """The step's metadata, with its rows sorted into groups and chunks."""
        plan = ReferencePlan(self._groups(inputs), self._chunks(inputs))
        return metadata_of(inputs, arrays, self.spec.block_size, plan)

    write_kv = staticmethod(write_slots)

    def forward(
        self, query: Tensor, cache: LayerCache, metadata: AttentionMetadata, *, window: int | None
    ) -> Tensor:
        """Attend to the cached contexts."""
        plan: ReferencePlan = metadata.plan
        output = torch.empty_like(query)
        for group in plan.groups:
            output[group.rows] = self._attend_group(query[group.rows], cache, group, window)
        for chunk in plan.chunks:
            tokens = slice(chunk.start, chunk.end)
            output[tokens] = self._attend_chunk(query[tokens], cache, chunk, window)
        return output

    def _groups(self, inputs: StepInputs) -> tuple[DecodeGroup, ...]:
        num_decodes, block_size = inputs.num_decodes, self.spec.block_size
        seq_lens = inputs.seq_lens[:num_decodes].astype(np.int64)
        num_blocks = -(-seq_lens // block_size)
        group_of_row = np.ceil(np.log2(num_blocks)).astype(np.int64)
        return tuple(
            self._group(np.flatnonzero(group_of_row == group), num_blocks, inputs)
            for group in np.unique(group_of_row)
        )

    def _group(self, rows: np.ndarray, num_blocks: np.ndarray, inputs: StepInputs) -> DecodeGroup:
        device = self.spec.device
        width = int(num_blocks[rows].max())
        slots = np.arange(width * self.spec.block_size)
        mask = torch.from_numpy(slots[None, :] < inputs.seq_lens[rows, None]).to(device)
        return DecodeGroup(
            rows=torch.from_numpy(rows).to(device),
            block_tables=torch.from_numpy(inputs.block_tables[rows, :width].astype(np.int64)).to(device),
            padding=~mask[:, None, :, None],
            mask=mask[:, None, None, :],
        )

    def _chunks(self, inputs: StepInputs) -> tuple[Chunk, ...]:
        rows = range(inputs.num_decodes, len(inputs.seq_lens))
        return tuple(self._chunk(row, inputs) for row in rows)

    def _chunk(self, row: int, inputs: StepInputs) -> Chunk:
        device = self.spec.device
        start, end = int(inputs.query_start_loc[row]), int(inputs.query_start_loc[row + 1])
        seq_len = int(inputs.seq_lens[row])
        num_blocks = -(-seq_len // self.spec.block_size)
        query_positions = np.arange(seq_len - (end - start), seq_len)
        return Chunk(
            start=start,
            end=end,
            seq_len=seq_len,
            block_table=torch.from_numpy(inputs.block_tables[row, :num_blocks].astype(np.int64)).to(device),
            mask=torch.from_numpy(np.arange(seq_len)[None, :] <= query_positions[:, None]).to(device),
        )

    def _attend_group(
        self, query: Tensor, cache: LayerCache, group: DecodeGroup, window: int | None
    ) -> Tensor:
        # The query heads that share a key-value head become its query tokens: they see the same context.
        num_rows, num_heads, head_dim = query.shape
        queries = query.view(num_rows, self.spec.num_kv_heads, -1, head_dim)
        keys = _gathered(cache.keys, group.block_tables).masked_fill_(group.padding, 0.0)
        values = _gathered(cache.values, group.block_tables).masked_fill_(group.padding, 0.0)
        mask = group.mask
        if window is not None:
            slots = torch.arange(mask.shape[-1], device=mask.device)
            mask = mask & (slots >= mask.sum(dim=-1, keepdim=True) - window)
        return self._attend(queries, keys, values, mask).reshape(num_rows, num_heads, head_dim)

    def _attend_chunk(self, query: Tensor, cache: LayerCache, chunk: Chunk, window: int | None) -> Tensor:
        table = chunk.block_table.unsqueeze(0)
        group_size = self.spec.num_heads // self.spec.num_kv_heads
        keys, values = (
            _gathered(side, table)[:, :, : chunk.seq_len].repeat_interleave(group_size, dim=1)
            for side in (cache.keys, cache.values)
        )
        mask = chunk.mask
        if window is not None:
            num_before = mask.shape[1] - mask.shape[0]
            mask = mask & ~mask.tril(num_before - window)
        return self._attend(query.transpose(0, 1).unsqueeze(0), keys, values, mask).squeeze(0).transpose(0, 1)

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Attention of `[G, H, Q, head_dim]` to `[G, H, L, head_dim]` where `mask` allows it."""
        scale, cap = self.spec.scale, self.spec.soft_cap
        if cap is None:
            return functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
        scores = cap * torch.tanh((query.float() @ keys.float().transpose(-1, -2)) * scale / cap)
        weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
        return (weights @ values.float()).to(query.dtype)


def _gathered(cache: Tensor, block_tables: Tensor) -> Tensor:
    """Copies of the contexts in `block_tables` `[G, B]`: `[G, num_kv_heads, B * block_size, head_dim]`."""
    num_rows, num_blocks = block_tables.shape
    _, block_size, num_kv_heads, head_dim = cache.shape
    blocks = cache.transpose(1, 2)[block_tables]  # [G, B, num_kv_heads, block_size, head_dim]
    return blocks.transpose(1, 2).reshape(num_rows, num_kv_heads, num_blocks * block_size, head_dim)
