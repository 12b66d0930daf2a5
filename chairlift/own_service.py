"""A private service: `chairlift serve` on a socket of its own, which ends when the `with` block does."""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from chairlift.child_lines import lines_of
from rpc.address import Address
from rpc.errors import StartError


@contextlib.asynccontextmanager
async def own_service(flags: list[str], *, tell: Callable[[str], None]) -> AsyncIterator[Address]:
    """`chairlift serve` with `flags`, ready; yields the router's address. `tell` gets its lines meanwhile.

    Raises:
        StartError: it did not become ready, or did not end well.
    """
    with tempfile.TemporaryDirectory(prefix="chairlift-own-") as folder:
        address = Address.parse(f"unix:{Path(folder)}/router.sock", field="the socket (see TMPDIR)")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "chairlift.child", str(os.getpid()), "chairlift", "serve"),
            *(*flags, "--listen", str(address)),
            stdout=asyncio.subprocess.PIPE,
            process_group=0,
        )
        assert process.stdout is not None  # a pipe
        unheard: asyncio.Future[None] | None = None
        try:
            lines = lines_of(process.stdout)
            async for line in lines:
                tell(line.decode(errors="replace").rstrip())
                if line.startswith(b"router ready"):
                    break
            else:
                raise StartError("the service did not become ready; what it said is above")
            unheard = asyncio.ensure_future(_read_on(lines))
            yield address
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
            code = await process.wait()
            if unheard is not None:
                await unheard
        if code != 0:
            raise StartError(f"the service ended with exit code {code}")


async def _read_on(lines: AsyncIterator[bytes]) -> None:
    """So that the service never waits for somebody to read what it says."""
    async for _ in lines:
        pass
