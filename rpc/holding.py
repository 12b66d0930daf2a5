"""Bounds the bytes of requests that a door holds at once, so that no client can exhaust the memory.

Short requests are not counted, nor are the first bytes of long ones: the number of requests is bounded by
other means, and whoever fills the room for long ones must not keep short ones out. Not thread-safe.
"""

from types import TracebackType
from typing import Final, Self

import grpc

from rpc.errors import RequestError

MAX_BYTES: Final = 512 * 1024 * 1024
SHORT_BYTES: Final = 64 * 1024
RETRY_AFTER_SECONDS: Final = 1.0


class Room:
    """For the long requests of one door."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def kept(self, num_bytes: int = 0) -> "Kept":
        """A request of which so many bytes are kept. Raises RequestError as `grow`."""
        kept = Kept(self)
        kept.grow(num_bytes)
        return kept

    def _take(self, num_bytes: int) -> None:
        if self.num_bytes + num_bytes > self._max_bytes:
            raise RequestError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"long requests of {self._max_bytes} bytes in all are being kept already; try again",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        self.num_bytes += num_bytes


class Kept:
    """What is kept of one request; leaving it, or `let_go`, gives the room back."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._num_bytes = 0
        self._num_counted = 0

    def grow(self, num_bytes: int) -> None:
        """More is kept. Raises RequestError, RESOURCE_EXHAUSTED, when there is no room."""
        num_counted = max(0, self._num_bytes + num_bytes - SHORT_BYTES)
        self._room._take(num_counted - self._num_counted)  # noqa: SLF001 - one thing in two parts
        self._num_bytes += num_bytes
        self._num_counted = num_counted

    def let_go(self) -> None:
        """Nothing is kept any more."""
        self._room.num_bytes -= self._num_counted
        self._num_bytes = self._num_counted = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.let_go()
