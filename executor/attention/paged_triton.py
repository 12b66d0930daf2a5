"""Attention by our own Triton kernels: what a GPU can use without any package besides torch.

There are two kinds of rows: decode rows, whose contexts are cut into parts, and chunks. A step with both
takes two calls.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

import torch
from torch import Tensor

from executor.attention.base import AttentionMetadata, AttentionSpec, metadata_of, write_slots
from executor.attention.splits import num_splits
from executor.inputs import StepInputs
from executor.kv_cache import LayerCache
from executor.staging import StepArrays

TYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
MOST_HEAD_DIM: Final = 256
MOST_GROUP: Final = 64
"""Query heads that share a key-value head: one tile of queries."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a kernel is cut: rows of queries, positions of the context, warps, stages of its loop."""

    rows: int
    positions: int
    num_warps: int
    num_stages: int


def decode_tiles(group: int) -> Tiles:
    """Of rows with one token; sixteen is the least that a matrix unit takes."""
    return Tiles(rows=max(16, power_of_two(group)), positions=64, num_warps=4, num_stages=3)


def chunk_tiles(group: int, dtype: torch.dtype) -> Tiles:
    """Of rows with many."""
    rows = max(64, power_of_two(group))
    return Tiles(rows, 32, 4, 2) if dtype == torch.float32 else Tiles(rows, 64, 4, 2)


def power_of_two(count: int) -> int:
    """The next one."""
    return 1 << (count - 1).bit_length()


class TritonAttention:
    """`AttentionBackend` by our own kernels."""

    name = "triton"
    block_size = 16
    can_be_captured = True
    needs_clean_tails = False

    @classmethod
    def refusal(cls, spec: AttentionSpec) -> str | None:
        """What it needs: a GPU, and triton. In triton's interpreter it runs on a CPU, for tests alone."""
        if spec.device.type != "cuda":
            return f"it runs on cuda, not on {spec.device.type}"
        if find_spec("triton") is None:
            return "triton is not installed"
        if spec.dtype not in TYPES:
            return f"it does not compute in {str(spec.dtype).removeprefix('torch.')}"
        if spec.head_dim > MOST_HEAD_DIM:
            return f"head_dim {spec.head_dim} is more than {MOST_HEAD_DIM}"
        if spec.num_heads // spec.num_kv_heads > MOST_GROUP:
            return f"more than {MOST_GROUP} query heads share a key-value head"
        return None

    def __init__(self, spec: AttentionSpec) -> None:
        from executor.attention import triton_kernels

        self.spec = spec
        self._kernels = triton_kernels
        group = spec.num_heads // spec.num_kv_heads
        self._group = group
        self._decode_tiles = decode_tiles(group)
        self._chunk_tiles = chunk_tiles(group, spec.dtype)

    def prepare(self, inputs: StepInputs, arrays: StepArrays) -> AttentionMetadata:
        """The step's metadata, with the splits of its decode rows."""
        splits = num_splits(inputs.num_decodes, self.spec.num_kv_heads) if inputs.num_decodes else 1
        return metadata_of(inputs, arrays, self.spec.block_size, splits)

    write_kv = staticmethod(write_slots)

    def forward(
        self, query: Tensor, cache: LayerCache, metadata: AttentionMetadata, *, window: int | None
    ) -> Tensor:
        """Decode rows, then chunks."""
        query = query.contiguous()
        output = torch.empty_like(query)
        if metadata.num_decodes:
            self._attend_decodes(query, output, cache, metadata, window)
        num_chunks = len(metadata.seq_lens) - metadata.num_decodes
        if num_chunks:
            tiles = self._chunk_tiles
            per_row = -(-metadata.max_query_len // (tiles.rows // self._group))
            grid = (num_chunks * per_row, self.spec.num_kv_heads, 1)
            nothing = (output, output, output)
            self._attend(
                grid,
                (query, output),
                nothing,
                cache,
                metadata,
                window,
                tiles,
                (1, per_row, metadata.num_decodes),
            )
        return output

    def _attend_decodes(
        self,
        query: Tensor,
        output: Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        window: int | None,
    ) -> None:
        spec, splits, num_rows = self.spec, metadata.plan, metadata.num_decodes
        parts = (output, output, output)
        if splits > 1:
            shape = (num_rows, spec.num_heads, splits)
            parts = (
                torch.empty(*shape, spec.head_dim, dtype=torch.float32, device=query.device),
                torch.empty(shape, dtype=torch.float32, device=query.device),
                torch.empty(shape, dtype=torch.float32, device=query.device),
            )
        grid = (num_rows, spec.num_kv_heads, splits)
        self._attend(
            grid, (query, output), parts, cache, metadata, window, self._decode_tiles, (splits, 1, 0)
        )
        if splits > 1:
            self._kernels.combine[num_rows, spec.num_heads](
                output, *parts, output.stride(0), splits,
                HEAD_DIM=spec.head_dim, PADDED_DIM=max(16, power_of_two(spec.head_dim)), num_warps=4,
            )  # fmt: skip

    def _attend(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor, Tensor],
        parts: tuple[Tensor, Tensor, Tensor],
        cache: LayerCache,
        metadata: AttentionMetadata,
        window: int | None,
        tiles: Tiles,
        cut: tuple[int, int, int],
    ) -> None:
        """`cut`: splits, tiles of queries in a row, the first row."""
        spec, (query, output), (splits, tiles_per_row, first_row) = self.spec, tensors, cut
        self._kernels.attend[grid](
            query, cache.keys, cache.values, output, *parts,
            metadata.block_tables, metadata.seq_lens, metadata.query_start_loc,
            metadata.block_tables.stride(0), query.stride(0), output.stride(0), *cache.keys.stride()[:3],
            spec.scale, spec.soft_cap or 1.0, window or 0, self._group, splits, tiles_per_row, first_row,
            HEAD_DIM=spec.head_dim, PADDED_DIM=max(16, power_of_two(spec.head_dim)),
            BLOCK_SIZE=spec.block_size, TILE_M=tiles.rows, TILE_N=tiles.positions,
            HAS_SOFT_CAP=spec.soft_cap is not None, HAS_WINDOW=window is not None, IS_SPLIT=splits > 1,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
