"""The running scheduler: the core, its clock, and the events that wake executors' and routers' loops.

Whatever may give an executor work (a request, a cancel, a deadline, a result, an executor that returns) wakes
its epoch (`epoch`), so no request ever sleeps until another one arrives. The clock is read here and by what
drives the executors, and nowhere below.
"""

import asyncio
from collections.abc import Callable, Iterable

import structlog

from protos.v1 import router_pb2
from scheduler import identity, wire
from scheduler.core import SchedulerCore
from scheduler.counters import Outcome
from scheduler.executor_client import Opened
from scheduler.feed import Feed
from scheduler.plan import BatchPlan, Capacity
from scheduler.promise import Promise
from scheduler.router_session import RouterSession, superseded, touch
from scheduler.sequence import FinishReason, Sequence, State

_log = structlog.get_logger()
MAX_SUMMARIES_PENDING = 256
NO_EXECUTOR_YET = "no executor is attached yet"


class Watcher:
    """One reader of step summaries; a slow one misses some and is told how many."""

    def __init__(self, executor_id: str) -> None:
        self.executor_id = executor_id
        self.queue: asyncio.Queue[router_pb2.StepSummary] = asyncio.Queue(MAX_SUMMARIES_PENDING)
        self._num_dropped = 0

    def offer(self, summary: router_pb2.StepSummary) -> None:
        """Queues a summary unless the reader is too far behind."""
        if self.executor_id and self.executor_id != summary.executor_id:
            return
        if self.queue.full():
            self._num_dropped += 1
            return
        if self._num_dropped:
            told = router_pb2.StepSummary()
            told.CopyFrom(summary)
            told.num_dropped, self._num_dropped = self._num_dropped, 0
            summary = told
        self.queue.put_nowait(summary)


class RunningScheduler:
    """What the executors' loops, the routers' streams, the timers and the lease share."""

    def __init__(self, core: SchedulerCore, *, on_serving: Callable[[bool, str], None]) -> None:
        """`on_serving(serving, reason)` is called at every change."""
        self.core = core
        self.watchers: set[Watcher] = set()
        self.feed = Feed(core.waiting)
        self.capacity: Capacity | None = None  # of the newest executor; kept when it is lost
        self.num_plans = 0
        self.num_plan_bytes = 0
        self.promise: Promise | None = None
        """What routers are welcomed with; those that were told something else are welcomed again."""
        self.term = 0
        self.last_step_id = 0
        self.is_serving = False
        self.is_leaving = False
        self.standing_by = ""
        """Why it does not lead; empty if it does. See `leadership`."""
        self.num_step_downs = 0
        self.reason = NO_EXECUTOR_YET
        self._on_serving = on_serving
        self._executor_wakes: dict[str, asyncio.Event] = {}
        self._router_wakes: dict[RouterSession, asyncio.Event] = {}
        self.missing: dict[str, str] = {}  # executors that are not attached, and why
        self._timer_wake = asyncio.Event()
        self._core_changed = asyncio.Event()

    @staticmethod
    def now() -> float:
        """Seconds on the scheduler's clock: monotonic, from an arbitrary start."""
        return asyncio.get_running_loop().time()

    @property
    def num_routers(self) -> int:
        """Routers connected."""
        return len(self._router_wakes)

    # --- waking loops --------------------------------------------------------------------------------------

    def join(self, session: RouterSession, wake: asyncio.Event) -> None:
        """From now on, news for `session` sets `wake`; older streams of its router are over."""
        for over in superseded(session, self._router_wakes):
            over.is_superseded = True
            self.wake_router(over)
        self._router_wakes[session] = wake

    def leave(self, session: RouterSession) -> None:
        """The session's stream is gone: its sequences are orphans."""
        del self._router_wakes[session]
        for seq in session.close():
            self.core.orphan(seq, self.now())
        self.queue_changed()

    def deliver(self, sequences: Iterable[Sequence]) -> None:
        """These sequences have news for their routers."""
        self._core_changed.set()
        woken: set[RouterSession] = set()
        for seq in sequences:
            session = touch(seq)
            if session is not None:
                woken.add(session)
        for session in woken:
            self.wake_router(session)

    def _deliver_ended(self, sequences: Iterable[Sequence]) -> None:
        self.deliver(sequences)
        for seq in sequences:
            _log_end(seq, self.last_step_id)

    def wake_router(self, session: RouterSession) -> None:
        """`session` has something to send."""
        wake = self._router_wakes.get(session)
        if wake is not None:
            wake.set()

    def queue_changed(self) -> None:
        """The queue changed, or something was freed: executors may have work, and a timer may have moved."""
        self._core_changed.set()
        for wake in self._executor_wakes.values():
            wake.set()
        self._timer_wake.set()

    # --- time ----------------------------------------------------------------------------------------------

    async def run_timers(self) -> None:
        """Ends what is past its time. Does not rely on steps: a hung executor makes none."""
        while True:
            self._timer_wake.clear()
            next_time = self.core.next_timer
            delay = None if next_time is None else max(0.0, next_time - self.now())
            try:
                async with asyncio.timeout(delay):
                    await self._timer_wake.wait()
            except TimeoutError:
                self._deliver_ended(self.core.expire(self.now()))
                self.queue_changed()

    # --- executors -----------------------------------------------------------------------------------------

    def executor_attached(self, executor_id: str, opened: Opened, wake: asyncio.Event) -> None:
        """An executor was opened, with a fresh epoch."""
        self._executor_wakes[executor_id] = wake
        self.capacity = opened.capacity
        self.term = max(self.term, opened.term)
        self.missing.pop(executor_id, None)
        self._deliver_ended(self.core.attach(executor_id, opened.epoch, opened.capacity, self.now()))
        self._renew_promise()
        self._update_serving()

    def refusal_of(self, executor_id: str, capacity: Capacity) -> str | None:
        """Why an executor that was opened cannot be attached, as a sentence; None if it can.

        If others are attached, it must serve their model, with their numerics. Alone it may bring another
        model, once no live request was promised the earlier one.
        """
        told = self.capacity
        if told is None:
            return None
        model, numbers = identity.other_model(told, capacity), identity.other_numbers(told, capacity)
        difference = model or numbers
        if difference is None:
            return None
        if self.core.executors:
            return f"the executor at {executor_id} does not fit the others: {difference}"
        if model is not None and any(seq.state is not State.FINISHED for seq in self.core.sequences.values()):
            return (
                f"the executor at {executor_id} serves another model than the requests were begun with: "
                f"{model}; it is taken in when they have ended"
            )
        _log.warning("another_model", executor=executor_id, difference=difference)
        return None

    def _renew_promise(self) -> None:
        """While no executor is attached, the latest promise stands."""
        core = self.core
        if core.executors and self.capacity is not None:
            promise = Promise.of(self.capacity, core.max_total_tokens, core.features)
            self.promise = promise.knowing(self.promise if len(core.executors) > 1 else None)

    def twin_of(self, executor_id: str, instance_id: str) -> str | None:
        """Another address under which the same process is already attached."""
        for other_id, state in self.core.executors.items():
            if instance_id and other_id != executor_id and state.capacity.instance_id == instance_id:
                return other_id
        return None

    def executor_lost(self, executor_id: str, reason: str, *, is_crash: bool) -> None:
        """Its epoch is over: what ran there waits again. `is_crash`: what it computed may have killed it."""
        del self._executor_wakes[executor_id]
        self.feed.executor_gone(executor_id)
        self._deliver_ended(self.core.detach(executor_id, self.now(), is_crash=is_crash))
        self._renew_promise()
        self.executor_missing(executor_id, reason)
        self.queue_changed()

    def executor_missing(self, executor_id: str, reason: str) -> None:
        """Records why an executor is not attached."""
        if self.missing.get(executor_id) != reason:
            self.missing[executor_id] = reason
            _log.warning("waiting_for_executor", executor=executor_id, reason=reason)
            self._update_serving()

    def executor_given_up(self, executor_id: str) -> None:
        """The scheduler no longer wants this executor."""
        self.missing.pop(executor_id, None)
        self._update_serving()

    def _update_serving(self) -> None:
        states = self.core.executors.values()
        serving = not (self.is_leaving or self.standing_by) and any(not state.is_draining for state in states)
        reason = "" if serving else self._reason_not_to_serve()
        if serving != self.is_serving:
            self.is_serving = serving
            self._on_serving(serving, reason)
        self.reason = reason
        for wake in self._router_wakes.values():
            wake.set()

    def _reason_not_to_serve(self) -> str:
        if self.is_leaving:
            return "the scheduler is shutting down"
        if self.standing_by:
            return self.standing_by
        draining = [f"the executor at {executor_id} is draining" for executor_id in self.core.executors]
        return "; ".join([*draining, *self.missing.values()]) or NO_EXECUTOR_YET

    # --- steps ---------------------------------------------------------------------------------------------

    def plan_leaves(self, executor_id: str, plan: BatchPlan, num_bytes: int) -> None:
        """A plan is about to be sent."""
        self.num_plans += 1
        self.num_plan_bytes += num_bytes
        if self.watchers:
            self._tell_watchers(executor_id, plan, num_bytes)
        if self.feed.has_readers:
            self.feed.step(self.core.executors[executor_id], plan, self.now(), num_bytes)

    def result_applied(self, step_id: int, outcome: Outcome, *, has_turned: bool) -> None:
        """A result was applied; `has_turned`: its executor began, or ceased, to drain."""
        self.last_step_id = step_id
        self.deliver(outcome.progressed)
        self._deliver_ended(outcome.ended)
        if has_turned:
            self._update_serving()
        if self.core.waiting:
            self._wake_idle()
        if outcome.ended:
            self._timer_wake.set()  # their results are kept only for a while

    def _wake_idle(self) -> None:
        """Sequences wait, and something was freed: an executor with nothing to do may take one."""
        for executor_id, state in self.core.executors.items():
            if not state.running:
                self._executor_wakes[executor_id].set()

    def _tell_watchers(self, executor_id: str, plan: BatchPlan, num_plan_bytes: int) -> None:
        summary = wire.step_summary(self.core.executors[executor_id], plan, self.now())
        summary.num_waiting = len(self.core.waiting)
        summary.waiting.extend(wire.waiting_groups(self.core.waiting.counts))
        summary.num_plan_bytes = num_plan_bytes
        for watcher in self.watchers:
            watcher.offer(summary)

    # --- leading and standing by ---------------------------------------------------------------------------

    def lead(self) -> None:
        """From now on this scheduler leads."""
        self.standing_by = ""
        self._update_serving()

    def stand_by(self, reason: str) -> None:
        """Another scheduler leads. The executors here are gone, and routers take their requests there."""
        assert not self.core.executors
        if not self.standing_by:
            self.num_step_downs += 1  # ends the streams of routers that were welcomed
            for key in list(self.core.sequences):
                self.core.cancel(key, FinishReason.ABORT, self.now())
        self.standing_by = reason
        self._core_changed.set()
        self._timer_wake.set()
        self._update_serving()

    # --- draining ------------------------------------------------------------------------------------------

    async def drained(self) -> None:
        """Accepts nothing new from now on; returns when nothing runs or waits."""
        self.is_leaving = True
        self._update_serving()
        while not self.core.is_idle:
            self._core_changed.clear()
            await self._core_changed.wait()


def _log_end(seq: Sequence, step_id: int) -> None:
    assert seq.finish is not None
    _log.info(
        "sequence_ended",
        request_id=seq.request.request_id,
        index=seq.request.sample_index,
        step_id=step_id,
        reason=seq.finish.reason.name,
        num_prompt_tokens=seq.num_prompt_tokens,
        num_output_tokens=seq.num_output_tokens,
        num_preemptions=seq.num_preemptions,
        error=seq.finish.message or None,
    )
