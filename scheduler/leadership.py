"""The shell of the lease: looks, claims, beats; starts to lead, and stops when another scheduler leads.

Decides nothing: `lease` does. File calls run in a thread, since a file system may hang. If one does, only the
next file call waits: neither stepping down, nor draining, nor the end of the process.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import structlog

from rpc.errors import StartError
from scheduler.lease import Lease, Record, Role
from scheduler.lease_file import LeaseFile, LeaseFileError
from scheduler.running_scheduler import RunningScheduler

_log = structlog.get_logger()
# A standby takes over at its next look, at most a quarter of a second later.
HAND_OVER_SECONDS = 2.0
T = TypeVar("T")


class Leadership:
    """One scheduler process that leads or stands by, as its lease says."""

    def __init__(
        self,
        lease: Lease,
        file: LeaseFile,
        scheduler: RunningScheduler,
        lead: Callable[[int], Coroutine[None, None, None]],
    ) -> None:
        """`lead(term)` drives the executors; it is cancelled when another scheduler leads."""
        self._lease = lease
        self._file = file
        self._scheduler = scheduler
        self._lead = lead
        self._over = asyncio.Event()
        self._reason = ""
        self._is_leaving = False
        self._files = _FileThread()
        self._logged_reason = ""  # why the lease was out of reach, as last logged
        scheduler.stand_by("standby: it has not looked yet who leads")

    async def run(self) -> None:
        """Stands by and leads in turns until cancelled. Raises StartError, and what `lead` raises."""
        try:
            while True:
                await self._stand_by()
                await self._lead_on()
        finally:
            self._files.submit(self._file.let_go)
            self._files.end()

    def fenced(self, holder: str, term: int) -> None:
        """An executor says that another scheduler holds it."""
        was_leading = self._lease.role is not Role.STANDING_BY
        self._lease.fenced(term, self._scheduler.now())
        if was_leading:
            self._end_leading(f"{holder or 'another scheduler'} leads at term {term}")

    async def drained(self) -> None:
        """Lets a standby take over if there is one; then waits until nothing runs or waits here."""
        self._is_leaving = True
        if self._lease.role is Role.LEADING:
            self._lease.hand_over()
            self._files.submit(self._file.let_go)
            _log.info("lease_given_up", term=self._lease.term)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HAND_OVER_SECONDS):
                    await self._over.wait()
        await self._scheduler.drained()

    # --- standing by --------------------------------------------------------------------------------------

    async def _stand_by(self) -> None:
        lease = self._lease
        while not self._is_leaving:
            try:
                record, is_free = await self._look()
                claim = lease.look(record, self._scheduler.now(), is_free=is_free)
                if claim is None:
                    if lease.leader:
                        self._scheduler.stand_by(f"standby: {lease.leader} leads")
                elif await self._files.done(self._file.claim, claim.record):
                    lease.claimed(claim)
                    self._in_reach()
                    _log.info("leads", term=lease.term, usurped=claim.usurps)
                    return
                else:
                    await self._files.done(self._file.let_go)
            except LeaseFileError as error:
                raise StartError(f"--lease: {error}") from error
            except OSError as error:
                if not lease.has_seen:  # it was never there: a wrong path, or no permission
                    raise StartError(f"--lease: {error.strerror}: {error.filename}") from error
                self._out_of_reach(error)
            else:
                self._in_reach()
            await asyncio.sleep(lease.look_seconds)
        await asyncio.Event().wait()  # until the process ends: it wants nothing any more

    async def _look(self) -> tuple[Record | None, bool]:
        """What the file says, and whether it is free to be claimed; if so, it is locked from now on."""
        if self._lease.may_claim(self._scheduler.now()):
            return await self._files.done(self._file.look)
        return await self._files.done(self._file.read), False

    # --- leading ------------------------------------------------------------------------------------------

    async def _lead_on(self) -> None:
        self._over.clear()
        self._scheduler.lead()
        leading = asyncio.ensure_future(self._lead(self._lease.term))
        beating = asyncio.ensure_future(self._beat_on())
        for task in (leading, beating):
            task.add_done_callback(lambda _: self._over.set())
        try:
            await self._over.wait()
            for task in (leading, beating):
                if task.done():
                    task.result()
        finally:
            leading.cancel()
            beating.cancel()
            await asyncio.wait([leading, beating])
            let_go = self._files.submit(self._file.let_go)
        _log.warning("stepped_down", term=self._lease.term, reason=self._reason)
        await asyncio.wait([asyncio.wrap_future(let_go)], timeout=self._lease.look_seconds)
        self._scheduler.stand_by(f"standby: {self._reason}")

    async def _beat_on(self) -> None:
        while True:
            await self._beat_or_see()
            await asyncio.sleep(self._lease.beat_seconds)

    async def _beat_or_see(self) -> None:
        lease = self._lease
        try:
            if lease.role is Role.LEADING:
                is_mine = await self._files.done(self._file.is_mine)
                if lease.role is not Role.LEADING:
                    return
                record = lease.beat(self._scheduler.now(), is_mine=is_mine)
                if record is None:
                    self._end_leading("another scheduler has taken the lease")
                else:
                    await self._files.done(self._file.write, record)
            elif lease.role is Role.LEAVING:
                seen = await self._files.done(self._file.read)
                if lease.role is Role.LEAVING and lease.seen(seen, self._scheduler.now()):
                    assert seen is not None
                    self._end_leading(f"{seen.holder} leads at term {seen.term}")
            self._in_reach()
        except (OSError, LeaseFileError) as error:  # it leads on: a standby that can read takes over
            self._out_of_reach(error)

    def _out_of_reach(self, error: Exception) -> None:
        """Logs each reason once: the file is looked at several times a second."""
        if str(error) != self._logged_reason:
            _log.warning("lease_out_of_reach", error=str(error))
        self._logged_reason = str(error)

    def _in_reach(self) -> None:
        if self._logged_reason:
            _log.info("lease_in_reach")
        self._logged_reason = ""

    def _end_leading(self, reason: str) -> None:
        self._reason = reason
        self._over.set()


class _FileThread:
    """Makes calls one after another, in a thread that does not delay the end of the process."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="lease", daemon=True).start()

    def submit(self, call: Callable[..., T], *arguments: object) -> Future[T]:
        """Makes a call after all earlier ones."""
        future: Future[T] = Future()
        self._calls.put((future, lambda: call(*arguments)))
        return future

    async def done(self, call: Callable[..., T], *arguments: object) -> T:
        """What the call returns, or raises. A cancelled caller leaves it to the thread."""
        return await asyncio.wrap_future(self.submit(call, *arguments))

    def end(self) -> None:
        """Ends the thread after the calls that it was given."""
        self._calls.put(None)

    def _run(self) -> None:
        while (given := self._calls.get()) is not None:
            future, call = given
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - passed on to the caller
                future.set_exception(error)
