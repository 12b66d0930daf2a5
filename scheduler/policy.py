"""Decisions from counts: what the operator may choose, which sequences to preempt, how much room they need.

Pure functions over numbers and sequences' numbers: no block ids, no clock, no I/O. Laws of these functions
are tested with integers. `waiting` orders the waiting sequences; this is about the running ones:

- Every running sequence with one token to compute (it decodes) comes before those with more (they catch up on
  their prompts in chunks). So a long prompt never stalls running streams.
- When blocks run out, the victim is the cheapest to recompute among the least important. While a less
  important sequence has not progressed since its admission, none is preempted: it is about to progress, and
  holds all the blocks that it needs for that.
- A waiting request displaces running ones only if it is strictly more important, they have progressed since
  they were admitted, and the work thrown away is in proportion to the work gained.
- No sequence is preempted twice without producing a token in between.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, takewhile

from scheduler.forecast import LengthModel, peak_blocks
from scheduler.sequence import Sequence
from scheduler.tenants import TenantLimits
from scheduler.waiting import Policy

MIN_TOKENS_BEFORE_DISPLACEMENT = 8  # hysteresis: a newcomer is left alone until it has progressed
MAX_DISPLACEMENTS = 3  # after that it is not displaced any more
FREE_RECOMPUTE_TOKENS = 256  # less than this is never too much to throw away
MIN_NAMED_AT_ONCE = 64
MIN_RUNNING_TO_SPREAD = 128  # fewer may all take their blocks in one step


class Admission(Enum):
    """How much room a newcomer must find."""

    RESERVE = (
        "reserve"  # its whole length to the limit, and those of all running ones: nothing is ever preempted
    )
    FORECAST = "forecast"  # the peak that it and the running are expected to reach
    OPTIMISTIC = "optimistic"  # its context and a watermark: preempts most; for comparison


@dataclass(frozen=True, slots=True)
class Limits:
    """What the operator allows. None means the executor's own limit if it has one, else no limit."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    num_blocks: int | None = None
    window: int = 2
    late_plans: bool = False  # the plan behind a running step leaves as late as it can
    max_step_us: float | None = None  # target step duration while any sequence decodes
    policy: Policy = Policy.FCFS
    admission: Admission = Admission.FORECAST
    aging_seconds: float | None = 10.0  # waiting this long is worth one importance class
    prefix_caching: bool = True
    num_speculative_tokens: int = 8  # most draft tokens of a row; 0: nothing is guessed
    watermark: float = 0.01  # share of blocks that a forecast leaves free
    max_queued: int | None = None  # waiting requests beyond the free seats
    max_queued_tokens: int | None = None  # prompt tokens of all waiting requests
    tenants: dict[str, TenantLimits] = field(default_factory=dict)
    default_tenant: TenantLimits = field(default_factory=TenantLimits)
    recovery_timeout_seconds: float = 60.0  # how long a sequence waits for an executor that can compute it
    orphan_grace_seconds: float = 10.0
    result_keep_seconds: float = 60.0


def early_growth(num_running: int, num_free: int, block_size: int) -> tuple[int, int]:
    """How many blocks a step may hand out ahead of need, and how many tokens ahead.

    Equal prompts that entered together fill their blocks in the same step. Handing out thousands of blocks at
    once would cause a pause, so while there is plenty of room it is spread over half a block's worth of
    steps.
    """
    num_tokens = block_size // 2
    if num_running < MIN_RUNNING_TO_SPREAD or num_free < 2 * num_running or not num_tokens:
        return 0, 0
    return num_running // num_tokens + 1, num_tokens


def num_named_at_once(num_running: int, block_size: int) -> int:
    """How many full blocks get their names in one step.

    A decoding sequence fills a block every `block_size` steps: this is somewhat more than fill on average.
    """
    return max(MIN_NAMED_AT_ONCE, 4 * num_running // (3 * block_size) + 1)


def victim(
    running: Iterable[Sequence],
    recompute_tokens: Callable[[Sequence], int],
    num_freed: Callable[[Sequence], int],
) -> Sequence | None:
    """The sequence to preempt for blocks, or None when the least important ones have only just entered.

    Padding rows go first; then the least important, among them the cheapest to recompute, among those the
    latest. `recompute_tokens` counts what a sequence's own blocks hold: shared ones will be found again.
    `num_freed` counts the blocks that would come free: those that free none are spared while any frees some.
    """
    candidates: list[Sequence] = []
    spared: list[Sequence] = []  # they have only just entered
    for seq in running:
        (candidates if seq.has_progressed or seq.is_padding else spared).append(seq)
    chosen = max(
        [seq for seq in candidates if num_freed(seq)] or candidates,
        key=lambda seq: (
            seq.is_padding,
            seq.request.priority,
            -recompute_tokens(seq),
            seq.request.arrival,
            seq.order,
        ),
        default=None,
    )
    if chosen is None or chosen.is_padding:
        return chosen
    less_important = (seq for seq in spared if seq.request.priority > chosen.request.priority)
    return None if any(map(num_freed, less_important)) else chosen


def worth(head: Sequence) -> int:
    """Tokens of work that may be thrown away, and recomputed later, so that `head` enters."""
    return max(FREE_RECOMPUTE_TOKENS, 2 * head.max_len)


def displaced(
    head: Sequence,
    running: Iterable[Sequence],
    *,
    suffices: Callable[[list[Sequence]], bool],
    recompute_tokens: Callable[[Sequence], int],
    max_recompute_tokens: float,
) -> list[Sequence]:
    """The sequences to displace so that `head` enters; empty when none need be or none may.

    `suffices` tells whether it enters once these have left; adding more never changes that. All or nothing:
    no work is thrown away unless `head` enters for it, and no sequence whose leaving makes no difference
    goes.
    """
    candidates = sorted(
        (seq for seq in running if _may_be_displaced(seq, head)),
        key=lambda seq: (-seq.request.priority, recompute_tokens(seq), -seq.request.arrival, -seq.order),
    )
    costs = accumulate(map(recompute_tokens, candidates))
    affordable = candidates[: sum(1 for _ in takewhile(lambda cost: cost <= max_recompute_tokens, costs))]
    if not affordable or not suffices(affordable) or suffices([]):
        return []
    # The shortest prefix of the list that suffices.
    count = bisect_left(range(len(affordable)), x=True, key=lambda count: suffices(affordable[:count]))
    chosen = affordable[:count]
    # The last one is needed; some of those before it may not be.
    for seq in affordable[: count - 1]:
        fewer = [other for other in chosen if other is not seq]
        if suffices(fewer):
            chosen = fewer
    return chosen


def _may_be_displaced(seq: Sequence, head: Sequence) -> bool:
    return (
        seq.request.priority > head.request.priority
        and seq.num_displacements < MAX_DISPLACEMENTS
        and len(seq.token_ids) - seq.num_tokens_at_admission >= MIN_TOKENS_BEFORE_DISPLACEMENT
    )


def blocks_to_reserve(seq: Sequence, running: Iterable[Sequence], block_size: int) -> int:
    """Blocks that `seq` and the running hold if each grows to its limit."""
    return sum(-(-(member.max_len - 1) // block_size) for member in [seq, *running])


def blocks_to_begin(seq: Sequence, running: Iterable[Sequence], block_size: int) -> int:
    """Free blocks with which `seq` may begin, if growth is ignored.

    Only a preempted sequence looks ahead: it must be expected to run at least as long as its recompute is
    large. Otherwise it would be preempted again before the recompute has paid off, for ever.
    """
    context = -(-len(seq.token_ids) // block_size)
    if not seq.num_preemptions:
        return context
    horizon = len(seq.token_ids)
    return context + sum(_growth(member, horizon, block_size) for member in [seq, *running])


def _growth(seq: Sequence, num_tokens: int, block_size: int) -> int:
    """Blocks that `seq` takes, beyond those it has, while it produces `num_tokens` more tokens."""
    held = len(seq.block_table) or -(-len(seq.token_ids) // block_size)
    future = min(len(seq.token_ids) + num_tokens, seq.max_len - 1)
    return max(0, -(-future // block_size) - held)


def blocks_at_most(seq: Sequence, running: Iterable[Sequence], block_size: int) -> int:
    """An upper bound of `blocks_expected`, and much quicker: each grows to its limit."""
    half_a_block = block_size // 2
    return -(-sum([member.max_len + half_a_block for member in [seq, *running]]) // block_size)


def blocks_expected(seq: Sequence, running: Iterable[Sequence], block_size: int, lengths: LengthModel) -> int:
    """Peak number of blocks that `seq` and the running are expected to hold together.

    If `seq` was preempted, each is assumed to grow by at least the size of its recompute, for the reason
    given in `blocks_to_begin`.
    """
    at_least = len(seq.token_ids) if seq.num_preemptions else 0
    members = []
    for member in [seq, *running]:
        limit = member.request.max_tokens
        num_tokens = len(member.token_ids)
        num_output_tokens = num_tokens - member.num_prompt_tokens
        remaining = lengths.remaining(num_output_tokens, limit)
        if at_least:
            remaining = max(remaining, min(at_least, limit - num_output_tokens))
        members.append((num_tokens, remaining))
    return peak_blocks(members, block_size)
