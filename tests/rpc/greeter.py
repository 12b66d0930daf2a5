"""A process on rpc alone: it takes the router's contract for a service and has no model behind it.

Tokenize answers the length of the text, Generate a delta every 50 ms until its text's number is reached.
"""

import asyncio
import sys
from typing import Any

import grpc
from pydantic import Field

from protos.v1 import router_pb2, router_pb2_grpc
from rpc import log, server
from rpc.errors import RequestError, StartError, abort, invalid
from rpc.health import Health
from rpc.settings import ServiceSettings, load

SERVICE = "chairlift.v1.Router"


class GreeterSettings(ServiceSettings):
    """What a test may ask for."""

    listen: str = Field(default="127.0.0.1:0", description="Where to listen.")
    fail: str = Field(
        default="", description="How the background work ends: start, start-together, crash or return."
    )
    word: str = Field(default="", description="What a call's header of this name must say.")
    max_received_bytes: int | None = Field(default=None, description="Largest message taken.")


class Servicer(router_pb2_grpc.RouterServicer):
    def __init__(self) -> None:
        self.num_running = 0

    async def Tokenize(  # noqa: N802 - the contract's name
        self, request: router_pb2.TokenizeRequest, context: Any
    ) -> router_pb2.TokenizeResponse:
        if not request.text:
            await abort(context, invalid("text", "text is empty: it must hold a character"))
        return router_pb2.TokenizeResponse(token_ids=[len(request.text)])

    async def Generate(self, request: router_pb2.GenerateRequest, context: Any) -> Any:  # noqa: N802 - likewise
        self.num_running += 1
        try:
            for offset in range(int(request.text)):
                yield router_pb2.GenerateEvent(delta=router_pb2.Delta(offset=offset))
                await asyncio.sleep(0.05)
        finally:
            self.num_running -= 1

    async def drained(self) -> None:
        while self.num_running:  # noqa: ASYNC110 - a test's few polls
            await asyncio.sleep(0.02)


async def cannot_start() -> None:
    raise StartError("the rope\nis missing")


async def service() -> int:
    settings = load(GreeterSettings, sys.argv[1:], prog="greeter")
    log.configure("greeter", fmt="json", level="info")
    health, servicer = Health([SERVICE]), Servicer()

    async def run() -> None:
        health.serving(True)
        if settings.fail == "start":
            raise StartError("the rope\nis missing")
        if settings.fail == "start-together":
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(asyncio.Event().wait())
                tasks.create_task(cannot_start())
        if settings.fail == "crash":
            raise RuntimeError("snap")
        if not settings.fail:
            await asyncio.Event().wait()

    def admit(metadata: Any) -> None:
        if settings.word and ("word", settings.word) not in metadata:
            raise RequestError(grpc.StatusCode.UNAUTHENTICATED, "say the word")

    return await server.serve(
        settings,
        services={SERVICE: lambda it: router_pb2_grpc.add_RouterServicer_to_server(servicer, it)},
        health=health,
        run=run,
        drain=servicer.drained,
        admit=admit,
        max_received_bytes=settings.max_received_bytes,
    )


if __name__ == "__main__":
    server.main("greeter", service)
