"""How the door counts calls, in one process."""

import contextlib
from collections.abc import Iterator
from typing import Any

import grpc

from protos.v1 import router_pb2, router_pb2_grpc
from rpc.door import Door
from rpc.errors import RequestError, abort, invalid


class Servicer(router_pb2_grpc.RouterServicer):
    async def Tokenize(self, request: Any, context: Any) -> Any:  # noqa: N802 - the contract's name
        if not request.text:
            await abort(context, invalid("text", "text is empty"))
        return router_pb2.TokenizeResponse()

    async def GetModel(self, request: Any, context: Any) -> Any:  # noqa: N802 - likewise
        raise ZeroDivisionError

    async def Generate(self, request: Any, context: Any) -> Any:  # noqa: N802 - likewise
        yield router_pb2.GenerateEvent()
        await abort(context, RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, "too slow"))

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802 - likewise
        await context.write(router_pb2.StepSummary())
        await abort(context, RequestError(grpc.StatusCode.PERMISSION_DENIED, "not yours"))


def counted(door: Door) -> Iterator[tuple[str, str, float]]:
    (ended,) = (metric for metric in door.metrics() if metric.name.endswith("grpc_calls"))
    for sample in ended.samples:
        if sample.name.endswith("_total"):
            yield sample.labels["method"], sample.labels["code"], sample.value


async def test_each_call_is_counted_under_its_own_status() -> None:
    door = Door()
    server = grpc.aio.server(interceptors=[door])
    router_pb2_grpc.add_RouterServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        router = router_pb2_grpc.RouterStub(channel)
        await router.Tokenize(router_pb2.TokenizeRequest(text="a"))
        for call in (
            router.Tokenize(router_pb2.TokenizeRequest()),
            router.GetModel(router_pb2.GetModelRequest()),
            router.Complete(router_pb2.GenerateRequest()),  # not there
        ):
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call
        for stream in (
            router.Generate(router_pb2.GenerateRequest()),
            router.Watch(router_pb2.WatchRequest()),
        ):
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in stream:
                    pass
        door.close()
        with contextlib.suppress(grpc.aio.AioRpcError):
            await router.Tokenize(router_pb2.TokenizeRequest(text="a"))
    await server.stop(None)
    assert set(counted(door)) == {
        ("Tokenize", "OK", 1),
        ("Tokenize", "INVALID_ARGUMENT", 1),
        ("GetModel", "UNKNOWN", 1),
        ("Complete", "UNIMPLEMENTED", 1),
        ("Generate", "RESOURCE_EXHAUSTED", 1),
        ("Watch", "PERMISSION_DENIED", 1),
        ("Tokenize", "UNAVAILABLE", 1),
    }
