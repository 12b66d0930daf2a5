"""Our own Triton kernel for a mixture of experts on a GPU: each row times the matrix of its own expert.

    rows in the order of their experts    [ of expert 0 ......... | of expert 1 .. | of expert 3 ..... ]
    tiles                                 [ 0 ... | 1 ... | 2 .   | 3 ..           | 4 ... | 5 .       ]

A tile has rows of one expert; there are as many programs as there may be tiles, and those without one end at
once. Sums are float32, in ascending order of what is summed over.

Must not know: torch. Imported only where triton is there; with TRITON_INTERPRET=1 in the environment before
the import, the same text runs on the CPU.
"""

import triton
import triton.language as tl


@triton.jit
def expert_product(
    rows, weight, out, sources, tile_experts, tile_rows, ends,
    WIDTH: tl.constexpr, NUM_COLUMNS: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_DEPTH: tl.constexpr,
):  # fmt: skip
    """`out[i] = weight[expert of i] @ rows[sources[i]]`. Grid: (tile, tile of columns).

    `weight` is `[NUM_EXPERTS, NUM_COLUMNS, WIDTH]`; `ends` says where each expert's rows end, and
    `tile_experts` is NUM_EXPERTS where there is no tile.
    """
    tile = tl.program_id(0)
    expert = tl.load(tile_experts + tile)
    if expert < NUM_EXPERTS:
        row = tl.load(tile_rows + tile) + tl.arange(0, TILE_ROWS)
        is_row = row < tl.load(ends + expert)
        source = tl.load(sources + row, mask=is_row, other=0)
        column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
        is_column = column < NUM_COLUMNS
        matrix = weight + (expert * NUM_COLUMNS + column) * WIDTH
        sums = tl.zeros((TILE_ROWS, TILE_COLUMNS), tl.float32)
        for first in range(0, WIDTH, TILE_DEPTH):
            number = first + tl.arange(0, TILE_DEPTH)
            is_number = number < WIDTH
            left = tl.load(
                rows + source[:, None] * WIDTH + number[None, :],
                mask=is_row[:, None] & is_number[None, :],
                other=0.0,
            )
            right = tl.load(
                matrix[None, :] + number[:, None], mask=is_column[None, :] & is_number[:, None], other=0.0
            )
            sums += tl.dot(left, right, input_precision="ieee")
        tl.store(
            out + row[:, None] * NUM_COLUMNS + column[None, :],
            sums.to(out.dtype.element_ty),
            mask=is_row[:, None] & is_column[None, :],
        )
