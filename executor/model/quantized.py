"""Matrices whose numbers are kept in 8 or 4 bits, in blocks of 32 neighbours of a row.

    number  =  scale of its block  x  code  +  offset of its block

Codes are unsigned, scales and offsets are float16: what a GGUF file holds as Q8_0, Q5_0, Q5_1, Q4_0 or Q4_1
can be said in this form without changing a number (`gguf_blocks`). Knows no file and no kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

import torch
from torch import Tensor

BLOCK_SIZE: Final = 32
"""Numbers that share a scale and an offset."""
_MIDDLE: Final = 128
_MOST: Final = 127
_ROWS_AT_A_TIME: Final = 1024
LARGEST_IN_8_BITS: Final = 64_960
"""Numbers up to this fit into 8 bits: an offset is 128 scales, and float16 ends at 65,504."""


class Quantization(Enum):
    """In what form a model's matrices are kept in memory, and computed with."""

    NONE = "none"
    """In the number type of the computation."""
    INT8 = "int8"
    """In 8 bits."""
    STORED = "stored"
    """As they are stored, where that is in blocks of 32; else in 8 bits."""


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix `[num_rows, num_columns]`, its rows padded to whole blocks by numbers that are zero."""

    codes: Tensor
    """uint8 `[num_rows, num_blocks * 32]`, each below 2 to the power of `bits`"""
    scales: Tensor
    """float16 `[num_rows, num_blocks]`"""
    offsets: Tensor
    """float16 `[num_rows, num_blocks]`"""
    num_columns: int
    bits: int
    """8 or 4"""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return self.codes.shape[0], self.num_columns

    @property
    def num_bytes(self) -> int:
        """What it takes in memory once it is packed."""
        return self.codes.numel() * self.bits // 8 + self.scales.nbytes + self.offsets.nbytes

    def part(self, rows: slice, columns: slice) -> "QuantizedMatrix":
        """Rows and columns of it; columns begin with a block, and end with one or with the matrix."""
        first, last, _ = columns.indices(self.num_columns)
        blocks = slice(first // BLOCK_SIZE, -(-last // BLOCK_SIZE))
        codes = self.codes[rows, blocks.start * BLOCK_SIZE : blocks.stop * BLOCK_SIZE]
        return replace(
            self,
            codes=codes,
            scales=self.scales[rows, blocks],
            offsets=self.offsets[rows, blocks],
            num_columns=last - first,
        )

    def dequantized(self) -> Tensor:
        """The numbers, float32 `[num_rows, num_columns]`."""
        blocks = self.codes.view(*self.scales.shape, BLOCK_SIZE).float()
        numbers = blocks * self.scales.float().unsqueeze(-1) + self.offsets.float().unsqueeze(-1)
        return numbers.view(self.codes.shape)[:, : self.num_columns]


def quantized(numbers: Tensor) -> QuantizedMatrix:
    """`numbers` `[num_rows, num_columns]` in 8 bits: each the nearest of -127 to 127 times its block's scale.

    Source: GGUF's type Q8_0. A block's largest number is 127 scales, rounded to float16. Offsets of blocks
    with numbers beyond `LARGEST_IN_8_BITS` may be infinite.
    """
    num_rows, num_columns = numbers.shape
    num_blocks = -(-num_columns // BLOCK_SIZE)
    codes = torch.full((num_rows, num_blocks * BLOCK_SIZE), _MIDDLE, dtype=torch.uint8)
    scales = torch.empty((num_rows, num_blocks), dtype=torch.float16)
    for first in range(0, num_rows, _ROWS_AT_A_TIME):
        rows = slice(first, first + _ROWS_AT_A_TIME)
        some = torch.zeros(codes[rows].shape)
        some[:, :num_columns] = numbers[rows]
        blocks = some.view(-1, num_blocks, BLOCK_SIZE)
        scales[rows] = (blocks.abs().amax(-1) / _MOST).half()
        steps = blocks / scales[rows].float().unsqueeze(-1)
        steps.nan_to_num_(0.0).round_().clamp_(-_MOST, _MOST)  # a scale of zero: so are its numbers
        codes[rows] = (steps + _MIDDLE).to(torch.uint8).view(some.shape)
    return QuantizedMatrix(codes, scales, scales * -_MIDDLE, num_columns, 8)


def stacked(parts: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """`parts` one under the other: in 4 bits if all of them are, else in 8, which changes no number."""
    if len(parts) == 1:
        return parts[0]  # a model's largest matrices stand alone: no second copy of them
    return QuantizedMatrix(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat([part.offsets for part in parts]),
        parts[0].num_columns,
        max(part.bits for part in parts),
    )
