"""Who may enter the batch of one executor now, and who makes way for whom.

Reads the core, and changes nothing but the queue's marks for those who are passed over. Pure.
"""

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


@dataclass(frozen=True, slots=True)
class Fits:
    """It may enter; these blocks of its beginning were found."""

    matched: list[int]


@dataclass(frozen=True, slots=True)
class Blocked:
    """Too few blocks: it holds back those behind it."""


@dataclass(frozen=True, slots=True)
class PassedOver:
    """It waits for something of its own, and holds nobody back."""

    reason: Reason
    detail: str


def obstacle(state: ExecutorState, head: Sequence | None, *, has_budget: bool) -> Reason | None:
    """What keeps anybody from entering, blocks aside."""
    if head is None:
        return None
    if len(state.running) >= state.max_num_seqs:
        return Reason.QUEUED_FOR_SEAT
    return None if has_budget else Reason.QUEUED_FOR_TOKENS


def find(
    core: "SchedulerCore", state: ExecutorState, seq: Sequence, *, follows: bool
) -> Fits | Blocked | PassedOver | None:
    """Whether `seq`, the next one, may enter; None when its names are still being made."""
    tenant = seq.tenant
    num_blocks = state.blocks.blocks_for(len(seq.token_ids))
    if not tenant.may_run_one_more or not tenant.may_hold(num_blocks):
        core.waiting.set_aside(tenant)
        return PassedOver(Reason.QUEUED_FOR_TENANT, f"tenant {tenant.name!r} is at its own limit")
    matched = state.cache.matched(seq)
    state.is_hashing = matched is None
    if matched is None:
        return None
    leader = state.cache.leader_of(seq, len(matched)) if follows else None
    if leader is not None:
        core.waiting.park(seq)
        state.cache.follow(seq, leader)
        return PassedOver(Reason.QUEUED_FOR_PREFIX, f"{leader.request.request_id} is computing its beginning")
    return Fits(matched) if _has_room(core, state, seq, matched) else Blocked()


def _has_room(core: "SchedulerCore", state: ExecutorState, seq: Sequence, matched: list[int]) -> bool:
    """Whether there are blocks for its whole context, and for what it and the running will grow by.

    Shared blocks cost nothing, unless nobody held them. Room only gets more when somebody leaves, so a head
    that found none is not measured again before.
    """
    blocks = state.blocks
    if num_missing_blocks(state, seq, matched) > 0:
        return False
    if not state.running:
        return True  # alone it fits: `submit` and `attach` saw to that
    if state.too_full_for is seq:
        return False
    running = state.running.values()
    match core.limits.admission:
        case Admission.RESERVE:
            needed, limit = policy.blocks_to_reserve(seq, running, blocks.block_size), blocks.num_blocks
        case Admission.FORECAST:
            needed = policy.blocks_expected(seq, running, blocks.block_size, core.lengths)
            limit = blocks.num_blocks - state.watermark_blocks
        case Admission.OPTIMISTIC:
            needed = policy.blocks_to_begin(seq, running, blocks.block_size)
            num_found = len(matched) - blocks.num_idle_among(matched)
            limit = blocks.num_free + num_found - state.watermark_blocks
    fits = needed <= limit
    if not fits:
        state.too_full_for = seq
    return fits


def num_missing_blocks(state: ExecutorState, seq: Sequence, matched: list[int]) -> int:
    """Blocks that `seq` lacks for its context; not more than 0 when it fits."""
    blocks = state.blocks
    num_needed = blocks.blocks_for(len(seq.token_ids)) - len(matched)
    return num_needed - (blocks.num_free - blocks.num_idle_among(matched))


def who_makes_way(state: ExecutorState, head: Sequence) -> list[Sequence]:
    """Less important sequences whose leaving lets `head` enter now; empty when it needs or gets none."""
    if not head.tenant.may_run_one_more:
        return []
    matched = state.cache.matched(head)
    if matched is None or state.cache.leader_of(head, len(matched)) is not None:
        return []
    num_seats = len(state.running) + 1 - state.max_num_seqs
    num_blocks = num_missing_blocks(state, head, matched)
    if num_seats <= 0 and num_blocks <= 0:
        return []
    return policy.displaced(
        head,
        state.running.values(),
        num_seats=num_seats,
        num_blocks=num_blocks,
        private_blocks=lambda seq: state.blocks.num_private(seq.block_table),
        recompute_tokens=state.recompute_tokens,
    )


def latest_start(core: "SchedulerCore", seq: Sequence) -> float:
    """When `seq` must begin to be done by its deadline; never, when it has none or nobody orders by it."""
    deadline = seq.request.deadline
    if deadline is None or core.limits.policy is not Policy.DEADLINE:
        return float("inf")
    return deadline - remaining_service(core, seq)


def remaining_service(core: "SchedulerCore", seq: Sequence) -> float:
    """Seconds that `seq` will take once it runs, by the measured step times; 0 while nothing was measured."""
    times = []
    for state in core.executors.values():
        line = state.step_time.line
        if line is not None:
            base, per_token = line
            num_new = core.lengths.remaining(seq.num_output_tokens, seq.request.max_tokens)
            width = max(1, len(state.running))
            times.append((len(seq.token_ids) * per_token + num_new * (base + width * per_token)) / 1e6)
    return min(times, default=0.0)
