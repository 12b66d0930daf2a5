"""The file of a record: a series of chunks, each sealed by a checksum that covers all before it.

    magic       the line `chairlift record 1`
    chunk       bytes of the body (4) │ 1 in the last (1) │ checksum (16) │ body
    body        lines of JSON, compressed with zlib; an event never crosses into the next chunk
    checksum    BLAKE2b over the previous checksum, the head's first five bytes and the body

So a changed byte, a missing or moved chunk, and a truncated end are all detected, with the place. What the
lines say is `record_events`' business. Pure except for reading the file that it is given.
"""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import BinaryIO

MAGIC = b"chairlift record 1\n"
MAX_CHUNK_BYTES = 1 << 28  # of its lines: more cannot be ours
_HEAD = struct.Struct("<I?")
_CHECKSUM_BYTES = 16


class RecordError(ValueError):
    """A record that is incomplete, not ours, or impossible: a sentence with the place."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Lines of JSON, and where they are in the file."""

    number: int  # from 1
    offset: int  # of its head, in bytes
    lines: bytes

    @property
    def place(self) -> str:
        """The place, for people."""
        return f"chunk {self.number} at byte {self.offset}"


class Sealer:
    """Makes the chunks of one file, in order."""

    __slots__ = ("_checksum",)

    def __init__(self) -> None:
        self._checksum = MAGIC

    def seal(self, lines: bytes, *, is_last: bool = False) -> bytes:
        """The next chunk, as it is written."""
        body = zlib.compress(lines, 1)
        head = _HEAD.pack(len(body), is_last)
        self._checksum = _checksum(self._checksum, head, body)
        return head + self._checksum + body


def chunks(file: BinaryIO, *, may_be_cut: bool = False) -> Iterator[Chunk]:
    """All chunks, each checked before it is yielded.

    `may_be_cut`: a missing end, as when the writer was killed, counts as the end. Raises RecordError.
    """
    if file.read(len(MAGIC)) != MAGIC:
        raise RecordError(f"this is no record: it does not begin with {MAGIC.decode().strip()!r}")
    offset, number, checksum, is_last = len(MAGIC), 0, MAGIC, False
    while not is_last:
        number += 1
        head = file.read(_HEAD.size + _CHECKSUM_BYTES)
        num_body_bytes, is_last = _HEAD.unpack_from(head.ljust(_HEAD.size, b"\0"))
        body = file.read(num_body_bytes)
        if len(head) < _HEAD.size + _CHECKSUM_BYTES or len(body) < num_body_bytes:
            if may_be_cut:
                return
            raise RecordError(
                f"the record is cut off in chunk {number} at byte {offset}: its writer was killed, or it is "
                "still being written, or a part is missing (--cut replays what is whole)"
            )
        checksum = _checksum(checksum, head[: _HEAD.size], body)
        if checksum != head[_HEAD.size :]:
            raise RecordError(
                f"chunk {number} at byte {offset} is not as it was written: its checksum is "
                f"{head[_HEAD.size :].hex()}, its bytes give {checksum.hex()}"
            )
        yield Chunk(number, offset, _expanded(body, number, offset))
        offset += len(head) + len(body)
    if file.read(1):
        raise RecordError(f"the record ends at byte {offset}, and there is more behind it")


def _checksum(before: bytes, head: bytes, body: bytes) -> bytes:
    return blake2b(before + head + body, digest_size=_CHECKSUM_BYTES).digest()


def _expanded(body: bytes, number: int, offset: int) -> bytes:
    expander = zlib.decompressobj()
    try:
        lines = expander.decompress(body, MAX_CHUNK_BYTES)
    except zlib.error as error:
        raise RecordError(f"chunk {number} at byte {offset} cannot be read: {error}") from error
    if not expander.eof:
        raise RecordError(f"chunk {number} at byte {offset} is larger than {MAX_CHUNK_BYTES} bytes")
    return lines
