"""The iteration loops: one short coroutine for each executor, the only callers of `schedule` and `update`.

Everything here waits for an event and none of it polls: whatever may give an executor work (a request, a
cancel, a deadline, a result, an executor come back) wakes its loop, so no request ever sleeps until another
one arrives. The clock is read here and nowhere below.
"""

import asyncio
import contextlib
import random
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import structlog

from protos.v1 import router_pb2
from rpc.address import Address
from rpc.channel import MAX_RECONNECT_SECONDS
from rpc.tls import Tls
from scheduler import audit, identity, wire
from scheduler.blocks import BlockError
from scheduler.core import SchedulerCore
from scheduler.executor_client import (
    EpochLostError,
    ExecuteStream,
    ExecutorClient,
    ExecutorUnreachableError,
    HeldError,
    LeftError,
    Opened,
)
from scheduler.executor_session import SessionBrokenError
from scheduler.plan import BatchPlan, Capacity
from scheduler.router_session import RouterSession, superseded, touch
from scheduler.sequence import FinishReason, Sequence, State

_log = structlog.get_logger()
RETRY_SECONDS = 0.2
MAX_RETRY_SECONDS = 1.0
STEP_TIMEOUT_SECONDS = 10.0
# A result may be here and not be read yet, when it was this process that stood still.
_READING_SECONDS = 0.25
_MIN_LOOK_SECONDS = 0.005
_TWIN_GONE_LOOKS = 5
AUDIT_STEPS = 1024
RESOLVE_SECONDS = 1.0
# A stream that lived longer than any attempt to connect was a connection, even if it brought nothing.
HELD_SECONDS = 2.0 * MAX_RECONNECT_SECONDS
MAX_SUMMARIES_PENDING = 256
NO_EXECUTOR_YET = "no executor is attached yet"


class StepLateError(Exception):
    """A step takes far longer than it should: the executor hangs, or stands still."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Why an epoch is over; `is_crash`: the executor may have died of what it computed."""

    reason: str
    is_crash: bool = False


def _backoff(attempt: int) -> float:
    """Seconds until the next attempt; with jitter, so that many do not ask at once."""
    return min(MAX_RETRY_SECONDS, RETRY_SECONDS * 2.0 ** min(attempt, 8)) * random.uniform(0.5, 1.0)  # noqa: S311


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


class SchedulerLoop:
    """The running scheduler: the core, its clock, and who must be woken by what."""

    def __init__(self, core: SchedulerCore, *, on_serving: Callable[[bool, str], None]) -> None:
        """`on_serving(serving, reason)` is called at every change."""
        self.core = core
        self.watchers: set[Watcher] = set()
        self.capacity: Capacity | None = None  # of the newest executor; kept when it is lost
        self.num_plans = 0
        self.num_plan_bytes = 0
        self.num_models = 0  # how often the model has changed: routers must be welcomed anew
        self.term = 0
        self.last_step_id = 0
        self.is_serving = False
        self.is_leaving = False
        self.standing_by = ""
        """Why it does not lead, if it does not: see `leadership`."""
        self.num_step_downs = 0
        self.reason = NO_EXECUTOR_YET
        self._on_serving = on_serving
        self._executor_wakes: dict[str, asyncio.Event] = {}
        self._router_wakes: dict[RouterSession, asyncio.Event] = {}
        self.missing: dict[str, str] = {}  # executors not attached, and why
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

    # --- who is woken by what ------------------------------------------------------------------------------

    def join(self, session: RouterSession, wake: asyncio.Event) -> None:
        """From now on news for `session` set `wake`; older streams of its router are over."""
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
        """These have news for their routers."""
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
        """`session` has something to say."""
        wake = self._router_wakes.get(session)
        if wake is not None:
            wake.set()

    def queue_changed(self) -> None:
        """Something came, went, or freed something: every executor may have work, a timer may have moved."""
        self._core_changed.set()
        for wake in self._executor_wakes.values():
            wake.set()
        self._timer_wake.set()

    # --- time ----------------------------------------------------------------------------------------------

    async def run_timers(self) -> None:
        """Ends what is past its time. Has its own clock: a hung executor brings no step to notice it."""
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
        """A fresh epoch is there."""
        self._executor_wakes[executor_id] = wake
        self.capacity = opened.capacity
        self.term = max(self.term, opened.term)
        self.missing.pop(executor_id, None)
        self._deliver_ended(self.core.attach(executor_id, opened.epoch, opened.capacity, self.now()))
        self._update_serving()

    def refusal_of(self, executor_id: str, capacity: Capacity) -> str | None:
        """Why an executor that was opened cannot be attached, as a sentence.

        Beside others it must serve their model, with their numbers. Alone it may bring another model, once
        nobody is left who was promised the earlier one.
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
        self.num_models += 1
        return None

    def twin_of(self, executor_id: str, instance_id: str) -> str | None:
        """Another address under which the same process is attached already."""
        for other_id, state in self.core.executors.items():
            if instance_id and other_id != executor_id and state.capacity.instance_id == instance_id:
                return other_id
        return None

    def executor_lost(self, executor_id: str, loss: Loss) -> None:
        """Its epoch is over: what ran there waits again."""
        del self._executor_wakes[executor_id]
        self._deliver_ended(self.core.detach(executor_id, self.now(), is_crash=loss.is_crash))
        self.executor_missing(executor_id, loss.reason)
        self.queue_changed()

    def executor_missing(self, executor_id: str, reason: str) -> None:
        """Says why an executor is not attached."""
        if self.missing.get(executor_id) != reason:
            self.missing[executor_id] = reason
            _log.warning("waiting_for_executor", executor=executor_id, reason=reason)
            self._update_serving()

    def executor_given_up(self, executor_id: str) -> None:
        """Nobody waits for this executor any more."""
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

    async def drive(
        self, executor_id: str, stream: ExecuteStream, wake: asyncio.Event, *, step_timeout_seconds: float
    ) -> None:
        """Sends plans and applies results until the stream ends; raises why it ended.

        A step that takes longer than `step_timeout_seconds`, and than 20 times what was predicted for it,
        ends the stream with StepLateError.
        """
        state = self.core.executors[executor_id]
        state.is_away = False
        state.clock.resumed(self.now())
        results = asyncio.ensure_future(self._apply_results(executor_id, stream, wake))
        results.add_done_callback(lambda _: wake.set())
        watch = asyncio.ensure_future(self._watch_steps(executor_id, step_timeout_seconds))
        # A writer that is held up by an executor that takes nothing must be freed as well.
        watch.add_done_callback(lambda _: stream.cancel())
        try:
            for unanswered in state.session.resend():
                await stream.send(wire.plan_message(unanswered).SerializeToString())
            while not results.done():
                wake.clear()
                await self._send_plans(executor_id, stream)
                look_at = state.look_again_at
                if look_at is not None:
                    look_at = max(look_at, self.now() + _MIN_LOOK_SECONDS)
                with self._waking_at(look_at, wake), self._waking_at(state.held_until, wake):
                    await wake.wait()
            if not watch.done():
                results.result()
            watch.result()
        except ExecutorUnreachableError:
            if watch.done():
                watch.result()
            # The writer only sees that the call is over; the reader knows its status.
            await asyncio.wait([results], timeout=1)
            if results.done():
                results.result()
            raise
        finally:
            state.is_away = True
            stream.cancel()
            for task in (results, watch):
                task.cancel()
            await asyncio.gather(results, watch, return_exceptions=True)

    @contextlib.contextmanager
    def _waking_at(self, when: float | None, wake: asyncio.Event) -> Iterator[None]:
        """Sets `wake` at that time, unless the block has been left."""
        if when is None:
            yield
            return
        timer = asyncio.get_running_loop().call_at(when, wake.set)
        try:
            yield
        finally:
            timer.cancel()

    async def _watch_steps(self, executor_id: str, least_seconds: float) -> None:
        """Raises StepLateError when a step is late."""
        state = self.core.executors[executor_id]
        while True:
            late_at = state.clock.late_at(least_seconds)
            if late_at is None:  # what is sent from now on cannot be late before that
                await asyncio.sleep(least_seconds)
            elif self.now() < late_at:
                await asyncio.sleep(late_at - self.now())
            else:
                step_id = state.session.unanswered[0].step_id
                await asyncio.sleep(_READING_SECONDS)
                if state.session.unanswered and state.session.unanswered[0].step_id == step_id:
                    raise StepLateError(
                        f"step {step_id} has not answered within "
                        f"{late_at - state.clock.began:.1f} seconds: the executor hangs"
                    )

    async def _send_plans(self, executor_id: str, stream: ExecuteStream) -> None:
        state = self.core.executors[executor_id]
        while True:
            plan = self.core.schedule(executor_id, self.now())
            if plan is not None:
                message = wire.plan_message(plan).SerializeToString()
                self.num_plans += 1
                self.num_plan_bytes += len(message)
                if self.watchers:
                    self._tell_watchers(executor_id, plan, len(message))
                await stream.send(message)
                if plan.step_id % AUDIT_STEPS == 0:
                    audit.check_counts(state)
            elif state.is_hashing and not state.session.num_unanswered:
                await asyncio.sleep(0)  # a long prompt is hashed in slices: let others in between
            else:
                break
        audit.check_idle(state)

    def _wake_idle(self) -> None:
        """Somebody waits, and something has just come free: an executor with nothing to do may take it."""
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

    async def _apply_results(self, executor_id: str, stream: ExecuteStream, wake: asyncio.Event) -> None:
        async for result in stream.results():
            was_draining = self.core.executors[executor_id].is_draining
            outcome = self.core.update(executor_id, result, self.now())
            self.last_step_id = result.step_id
            self.deliver(outcome.progressed)
            self._deliver_ended(outcome.ended)
            wake.set()
            if result.draining != was_draining:
                self._update_serving()
            if self.core.waiting:
                self._wake_idle()
            if outcome.ended:
                self._timer_wake.set()  # their results are kept for a while only

    # --- leading and standing by ---------------------------------------------------------------------------

    def lead(self) -> None:
        """From now on this scheduler is the one to ask."""
        self.standing_by = ""
        self._update_serving()

    def stand_by(self, reason: str) -> None:
        """Another one is. Its executors are gone; whoever was promised something here asks there."""
        assert not self.core.executors
        if not self.standing_by:
            self.num_step_downs += 1  # ends the streams of those who were welcomed
            for key in list(self.core.sequences):
                self.core.cancel(key, FinishReason.ABORT, self.now())
        self.standing_by = reason
        self._core_changed.set()
        self._timer_wake.set()
        self._update_serving()

    # --- draining ------------------------------------------------------------------------------------------

    async def drained(self) -> None:
        """Takes nothing new from now on; returns when nothing runs or waits."""
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


class ExecutorLoop:
    """One executor's life from this side: open, drive, lose, open again."""

    def __init__(
        self,
        loop: SchedulerLoop,
        address: Address,
        *,
        scheduler_id: str,
        reattach_seconds: float,
        max_message_bytes: int,
        step_timeout_seconds: float = STEP_TIMEOUT_SECONDS,
        tls: Tls | None = None,
        term: int = 0,
        on_held: Callable[[str, int], None] | None = None,
    ) -> None:
        """`term`: of the lease, 0 without one. `on_held(holder, term)` tells who has the executor instead."""
        self._loop = loop
        self._term = term
        self._on_held = on_held
        self._step_timeout_seconds = step_timeout_seconds
        self._num_late = 0  # epochs in a row that ended with their first step late
        self._address = address
        self._scheduler_id = scheduler_id
        self._reattach_seconds = reattach_seconds
        self._client = ExecutorClient(address, max_message_bytes=max_message_bytes, tls=tls)

    @property
    def is_attached(self) -> bool:
        """Whether an epoch of this executor is being driven."""
        return str(self._address) in self._loop.core.executors

    async def run(self) -> None:
        """Runs until cancelled."""
        executor_id = str(self._address)
        log = _log.bind(executor=executor_id)
        try:
            while True:
                opened = await self._open_fitting(executor_id)
                wake = asyncio.Event()
                self._loop.executor_attached(executor_id, opened, wake)
                capacity = opened.capacity
                log.info(
                    "executor_attached",
                    instance_id=capacity.instance_id,
                    num_blocks=capacity.num_blocks,
                    block_size=capacity.block_size,
                    max_num_seqs=capacity.max_num_seqs,
                    max_num_batched_tokens=capacity.max_num_batched_tokens,
                    row_invariant=capacity.row_invariant,
                )
                loss = Loss("the scheduler is shutting down")
                try:
                    loss = await self._drive_epoch(executor_id, wake)
                finally:
                    self._loop.executor_lost(executor_id, loss)
                log.warning("executor_lost", reason=loss.reason, is_crash=loss.is_crash)
                # Not at once: an executor that breaks every epoch must not spin, and a scheduler that has
                # just taken it over needs a moment to open its stream, by which it holds the executor.
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            self._loop.executor_given_up(executor_id)
            await self._client.close()

    async def _open_fitting(self, executor_id: str) -> Opened:
        """Opens the executor until it is one that may be attached."""
        attempt = 0
        while True:
            opened = await self._open(executor_id)
            twin = self._loop.twin_of(executor_id, opened.capacity.instance_id)
            if twin is not None:
                self._loop.executor_missing(executor_id, f"{executor_id} is the same executor as {twin}")
                await self._until_gone(twin)
                continue
            refusal = self._loop.refusal_of(executor_id, opened.capacity)
            if refusal is None:
                return opened
            self._loop.executor_missing(executor_id, refusal)
            await asyncio.sleep(_backoff(attempt))
            attempt += 1

    async def _until_gone(self, executor_id: str) -> None:
        """Returns when that executor was not attached for a while: opening its twin would end its epoch."""
        num_looks = 0
        while num_looks < _TWIN_GONE_LOOKS:
            await asyncio.sleep(MAX_RETRY_SECONDS)
            num_looks = 0 if executor_id in self._loop.core.executors else num_looks + 1

    async def _open(self, executor_id: str) -> Opened:
        attempt = 0
        while True:
            try:
                return await self._client.open(self._scheduler_id, self._term)
            except (ExecutorUnreachableError, LeftError) as error:
                reason = f"waiting for an executor at {executor_id} ({error})"
            except (HeldError, EpochLostError) as error:
                self._tell_held(error)
                # Asking again takes nothing from the holder: it is granted only when the holder has gone.
                reason = f"the executor at {executor_id} belongs to another scheduler ({error})"
            self._loop.executor_missing(executor_id, reason)
            await asyncio.sleep(_backoff(attempt))
            attempt += 1

    def _tell_held(self, error: Exception) -> None:
        if isinstance(error, HeldError) and self._on_held is not None:
            self._on_held(error.holder, error.term)

    async def _drive_epoch(self, executor_id: str, wake: asyncio.Event) -> Loss:
        """Drives one epoch over as many streams as it takes; returns why it is over."""
        broken_since: float | None = None
        state = self._loop.core.executors[executor_id]
        session = state.session
        # An executor whose first steps are slow, and nobody knows how slow yet, is given more time each time.
        step_timeout_seconds = self._step_timeout_seconds * 2.0 ** min(self._num_late, 8)
        while True:
            acked = session.acked_step_id
            started = self._loop.now()
            try:
                await self._loop.drive(
                    executor_id, self._client.execute(), wake, step_timeout_seconds=step_timeout_seconds
                )
            except (HeldError, EpochLostError, LeftError) as error:
                self._tell_held(error)
                return Loss(str(error), is_crash=isinstance(error, EpochLostError))
            except StepLateError as error:
                self._num_late = 0 if session.acked_step_id else self._num_late + 1
                return Loss(f"the executor at {executor_id} is given up: {error}", is_crash=True)
            except (SessionBrokenError, BlockError) as error:
                self._loop.core.counters.audits_failed += isinstance(error, BlockError)
                books = audit.describe(self._loop.core.executors[executor_id])
                _log.error("epoch_given_up", executor=executor_id, error=str(error), **books)
                return Loss(f"the epoch of the executor at {executor_id} was given up: {error}")
            except ExecutorUnreachableError as error:
                now = self._loop.now()
                has_worked = session.acked_step_id > acked or now - started > max(
                    self._reattach_seconds, HELD_SECONDS
                )
                if has_worked or broken_since is None:
                    broken_since = now
                    _log.warning("executor_stream_broken", executor=executor_id, error=str(error))
                if state.is_draining or now - broken_since >= self._reattach_seconds:
                    reason = f"the executor at {executor_id} is gone ({error})"
                    return Loss(reason, is_crash=not state.is_draining)
            await asyncio.sleep(_backoff(0) / 4)


class ExecutorDirectory:
    """Keeps one loop for each executor: those listed, and every address that a dns:/// name has now."""

    def __init__(self, addresses: list[Address], make_loop: Callable[[Address], ExecutorLoop]) -> None:
        self._addresses = addresses
        self._make_loop = make_loop
        self._loops: dict[str, ExecutorLoop] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Runs until cancelled, or until one of the loops fails."""
        try:
            while True:
                await self._look()
                if self._tasks:
                    done, _ = await asyncio.wait(self._tasks.values(), timeout=RESOLVE_SECONDS)
                    for task in done:
                        task.result()
                else:
                    await asyncio.sleep(RESOLVE_SECONDS)
        finally:
            await self._end(list(self._tasks))

    async def _look(self) -> None:
        answers = [await _resolved(address) for address in self._addresses]
        found = {str(address): address for answer in answers for address in answer or []}
        for executor_id, address in found.items():
            if executor_id not in self._tasks:
                self._loops[executor_id] = self._make_loop(address)
                self._tasks[executor_id] = asyncio.create_task(self._loops[executor_id].run())
        if None not in answers:
            # One that its name has left and that is lost as well will not come back under this address.
            await self._end(
                [name for name, loop in self._loops.items() if name not in found and not loop.is_attached]
            )

    async def _end(self, executor_ids: list[str]) -> None:
        tasks = [self._tasks.pop(executor_id) for executor_id in executor_ids]
        for executor_id, task in zip(executor_ids, tasks, strict=True):
            del self._loops[executor_id]
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _resolved(address: Address) -> list[Address] | None:
    """Every address behind a dns:///NAME:PORT, or None when it cannot be told now; any other as it is."""
    name, separator, port = address.target.removeprefix("dns:///").rpartition(":")
    if not address.target.startswith("dns:///") or not separator:
        return [address]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    hosts = sorted({str(item[4][0]) for item in found})
    return [
        Address.parse(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", field="--executor")
        for host in hosts
    ]
