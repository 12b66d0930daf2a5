"""A way between two processes that can be cut: a Unix socket that leads to another one."""

import asyncio
import contextlib
from typing import Self

PIECE_BYTES = 65_536


class Way:
    """Forwards every connection to `to_path`. Lives on the running event loop."""

    def __init__(self, from_path: str, to_path: str) -> None:
        self.num_cut = 0
        self._from_path = from_path
        self._to_path = to_path
        self._writers: set[asyncio.StreamWriter] = set()
        self._forwarding: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._forward, self._from_path)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._forwarding)  # what is cancelled in the middle complains later, elsewhere

    def cut(self) -> None:
        """Breaks every connection at once; what is under way is lost. New ones may be made."""
        for writer in self._writers:
            self.num_cut += 1
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._forwarding.add(task)
        task.add_done_callback(self._forwarding.discard)
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(self._to_path)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        try:
            await asyncio.wait(
                [
                    asyncio.ensure_future(_pump(reader, far_writer)),
                    asyncio.ensure_future(_pump(far_reader, writer)),
                ],
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            for end in (writer, far_writer):
                self._writers.discard(end)
                end.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(PIECE_BYTES):
            writer.write(data)
            await writer.drain()
