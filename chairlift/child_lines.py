"""The lines of a child's output, of whatever length. It knows nothing of what they say."""

import asyncio
from collections.abc import AsyncIterator
from typing import Final

MAX_LINE_BYTES: Final = 1024 * 1024
_CHUNK_BYTES: Final = 64 * 1024


async def lines_of(stream: asyncio.StreamReader, *, max_bytes: int = MAX_LINE_BYTES) -> AsyncIterator[bytes]:
    """Each line without its end. Of a longer one its beginning, with a word for what is left out.

    `StreamReader` has lines itself, but ends for good at one that is too long: the child would then write
    into a pipe that nobody reads, and stand still once it is full.
    """
    kept, num_left_out = bytearray(), 0
    while chunk := await stream.read(_CHUNK_BYTES):
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            kept, num_left_out = _longer(kept, num_left_out, piece, max_bytes)
            yield _told(kept, num_left_out)
            kept, num_left_out = bytearray(), 0
        kept, num_left_out = _longer(kept, num_left_out, rest, max_bytes)
    if kept:
        yield _told(kept, num_left_out)


def _longer(kept: bytearray, num_left_out: int, piece: bytes, max_bytes: int) -> tuple[bytearray, int]:
    room = max_bytes - len(kept)
    kept += piece[:room]
    return kept, num_left_out + len(piece[room:])


def _told(kept: bytearray, num_left_out: int) -> bytes:
    if not num_left_out:
        return bytes(kept)
    return bytes(kept) + f" … ({num_left_out} more bytes of this line are left out)".encode()
