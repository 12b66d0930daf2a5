"""The HTTP port at which a process reports its metrics to Prometheus: what there is when a scrape asks.

    scrape ─► thread of the port ─► event loop: sources read what the process keeps ─► thread: text ─► out

Sources are read on the event loop, between two of its turns, so that the numbers are of one moment; making
text of them, and talking to the scraper, is done in a thread. If the loop does not answer, that too is an
answer: 503.

Plain HTTP, without keys: the port is for the operator's network. It must not know what is measured.
"""

import asyncio
import contextlib
import errno
import http.server
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from rpc.histogram import Histogram
from rpc.listening import bound_socket
from rpc.metrics import Source, gauges, histogram
from rpc.version import version

_READ_SECONDS: Final = 5.0
_CLIENT_SECONDS: Final = 10.0
_LAG_LOOK_SECONDS: Final = 0.25
_LAG_BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class LoopLag:
    """How late the event loop gets to what is due: the wait of whatever happens next."""

    def __init__(self) -> None:
        self.seconds = Histogram(_LAG_BOUNDS)

    async def run(self) -> None:
        """Looks four times a second, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_LOOK_SECONDS
            await asyncio.sleep(_LAG_LOOK_SECONDS)
            self.seconds.observe(loop.time() - due)


class MetricsDoor:
    """Serves what `sources` tell at HOST:PORT or unix:PATH, path `/metrics`, from `open` to `stop`."""

    name = "metrics"

    def __init__(self, listen: str, sources: Sequence[Source]) -> None:
        self._listen = listen
        self._lag = LoopLag()
        self._sources = (*sources, self._own)
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self._looking: asyncio.Task[None] | None = None

    async def open(self) -> str:
        """Begins to listen; returns the address with the port that was taken. Raises StartError."""
        taken, address = bound_socket(self._listen, field="--metrics-listen")
        taken.setblocking(True)
        registry = CollectorRegistry()
        registry.register(_OnLoop(asyncio.get_running_loop(), self._read))
        ProcessCollector(registry=registry)
        self._server = _Server(taken, registry)
        self._looking = asyncio.create_task(self._lag.run())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="metrics")
        self._thread.daemon = True
        self._thread.start()
        return str(address)

    def close(self) -> None:
        """Does nothing: metrics are wanted while the process drains, too."""

    async def stop(self) -> None:
        """Ends the server."""
        if self._server is None or self._looking is None:
            return
        self._looking.cancel()
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()

    def _read(self) -> list[Metric]:
        return [family for source in self._sources for family in source()]

    def _own(self) -> Iterator[Metric]:
        yield gauges("build_info", "1, with what runs here.", ("version",), {(version(),): 1})
        yield histogram(
            "event_loop_lag_seconds", "How late the event loop gets to what is due.", self._lag.seconds
        )


class _OnLoop:
    """A collector for the library: reads on the event loop, whatever thread asks."""

    def __init__(self, loop: asyncio.AbstractEventLoop, read: Callable[[], list[Metric]]) -> None:
        self._loop = loop
        self._read = read

    def collect(self) -> list[Metric]:
        """What there is now. Raises TimeoutError when the loop stands still."""
        answer: Future[list[Metric]] = Future()

        def tell() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(self._read())
            except BaseException as error:  # noqa: BLE001 - handed on to the thread that asks
                answer.set_exception(error)

        self._loop.call_soon_threadsafe(tell)
        try:
            return answer.result(_READ_SECONDS)
        finally:
            answer.cancel()


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Answers each scraper in a thread of its own, on a socket that listens already."""

    daemon_threads = True
    full_seconds: ClassVar = 0.5

    def __init__(self, taken: socket.socket, registry: CollectorRegistry) -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = taken
        self.registry = registry

    def get_request(self) -> Any:
        """One scraper more. Without a descriptor for it the loop around this would ask again at once."""
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE}:
                time.sleep(self.full_seconds)
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that breaks off is nobody's fault."""


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = _CLIENT_SECONDS
    server: _Server

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self._answer(404, "text/plain; charset=utf-8", b"metrics are at /metrics\n")
            return
        encode, content_type = choose_encoder(self.headers.get("accept", ""))
        try:
            body = encode(self.server.registry)
        except TimeoutError:
            sentence = f"the event loop has not answered within {_READ_SECONDS:g} seconds\n"
            self._answer(503, "text/plain; charset=utf-8", sentence.encode())
            return
        self._answer(200, content_type, body)

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("content-type", content_type)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Scrapes are no events."""
