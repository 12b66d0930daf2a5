"""Processes for work that would hold up the event loop, or take more memory than the router may.

They are started when they are first needed, used again, and killed when what they were asked goes wrong. One
that does not come up is started again: a process with threads in the middle of things is copied before it
becomes another, and now and then the copy dies. Must not know: what they are asked, and in what words; that
is between their user and the module that they run, whose first line is `READY`.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import structlog

READY: Final = "ready"
_ROOT: Final = str(Path(__file__).parents[1])
_MOST_STARTS: Final = 3
_START_SECONDS: Final = 60.0

_log = structlog.get_logger()


class WorkerProcesses:
    """A few of one module. Use them on one event loop, and close them."""

    def __init__(self, module: str, *, num_processes: int, line_bytes: int) -> None:
        """`line_bytes`: the longest line that is read."""
        self.idle: list[asyncio.subprocess.Process] = []
        self._module = module
        self._line_bytes = line_bytes
        self._turns = asyncio.Semaphore(num_processes)

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[asyncio.subprocess.Process]:
        """One that nobody else uses. It is killed when anything is raised inside. Raises OSError."""
        async with self._turns:
            process = self._living() or await self._started()
            try:
                yield process
            except BaseException:
                await kill(process)
                raise
            if _is_alive(process):
                self.idle.append(process)

    async def close(self) -> None:
        """Ends those that nobody uses; returns when they have ended."""
        while self.idle:
            await kill(self.idle.pop())

    def _living(self) -> asyncio.subprocess.Process | None:
        while self.idle:
            process = self.idle.pop()
            if _is_alive(process):
                return process
        return None

    async def _started(self) -> asyncio.subprocess.Process:
        for _ in range(_MOST_STARTS):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", self._module),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=self._line_bytes,
                env=os.environ
                | {"PYTHONPATH": os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))},
            )
            try:
                if await _says_ready(process):
                    return process
            except BaseException:
                await kill(process)
                raise
            await kill(process)
            _log.warning("worker_not_started", module=self._module, exit_code=process.returncode)
        raise OSError(f"{self._module} does not come up")


async def _says_ready(process: asyncio.subprocess.Process) -> bool:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_START_SECONDS):
            return await process.stdout.readline() == f"{READY}\n".encode()
    except (OSError, ValueError):  # nothing in time, or something else
        return False


async def kill(process: asyncio.subprocess.Process) -> None:
    """Returns when it has ended."""
    if process.stdin is not None:
        process.stdin.close()
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def _is_alive(process: asyncio.subprocess.Process) -> bool:
    return process.returncode is None and process.stdin is not None and not process.stdin.is_closing()
