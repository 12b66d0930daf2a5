"""Processes of our own for work that the event loop must not do, or its memory must not hold.

They are started when they are first needed, used again, and killed when what they were asked goes wrong. Must
not know: what they are asked, and in what words; that is between their user and the module that they run.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

_ROOT = str(Path(__file__).parents[1])


class WorkerProcesses:
    """A few of one module. Use them on one event loop, and close them."""

    def __init__(
        self,
        module: str,
        *,
        num_processes: int,
        line_bytes: int,
        on_start: Callable[[asyncio.subprocess.Process], Awaitable[None]] | None = None,
    ) -> None:
        """`line_bytes`: the longest line that is read. `on_start` sees each one before it is used."""
        self.idle: list[asyncio.subprocess.Process] = []
        self._module = module
        self._line_bytes = line_bytes
        self._on_start = on_start
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
        if self._on_start is not None:
            try:
                await self._on_start(process)
            except BaseException:
                await kill(process)
                raise
        return process


async def kill(process: asyncio.subprocess.Process) -> None:
    """Returns when it has ended."""
    if process.stdin is not None:
        process.stdin.close()
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def _is_alive(process: asyncio.subprocess.Process) -> bool:
    return process.returncode is None and process.stdin is not None and not process.stdin.is_closing()
