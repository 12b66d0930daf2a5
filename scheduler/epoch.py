"""Drives one epoch of one executor: plans out, results in, over as many streams as it takes, until its end.

The only caller of `schedule` and `update`. Everything here waits for an event and nothing polls, except for
the connection itself (`ExecuteStream.connected`): whatever may give the executor work (a request, a cancel, a
deadline, a result) sets its `wake`.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import structlog

from rpc.channel import MAX_RECONNECT_SECONDS
from scheduler import audit, wire
from scheduler.blocks import BlockError
from scheduler.executor_client import (
    EpochLostError,
    ExecuteStream,
    ExecutorUnreachableError,
    HeldError,
    LeftError,
)
from scheduler.executor_session import SessionBrokenError, check_ids
from scheduler.running_scheduler import RunningScheduler

_log = structlog.get_logger()
RECONNECT_SECONDS = 0.05  # at most
# A result may have arrived but not been read yet, if it was this process that stood still.
_READING_SECONDS = 0.25
_MIN_LOOK_SECONDS = 0.005
AUDIT_STEPS = 1024
# A stream that lived longer than any attempt to connect was connected, even if it brought nothing.
HELD_SECONDS = 2.0 * MAX_RECONNECT_SECONDS


class StepLateError(Exception):
    """A step takes far longer than it should: the executor hangs, or is paused."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Why an epoch is over."""

    reason: str
    is_crash: bool = False
    """What it computed may be the cause: the executor died, hangs, or answered wrongly."""
    is_late: bool = False
    """It has not died: a step took too long."""
    is_unfit: bool = False
    """It has not died: its answer does not fit the plan."""
    held: HeldError | None = None
    """Another scheduler has the executor."""


class Epoch:
    """An executor that was opened and attached."""

    def __init__(
        self,
        scheduler: RunningScheduler,
        executor_id: str,
        wake: asyncio.Event,
        *,
        reattach_seconds: float,
        step_timeout_seconds: float,
    ) -> None:
        """`wake`: set by the scheduler whenever the executor may have work."""
        self._scheduler = scheduler
        self._executor_id = executor_id
        self._wake = wake
        self._reattach_seconds = reattach_seconds
        self._step_timeout_seconds = step_timeout_seconds
        self._state = scheduler.core.executors[executor_id]

    async def run(self, connect: Callable[[], ExecuteStream]) -> Loss:
        """Drives the executor over one stream after another; returns why the epoch is over."""
        broken_since: float | None = None
        executor_id, state, session = self._executor_id, self._state, self._state.session
        while True:
            acked = session.acked_step_id
            started = self._scheduler.now()
            try:
                await self._drive(connect())
            except HeldError as error:
                return Loss(str(error), held=error)
            except LeftError as error:
                return Loss(str(error))
            except EpochLostError as error:
                return Loss(str(error), is_crash=not state.is_draining)
            except StepLateError as error:
                return Loss(
                    f"the executor at {executor_id} is given up: {error}", is_crash=True, is_late=True
                )
            except (SessionBrokenError, BlockError) as error:
                is_unfit = isinstance(error, SessionBrokenError)
                self._scheduler.core.counters.audits_failed += not is_unfit
                _log.error("epoch_given_up", executor=executor_id, error=str(error), **audit.describe(state))
                reason = f"the epoch of the executor at {executor_id} was given up: {error}"
                return Loss(reason, is_crash=is_unfit, is_unfit=is_unfit)
            except ExecutorUnreachableError as error:
                now = self._scheduler.now()
                has_worked = session.acked_step_id > acked or now - started > max(
                    self._reattach_seconds, HELD_SECONDS
                )
                if has_worked or broken_since is None:
                    broken_since = now
                    _log.warning("executor_stream_broken", executor=executor_id, error=str(error))
                if state.is_draining or now - broken_since >= self._reattach_seconds:
                    reason = f"the executor at {executor_id} is gone ({error})"
                    return Loss(reason, is_crash=not state.is_draining)
            await asyncio.sleep(RECONNECT_SECONDS * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, no secret

    async def _drive(self, stream: ExecuteStream) -> None:
        """Sends plans and applies results until the stream ends; raises the reason for its end.

        A step that takes longer than the step timeout, and than 20 times its predicted duration, ends the
        stream with StepLateError. Nothing waits for the writer: an executor that takes nothing may block it
        for as long as the connection lasts, even after the call was cancelled.
        """
        state = self._state
        state.clock.resumed(self._scheduler.now())
        watching = asyncio.ensure_future(self._watch_steps())
        reading = asyncio.ensure_future(self._apply_results(stream))
        writing = asyncio.ensure_future(self._write_plans(stream))
        tasks = (watching, reading, writing)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if writing.done() and isinstance(writing.exception(), ExecutorUnreachableError):
                # The writer only sees that the call has ended; the reader knows its status.
                await asyncio.wait([reading], timeout=1)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            state.is_away = True
            stream.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _write_plans(self, stream: ExecuteStream) -> None:
        """Sends unanswered plans again; after that, plans and sends whenever there may be work.

        Nothing is planned before there is a connection: if the executor is dead, a sequence planned for it
        would only wait there, and then be suspected of having killed it.
        """
        state, wake = self._state, self._wake
        await stream.connected()
        state.is_away = False
        for unanswered in state.session.resend():
            await stream.send(wire.plan_message(unanswered).SerializeToString())
        while True:
            wake.clear()
            await self._send_plans(stream)
            look_at = state.look_again_at
            if look_at is not None:
                look_at = max(look_at, self._scheduler.now() + _MIN_LOOK_SECONDS)
            with _waking_at(look_at, wake), _waking_at(state.held_until, wake):
                await wake.wait()

    async def _watch_steps(self) -> None:
        """Raises StepLateError when a step is late."""
        clock, session, scheduler = self._state.clock, self._state.session, self._scheduler
        while True:
            late_at = clock.late_at(self._step_timeout_seconds)
            if late_at is None:  # what is sent from now on cannot be late earlier than that
                await asyncio.sleep(self._step_timeout_seconds)
            elif scheduler.now() < late_at:
                await asyncio.sleep(late_at - scheduler.now())
            else:
                step_id = session.unanswered[0].step_id
                await asyncio.sleep(_READING_SECONDS)
                if session.unanswered and session.unanswered[0].step_id == step_id:
                    seconds = late_at - clock.began
                    raise StepLateError(
                        f"step {step_id} has not answered within {seconds:.1f} seconds: the executor hangs"
                    )

    async def _send_plans(self, stream: ExecuteStream) -> None:
        core, state = self._scheduler.core, self._state
        while True:
            plan = core.schedule(self._executor_id, self._scheduler.now())
            if plan is not None:
                message = wire.plan_message(plan).SerializeToString()
                self._scheduler.plan_leaves(self._executor_id, plan, len(message))
                await stream.send(message)
                if plan.step_id % AUDIT_STEPS == 0:
                    audit.check_counts(state)
            elif state.is_still_looking and not state.session.num_unanswered:
                await asyncio.sleep(0)  # long work is done in slices: let other tasks run in between
            else:
                break
        audit.check_idle(state)

    async def _apply_results(self, stream: ExecuteStream) -> None:
        async for result in stream.results():
            check_ids(result, self._state.session.next_unanswered, self._state.capacity)
            was_draining = self._state.is_draining
            outcome = self._scheduler.core.update(self._executor_id, result, self._scheduler.now())
            self._scheduler.result_applied(
                result.step_id, outcome, has_turned=result.draining != was_draining
            )
            self._wake.set()


@contextlib.contextmanager
def _waking_at(when: float | None, wake: asyncio.Event) -> Iterator[None]:
    """Sets `wake` at that time, unless the block was left before."""
    if when is None:
        yield
        return
    timer = asyncio.get_running_loop().call_at(when, wake.set)
    try:
        yield
    finally:
        timer.cancel()
