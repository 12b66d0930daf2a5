"""The HTTP server beside the gRPC one: uvicorn, on the same event loop, in the life that `rpc.server` leads.

Signals, logs and draining are left to the process; uvicorn only speaks HTTP/1.1 here. The head of a request
must have arrived within 10 s of its first byte, or of the connection's start; the rest of a body that was
refused, within 10 s of the answer. `app` says how large they may be. A client of the network that vanished
without a word is noticed as soon as by gRPC's pings (`peer`).
"""

import asyncio
import contextlib
import socket
from collections import abc
from functools import partial
from typing import Any, ClassVar, Final

import h11
import structlog
import uvicorn
from prometheus_client.metrics_core import Metric
from uvicorn.protocols.http.h11_impl import H11Protocol

from router.http.app import MAX_HEAD_BYTES, HttpApp
from router.http.exchange import ABORT
from router.http.peer import LOOK_SECONDS, Peer, pinged
from rpc.listening import bound_socket
from rpc.metrics import counters
from rpc.tls import Tls

# Connections that are idle, or whose last bytes their client does not take, are cut after this.
_FAREWELL_SECONDS: Final = 1
_IDLE_SECONDS: Final = 60
_HEAD_SECONDS: Final = 10.0

_log = structlog.get_logger()


class HttpDoor:
    """Serves an HttpApp at HOST:PORT or unix:PATH, from `open` to `stop`. With `tls` a port is HTTPS."""

    name = "http"

    def __init__(
        self,
        app: HttpApp,
        listen: str,
        *,
        tls: Tls | None = None,
        demand_certificates: bool = False,
    ) -> None:
        self._app = app
        self._listen = listen
        self._tls = tls
        self._demand_certificates = demand_certificates
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def open(self) -> str:
        """Begins to listen; returns the address with the port that was taken. Raises StartError."""
        taken, address = bound_socket(self._listen, field="--http")
        if address.unix_path is None:
            pinged(taken)
        tls = self._tls if address.unix_path is None else None
        context = None
        if tls is not None:
            context = tls.server_context(demand_certificates=self._demand_certificates)
        self._server = _Server(
            uvicorn.Config(
                self._app.asgi,
                http=partial(_Connection, stall_seconds=self._app.client_stall_seconds),  # type: ignore[arg-type]  # it makes one
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_IDLE_SECONDS,
                timeout_graceful_shutdown=_FAREWELL_SECONDS,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                ssl_context_factory=None if context is None else lambda _config, _default: context,
            )
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[taken]))
        return str(address)

    def metrics(self) -> abc.Iterator[Metric]:
        """How responses began."""
        yield counters(
            "http_responses",
            "HTTP responses that began, by status.",
            ("code",),
            {(str(status),): count for status, count in self._app.num_responses.items()},
        )

    def close(self) -> None:
        """New calls get 503 from now on; running ones are not touched."""
        self._app.close()

    async def stop(self) -> None:
        """Ends what still runs (503, or an error event), and the server."""
        if self._server is None or self._serving is None:
            return
        self._app.cut()
        self._server.should_exit = True
        await asyncio.wait([self._serving])
        await self._app.stop()
        self._serving.result()


class _Server(uvicorn.Server):
    """Leaves the process's signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> abc.Iterator[None]:
        """Captures none."""
        yield


class _Connection(H11Protocol):
    """HTTP/1.1 on one connection, which is cut when a head, or the rest of a refused body, takes too long.

    uvicorn times idle ones alone. It is cut too when a client of the network vanishes, or takes nothing for
    `stall_seconds`, and when the application says so: at once, where `transport.close` would wait for the
    client. It goes on reading while an answer is made, or nobody would see the client hang up behind what it
    has sent ahead.
    """

    head_seconds: ClassVar = _HEAD_SECONDS
    look_seconds: ClassVar = LOOK_SECONDS
    _cut: asyncio.TimerHandle | None = None
    _look: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, stall_seconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stall_seconds = stall_seconds

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self.app_state = {**self.app_state, ABORT: transport.abort}
        self._watch_owed()
        connection = transport.get_extra_info("socket")
        if connection.family != socket.AF_UNIX:
            peer = Peer(connection, stall_seconds=self._stall_seconds, now=self.loop.time())
            self._look = self.loop.call_later(self.look_seconds, self._look_at, peer)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_owed()

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is None or self.cycle.more_body:
            return
        # The request is whole. What comes behind it waits for the answer, for which uvicorn pauses reading.
        self.flow.resume_reading()
        num_bytes = len(self.conn.trailing_data[0])
        if num_bytes > MAX_HEAD_BYTES:
            _log.info("too_far_ahead_cut", num_bytes=num_bytes)
            self.transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_owed()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_cut()
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    def _watch_owed(self) -> None:
        if not self._is_owed:
            self._unset_cut()
        elif self._cut is None:
            self._cut = self.loop.call_later(self.head_seconds, self._too_slow)

    @property
    def _is_owed(self) -> bool:
        """Whether a head has begun, the first with its connection, or more of a refused body is to come."""
        if self.conn.their_state is h11.IDLE:
            return self.cycle is None or bool(self.conn.trailing_data[0])
        return self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete

    def _unset_cut(self) -> None:
        if self._cut is not None:
            self._cut.cancel()
            self._cut = None

    def _look_at(self, peer: Peer) -> None:
        if self.transport.is_closing():
            return
        fault = peer.fault(self.loop.time())
        if fault is None:
            self._look = self.loop.call_later(self.look_seconds, self._look_at, peer)
            return
        _log.info(fault.value)
        self.transport.abort()

    def _too_slow(self) -> None:
        what = "head" if self.conn.their_state is h11.IDLE else "rest_of_body"
        _log.info("slow_client_cut", what=what, seconds=self.head_seconds)
        self.transport.abort()
