"""Sends followers what changes in the batches: several steps in one message, and of each only the changes.

Without followers nothing is computed. A step in which the same rows decode as in the one before costs a
comparison of columns and a count, however many rows there are. A message is made once for all followers; a
slow reader misses some, and is then sent the whole batch. `batch_changes` computes the changes; this module
decides when to send them.
"""

import asyncio
from typing import Final

from protos.v1 import router_pb2, scheduler_pb2
from scheduler import wire
from scheduler.batch_changes import BatchChanges
from scheduler.executor_state import ExecutorState
from scheduler.plan import BatchPlan
from scheduler.waiting import WaitingQueue

# A dozen times a second looks like motion; this is how late a step is reported at most.
FLUSH_SECONDS: Final = 0.08
MAX_MESSAGES_PENDING: Final = 128


class FeedReader:
    """One reader of changes."""

    def __init__(self, executor_id: str) -> None:
        self.executor_id = executor_id
        self.queue: asyncio.Queue[scheduler_pb2.BatchChanges] = asyncio.Queue(MAX_MESSAGES_PENDING)
        self.num_missed: dict[str, int] = {}  # messages, by executor, since it was last sent the whole batch


class _Followed:
    """One followed executor: what has changed since the last message, and its figures."""

    def __init__(self) -> None:
        self.changes = BatchChanges()
        self.state: ExecutorState | None = None  # while there is something to send
        self.planned_at = 0.0
        self.num_plan_bytes = 0
        self.gauges = router_pb2.StepSummary()  # as of the last message


class Feed:
    """All readers, and all executors that they follow."""

    def __init__(self, waiting: WaitingQueue) -> None:
        self._waiting = waiting
        self._readers: set[FeedReader] = set()
        self._followed: dict[str, _Followed] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def has_readers(self) -> bool:
        """Whether there are any readers."""
        return bool(self._readers)

    def join(self, reader: FeedReader) -> None:
        """Sends a new reader the batches as far as they are known, and every step from now on."""
        self._flush()
        self._readers.add(reader)
        for one in self._followed.values():
            self._offer(reader, one, None)

    def leave(self, reader: FeedReader) -> None:
        """Removes a reader; after the last one, everything is forgotten."""
        self._readers.discard(reader)
        if not self._readers:
            self._followed.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def step(self, state: ExecutorState, plan: BatchPlan, planned_at: float, num_plan_bytes: int) -> None:
        """A step begins while there are readers."""
        one = self._followed.get(state.executor_id)
        if one is None:
            one = self._followed[state.executor_id] = _Followed()
        one.changes.take(plan)
        one.state, one.planned_at, one.num_plan_bytes = state, planned_at, num_plan_bytes
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._flush)

    def executor_gone(self, executor_id: str) -> None:
        """An executor's epoch is over: sends its last steps; the next epoch starts from nothing."""
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
        """Queues `message` (None, or after a gap: the whole batch) unless the reader is too far behind."""
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
