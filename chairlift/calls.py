"""How what a person types or imports speaks to a router: where it is, and its failures as ChairliftError."""

import contextlib
from collections.abc import AsyncIterator

import grpc

from chairlift.results import ChairliftError
from protos.v1 import router_pb2_grpc
from rpc.address import Address
from rpc.channel import connect
from rpc.errors import RequestError, from_call

DEFAULT_ADDRESS = "127.0.0.1:50051"
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# Where gRPC reports that it found nobody, in its own words.
_NOBODY = ("failed to connect", "connections to all backends failing", "DNS resolution failed")


@contextlib.asynccontextmanager
async def router_at(address: Address) -> "AsyncIterator[router_pb2_grpc.RouterAsyncStub]":
    """A stub of the router there. A call that fails inside raises ChairliftError.

    Raises:
        ChairliftError: what the router, or the way to it, said.
    """
    async with connect(address, max_message_bytes=MAX_MESSAGE_BYTES) as channel:
        try:
            yield router_pb2_grpc.RouterStub(channel)
        except grpc.aio.AioRpcError as error:
            raise failure(from_call(error), address) from error


def failure(refusal: RequestError, address: Address) -> ChairliftError:
    """A refusal as the caller gets it; gRPC's own words for "nobody is there" become ours."""
    message = refusal.message
    if refusal.code is grpc.StatusCode.UNAVAILABLE and any(words in message for words in _NOBODY):
        message = f"nobody answers at {address} (is `chairlift serve` running there?)"
    return ChairliftError(
        refusal.code.name,
        message,
        field=refusal.field,
        retry_after_seconds=refusal.retry_after_seconds,
    )
