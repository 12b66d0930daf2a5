"""How a router is called, by commands and by the client library: where it is, what is shown to it, errors."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from chairlift.results import ChairliftError
from protos.v1 import router_pb2_grpc
from rpc import tls, unconnected
from rpc.address import Address
from rpc.channel import connect
from rpc.errors import RequestError, from_call

DEFAULT_ADDRESS = "127.0.0.1:50051"
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
API_KEY_VARIABLE = "CHAIRLIFT_API_KEY"

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Router:
    """Where a router is, by which certificates it is spoken to, and whose key is shown; empty: none."""

    address: Address
    certificates: tls.Tls | None = None
    api_key: str = ""

    @property
    def metadata(self) -> Metadata:
        """What goes with each call."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()


@contextlib.asynccontextmanager
async def router_at(router: Router) -> "AsyncIterator[router_pb2_grpc.RouterAsyncStub]":
    """A stub of the router; its calls take `router.metadata`. One that fails inside raises ChairliftError.

    Raises:
        ChairliftError: what the router, or the way to it, said.
    """
    async with connect(
        router.address, max_message_bytes=MAX_MESSAGE_BYTES, tls=router.certificates
    ) as channel:
        try:
            yield router_pb2_grpc.RouterStub(channel)
        except grpc.aio.AioRpcError as error:
            raise failure(from_call(error), router) from error


def failure(refusal: RequestError, router: Router) -> ChairliftError:
    """A refusal as the caller gets it; gRPC's own words for what it notices itself become ours."""
    message = refusal.message
    if refusal.code is grpc.StatusCode.UNAVAILABLE:
        why = unconnected.explained(message, router.certificates)
        if why == unconnected.NOBODY:
            message = f"nobody answers at {router.address} (is `chairlift serve` running there?)"
        elif why is not None:
            message = f"no connection to the router at {router.address}: {why}"
    elif refusal.code is grpc.StatusCode.DEADLINE_EXCEEDED:  # in one of gRPC's many ways, or the router's
        message = f"the time given was over before the router at {router.address} had answered"
    elif refusal.code is grpc.StatusCode.UNAUTHENTICATED and not router.api_key:
        message = f"{message} (set {API_KEY_VARIABLE})"
    return ChairliftError(
        refusal.code.name,
        message,
        field=refusal.field,
        retry_after_seconds=refusal.retry_after_seconds,
    )
