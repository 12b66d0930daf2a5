"""The HTTP server beside the gRPC one: uvicorn, on the same event loop, in the life that `rpc.server` leads.

Signals, logs and draining are the process's own business; uvicorn only speaks HTTP/1.1 here.
"""

import asyncio
import contextlib
from collections import abc
from typing import Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from router.http.app import HttpApp
from router.http.exchange import ABORT
from rpc.listening import bound_socket

# Connections that are idle, or whose last bytes their client does not take, are cut after this.
_FAREWELL_SECONDS: Final = 1
_IDLE_SECONDS: Final = 60
_MAX_HEAD_BYTES: Final = 32 * 1024


class HttpDoor:
    """Serves an HttpApp at HOST:PORT or unix:PATH, from `open` to `stop`."""

    name = "http"

    def __init__(self, app: HttpApp, listen: str) -> None:
        self._app = app
        self._listen = listen
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def open(self) -> str:
        """Begins to listen; returns the address with the port that was taken. Raises StartError."""
        taken, address = bound_socket(self._listen, field="--http")
        self._server = _Server(
            uvicorn.Config(
                self._app.asgi,
                http=_Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_IDLE_SECONDS,
                timeout_graceful_shutdown=_FAREWELL_SECONDS,
                h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
            )
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[taken]))
        return str(address)

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
        self._serving.result()


class _Protocol(H11Protocol):
    """HTTP/1.1 whose connections can be ended by the application: `transport.close` waits for the client."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self.app_state = {**self.app_state, ABORT: transport.abort}


class _Server(uvicorn.Server):
    """Leaves the process's signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> abc.Iterator[None]:
        """Captures none."""
        yield
