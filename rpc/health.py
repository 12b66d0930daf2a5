"""The standard health service: SERVING means that a request sent now would be served.

Who decides that is the service; here the word is only kept, told to watchers, and logged when it changes.
"""

import asyncio
from collections.abc import Iterable

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

SERVICE_NAME: str = health.SERVICE_NAME
_log = structlog.get_logger()


class Health:
    """Health of one process, under each service name given and under the empty name for the whole.

    It starts NOT_SERVING. An unknown name is answered NOT_FOUND (Watch: SERVICE_UNKNOWN).
    """

    def __init__(self, service_names: Iterable[str]) -> None:
        self._names = ["", *service_names]
        self._servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack the aio half
        self._serving = False
        self._updates: set[asyncio.Task[None]] = set()

    @property
    def is_serving(self) -> bool:
        """Whether the last word was SERVING."""
        return self._serving

    def serving(self, yes: bool, reason: str = "") -> None:  # noqa: FBT001 - health.serving(True) reads as it should
        """Says whether requests are served from now on, and why not. To be called on the event loop."""
        if yes == self._serving:
            return
        self._serving = yes
        _log.info("health", serving=yes, reason=reason)
        update = asyncio.get_running_loop().create_task(self._publish())
        self._updates.add(update)  # the loop holds tasks weakly
        update.add_done_callback(self._updates.discard)

    async def register(self, server: grpc.aio.Server) -> None:
        """Adds the health service to a server that has not started yet."""
        await self._publish()
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def shut_down(self) -> None:
        """NOT_SERVING from now on, whatever is said later."""
        self.serving(False, "shutting down")
        await self._servicer.enter_graceful_shutdown()

    async def _publish(self) -> None:
        # The present word, not that of the time when the update was asked for: the last one wins.
        response = health_pb2.HealthCheckResponse
        for name in self._names:
            await self._servicer.set(name, response.SERVING if self._serving else response.NOT_SERVING)
