"""What those who follow are told: several steps of an executor in one message, and of each only what changed.

Nobody follows: nothing is computed. A step in which the same rows decode as in the one before costs a
comparison of columns and a count, however many rows there are. A message is made once, however many follow;
a reader that is slow misses some, and is then told who sits where. `batch_changes` knows what changes;
here is when it is told.
"""

import asyncio
from typing import Final

from protos.v1 import router_pb2, scheduler_pb2
from scheduler import wire
from scheduler.batch_changes import BatchChanges
from scheduler.executor_state import ExecutorState
from scheduler.plan import BatchPlan
from scheduler.waiting import WaitingQueue

# A dozen times a second is a moving picture; this is how late a step is told at most.
FLUSH_SECONDS: Final = 0.08
MAX_MESSAGES_PENDING: Final = 128


class FeedReader:
    """One reader of changes."""

    def __init__(self, executor_id: str) -> None:
        self.executor_id = executor_id
        self.queue: asyncio.Queue[scheduler_pb2.BatchChanges] = asyncio.Queue(MAX_MESSAGES_PENDING)
        self.num_missed: dict[str, int] = {}  # messages, by executor, since it was last told who sits where


class _Followed:
    """One executor: what has changed since the last message, and where its figures are."""

    def __init__(self) -> None:
        self.changes = BatchChanges()
        self.state: ExecutorState | None = None  # while there is something to tell
        self.planned_at = 0.0
        self.num_plan_bytes = 0
        self.gauges = router_pb2.StepSummary()  # as of the last message


class Feed:
    """All readers, and all executors as they know them."""

    def __init__(self, waiting: WaitingQueue) -> None:
        self._waiting = waiting
        self._readers: set[FeedReader] = set()
        self._followed: dict[str, _Followed] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def has_readers(self) -> bool:
        """Whether anybody is told anything."""
        return bool(self._readers)

    def join(self, reader: FeedReader) -> None:
        """It is told who sits where, as far as that is known, and from now on every step."""
        self._flush()
        self._readers.add(reader)
        for one in self._followed.values():
            self._offer(reader, one, None)

    def leave(self, reader: FeedReader) -> None:
        """It is gone; after the last one everything is forgotten."""
        self._readers.discard(reader)
        if not self._readers:
            self._followed.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def step(self, state: ExecutorState, plan: BatchPlan, planned_at: float, num_plan_bytes: int) -> None:
        """A step begins, and somebody follows."""
        one = self._followed.get(state.executor_id)
        if one is None:
            one = self._followed[state.executor_id] = _Followed()
        one.changes.take(plan)
        one.state, one.planned_at, one.num_plan_bytes = state, planned_at, num_plan_bytes
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._flush)

    def executor_gone(self, executor_id: str) -> None:
        """Its epoch is over: its last steps are told, and in a fresh one everything begins anew."""
        if executor_id in self._followed:
            self._flush()
            del self._followed[executor_id]

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for one in self._followed.values():
            if one.state is None:
                continue
            one.gauges = wire.step_gauges(one.state, one.changes.step_id, one.planned_at)
            one.gauges.num_plan_bytes = one.num_plan_bytes
            one.gauges.num_waiting = len(self._waiting)
            one.gauges.waiting.extend(wire.waiting_groups(self._waiting.counts))
            message = wire.changes_message(one.gauges, one.changes)
            one.changes.told()
            one.state = None  # it may be gone for good
            for reader in self._readers:
                self._offer(reader, one, message)

    def _offer(self, reader: FeedReader, one: _Followed, message: scheduler_pb2.BatchChanges | None) -> None:
        """Queues it unless the reader is too far behind. None, or one after a gap: who sits where instead."""
        executor_id = one.gauges.executor_id
        if reader.executor_id not in {"", executor_id}:
            return
        if reader.queue.full():
            reader.num_missed[executor_id] = reader.num_missed.get(executor_id, 0) + 1
            return
        num_missed = reader.num_missed.pop(executor_id, 0)
        if message is None or num_missed:
            message = wire.whole_message(one.gauges, one.changes, num_missed)
        reader.queue.put_nowait(message)
