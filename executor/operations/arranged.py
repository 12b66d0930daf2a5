"""The rows of a mixture of experts in the order of their experts, worked out on the device.

How many rows an expert has is known on the device alone. So all sizes here are those of the largest case, and
no host waits for a number: a captured step routes other tokens as well.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Arranged:
    """T tokens with K experts each are T * K rows, expert by expert, cut into tiles of rows of one expert."""

    tokens: Tensor
    """int64 `[T * K]`, whose row each is"""
    places: Tensor
    """int64 `[T, K]`, which row is a token's for each of its experts"""
    ends: Tensor
    """int64 `[num_experts]`, where each expert's rows end"""
    tile_experts: Tensor
    """int64 `[most tiles]`; the number of experts after the last tile"""
    tile_rows: Tensor
    """int64 `[most tiles]`, the first row of each"""


def arranged(chosen: Tensor, num_experts: int, rows_per_tile: int) -> Arranged:
    """The rows of tokens that have the experts `chosen`, int64 `[T, K]`."""
    flat = chosen.flatten()
    num_rows, device = len(flat), chosen.device
    order = flat.argsort(stable=True)
    rows = torch.arange(num_rows, device=device)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    ends, num_tiles = counts.cumsum(0), -(-counts // rows_per_tile)
    tile_ends = num_tiles.cumsum(0)
    # Each expert but the idle ones may have one tile that is not full.
    tiles = torch.arange(min(num_rows, num_rows // rows_per_tile + num_experts), device=device)
    experts = torch.searchsorted(tile_ends, tiles, right=True)
    known = experts.clamp(max=num_experts - 1)
    of_expert = tiles - (tile_ends - num_tiles)[known]
    return Arranged(
        tokens=order // chosen.shape[1],
        places=torch.empty_like(order).scatter_(0, order, rows).view_as(chosen),
        ends=ends,
        tile_experts=experts,
        tile_rows=(ends - counts)[known] + of_expert * rows_per_tile,
    )
