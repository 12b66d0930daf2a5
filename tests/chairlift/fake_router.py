"""A router without anything behind it, for tests of what asks one: it answers as it is told."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from protos.v1 import common_pb2, router_pb2, router_pb2_grpc
from rpc.channel import server_options
from rpc.errors import RequestError, abort


class FakeRouter(router_pb2_grpc.RouterServicer):
    """Sends `events` to every Generate and `summaries` to every Watch; or refuses with `refusal`."""

    def __init__(self) -> None:
        self.requests: list[router_pb2.GenerateRequest] = []
        self.events: list[router_pb2.GenerateEvent] = []
        self.summaries: list[router_pb2.StepSummary] = []
        self.status = router_pb2.GetStatusResponse()
        self.explained: dict[str, router_pb2.ExplainResponse] = {}
        self.refusal: RequestError | None = None
        self.num_cancelled = 0
        self.wait: Any = None
        """Awaited after the events: an endless answer."""

    async def Generate(self, request: router_pb2.GenerateRequest, context: Any) -> Any:  # noqa: N802 - the contract's
        self.requests.append(request)
        try:
            for event in self.events:
                yield event
            if self.refusal:
                await abort(context, self.refusal)
            if self.wait:
                await self.wait.wait()
        finally:  # wherever it was: a client may go while an event is still being written
            self.num_cancelled += bool(self.wait)

    async def Watch(self, request: router_pb2.WatchRequest, context: Any) -> Any:  # noqa: N802 - the contract's
        for summary in self.summaries:
            yield summary

    async def Explain(self, request: router_pb2.ExplainRequest, context: Any) -> Any:  # noqa: N802 - likewise
        if request.request_id not in self.explained:
            refusal = f"no request {request.request_id!r} is known here"
            await abort(context, RequestError(grpc.StatusCode.NOT_FOUND, refusal))
        return self.explained[request.request_id]

    async def GetStatus(self, request: router_pb2.GetStatusRequest, context: Any) -> Any:  # noqa: N802 - likewise
        if self.refusal:
            await abort(context, self.refusal)
        return self.status


def delta(text: str, index: int = 0) -> router_pb2.GenerateEvent:
    return router_pb2.GenerateEvent(delta=router_pb2.Delta(index=index, text=text))


def finished(reason: common_pb2.FinishReason, index: int = 0) -> router_pb2.GenerateEvent:
    return router_pb2.GenerateEvent(finished=router_pb2.Finished(index=index, reason=reason))


@contextlib.asynccontextmanager
async def listening(router: FakeRouter, folder: Path) -> AsyncIterator[str]:
    """The address at which the router answers."""
    server = grpc.aio.server(options=server_options(max_message_bytes=1024 * 1024))
    router_pb2_grpc.add_RouterServicer_to_server(router, server)
    address = f"unix:{folder}/router.sock"
    server.add_insecure_port(address)
    try:
        await server.start()
        yield address
    finally:
        await server.stop(None)
