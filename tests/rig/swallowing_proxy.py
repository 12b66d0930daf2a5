"""A connection whose packets are dropped: a proxy that from some moment on swallows what either side sends.

Neither side is told: to both the connection is open, and the other one silent.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path


class SwallowingProxy:
    """Stands at `path`, before the server at `behind`; both are Unix sockets."""

    def __init__(self, path: Path, behind: Path) -> None:
        self.path = path
        self._behind = behind
        self._swallows = False
        self._tasks: set[asyncio.Task[None]] = set()

    def swallow(self) -> None:
        """From now on nothing passes, and no connection ends."""
        self._swallows = True

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(str(self._behind))
        both = (self._pump(reader, inner_writer), self._pump(inner_reader, writer))
        tasks = {asyncio.create_task(pump) for pump in both}
        self._tasks |= tasks
        await asyncio.wait(tasks)
        writer.close()
        inner_writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                if not self._swallows:
                    writer.write(data)
                    await writer.drain()
            if not self._swallows:
                writer.close()
                return
        if self._swallows:
            await asyncio.Event().wait()  # what one side knows of the end, the other does not

    def close(self) -> None:
        """Ends every connection."""
        for task in self._tasks:
            task.cancel()


@contextlib.asynccontextmanager
async def proxy(path: Path, behind: Path) -> AsyncIterator[SwallowingProxy]:
    """One that listens."""
    swallowing = SwallowingProxy(path, behind)
    server = await asyncio.start_unix_server(swallowing._serve, str(path))
    try:
        yield swallowing
    finally:
        server.close()
        swallowing.close()
