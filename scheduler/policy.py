"""What the operator may choose, and who must go: decisions from counts.

Pure functions over numbers and sequences' numbers: no block ids, no clock, no I/O. Laws of these functions
are tested with integers. The order of those who wait is `waiting`'s; this is about those who run:

- Every running sequence with one token to compute (it decodes) comes before those with more (they catch up on
  prompts in chunks). So a long prompt never stalls running streams.
- Out of blocks, the victim is the cheapest to recompute among the least important. While a less important one
  has not got anywhere yet, nobody goes: it is about to, and holds all the blocks that it needs for that.
- A waiting request displaces running ones only if it is strictly more important, they have got somewhere
  since they were admitted, and what is thrown away is in proportion to what is won.
- Nobody is thrown out twice without a token in between.
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

MIN_TOKENS_BEFORE_DISPLACEMENT = 8  # hysteresis: a newcomer is left alone until it has got somewhere
MAX_DISPLACEMENTS = 3  # afterwards it stays to its end
FREE_RECOMPUTE_TOKENS = 256  # displacing never counts as too dear below this
MIN_NAMED_AT_ONCE = 64
MIN_RUNNING_TO_SPREAD = 128  # fewer may take their blocks all in one step


class Admission(Enum):
    """How much room a newcomer must find."""

    RESERVE = (
        "reserve"  # its whole length to the limit, and that of everybody who runs: nothing is ever preempted
    )
    FORECAST = "forecast"  # the peak that it and the running are expected to reach
    OPTIMISTIC = "optimistic"  # its context and a watermark: preempts most; for comparison


@dataclass(frozen=True, slots=True)
class Limits:
    """What the operator allows. None means the executor's own limit where it has one, else no limit."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    num_blocks: int | None = None
    window: int = 2
    late_plans: bool = False  # the plan behind a running step leaves as late as it can
    max_step_us: float | None = None  # wanted step duration while anything decodes
    policy: Policy = Policy.FCFS
    admission: Admission = Admission.FORECAST
    aging_seconds: float | None = 10.0  # waiting this long is worth one importance class
    prefix_caching: bool = True
    watermark: float = 0.01  # share of blocks that a forecast leaves free
    max_queued: int | None = None  # waiting requests beyond the free seats
    max_queued_tokens: int | None = None  # prompt tokens of all that wait
    tenants: dict[str, TenantLimits] = field(default_factory=dict)
    default_tenant: TenantLimits = field(default_factory=TenantLimits)
    recovery_timeout_seconds: float = 60.0  # how long everything waits when no executor is left
    orphan_grace_seconds: float = 10.0
    result_keep_seconds: float = 60.0


def early_growth(num_running: int, num_free: int, block_size: int) -> tuple[int, int]:
    """How many blocks a step may hand out ahead of need, and from how many tokens before the need on.

    Equal prompts that entered together fill their blocks in the same step. So that handing out thousands of
    blocks makes no pause, it is spread over half a block's worth of steps, while there is plenty of room.
    """
    num_tokens = block_size // 2
    if num_running < MIN_RUNNING_TO_SPREAD or num_free < 2 * num_running or not num_tokens:
        return 0, 0
    return num_running // num_tokens + 1, num_tokens


def num_named_at_once(num_running: int, block_size: int) -> int:
    """How many full blocks get their names in one step.

    Those who decode fill a block each `block_size` steps: this is somewhat more than they fill on average.
    """
    return max(MIN_NAMED_AT_ONCE, 4 * num_running // (3 * block_size) + 1)


def victim(
    running: Iterable[Sequence],
    recompute_tokens: Callable[[Sequence], int],
    num_freed: Callable[[Sequence], int],
) -> Sequence | None:
    """Whom to preempt for blocks, or None when the least important have only just come.

    A padding row goes first; then the least important, the cheapest to recompute among them, the latest of
    those. `recompute_tokens` tells what its own blocks hold: shared ones will be found again. `num_freed`
    tells how many blocks come free: who frees none is spared while anybody frees some.
    """
    candidates: list[Sequence] = []
    spared: list[Sequence] = []  # they have only just come
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
    """Tokens that may be thrown away, to be recomputed, so that `head` enters."""
    return max(FREE_RECOMPUTE_TOKENS, 2 * head.max_len)


def displaced(
    head: Sequence,
    running: Iterable[Sequence],
    *,
    suffices: Callable[[list[Sequence]], bool],
    recompute_tokens: Callable[[Sequence], int],
    max_recompute_tokens: float,
) -> list[Sequence]:
    """Who makes way so that `head` enters; empty when nobody need or none may.

    `suffices` tells whether it enters once these have left; when some are enough, so are more. All or
    nothing: no work is thrown away without the head entering for it, and none whose leaving changes nothing.
    """
    candidates = sorted(
        (seq for seq in running if _may_be_displaced(seq, head)),
        key=lambda seq: (-seq.request.priority, recompute_tokens(seq), -seq.request.arrival, -seq.order),
    )
    costs = accumulate(map(recompute_tokens, candidates))
    affordable = candidates[: sum(1 for _ in takewhile(lambda cost: cost <= max_recompute_tokens, costs))]
    if not affordable or not suffices(affordable) or suffices([]):
        return []
    # The shortest beginning of the list that suffices: more of them never suffice less.
    count = bisect_left(range(len(affordable)), x=True, key=lambda count: suffices(affordable[:count]))
    chosen = affordable[:count]
    # Without the last one it did not suffice; of those before it some may not be needed.
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
    """Free blocks with which `seq` may begin, nobody's growth foreseen.

    Only one that was preempted looks ahead: it must be expected to run at least as long as its recompute is
    large. Else it would be thrown out again before the recompute has paid, for ever.
    """
    context = -(-len(seq.token_ids) // block_size)
    if not seq.num_preemptions:
        return context
    horizon = len(seq.token_ids)
    return context + sum(_growth(member, horizon, block_size) for member in [seq, *running])


def _growth(seq: Sequence, num_tokens: int, block_size: int) -> int:
    """Blocks beyond its present ones that `seq` takes while it wins `num_tokens` more tokens."""
    held = len(seq.block_table) or -(-len(seq.token_ids) // block_size)
    future = min(len(seq.token_ids) + num_tokens, seq.max_len - 1)
    return max(0, -(-future // block_size) - held)


def blocks_at_most(seq: Sequence, running: Iterable[Sequence], block_size: int) -> int:
    """No less than `blocks_expected` of the same, and much quicker: everybody grows to its limit."""
    half_a_block = block_size // 2
    return -(-sum([member.max_len + half_a_block for member in [seq, *running]]) // block_size)


def blocks_expected(seq: Sequence, running: Iterable[Sequence], block_size: int, lengths: LengthModel) -> int:
    """Peak blocks that `seq` and the running are expected to hold together.

    For one that was preempted everybody is taken to grow at least as much as its recompute is large, for the
    reason given in `blocks_to_begin`.
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
