"""The iteration loops: one short coroutine for each executor, the only callers of `schedule` and `update`.

Everything here waits for an event and none of it polls: whatever may give an executor work (a request, a
cancel, a deadline, a result, an executor come back) wakes its loop, so no request ever sleeps until another
one arrives. The clock is read here and nowhere below.
"""

import asyncio
import socket
from collections.abc import Callable, Iterable

import structlog

from protos.v1 import router_pb2
from rpc.address import Address
from scheduler import wire
from scheduler.core import SchedulerCore
from scheduler.executor_client import (
    EpochLostError,
    ExecuteStream,
    ExecutorClient,
    ExecutorUnreachableError,
    HeldError,
    Opened,
)
from scheduler.executor_session import SessionBrokenError
from scheduler.plan import BatchPlan, Capacity
from scheduler.router_session import RouterSession, touch
from scheduler.sequence import Sequence

_log = structlog.get_logger()
RETRY_SECONDS = 0.2
RESOLVE_SECONDS = 1.0
MAX_SUMMARIES_PENDING = 256


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
        self.term = 0
        self.last_step_id = 0
        self.is_serving = False
        self.reason = "no executor is attached yet"
        self._on_serving = on_serving
        self._executor_wakes: dict[str, asyncio.Event] = {}
        self._router_wakes: dict[RouterSession, asyncio.Event] = {}
        self._timer_wake = asyncio.Event()
        self._core_changed = asyncio.Event()

    @staticmethod
    def now() -> float:
        """Seconds on the scheduler's clock: monotonic, from an arbitrary start."""
        return asyncio.get_running_loop().time()

    # --- who is woken by what ------------------------------------------------------------------------------

    def join(self, session: RouterSession, wake: asyncio.Event) -> None:
        """From now on news for `session` set `wake`."""
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
            wake = self._router_wakes.get(session)
            if wake is not None:
                wake.set()

    def queue_changed(self) -> None:
        """Something came, went, or freed something: every executor may have work, a timer may have moved."""
        self._core_changed.set()
        for wake in self._executor_wakes.values():
            wake.set()
        self._timer_wake.set()

    def wake_routers(self) -> None:
        """All routers must look: the serving status changed."""
        for wake in self._router_wakes.values():
            wake.set()

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
                self.deliver(self.core.expire(self.now()))
                self.queue_changed()

    # --- executors -----------------------------------------------------------------------------------------

    def executor_attached(self, executor_id: str, opened: Opened, wake: asyncio.Event) -> None:
        """A fresh epoch is there."""
        self._executor_wakes[executor_id] = wake
        self.capacity = opened.capacity
        self.term = max(self.term, opened.term)
        self.deliver(self.core.attach(executor_id, opened.epoch, opened.capacity, self.now()))
        self._update_serving("")

    def executor_lost(self, executor_id: str, reason: str) -> None:
        """Its epoch is over: what ran there waits again."""
        del self._executor_wakes[executor_id]
        self.core.detach(executor_id, self.now())
        self._update_serving(reason)
        self.queue_changed()

    def _update_serving(self, reason: str) -> None:
        serving = any(not state.is_draining for state in self.core.executors.values())
        self.reason = "" if serving else reason or "every executor is draining"
        if serving != self.is_serving:
            self.is_serving = serving
            self._on_serving(serving, self.reason)
        self.wake_routers()

    def not_serving_because(self, reason: str) -> None:
        """Says why there is still no executor."""
        if not self.is_serving and reason != self.reason:
            self.reason = reason
            _log.warning("waiting_for_executor", reason=reason)
            self.wake_routers()

    async def drive(self, executor_id: str, stream: ExecuteStream, wake: asyncio.Event) -> None:
        """Sends plans and applies results until the stream ends; raises why it ended."""
        for unanswered in self.core.executors[executor_id].session.resend():
            await stream.send(wire.plan_message(unanswered))
        results = asyncio.ensure_future(self._apply_results(executor_id, stream, wake))
        try:
            while True:
                wake.clear()
                while (plan := self.core.schedule(executor_id, self.now())) is not None:
                    message = wire.plan_message(plan)
                    if self.watchers:
                        self._tell_watchers(executor_id, plan, message.ByteSize())
                    await stream.send(message)
                waiting = asyncio.ensure_future(wake.wait())
                await asyncio.wait([waiting, results], return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if results.done():
                    results.result()
        except ExecutorUnreachableError:
            # The writer only sees that the call is over; the reader knows its status.
            await asyncio.wait([results], timeout=1)
            if results.done():
                results.result()
            raise
        finally:
            results.cancel()
            stream.cancel()

    def _tell_watchers(self, executor_id: str, plan: BatchPlan, num_plan_bytes: int) -> None:
        summary = wire.step_summary(self.core.executors[executor_id], plan, self.now())
        summary.num_waiting = len(self.core.waiting)
        summary.num_plan_bytes = num_plan_bytes
        for watcher in self.watchers:
            watcher.offer(summary)

    async def _apply_results(self, executor_id: str, stream: ExecuteStream, wake: asyncio.Event) -> None:
        async for result in stream.results():
            was_draining = self.core.executors[executor_id].is_draining
            outcome = self.core.update(executor_id, result, self.now())
            self.last_step_id = result.step_id
            self.deliver(outcome.progressed)
            self.deliver(outcome.ended)
            wake.set()
            for seq in outcome.ended:
                _log_end(seq, result.step_id)
            if result.draining != was_draining:
                self._update_serving("the executor is draining")
            if outcome.ended and not self.core.sequences:
                self._timer_wake.set()

    # --- draining ------------------------------------------------------------------------------------------

    async def drained(self) -> None:
        """Returns when nothing runs or waits."""
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
    ) -> None:
        self._loop = loop
        self._address = address
        self._scheduler_id = scheduler_id
        self._reattach_seconds = reattach_seconds
        self._client = ExecutorClient(address, max_message_bytes=max_message_bytes)

    async def run(self) -> None:
        """Runs until cancelled."""
        executor_id = str(self._address)
        log = _log.bind(executor=executor_id)
        try:
            while True:
                opened = await self._open(executor_id)
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
                reason = "the scheduler is shutting down"
                try:
                    reason = await self._drive_epoch(executor_id, wake)
                finally:
                    self._loop.executor_lost(executor_id, reason)
                log.warning("executor_lost", reason=reason)
        finally:
            await self._client.close()

    async def _open(self, executor_id: str) -> Opened:
        while True:
            try:
                return await self._client.open(self._scheduler_id)
            except ExecutorUnreachableError as error:
                self._loop.not_serving_because(f"waiting for an executor at {executor_id} ({error})")
            except (HeldError, EpochLostError) as error:
                # Asking again takes nothing from the holder: it is granted only when the holder has gone.
                self._loop.not_serving_because(
                    f"the executor at {executor_id} belongs to another scheduler ({error})"
                )
            await asyncio.sleep(RETRY_SECONDS)

    async def _drive_epoch(self, executor_id: str, wake: asyncio.Event) -> str:
        """Drives one epoch over as many streams as it takes; returns why it is over."""
        broken_since: float | None = None
        session = self._loop.core.executors[executor_id].session
        while True:
            acked = session.acked_step_id
            started = self._loop.now()
            try:
                await self._loop.drive(executor_id, self._client.execute(), wake)
            except (EpochLostError, HeldError) as error:
                return str(error)
            except SessionBrokenError as error:
                _log.error("result_does_not_fit", executor=executor_id, error=str(error))
                return str(error)
            except ExecutorUnreachableError as error:
                now = self._loop.now()
                if (
                    session.acked_step_id > acked
                    or broken_since is None
                    or now - started > self._reattach_seconds
                ):
                    broken_since = now  # it has worked since the last break
                    _log.warning("executor_stream_broken", executor=executor_id, error=str(error))
                if now - broken_since >= self._reattach_seconds:
                    return f"the executor at {executor_id} is gone ({error})"
            await asyncio.sleep(RETRY_SECONDS / 4)


class ExecutorDirectory:
    """Keeps one loop for each executor: those listed, and every address that a dns:/// name has now."""

    def __init__(self, addresses: list[Address], make_loop: Callable[[Address], ExecutorLoop]) -> None:
        self._addresses = addresses
        self._make_loop = make_loop
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Runs until cancelled, or until one of the loops fails."""
        try:
            while True:
                await self._look()
                done, _ = (
                    await asyncio.wait(self._tasks.values(), timeout=RESOLVE_SECONDS)
                    if self._tasks
                    else ((), ())
                )
                for task in done:
                    task.result()
                if not self._tasks:
                    await asyncio.sleep(RESOLVE_SECONDS)
        finally:
            for task in self._tasks.values():
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks.values())

    async def _look(self) -> None:
        for address in self._addresses:
            for found in await _resolved(address):
                if str(found) not in self._tasks:
                    self._tasks[str(found)] = asyncio.create_task(self._make_loop(found).run())


async def _resolved(address: Address) -> list[Address]:
    """Every address behind a dns:///NAME:PORT; any other address as it is."""
    name, separator, port = address.target.removeprefix("dns:///").rpartition(":")
    if not address.target.startswith("dns:///") or not separator:
        return [address]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
    except socket.gaierror:
        return []
    hosts = sorted({str(item[4][0]) for item in found})
    return [
        Address.parse(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", field="--executor")
        for host in hosts
    ]
