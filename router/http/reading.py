"""Turns bodies into what they ask for, while the event loop answers others.

Parsing JSON holds the GIL from the first byte to the last, in whatever thread. So a short body is read at
once, a longer one in a thread, and a long one in a process of its own, whose answer comes back in parts, none
of which takes long to unpack.
"""

import asyncio
import json
import pickle
from array import array
from collections import abc
from dataclasses import replace
from typing import Any, Final

import grpc
import structlog

from router.http.asked import Asked, Detokenizing
from router.http.reading_worker import LENGTH_BYTES, read
from router.worker_processes import WorkerProcesses
from rpc.errors import RequestError

INLINE_BYTES: Final = 16 * 1024
THREAD_BYTES: Final = 64 * 1024
MAX_SECONDS: Final = 60.0
_NUM_PROCESSES: Final = 2
_PIECE_BYTES: Final = 256 * 1024

_log = structlog.get_logger()


class Bodies:
    """Reads bodies of one door."""

    def __init__(self, *, max_seconds: float = MAX_SECONDS) -> None:
        self._max_seconds = max_seconds
        self._processes = WorkerProcesses(
            "router.http.reading_worker", num_processes=_NUM_PROCESSES, line_bytes=_PIECE_BYTES
        )

    async def read(self, kind: str, pieces: abc.Sequence[bytes], max_total_tokens: int) -> Any:
        """What `asked` makes of a body of this kind. Raises RequestError as that does.

        Prompts of as many ids as `max_total_tokens` or more may be refused here already.
        """
        num_bytes = sum(map(len, pieces))
        if num_bytes > THREAD_BYTES:
            return await self._read_in_a_process(kind, pieces, num_bytes, max_total_tokens)
        body = b"".join(pieces)
        if num_bytes > INLINE_BYTES:
            return await asyncio.to_thread(read, kind, body)
        return read(kind, body)

    async def close(self) -> None:
        """Ends the processes; returns when they have ended."""
        await self._processes.close()

    async def _read_in_a_process(
        self, kind: str, pieces: abc.Sequence[bytes], num_bytes: int, max_total_tokens: int
    ) -> Any:
        try:
            async with self._processes.one() as process, asyncio.timeout(self._max_seconds):
                frames = await _asked(process, [kind, num_bytes, max_total_tokens], pieces)
        except (TimeoutError, OSError, RuntimeError, asyncio.IncompleteReadError) as error:
            _log.warning("body_not_read", num_bytes=num_bytes, error=repr(error))
            raise RequestError(
                grpc.StatusCode.UNAVAILABLE, "the body could not be read now; try again"
            ) from error
        return _value(*frames)


async def _asked(
    process: asyncio.subprocess.Process, header: list[Any], pieces: abc.Sequence[bytes]
) -> list[Any]:
    """The frames of the answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(header).encode() + b"\n")
    for piece in pieces:
        process.stdin.write(piece)
        await process.stdin.drain()
    first = await _frame(process.stdout)
    num_parts = 0 if first[0] == "refused" else first[2]
    return [first, *[await _frame(process.stdout) for _ in range(num_parts)]]


def _value(first: tuple[Any, ...], *parts: Any) -> Any:
    """What was asked, whole again. Raises RequestError: the refusal."""
    if first[0] == "refused":
        raise first[1]
    value = first[1]
    if isinstance(value, Asked):
        requests = zip(value.requests, parts, strict=True)
        return replace(value, requests=tuple(replace(one, prompt=prompt) for one, prompt in requests))
    if isinstance(value, Detokenizing):
        return replace(value, token_ids=parts[0])
    return value


async def _frame(stream: asyncio.StreamReader) -> Any:
    left = int.from_bytes(await stream.readexactly(LENGTH_BYTES))
    frame = bytearray()
    while left:
        piece = await stream.read(min(left, _PIECE_BYTES))
        if not piece:
            raise asyncio.IncompleteReadError(b"", left)
        frame += piece
        left -= len(piece)
    if len(frame) <= INLINE_BYTES:
        return _unpacked(frame)
    return await asyncio.to_thread(_unpacked, frame)


def _unpacked(frame: bytearray) -> Any:
    value = pickle.loads(frame)  # noqa: S301 - a process of our own has made it
    return tuple(value) if isinstance(value, array) else value
