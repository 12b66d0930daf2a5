"""One request and its response over ASGI: a body in under limits, one JSON value or a stream of events out.

It knows whether the response has begun, and so how a failure can still be reported. It must not know what is
asked or answered.
"""

import asyncio
from collections import abc
from typing import Any, Final, TypeVar

import grpc
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from router.http import errors
from router.http.encoding import encoded, event
from router.http.errors import HttpError
from router.keys import ANYBODY
from router.stall import StallGuard
from rpc.errors import RequestError
from rpc.holding import Kept, Room

# A body must be in by then; a client that trickles bytes holds nothing but a connection, and not for longer.
BODY_SECONDS: Final = 60.0

# In a connection's state: what ends it at once.
ABORT: Final = "abort"

_T = TypeVar("_T")


class Exchange:
    """`names` are what the body calls fields of the contract; they may be set once the body has been read."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.request = Request(scope, receive)
        self.names: abc.Mapping[str, str] = {}
        self.guard: StallGuard | None = None
        """Watches over the writing of events."""
        self.caller = ANYBODY
        self.request_id = ""
        """Of what was asked, once that has been read; every answer says it."""
        self.last_words: abc.Callable[[errors.ErrorAnswer], bytes] = _last_event
        """What a stream that has begun says of a failure."""
        self._pieces: list[bytes] = []
        self._kept: Kept | None = None
        self._receive = receive
        self._send = send
        self._begun = False

    @property
    def named(self) -> dict[str, str]:
        """The request's id, for a line of the log; nothing while there is none."""
        return {"request_id": self.request_id} if self.request_id else {}

    # --- in -----------------------------------------------------------------------------------------

    async def body(self, max_bytes: int, room: Room) -> list[bytes]:
        """The whole body, in pieces as it came.

        It is kept until `let_go`. Raises HttpError when it is no JSON by its header, too long, or too late;
        RequestError when too much is kept already.
        """
        kind = self.request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # which no page of another site can send without asking first
            raise HttpError(415, "unsupported_media_type", "content-type must be application/json")
        if self.request.headers.get("content-encoding", "identity") != "identity":
            raise HttpError(415, "unsupported_media_type", "content-encoding is not supported")
        announced = self.request.headers.get("content-length", "0")
        if announced.isdigit() and int(announced) > max_bytes:
            raise _too_long(f"{announced} bytes", max_bytes)
        pieces, num_bytes, kept = self._pieces, 0, room.kept()
        self._kept = kept
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for piece in self.request.stream():
                    num_bytes += len(piece)
                    if num_bytes > max_bytes:
                        raise _too_long("longer", max_bytes)
                    kept.grow(len(piece))
                    pieces.append(piece)
        except TimeoutError:
            raise HttpError(408, "timeout", f"the body was not in after {BODY_SECONDS:g} seconds") from None
        return pieces

    def let_go(self) -> None:
        """The body is not needed any more."""
        self._pieces.clear()
        if self._kept is not None:
            self._kept.let_go()

    async def while_wanted(
        self, work: abc.Coroutine[Any, Any, _T], *, timeout_seconds: float | None, cut: asyncio.Event
    ) -> _T:
        """What the work returns. It is cancelled as soon as nobody wants it; the body must have been read.

        Raises ClientDisconnect when the client has hung up; RequestError, DEADLINE_EXCEEDED when the time is
        over, UNAVAILABLE when `cut` is set.
        """
        task = asyncio.ensure_future(work)
        gone, cutting = asyncio.ensure_future(self._hung_up()), asyncio.ensure_future(cut.wait())
        everything = (task, gone, cutting)
        try:
            await asyncio.wait(everything, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if gone.done():
                raise ClientDisconnect
            if cutting.done():
                raise RequestError(grpc.StatusCode.UNAVAILABLE, "the server is shutting down; try again")
            raise RequestError(grpc.StatusCode.DEADLINE_EXCEEDED, "the time given by timeout is over")
        finally:
            for one in everything:
                one.cancel()
            await asyncio.gather(*everything, return_exceptions=True)

    async def _hung_up(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # --- out ----------------------------------------------------------------------------------------

    async def answer(
        self, value: Any, *, status: int = 200, headers: abc.Mapping[str, str] | None = None
    ) -> None:
        """One JSON value, and that is all."""
        await self.answer_encoded(encoded(value), status=status, headers=headers)

    async def answer_encoded(
        self, body: bytes, *, status: int = 200, headers: abc.Mapping[str, str] | None = None
    ) -> None:
        """The same, of a value that is encoded already."""
        length = {"content-length": str(len(body))}
        await self._begin(status, "application/json", {**(headers or {}), **length})
        await self._send({"type": "http.response.body", "body": body})

    async def begin_events(self) -> None:
        """Opens a stream of server-sent events."""
        await self._begin(200, "text/event-stream; charset=utf-8", {})

    async def events(self, body: bytes) -> None:
        """Sends encoded events, or none. Returns when the client's connection can take more."""
        if body:
            await self._write({"type": "http.response.body", "body": body, "more_body": True})

    async def raw_event(self, data: str) -> None:
        """Sends one event whose value is encoded already."""
        await self._send(
            {"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True}
        )

    async def end_events(self, body: bytes) -> None:
        """Ends the stream well, with these events or none."""
        await self._write({"type": "http.response.body", "body": body})

    def hang_up(self) -> None:
        """Ends the connection at once, whatever is still to be sent."""
        abort = self.request.scope.get("state", {}).get(ABORT)
        if abort is not None:
            abort()

    async def _write(self, message: Message) -> None:
        if self.guard is None:
            await self._send(message)
        else:
            await self.guard.write(self._send(message))

    async def fail(self, error: RequestError | HttpError) -> None:
        """Tells a failure: as the response, or as the last event of one that has begun."""
        told = errors.answer(error, self.names)
        if not self._begun:
            await self.answer(told.body, status=told.status, headers=told.headers)
            return
        await self._send({"type": "http.response.body", "body": self.last_words(told)})

    async def _begin(self, status: int, kind: str, headers: abc.Mapping[str, str]) -> None:
        self._begun = True
        named = {"x-request-id": self.request_id} if self.request_id else {}
        pairs = {"content-type": kind, **named, **headers}.items()
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})


def _last_event(told: errors.ErrorAnswer) -> bytes:
    return event(told.body)


def _too_long(how_long: str, max_bytes: int) -> HttpError:
    return HttpError(413, "body_too_large", f"the body is {how_long}; at most {max_bytes} bytes are allowed")
