"""Who may enter the batch of one executor now, and who makes way for whom.

Reads the core. It changes only what it found out: the queue's marks for those who are passed over, whom a
sequence follows in the prefix cache, and the executor state's `is_hashing` and `too_full_for`. Pure.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler import policy
from scheduler.executor_state import ExecutorState
from scheduler.explain import Reason
from scheduler.policy import Admission
from scheduler.sequence import Sequence
from scheduler.waiting import Policy

if TYPE_CHECKING:
    from scheduler.core import SchedulerCore


# Half of all answers are longer than expected: begun without a margin they end late, and made others late.
# 1.5 did best of 1, 1.5, 2 and 3 on the Azure conversation trace (docs/results.md).
SERVICE_MARGIN = 1.5


@dataclass(frozen=True, slots=True)
class Fits:
    """It may enter; these blocks of its beginning were found."""

    matched: list[int]


@dataclass(frozen=True, slots=True)
class Blocked:
    """Too few blocks: it holds back those behind it."""


@dataclass(frozen=True, slots=True)
class Hashing:
    """Nobody can tell yet: the names of its blocks are still being made, a slice at each step."""


@dataclass(frozen=True, slots=True)
class AtOwnLimit:
    """Its tenant is at a limit of its own: that one's are passed over, and hold nobody back."""


@dataclass(frozen=True, slots=True)
class Follows:
    """This one is just computing its beginning: it waits for that, and holds nobody back."""

    leader: Sequence


Found = Fits | Blocked | Hashing | AtOwnLimit | Follows

NumCached = Callable[[ExecutorState], int]  # tokens that need no computing there


def obstacle(state: ExecutorState, head: Sequence | None, *, has_budget: bool) -> Reason | None:
    """What keeps anybody from entering, blocks aside."""
    if head is None:
        return None
    if len(state.running) >= state.max_num_seqs:
        return Reason.QUEUED_FOR_SEAT
    return None if has_budget else Reason.QUEUED_FOR_TOKENS


def find(core: "SchedulerCore", state: ExecutorState, seq: Sequence, *, follows: bool) -> Found:
    """Whether `seq`, the next one, may enter."""
    if not _tenant_allows(core, state, seq):
        core.waiting.set_aside(seq)
        return AtOwnLimit()
    core.waiting.let_through(seq.tenant)
    matched = state.cache.matched(seq)
    if matched is None:
        state.is_hashing = True
        return Hashing()
    leader = _leader(state, seq, matched) if follows else None
    if leader is not None:
        core.waiting.park(seq)
        state.cache.follow(seq, leader)
        return Follows(leader)
    if state.too_full_for is seq:
        return Blocked()
    if _has_room(core, state, seq, matched):
        return Fits(matched)
    state.too_full_for = seq
    return Blocked()


def _leader(state: ExecutorState, seq: Sequence, matched: list[int]) -> Sequence | None:
    """Whose work on the beginning of `seq` it should wait for, if anybody's.

    Nobody's who is less important: such a one gets its tokens after all others, and `seq` would as well.
    """
    leader = state.cache.leader_of(seq, len(matched))
    return None if leader is None or leader.importance > seq.request.priority else leader


def _tenant_allows(core: "SchedulerCore", state: ExecutorState, seq: Sequence, num_taken: int = 0) -> bool:
    """Whether the own limits of its tenant let `seq` enter, when others of it take `num_taken` blocks before.

    Where whole lengths are reserved, those of the tenant's own sequences are, so that none of them is ever
    preempted for its limit either.
    """
    tenant = seq.tenant
    if not tenant.may_run_one_more or not tenant.may_hold(
        state.blocks.blocks_for(len(seq.token_ids)) + num_taken
    ):
        return False
    if tenant.limits.max_blocks is None or not tenant.num_running:
        return True
    if core.limits.admission is not Admission.RESERVE:
        return True
    members = (member for other in core.executors.values() for member in other.running.values())
    own = [member for member in members if member.tenant is tenant]
    return policy.blocks_to_reserve(seq, own, state.blocks.block_size) <= tenant.limits.max_blocks


def _has_room(
    core: "SchedulerCore",
    state: ExecutorState,
    seq: Sequence,
    matched: list[int],
    leaving: Iterable[Sequence] = (),
    num_taken: int = 0,
) -> bool:
    """Whether there are blocks for its whole context, and for what it and the running will grow by.

    `leaving` are taken to be gone, and `num_taken` blocks to be needed by those who stay. Shared blocks cost
    nothing, unless nobody held them.
    """
    blocks = state.blocks
    used = set(matched)
    gone = set(leaving)
    num_idle = blocks.num_idle_among(matched)
    num_free = (
        blocks.num_free
        - num_taken
        + sum(
            blocks.num_private(block_id for block_id in member.block_table if block_id not in used)
            for member in gone
        )
    )
    if blocks.blocks_for(len(seq.token_ids)) - len(matched) > num_free - num_idle:
        return False
    running = state.running.values()
    staying = [member for member in running if member not in gone] if gone else running
    if not staying:
        return True  # alone it fits: `submit` and `attach` saw to that
    # What several hold counts once. Who leaves takes at least as much off the sum as off this, so that a
    # reservation stays one.
    num_entries = sum([len(member.block_table) for member in staying]) + len(matched)
    num_shared = num_entries - (blocks.num_blocks - num_free - num_taken + num_idle)
    match core.limits.admission:
        case Admission.RESERVE:
            needed = policy.blocks_to_reserve(seq, staying, blocks.block_size) - num_shared
            limit = blocks.num_blocks
        case Admission.FORECAST:
            limit = blocks.num_blocks - state.watermark_blocks
            if policy.blocks_at_most(seq, staying, blocks.block_size) - num_shared <= limit:
                return True
            needed = policy.blocks_expected(seq, staying, blocks.block_size, core.lengths) - num_shared
        case Admission.OPTIMISTIC:
            needed = policy.blocks_to_begin(seq, staying, blocks.block_size)
            limit = num_free + len(matched) - num_idle - state.watermark_blocks
    return needed <= limit


def who_makes_way(core: "SchedulerCore", state: ExecutorState, head: Sequence) -> list[Sequence]:
    """Less important sequences whose leaving lets `head` enter now; empty when it needs or gets none."""
    growing = [seq for seq in state.running.values() if seq.needs_block]  # in this very step, before `head`
    if not _tenant_allows(core, state, head, sum(seq.tenant is head.tenant for seq in growing)):
        return []
    matched = state.cache.matched(head)
    if matched is None or _leader(state, head, matched) is not None:
        return []
    num_seats = len(state.running) + 1 - state.max_num_seqs

    num_taken = len(growing)
    has_room = _has_room(core, state, head, matched, num_taken=num_taken)

    def suffices(leaving: list[Sequence]) -> bool:
        return len(leaving) >= num_seats and (
            has_room or _has_room(core, state, head, matched, leaving, num_taken)
        )

    # Where a seat is all that lacks, blocks stay as they are, and are found again.
    keeps_blocks = has_room and core.limits.prefix_caching
    return policy.displaced(
        head,
        state.running.values(),
        suffices=suffices,
        recompute_tokens=state.recompute_tokens,
        max_recompute_tokens=math.inf if keeps_blocks else policy.worth(head),
    )


def latest_start(core: "SchedulerCore", seq: Sequence) -> float:
    """When `seq` must begin to be done by its deadline; never, when it has none or nobody orders by it.

    What is cached of it counts as far as its names are made: of a new one, not before its turn.
    """
    return _latest_start(core, seq, lambda state: state.cache.num_found(seq))


def latest_start_at_best(core: "SchedulerCore", seq: Sequence) -> float:
    """When it must begin if all of its beginning that may be cached is."""
    return _latest_start(core, seq, lambda state: state.cache.num_found_at_most(seq))


def least_service(core: "SchedulerCore", seq: Sequence) -> float:
    """Seconds that `seq` will take at the least: for one token, with all cached that may be."""
    return _service(core, seq, 1, lambda state: state.cache.num_found_at_most(seq))


def _latest_start(core: "SchedulerCore", seq: Sequence, num_cached: NumCached) -> float:
    deadline = seq.request.deadline
    if deadline is None or core.limits.policy is not Policy.DEADLINE:
        return float("inf")
    num_new_tokens = core.lengths.remaining(seq.num_output_tokens, seq.request.max_tokens)
    return deadline - SERVICE_MARGIN * _service(core, seq, num_new_tokens, num_cached)


def _service(core: "SchedulerCore", seq: Sequence, num_new_tokens: int, num_cached: NumCached) -> float:
    """Seconds until `seq`, once it runs, has put out so many more tokens, by the measured step times.

    0 while nothing was measured.
    """
    times = []
    for state in core.executors.values():
        line = state.step_time.line
        if line is not None:
            base, per_token = line
            width = max(1, len(state.running))
            decoding = num_new_tokens * (base + width * per_token)
            times.append(((len(seq.token_ids) - num_cached(state)) * per_token + decoding) / 1e6)
    return min(times, default=0.0)
