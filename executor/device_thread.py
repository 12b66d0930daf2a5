"""The one thread that owns the device.

Loading, warming up and every step run here and nowhere else, one after the other, so that the event loop
answers gRPC and health checks whatever the device does. If the next plan has already arrived, it starts the
moment the one before it ends, without a turn through the event loop.

Must not know: what a job does.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final, Generic, TypeVar

T = TypeVar("T")

IDLE_SECONDS: Final = 0.5
"""So long without a job is more than a pause between steps, or between the requests of one client."""


@dataclass(frozen=True, slots=True)
class Later(Generic[T]):
    """What a job returns when it has asked the device for something and not waited for it."""

    wait: Callable[[], None]
    """returns when it is there; called in another thread"""
    finish: Callable[[], T]
    """the outcome; called in the device's thread, as a job of its own. Must not raise"""


class DeviceThread:
    """Runs functions one after the other in a thread of its own.

    What is there `Later` is waited for in a second thread, so that the jobs behind it run meanwhile. Both
    threads are daemons: a step that never returns does not keep the process from ending.

    `work_ahead`, once it is set, is called while there has been no job for `IDLE_SECONDS`, until it returns
    False or a job comes. It must not raise.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.work_ahead: Callable[[], bool] = lambda: False
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()
        self._waits: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._waiter: threading.Thread | None = None

    def submit(self, job: Callable[[], T | Later[T]], done: Callable[[T], None]) -> None:
        """Run `job` after all before it; then `done` on the event loop with its outcome.

        `job` must not raise. Outcomes that are there later come in the order of their jobs.
        """

        def run() -> None:
            outcome = job()
            if isinstance(outcome, Later):
                self._finish_later(outcome, done)
            else:
                self._loop.call_soon_threadsafe(done, outcome)

        self._jobs.put(run)

    def _finish_later(self, later: Later[T], done: Callable[[T], None]) -> None:
        def finish() -> None:
            self._loop.call_soon_threadsafe(done, later.finish())

        def wait() -> None:
            # What is wrong with the device shows again where the outcome is made, and is dealt with there.
            with suppress(Exception):
                later.wait()
            self._jobs.put(finish)

        if self._waiter is None:
            self._waiter = threading.Thread(target=self._wait, name="device-waiter", daemon=True)
            self._waiter.start()
        self._waits.put(wait)

    def _wait(self) -> None:
        while True:
            self._waits.get()()

    async def call(self, function: Callable[[], T]) -> T:
        """Run `function` after all before it and hand on what it returns or raises."""
        future: asyncio.Future[T] = self._loop.create_future()

        def job() -> tuple[T | None, BaseException | None]:
            try:
                return function(), None
            except Exception as error:  # noqa: BLE001 - handed on to the caller
                return None, error

        def done(outcome: tuple[T | None, BaseException | None]) -> None:
            if future.cancelled():
                return
            value, error = outcome
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)  # type: ignore[arg-type]  # None only if T is None

        self.submit(job, done)
        return await future

    def close(self) -> bool:
        """End the thread after what it has; wait a second for it at most. Whether it has ended."""
        self._jobs.put(None)
        self._thread.join(timeout=1.0)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._next_job()) is not None:
            job()

    def _next_job(self) -> Callable[[], None] | None:
        seconds = IDLE_SECONDS
        while True:
            with suppress(Empty):
                return self._jobs.get(timeout=seconds)
            if not self.work_ahead():
                return self._jobs.get()
            seconds = 0.0
