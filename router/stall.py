"""Cuts off a client that reads nothing of its stream: it must not hold KV blocks and memory for ever.

Between two looks of one timer for each stream, a write costs two assignments: every token passes here. It
must not know what is written, or how.
"""

import asyncio
import time
from collections import abc
from types import TracebackType
from typing import Final, Self

import grpc

from rpc.errors import RequestError

STALL_SECONDS: Final = 30.0
# A client that asked for log-probabilities may be this many tokens behind. Ids and text are small (about 50
# bytes a token); an entry with 20 alternatives takes about 2 KB, so this is about 4 MB for each choice.
MAX_UNREAD_LOGPROBS: Final = 2048
_LOOK_SECONDS: Final = 1.0


class StalledError(RequestError):
    """The client has taken nothing for too long, or is too far behind."""


class StallGuard:
    """Around the writing of one stream. Leaving it raises StalledError once it has cut.

    `num_unread` tells how many log-probabilities wait for the client.
    """

    def __init__(self, stall_seconds: float, num_unread: abc.Callable[[], int]) -> None:
        self._stall_seconds = stall_seconds
        self._num_unread = num_unread
        self._limit = asyncio.timeout(None)
        self._writing_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reason = ""

    async def write(self, writing: abc.Awaitable[None]) -> None:
        """Awaits one write, which ends when the client's connection can take more."""
        self._writing_since = time.monotonic()
        await writing
        self._writing_since = None

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        self._look()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError:
            raise StalledError(grpc.StatusCode.RESOURCE_EXHAUSTED, self._reason) from None

    def _look(self) -> None:
        loop, now, since = asyncio.get_running_loop(), time.monotonic(), self._writing_since
        delay = min(_LOOK_SECONDS, self._stall_seconds)
        if since is not None:
            if now >= since + self._stall_seconds:
                self._cut(f"nothing of the stream was taken for {self._stall_seconds:g} seconds")
                return
            if self._num_unread() > MAX_UNREAD_LOGPROBS:
                self._cut(f"the stream was {MAX_UNREAD_LOGPROBS} tokens with log-probabilities behind")
                return
            delay = min(delay, since + self._stall_seconds - now)
        self._timer = loop.call_later(delay, self._look)

    def _cut(self, reason: str) -> None:
        self._reason = f"{reason}; the request was given up"
        self._limit.reschedule(asyncio.get_running_loop().time())
