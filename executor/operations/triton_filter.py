"""Our own kernel for top-k, top-p and min-p on a GPU, in Triton: the tokens that stay are found, not sorted.

With the most likely tokens first, and among equals the lower id first, what a filter leaves is a beginning of
the row, and so is what all of them leave. So only its end has to be found, the *cut*: the weight of the last
token that stays and, if several tokens have that weight, up to which id they stay.

    bits of a weight   1.0 ...   larger: all stay   | at the cut: ids up to `last_id` |  smaller: none   ... 0
                       '------- count, mass -------''--- each tie adds its weight ---'

    top-k    the cut is the least weight that has fewer than k tokens above it
    top-p    the cut is the least weight that has less mass above it than top_p of the whole; the whole is
             what top-k leaves, or all. If both are asked for, the larger cut is used
    ties     a tie stays while there are fewer ties before it than top-k has room for, and the mass above the
             cut with theirs is less than top_p of the whole
    min-p    is checked for each weight, besides the cut

The bits of weights, taken as integers, have the same order as the weights: so the least number that fits is
found two bits at a time. Each pass over the row sums up what is above each of three bounds, and the answer is
in one of the four quarters that they make. Ids are searched in the same way. One program handles one row: it
reads it again and again, about 18 times for top-p, and writes zeros for the tokens that are dropped.

Counts are exact, and so is min-p. Mass is summed in float64, in one order for one vocabulary, whatever the
other rows: lane by lane over the row, then over the lanes as in a tree. No more than a few dozen roundings
follow each other, so that the sums are right to 1e-14. What is promised: if the mass before a token, as a
share of the whole, is more than 1e-12 away from top_p, the token stays or is dropped as the rule says. Nearer
than that, sums in another order may find another cut; those of plain torch, the reference
(`executor.sampler.stays`), are no more correct.

Must not know: torch. Imported only where triton is there; with TRITON_INTERPRET=1 in the environment before
the import, the same text runs on the CPU.
"""

import triton
import triton.language as tl


@triton.jit
def part_of(row, start, VOCAB: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr):
    """Ids `[DEPTH, WIDTH]` from `start` on, and their weights; zeros behind the vocabulary's end."""
    token = start + tl.arange(0, DEPTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return token, tl.load(row + token, mask=token < VOCAB, other=0.0)


@triton.jit
def least_bits(
    row, limit, COUNTS: tl.constexpr,
    VOCAB: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The least bits that have less than `limit` (float64) above them: of tokens if `COUNTS`, else of mass.

    Weights are below 2, so that 30 bits are all there are.
    """
    found = 0
    quarter = 1 << 28
    for _step in range(15):
        above_first = tl.zeros([WIDTH], tl.float64)
        above_second = tl.zeros([WIDTH], tl.float64)
        above_third = tl.zeros([WIDTH], tl.float64)
        for start in range(0, VOCAB, DEPTH * WIDTH):
            _token, weight = part_of(row, start, VOCAB, WIDTH, DEPTH)
            bits = weight.to(tl.int32, bitcast=True)
            amount = weight.to(tl.float64)
            if COUNTS:
                amount = tl.full([DEPTH, WIDTH], 1.0, tl.float64)
            above_first += tl.sum(tl.where(bits >= found + quarter, amount, 0.0), 0)
            above_second += tl.sum(tl.where(bits >= found + 2 * quarter, amount, 0.0), 0)
            above_third += tl.sum(tl.where(bits >= found + 3 * quarter, amount, 0.0), 0)
        too_low = (tl.sum(above_first, 0) >= limit).to(tl.int32)
        too_low += (tl.sum(above_second, 0) >= limit).to(tl.int32)
        too_low += (tl.sum(above_third, 0) >= limit).to(tl.int32)
        found += too_low * quarter
        quarter = quarter >> 2
    return found


@triton.jit
def around(row, cut, VOCAB: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr):
    """How many tokens are above the bits `cut` and their mass, and how many are there: all float64."""
    count = tl.zeros([WIDTH], tl.int32)
    mass = tl.zeros([WIDTH], tl.float64)
    ties = tl.zeros([WIDTH], tl.int32)
    for start in range(0, VOCAB, DEPTH * WIDTH):
        token, weight = part_of(row, start, VOCAB, WIDTH, DEPTH)
        bits = weight.to(tl.int32, bitcast=True)
        count += tl.sum((bits > cut).to(tl.int32), 0)
        mass += tl.sum(tl.where(bits > cut, weight.to(tl.float64), 0.0), 0)
        ties += tl.sum(((bits == cut) & (token < VOCAB)).to(tl.int32), 0)
    return tl.sum(count, 0).to(tl.float64), tl.sum(mass, 0), tl.sum(ties, 0).to(tl.float64)


@triton.jit
def stays(ties_before, room, mass, weight, limit):
    """Whether a tie at the cut stays, with so many before it; the first always does."""
    return (ties_before == 0.0) | ((ties_before < room) & (mass + ties_before * weight < limit))


@triton.jit
def last_tie(
    row, cut, room, mass, weight, limit,
    ID_STEPS: tl.constexpr, VOCAB: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The last id at which a tie would stay; ids have no more than `2 * ID_STEPS` bits."""
    found = 0
    quarter = 1 << (2 * ID_STEPS - 2)
    for _step in range(ID_STEPS):
        before_first = tl.zeros([WIDTH], tl.int32)
        before_second = tl.zeros([WIDTH], tl.int32)
        before_third = tl.zeros([WIDTH], tl.int32)
        for start in range(0, VOCAB, DEPTH * WIDTH):
            token, tokens_weight = part_of(row, start, VOCAB, WIDTH, DEPTH)
            is_tie = (tokens_weight.to(tl.int32, bitcast=True) == cut) & (token < VOCAB)
            before_first += tl.sum((is_tie & (token < found + quarter)).to(tl.int32), 0)
            before_second += tl.sum((is_tie & (token < found + 2 * quarter)).to(tl.int32), 0)
            before_third += tl.sum((is_tie & (token < found + 3 * quarter)).to(tl.int32), 0)
        further = stays(tl.sum(before_first, 0).to(tl.float64), room, mass, weight, limit).to(tl.int32)
        further += stays(tl.sum(before_second, 0).to(tl.float64), room, mass, weight, limit).to(tl.int32)
        further += stays(tl.sum(before_third, 0).to(tl.float64), room, mass, weight, limit).to(tl.int32)
        found += further * quarter
        quarter = quarter >> 2
    return found


@triton.jit
def filter_rows(
    weights, rows, filters,
    ID_STEPS: tl.constexpr, VOCAB: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Zeros for what the filters of one of `rows` (int64) remove. Grid: (filtered row,).

    `filters` are float64 `[top-k, top-p, min-p]` for each of them; top-k is VOCAB where it is off.
    """
    place = tl.program_id(0)
    row = weights + tl.load(rows + place) * VOCAB
    top_k = tl.load(filters + place * 3)
    top_p = tl.load(filters + place * 3 + 1)
    min_p = tl.load(filters + place * 3 + 2)

    most = tl.zeros([WIDTH], tl.float32)
    masses = tl.zeros([WIDTH], tl.float64)
    for start in range(0, VOCAB, DEPTH * WIDTH):
        _token, weight = part_of(row, start, VOCAB, WIDTH, DEPTH)
        most = tl.maximum(most, tl.max(weight, 0))
        masses += tl.sum(weight.to(tl.float64), 0)
    highest = tl.max(most, 0)
    whole = tl.sum(masses, 0)

    cut = 0
    room = top_k
    if top_k < VOCAB:
        cut = least_bits(row, top_k, True, VOCAB, WIDTH, DEPTH)
        num_above, mass_above, _ties = around(row, cut, VOCAB, WIDTH, DEPTH)
        room = top_k - num_above
        whole = mass_above + room * cut.to(tl.float32, bitcast=True).to(tl.float64)
    # At 1 all are within top-p, whatever sums round to.
    limit = tl.where(top_p < 1.0, top_p * whole, float("inf"))
    if top_p < 1.0:
        nucleus = least_bits(row, limit, False, VOCAB, WIDTH, DEPTH)
        if nucleus > cut:
            cut = tl.minimum(nucleus, highest.to(tl.int32, bitcast=True))
            room = top_k
    weight_at_cut = cut.to(tl.float32, bitcast=True).to(tl.float64)
    _num_above, mass_above, num_ties = around(row, cut, VOCAB, WIDTH, DEPTH)
    last_id = VOCAB
    if stays(num_ties - 1.0, room, mass_above, weight_at_cut, limit) == 0:
        last_id = last_tie(row, cut, room, mass_above, weight_at_cut, limit, ID_STEPS, VOCAB, WIDTH, DEPTH)

    floor = min_p * highest.to(tl.float64)
    for start in range(0, VOCAB, DEPTH * WIDTH):
        token, weight = part_of(row, start, VOCAB, WIDTH, DEPTH)
        bits = weight.to(tl.int32, bitcast=True)
        is_kept = (bits > cut) | ((bits == cut) & (token <= last_id))
        is_kept = is_kept & (weight.to(tl.float64) >= floor)
        tl.store(row + token, tl.zeros([DEPTH, WIDTH], tl.float32), mask=(token < VOCAB) & (is_kept == 0))
