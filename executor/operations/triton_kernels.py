"""Our own Triton kernels for what comes between a decoder's matrix products on a GPU.

    norm                one program for a token
    rotate_and_store    one program for HEADS heads of one kind of a token
    gate                one program for TILE columns of a token

    a token's groups of heads    [ query ... | key ... | value ... ]

Numbers are float32 between a load and a store, and are rounded where plain torch rounds them
(`executor/operations/plain.py`), which includes products before they are added: so the launcher turns off
contraction.

Must not know: torch. Imported only where triton is there; with TRITON_INTERPRET=1 in the environment before
the import, the same text runs on the CPU.
"""

import triton
import triton.language as tl


@triton.jit
def norm(
    hidden, update, norm_weight, update_weight, out, eps, update_eps,
    WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr,
    HAS_UPDATE: tl.constexpr, NORMS_UPDATE: tl.constexpr,
):  # fmt: skip
    """A token's hidden states, normed; an update is added to them before, and stays. Grid: (token,)."""
    start = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, PADDED_WIDTH)
    is_column = column < WIDTH
    states = tl.load(hidden + start + column, mask=is_column, other=0.0)
    if HAS_UPDATE:
        added = tl.load(update + start + column, mask=is_column, other=0.0).to(tl.float32)
        if NORMS_UPDATE:
            scale = tl.rsqrt(tl.sum(added * added, 0) / WIDTH + update_eps)
            added = added * scale * tl.load(update_weight + column, mask=is_column, other=0.0)
        states = states + added
        tl.store(hidden + start + column, states, mask=is_column)
    scale = tl.rsqrt(tl.sum(states * states, 0) / WIDTH + eps)
    result = states * scale * tl.load(norm_weight + column, mask=is_column, other=0.0)
    tl.store(out + start + column, result.to(out.dtype.element_ty), mask=is_column)


@triton.jit
def turned(heads, is_there, angles, weight, eps, d, HALF: tl.constexpr, HAS_NORM: tl.constexpr):
    """Heads in two halves, normed where there is a norm, and turned: element i is paired with i + HALF."""
    is_dim = d < HALF
    first = tl.load(heads, mask=is_there, other=0.0).to(tl.float32)
    second = tl.load(heads + HALF, mask=is_there, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        first = first * scale * tl.load(weight + d, mask=is_dim, other=0.0)
        second = second * scale * tl.load(weight + HALF + d, mask=is_dim, other=0.0)
    cos = tl.load(angles + d, mask=is_dim, other=0.0)
    sin = tl.load(angles + HALF + d, mask=is_dim, other=0.0)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def rotate_and_store(
    qkv, positions, slot_blocks, slot_offsets, rope, query_weight, key_weight, query, keys, values,
    query_eps, key_eps, block_stride, slot_stride, head_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr,
    HEADS: tl.constexpr, HAS_QUERY_NORM: tl.constexpr, HAS_KEY_NORM: tl.constexpr,
):  # fmt: skip
    """Queries into `query`, keys and values into the token's slot of the cache. Grid: (token, group)."""
    query_groups: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    kv_groups: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    row = qkv + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * 2 * HALF)
    angles = rope + tl.load(positions + token) * (2 * HALF)
    h = tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, PADDED_HALF)[None, :]
    if group < query_groups:
        head = group * HEADS + h
        is_there = (head < NUM_HEADS) & (d < HALF)
        at = head * (2 * HALF) + d
        first, second = turned(row + at, is_there, angles, query_weight, query_eps, d, HALF, HAS_QUERY_NORM)
        to = token * (NUM_HEADS * 2 * HALF) + at
        tl.store(query + to, first.to(query.dtype.element_ty), mask=is_there)
        tl.store(query + to + HALF, second.to(query.dtype.element_ty), mask=is_there)
    else:
        head = (group - query_groups) % kv_groups * HEADS + h
        is_there = (head < NUM_KV_HEADS) & (d < HALF)
        # Blocks and offsets are int64: a cache has more numbers than int32 counts.
        slot = tl.load(slot_blocks + token) * block_stride + tl.load(slot_offsets + token) * slot_stride
        to = slot + head * head_stride + d
        if group < query_groups + kv_groups:
            at = (NUM_HEADS + head) * (2 * HALF) + d
            first, second = turned(row + at, is_there, angles, key_weight, key_eps, d, HALF, HAS_KEY_NORM)
            tl.store(keys + to, first.to(keys.dtype.element_ty), mask=is_there)
            tl.store(keys + to + HALF, second.to(keys.dtype.element_ty), mask=is_there)
        else:
            at = (NUM_HEADS + NUM_KV_HEADS + head) * (2 * HALF) + d
            tl.store(values + to, tl.load(row + at, mask=is_there), mask=is_there)
            tl.store(values + to + HALF, tl.load(row + at + HALF, mask=is_there), mask=is_there)


@triton.jit
def gate(gate_up, out, WIDTH: tl.constexpr, TILE: tl.constexpr, ACTIVATION: tl.constexpr):
    """`activation(gate) * up` of rows `[gate | up]`, WIDTH columns each. Grid: (token, tile)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_column = column < WIDTH
    row = gate_up + token * (2 * WIDTH)
    x = tl.load(row + column, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(row + WIDTH + column, mask=is_column, other=0.0).to(tl.float32)
    if ACTIVATION == "gelu_tanh":
        # (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z)), without plain torch's cancellation where z is far below 0.
        exponent = -2.0 * (0.7978845608028654 * (x + 0.044715 * (x * x * x)))
    else:
        tl.static_assert(ACTIVATION == "silu")
        exponent = -x
    activated = tl.div_rn(x, 1.0 + tl.exp(exponent)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * WIDTH + column, (activated * up).to(out.dtype.element_ty), mask=is_column)
