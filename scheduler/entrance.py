"""Whether a sequence may enter an executor's batch now, and which ones would have to make way for it.

Changes only what records its findings: which sequences the queue passes over, what a sequence follows in the
prefix cache, and the executor state's `is_still_looking` and `too_full_for`. Pure.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scheduler import policy
from scheduler.executor_state import ExecutorState
from scheduler.explain import Reason
from scheduler.forecast import LengthModel
from scheduler.policy import Admission, Limits
from scheduler.sequence import Sequence
from scheduler.waiting import WaitingQueue


@dataclass(frozen=True, slots=True)
class Fits:
    """It may enter; these cached blocks match its prefix."""

    matched: list[int]


@dataclass(frozen=True, slots=True)
class Blocked:
    """Too few blocks: it holds back those behind it."""


@dataclass(frozen=True, slots=True)
class Hashing:
    """Not known yet: the names of its blocks are still being made, a slice in each step."""


@dataclass(frozen=True, slots=True)
class AtOwnLimit:
    """Its tenant is at a limit of its own: that tenant's sequences are passed over and hold nobody back."""


@dataclass(frozen=True, slots=True)
class Follows:
    """`leader` is computing its prefix: it waits for that, and holds nobody back."""

    leader: Sequence


Found = Fits | Blocked | Hashing | AtOwnLimit | Follows


def obstacle(state: ExecutorState, head: Sequence | None, *, has_budget: bool) -> Reason | None:
    """What keeps any sequence from entering, blocks aside."""
    if head is None:
        return None
    if len(state.running) >= state.max_num_seqs:
        return Reason.QUEUED_FOR_SEAT
    return None if has_budget else Reason.QUEUED_FOR_TOKENS


class Entrance:
    """Decides about entering, for the batches of all executors."""

    __slots__ = ("_executors", "_lengths", "_limits", "_waiting")

    def __init__(
        self,
        limits: Limits,
        executors: Mapping[str, ExecutorState],
        waiting: WaitingQueue,
        lengths: LengthModel,
    ) -> None:
        self._limits = limits
        self._executors = executors
        self._waiting = waiting
        self._lengths = lengths

    def find(self, state: ExecutorState, seq: Sequence, *, follows: bool) -> Found:
        """Whether `seq`, the next one, may enter."""
        if not self._tenant_allows(state, seq):
            self._waiting.set_aside(seq)
            return AtOwnLimit()
        self._waiting.let_through(seq.tenant)
        matched = state.cache.matched(seq)
        if matched is None:
            state.is_still_looking = True
            return Hashing()
        leader = _leader(state, seq, matched) if follows else None
        if leader is not None:
            self._waiting.park(seq)
            state.cache.follow(seq, leader)
            return Follows(leader)
        if state.too_full_for is seq:
            return Blocked()
        if self._has_room(state, seq, matched):
            return Fits(matched)
        state.too_full_for = seq
        return Blocked()

    def _tenant_allows(self, state: ExecutorState, seq: Sequence, num_taken: int = 0) -> bool:
        """Whether its tenant's limits let `seq` enter, when the tenant takes `num_taken` blocks first.

        When whole lengths are reserved, the tenant's own sequences are reserved for too, so that its limit
        never causes a preemption either.
        """
        tenant = seq.tenant
        if not tenant.may_run_one_more or not tenant.may_hold(
            state.blocks.blocks_for(len(seq.token_ids)) + num_taken
        ):
            return False
        if tenant.limits.max_blocks is None or not tenant.num_running:
            return True
        if self._limits.admission is not Admission.RESERVE:
            return True
        members = (member for other in self._executors.values() for member in other.running.values())
        own = [member for member in members if member.tenant is tenant]
        return policy.blocks_to_reserve(seq, own, state.blocks.block_size) <= tenant.limits.max_blocks

    def _has_room(
        self,
        state: ExecutorState,
        seq: Sequence,
        matched: list[int],
        leaving: Iterable[Sequence] = (),
        num_taken: int = 0,
    ) -> bool:
        """Whether there are blocks for its whole context, and for what it and the running will grow by.

        Assumes that `leaving` have left and that those who stay take `num_taken` blocks. Shared blocks cost
        nothing, unless they were idle.
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
            return True  # alone it fits: `submit` and `attach` made sure
        # Shared blocks count once. A sequence that leaves takes at least as much off the sum as off this, so
        # a reservation stays one.
        num_entries = sum([len(member.block_table) for member in staying]) + len(matched)
        num_shared = num_entries - (blocks.num_blocks - num_free - num_taken + num_idle)
        match self._limits.admission:
            case Admission.RESERVE:
                needed = policy.blocks_to_reserve(seq, staying, blocks.block_size) - num_shared
                limit = blocks.num_blocks
            case Admission.FORECAST:
                limit = blocks.num_blocks - state.watermark_blocks
                if policy.blocks_at_most(seq, staying, blocks.block_size) - num_shared <= limit:
                    return True
                needed = policy.blocks_expected(seq, staying, blocks.block_size, self._lengths) - num_shared
            case Admission.OPTIMISTIC:
                needed = policy.blocks_to_begin(seq, staying, blocks.block_size)
                limit = num_free + len(matched) - num_idle - state.watermark_blocks
        return needed <= limit

    def who_makes_way(self, state: ExecutorState, head: Sequence) -> list[Sequence]:
        """Less important sequences whose leaving lets `head` enter now; empty if none need or suffice."""
        growing = [
            seq for seq in state.running.values() if seq.needs_block
        ]  # in this very step, before `head`
        if not self._tenant_allows(state, head, sum(seq.tenant is head.tenant for seq in growing)):
            return []
        matched = state.cache.matched(head)
        if matched is None or _leader(state, head, matched) is not None:
            return []
        num_seats = len(state.running) + 1 - state.max_num_seqs

        num_taken = len(growing)
        has_room = self._has_room(state, head, matched, num_taken=num_taken)

        def suffices(leaving: list[Sequence]) -> bool:
            return len(leaving) >= num_seats and (
                has_room or self._has_room(state, head, matched, leaving, num_taken)
            )

        # If only a seat is lacking, the victims' blocks keep their content and are found again.
        keeps_blocks = has_room and self._limits.prefix_caching
        return policy.displaced(
            head,
            state.running.values(),
            suffices=suffices,
            recompute_tokens=state.recompute_tokens,
            max_recompute_tokens=math.inf if keeps_blocks else policy.worth(head),
        )


def _leader(state: ExecutorState, seq: Sequence, matched: list[int]) -> Sequence | None:
    """The sequence that is computing the prefix of `seq`, if `seq` should wait for it.

    Never a less important one: that gets its tokens after all others, and `seq` would have to wait as long.
    """
    leader = state.cache.leader_of(seq, len(matched))
    return None if leader is None or leader.importance > seq.request.priority else leader
