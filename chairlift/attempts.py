"""Lets others end a request, which is a series of calls (attempts), or all requests of a client.

For threads and for asyncio alike. Nothing here waits, and no lock is held: a signal, or a stream that is
collected as garbage, may come between any two steps. When to ask again is `patience`'s.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from chairlift.results import ChairliftError

_CLIENT_CLOSED = "the client was closed"

Ended = TypeVar("Ended", threading.Event, asyncio.Event)


class Attempts(Generic[Ended]):
    """The calls of one request; any thread, or any task of its loop, may end them."""

    def __init__(self, ended: Ended) -> None:
        self.ended: Ended = ended
        """Set once the request is ended: what a pause between two calls waits for."""
        self._why = ""
        self._call: Any = None

    def begin(self, method: Callable[..., Any], request: object, **named: Any) -> Any:
        """The next call. Raises ChairliftError when the client was closed."""
        try:
            call = method(request, **named)
        except ValueError:  # gRPC's word for a channel that was closed a moment ago, among others
            self.check()
            raise
        self._call = call
        if self.ended.is_set():  # by somebody who may have known the call before this one
            call.cancel()
        return call

    def check(self) -> None:
        """Raises ChairliftError, CANCELLED, when the request was ended."""
        if self.ended.is_set():
            raise ChairliftError("CANCELLED", self._why)

    def end(self, why: str) -> None:
        """Cancels the call that runs, and lets no other begin; what was ended before stays as it is."""
        if self.ended.is_set():
            return
        self._why = why
        self.ended.set()
        if self._call is not None:
            self._call.cancel()


class Requests(Generic[Ended]):
    """The requests of one client; they end with it."""

    def __init__(self) -> None:
        self._running: set[Attempts[Ended]] = set()
        self._is_closed = False

    @contextlib.contextmanager
    def running(self, attempts: Attempts[Ended]) -> Iterator[None]:
        """Ends a request that runs inside when the client is closed. Raises ChairliftError when it was."""
        self._running.add(attempts)
        try:
            if self._is_closed:
                attempts.end(_CLIENT_CLOSED)
            attempts.check()
            yield
        finally:
            self._running.discard(attempts)

    def close(self) -> None:
        """Ends all requests, and each that comes after."""
        self._is_closed = True
        for attempts in self._running.copy():
            attempts.end(_CLIENT_CLOSED)
