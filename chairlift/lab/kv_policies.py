"""Ways to hold KV memory other than the server's, on the server's core, so that nothing else differs.

    contiguous   a sequence enters when there is a run of slots (whole blocks) for the longest it may become,
                 and has this run to itself until it leaves. Nothing is preempted, nothing is shared.
    by order     blocks as in the server; when they run out, the sequence that came last goes first, however
                 much of it is computed

The core's own blocks are kept as well, as the executor's addresses: a sequence that holds a run has enough
blocks.
"""

import sys
from collections.abc import Callable
from typing import Any

from chairlift.lab.ranges import Ranges
from scheduler import entrance
from scheduler.core import SchedulerCore
from scheduler.door import RefusedError
from scheduler.executor_state import ExecutorState
from scheduler.plan import Capacity
from scheduler.plan_builder import PlanBuilder
from scheduler.sequence import FinishReason, Request, Sequence, StatusCode
from scheduler.token_ids import NO_IDS, TokenIds


class ContiguousCore(SchedulerCore):
    """Runs of neighbouring slots, found by `ranges`."""

    def __init__(self, ranges: Callable[[int], Ranges], *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._make_ranges = ranges
        self._ranges: dict[str, Ranges] = {}
        self._longest = sys.maxsize
        self._starts: dict[Sequence, int] = {}

    def attach(self, executor_id: str, epoch: int, capacity: Capacity, now: float) -> list[Sequence]:
        """As the core's."""
        ended = super().attach(executor_id, epoch, capacity, now)
        blocks = self.executors[executor_id].blocks
        ranges = self._ranges[executor_id] = self._make_ranges(blocks.num_blocks * blocks.block_size)
        self._longest = min(self._longest, ranges.longest // blocks.block_size * blocks.block_size)
        return ended

    def submit(self, request: Request, output_token_ids: TokenIds = NO_IDS, *, now: float) -> Sequence:
        """As the core's; refuses what no run is long enough for."""
        length = len(request.prompt_token_ids) + request.max_tokens
        if length > self._longest:
            raise RefusedError(
                StatusCode.INVALID_ARGUMENT,
                f"{length} tokens need a run of slots, the longest has {self._longest}",
            )
        return super().submit(request, output_token_ids, now=now)

    def num_held(self, state: ExecutorState) -> int:
        """Slots that nobody else can have."""
        return self._ranges[state.executor_id].num_held

    def find_place(self, state: ExecutorState, seq: Sequence, *, follows: bool) -> entrance.Found:
        """As the core's; there must be a run, too."""
        ranges = self._ranges[state.executor_id]
        start = ranges.take(_num_slots(state, seq))
        if start is None:
            return entrance.Blocked()
        ranges.give_back(start)  # it may still stay out, for another reason
        return super().find_place(state, seq, follows=follows)

    def enter(
        self, state: ExecutorState, seq: Sequence, block_table: list[int], builder: PlanBuilder
    ) -> None:
        """As the core's; takes the run."""
        start = self._ranges[state.executor_id].take(_num_slots(state, seq))
        assert start is not None
        self._starts[seq] = start
        super().enter(state, seq, block_table, builder)

    def _leave(
        self,
        state: ExecutorState,
        seq: Sequence,
        reason: FinishReason | None,
        *,
        tell_executor: bool,
        keep_blocks: bool = False,
    ) -> None:
        super()._leave(state, seq, reason, tell_executor=tell_executor, keep_blocks=keep_blocks)
        self._ranges[state.executor_id].give_back(self._starts.pop(seq))


def _num_slots(state: ExecutorState, seq: Sequence) -> int:
    """Of the run that `seq` needs: whole blocks for the longest that it may become."""
    blocks = state.blocks
    return blocks.blocks_for(seq.max_len) * blocks.block_size


class VictimsByOrderCore(SchedulerCore):
    """Who came last goes first."""

    def _clear_the_way(self, state: ExecutorState) -> bool:
        """Makes the room first, so that the core finds nobody short of a block."""
        while sum(seq.needs_block for seq in state.running.values()) > state.blocks.num_free:
            if state.session.num_unanswered:
                return False
            candidates = [seq for seq in state.running.values() if seq.has_progressed]
            if not candidates:
                break
            last = max(candidates, key=lambda seq: (seq.request.priority, seq.request.arrival, seq.order))
            self.counters.preemptions += 1
            last.num_preemptions += 1
            self.preempt(state, last, "blocks ran out, and it came last")
        return super()._clear_the_way(state)


def num_held_slots(core: SchedulerCore, state: ExecutorState) -> int:
    """KV slots of an executor that somebody holds, with or without tokens in them."""
    if isinstance(core, ContiguousCore):
        return core.num_held(state)
    blocks = state.blocks
    return (blocks.num_blocks - blocks.num_free) * blocks.block_size
