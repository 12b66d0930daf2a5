"""Our own attention kernels for GPUs, in Triton: paged, ragged, grouped, causal.

A program computes one *tile of queries* against one part of one row's context. The query heads that share a
key-value head are rows of the same tile, so that keys and values are read once for all of them:

    row m of a tile    token first_token + m // group,  head kv_head * group + m % group

    grid of decode rows    (row,                       kv_head, part of the context)
    grid of chunks         (row x tile of its tokens,  kv_head, 1)

A context is read in tiles of TILE_N positions, counted from its first. A tile's positions are looked up in
the block table one by one, or all at once if a block holds whole tiles. Sums are kept in float32, as is the
product of probabilities and values; slots past a context are not read. The parts of a context are combined by
a second kernel, in order.

Must not know: torch. Imported only where triton is there; with TRITON_INTERPRET=1 in the environment before
the import, the same text runs on the CPU.
"""

import triton
import triton.language as tl


# What differs between two steps of one model makes no new kernel: that would be built while requests wait.
@triton.jit(
    do_not_specialize=[
        *("table_stride", "num_splits", "tiles_per_row", "first_row"),
        *("group", "window", "soft_cap"),
    ]
)
def attend(
    query, keys, values, out, partial_out, partial_max, partial_sum,
    block_tables, seq_lens, query_start_loc,
    table_stride, query_stride, out_stride, block_stride, slot_stride, head_stride,
    scale, soft_cap, window, group, num_splits, tiles_per_row, first_row,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_SPLIT: tl.constexpr,
):  # fmt: skip
    """One tile of queries and one part of its context; see the module."""
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row = first_row + program // tiles_per_row
    tokens_per_tile = TILE_M // group
    query_start = tl.load(query_start_loc + row)
    query_len = tl.load(query_start_loc + row + 1) - query_start
    first_token = (program % tiles_per_row) * tokens_per_tile
    if first_token >= query_len:
        return
    seq_len = tl.load(seq_lens + row)
    context_before = seq_len - query_len

    m = tl.arange(0, TILE_M)
    token = first_token + m // group
    head = kv_head * group + m % group
    is_row = (m < tokens_per_tile * group) & (token < query_len)
    position = context_before + token
    d = tl.arange(0, PADDED_DIM)
    is_dim = d < HEAD_DIM
    place = (query_start + token).to(tl.int64)
    q = tl.load(
        query + place[:, None] * query_stride + head[:, None] * HEAD_DIM + d[None, :],
        mask=is_row[:, None] & is_dim[None, :],
        other=0.0,
    )

    # The context that any row of the tile sees, in whole tiles; and of those this program's part.
    last_token = tl.minimum(first_token + tokens_per_tile, query_len) - 1
    end = context_before + last_token + 1
    first_tile = 0
    if HAS_WINDOW:
        first_tile = tl.maximum(context_before + first_token + 1 - window, 0) // TILE_N
    last_tile = tl.cdiv(end, TILE_N)
    if IS_SPLIT:
        per_split = tl.cdiv(last_tile - first_tile, num_splits)
        first_tile = first_tile + split * per_split
        last_tile = tl.minimum(first_tile + per_split, last_tile)

    highest = tl.full([TILE_M], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    sums = tl.zeros([TILE_M, PADDED_DIM], tl.float32)
    for tile in range(first_tile, last_tile):
        n = tile * TILE_N + tl.arange(0, TILE_N)
        is_slot = n < end
        if BLOCK_SIZE % TILE_N == 0:
            block = tl.load(block_tables + row * table_stride + tile * TILE_N // BLOCK_SIZE).to(tl.int64)
            slot = block * block_stride + (n % BLOCK_SIZE) * slot_stride
        else:
            block = tl.load(block_tables + row * table_stride + n // BLOCK_SIZE, mask=is_slot, other=0)
            slot = block.to(tl.int64) * block_stride + (n % BLOCK_SIZE) * slot_stride
        at = slot[:, None] + kv_head * head_stride + d[None, :]
        is_there = is_slot[:, None] & is_dim[None, :]
        k = tl.load(keys + at, mask=is_there, other=0.0)
        v = tl.load(values + at, mask=is_there, other=0.0)

        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_SOFT_CAP:
            scores = soft_cap * (2.0 * tl.sigmoid(2.0 * scores / soft_cap) - 1.0)
        is_seen = (n[None, :] <= position[:, None]) & is_row[:, None]
        if HAS_WINDOW:
            is_seen = is_seen & (n[None, :] > position[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        # Where nothing was seen yet, both are minus infinity: their difference would be no number.
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(highest - base)
        total = total * shrink + tl.sum(weights, 1)
        # Probabilities keep their float32 in float32; in half types they are rounded once for the product.
        sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        highest = new_highest

    if IS_SPLIT:
        part = ((query_start + token) * tl.num_programs(1) * group + head).to(tl.int64) * num_splits + split
        tl.store(partial_max + part, highest, mask=is_row)
        tl.store(partial_sum + part, total, mask=is_row)
        tl.store(
            partial_out + part[:, None] * HEAD_DIM + d[None, :],
            sums,
            mask=is_row[:, None] & is_dim[None, :],
        )
    else:
        result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            out + place[:, None] * out_stride + head[:, None] * HEAD_DIM + d[None, :],
            result.to(out.dtype.element_ty),
            mask=is_row[:, None] & is_dim[None, :],
        )


@triton.jit(do_not_specialize=["num_splits"])
def combine(
    out, partial_out, partial_max, partial_sum, out_stride, num_splits,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    """Put the parts of one token's head together. Grid: (token, head)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first = (token * tl.num_programs(1) + head) * num_splits
    d = tl.arange(0, PADDED_DIM)
    is_dim = d < HEAD_DIM
    highest = tl.load(partial_max + first)
    for split in range(1, num_splits):
        highest = tl.maximum(highest, tl.load(partial_max + first + split))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = 0.0
    sums = tl.zeros([PADDED_DIM], tl.float32)
    for split in range(num_splits):
        weight = tl.exp(tl.load(partial_max + first + split) - base)
        total += tl.load(partial_sum + first + split) * weight
        part = tl.load(partial_out + (first + split) * HEAD_DIM + d, mask=is_dim, other=0.0)
        sums += part * weight
    result = sums / tl.where(total == 0.0, 1.0, total)
    tl.store(out + token * out_stride + head * HEAD_DIM + d, result.to(out.dtype.element_ty), mask=is_dim)
