"""The shell of the lease: looks, claims, beats; starts what leading means, and ends it when another leads.

Decides nothing: `lease` does. File calls run in a thread, for a file system may hang.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine

import structlog

from rpc.errors import StartError
from scheduler.lease import Lease, Role
from scheduler.lease_file import LeaseFile, LeaseFileError
from scheduler.running_scheduler import RunningScheduler

_log = structlog.get_logger()
# A standby takes over at its next look, a quarter of a second away at most.
HAND_OVER_SECONDS = 2.0


class Leadership:
    """One scheduler process that leads or stands by, as its lease says."""

    def __init__(
        self,
        lease: Lease,
        file: LeaseFile,
        scheduler: RunningScheduler,
        lead: Callable[[int], Coroutine[None, None, None]],
    ) -> None:
        """`lead(term)` drives the executors; it is cancelled when another one leads."""
        self._lease = lease
        self._file = file
        self._scheduler = scheduler
        self._lead = lead
        self._over = asyncio.Event()
        self._reason = ""
        self._is_leaving = False
        self._uses_file = asyncio.Lock()
        scheduler.stand_by("standby: it has not looked yet who leads")

    async def run(self) -> None:
        """Stands by and leads by turns until cancelled. Raises StartError, and what `lead` raises."""
        try:
            while True:
                await self._stand_by()
                await self._lead_on()
        finally:
            self._file.let_go()

    def fenced(self, holder: str, term: int) -> None:
        """An executor says that another scheduler holds it."""
        was_leading = self._lease.role is not Role.STANDING_BY
        self._lease.fenced(term, self._scheduler.now())
        if was_leading:
            self._end_leading(f"{holder or 'another scheduler'} leads at term {term}")

    async def drained(self) -> None:
        """Lets another one take over if there is one; then waits until nothing runs or waits here."""
        self._is_leaving = True
        if self._lease.role is Role.LEADING:
            self._lease.hand_over()
            async with self._uses_file:
                self._file.let_go()
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
                record, is_free = await asyncio.to_thread(self._file.look)
                claim = lease.look(record, self._scheduler.now(), is_free=is_free)
                if claim is None:
                    if lease.leader:
                        self._scheduler.stand_by(f"standby: {lease.leader} leads")
                    if is_free:
                        self._file.let_go()
                elif await asyncio.to_thread(self._file.claim, claim.record):
                    lease.claimed(claim)
                    _log.info("leads", term=lease.term, usurped=claim.usurps)
                    return
                else:
                    self._file.let_go()
            except LeaseFileError as error:
                raise StartError(f"--lease: {error}") from error
            except OSError as error:
                if not lease.has_seen:  # it was never there: a wrong path, no right to it
                    raise StartError(f"--lease: {error.strerror}: {error.filename}") from error
                _log.warning("lease_out_of_reach", error=str(error))
            await asyncio.sleep(lease.look_seconds)
        await asyncio.Event().wait()  # until the process ends: it wants nothing any more

    # --- leading ------------------------------------------------------------------------------------------

    async def _lead_on(self) -> None:
        self._over.clear()
        self._scheduler.lead()
        leading = asyncio.ensure_future(self._lead(self._lease.term))
        leading.add_done_callback(lambda _: self._over.set())
        try:
            while not self._over.is_set():
                await self._beat()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._lease.beat_seconds):
                        await self._over.wait()
            if leading.done():
                leading.result()
        finally:
            leading.cancel()
            await asyncio.wait([leading])
            self._file.let_go()
        _log.warning("stepped_down", term=self._lease.term, reason=self._reason)
        self._scheduler.stand_by(f"standby: {self._reason}")

    async def _beat(self) -> None:
        async with self._uses_file:
            await self._beat_or_see()

    async def _beat_or_see(self) -> None:
        lease = self._lease
        try:
            if lease.role is Role.LEADING:
                is_mine = await asyncio.to_thread(self._file.is_mine)
                if lease.role is not Role.LEADING:
                    return
                record = lease.beat(self._scheduler.now(), is_mine=is_mine)
                if record is None:
                    self._end_leading("another scheduler has taken the lease")
                else:
                    await asyncio.to_thread(self._file.write, record)
            elif lease.role is Role.LEAVING:
                seen = await asyncio.to_thread(self._file.read)
                if lease.role is Role.LEAVING and lease.seen(seen, self._scheduler.now()):
                    assert seen is not None
                    self._end_leading(f"{seen.holder} leads at term {seen.term}")
        except (OSError, LeaseFileError) as error:  # it leads on: a standby that can read takes over
            _log.warning("lease_out_of_reach", error=str(error))

    def _end_leading(self, reason: str) -> None:
        self._reason = reason
        self._over.set()
