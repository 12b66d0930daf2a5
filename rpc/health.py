"""The standard health service: SERVING means that a request sent now would be served.

The service decides this; here its word is only kept, passed on to watchers, and logged when it changes.
Two more names are for whoever runs the process: `liveness`, SERVING for as long as it answers at all, and
`readiness`, which follows the service's word and may be patient with a short NOT_SERVING.
"""

import asyncio
from collections.abc import Iterable

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

SERVICE_NAME: str = health.SERVICE_NAME
LIVENESS = "liveness"
READINESS = "readiness"
_log = structlog.get_logger()


class Health:
    """Health of one process, under each service name given and under the empty name for the whole.

    It starts NOT_SERVING, alive. `readiness` falls once that has lasted for `patience_seconds`, and at once
    when the process is told to stop. An unknown name is answered NOT_FOUND (Watch: SERVICE_UNKNOWN).
    """

    def __init__(self, service_names: Iterable[str], *, patience_seconds: float = 0.0) -> None:
        self._names = ["", *service_names]
        self._patience_seconds = patience_seconds
        self._servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack the aio half
        self._serving = False
        self._ready = False
        self._losing_patience: asyncio.TimerHandle | None = None
        self._closed = False
        self._updates: set[asyncio.Task[None]] = set()

    @property
    def is_serving(self) -> bool:
        """Whether the last word was SERVING."""
        return self._serving

    def serving(self, yes: bool, reason: str = "") -> None:  # noqa: FBT001 - health.serving(True) reads as it should
        """Says whether requests are served from now on, and why not. To be called on the event loop."""
        if yes == self._serving or (yes and self._closed):
            return
        self._serving = yes
        _log.info("health", serving=yes, reason=reason)
        if self._losing_patience is not None:
            self._losing_patience.cancel()
            self._losing_patience = None
        if yes:
            self._ready = True
        elif self._patience_seconds and not self._closed:
            loop = asyncio.get_running_loop()
            self._losing_patience = loop.call_later(self._patience_seconds, self._unready)
        else:
            self._ready = False
        self._update()

    async def register(self, server: grpc.aio.Server) -> None:
        """Adds the health service to a server that has not started yet."""
        await self._publish()
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def shut_down(self) -> None:
        """NOT_SERVING and not ready from now on, whatever is said later; alive until the process ends."""
        self._closed = True
        self.serving(False, "shutting down")
        if self._losing_patience is not None:
            self._losing_patience.cancel()
        self._ready = False
        await self._publish()

    def _unready(self) -> None:
        _log.warning("not_ready", not_serving_seconds=self._patience_seconds)
        self._ready = False
        self._update()

    def _update(self) -> None:
        update = asyncio.get_running_loop().create_task(self._publish())
        self._updates.add(update)  # the loop holds tasks weakly
        update.add_done_callback(self._updates.discard)

    async def _publish(self) -> None:
        # The present words, not those of the time when the update was asked for: the last ones win.
        words = dict.fromkeys(self._names, self._serving) | {READINESS: self._ready, LIVENESS: True}
        response = health_pb2.HealthCheckResponse
        for name, well in words.items():
            await self._servicer.set(name, response.SERVING if well else response.NOT_SERVING)
