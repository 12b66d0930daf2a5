"""The other ranks as child processes of the first: started, watched, ended. No torch, no model.

When one rank ends, the executor ends: what the rank held of the sequences is lost, and the scheduler has them
computed again on the next executor. Each follower's stdin is a pipe that nobody writes to: the system closes
it when the first rank ends, however that happens, and the others then end too.
"""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Final, NoReturn, Self

import structlog

from executor.parallel.errors import RankLostError
from executor.parallel.place import FILE_SCHEME, Place, environment_of

FAREWELL_SECONDS: Final = 5.0
"""How long ranks that were told to end may take."""

_log = structlog.get_logger()


class Followers:
    """Ranks 1 to the last of `first`'s, with the flags `argv`; none where somebody else has started them.

    They run while the context is open. `place` is the first rank's own, with where all of them meet.
    """

    def __init__(self, first: Place, argv: Sequence[str]) -> None:
        self.place = first
        self._argv = argv
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._lost: asyncio.Future[RankLostError] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        if not self.place.starts_others:
            return self
        self._folder = tempfile.TemporaryDirectory(prefix="chairlift-ranks-", ignore_cleanup_errors=True)
        self.place = replace(self.place, meeting=f"{FILE_SCHEME}{self._folder.name}/meeting")
        for rank in range(1, self.place.size):
            self._processes[rank] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "executor", *self._argv),
                env=os.environ | environment_of(rank, self.place.size, self.place.meeting),
                stdin=asyncio.subprocess.PIPE,
                # What is announced on stdout is announced by the first rank.
                stdout=asyncio.subprocess.DEVNULL,
                # The first rank's signals are its own: it drains while the others still compute.
                start_new_session=True,
            )
            _log.info("rank_started", rank=rank, size=self.place.size, pid=self._processes[rank].pid)
        return self

    def lose(self, error: RankLostError) -> None:
        """Let `watch` raise `error`, which was found otherwise."""
        if not self._lost.done():
            self._lost.set_result(error)

    async def watch(self) -> NoReturn:
        """Raises RankLostError, which says how, when one of them ends. Returns never."""
        ends = [asyncio.ensure_future(self._end_of(rank)) for rank in self._processes]
        try:
            ended, _ = await asyncio.wait([self._lost, *ends], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        raise ended.pop().result()

    async def _end_of(self, rank: int) -> RankLostError:
        await self._processes[rank].wait()
        return RankLostError(self._how_it_ended(rank))

    def _how_it_ended(self, rank: int) -> str:
        process = self._processes[rank]
        code = process.returncode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        of = f"rank {rank} of {self.place.size} (process {process.pid})"
        return f"{of} {how}: without it no step can be made"

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End them, by their pipes or by force, and say which had ended by themselves."""
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
        ends = [asyncio.ensure_future(each.wait()) for each in self._processes.values()]
        if ends:
            await asyncio.wait(ends, timeout=FAREWELL_SECONDS)
        for rank, process in self._processes.items():
            if process.returncode is None:
                _log.warning("rank_killed", rank=rank, after_seconds=FAREWELL_SECONDS)
                process.kill()
            elif process.returncode != 0:
                _log.error("rank_lost", rank=rank, reason=self._how_it_ended(rank))
        await asyncio.gather(*ends)
        if self._folder is not None:
            self._folder.cleanup()
