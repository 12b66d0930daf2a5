"""How the command line speaks to a router: one channel, and errors as sentences."""

import contextlib
from collections.abc import AsyncIterator

import grpc

from protos.v1 import router_pb2_grpc
from rpc.address import Address
from rpc.channel import connect
from rpc.errors import from_call

DEFAULT_ADDRESS = "127.0.0.1:50051"
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# Where gRPC reports that it found nobody, in its own words.
_NOBODY = ("failed to connect", "connections to all backends failing", "DNS resolution failed")


class CallError(Exception):
    """A call that failed; the text is a sentence for people."""


@contextlib.asynccontextmanager
async def router_at(address: Address) -> "AsyncIterator[router_pb2_grpc.RouterAsyncStub]":
    """A stub of the router there. A call that fails inside raises CallError.

    Raises:
        CallError: what the router, or the way to it, said.
    """
    async with connect(address, max_message_bytes=MAX_MESSAGE_BYTES) as channel:
        try:
            yield router_pb2_grpc.RouterStub(channel)
        except grpc.aio.AioRpcError as error:
            raise CallError(_sentence(error, address)) from error


def _sentence(error: grpc.aio.AioRpcError, address: Address) -> str:
    refusal = from_call(error)
    if refusal.code is grpc.StatusCode.UNAVAILABLE and any(words in refusal.message for words in _NOBODY):
        return f"nobody answers at {address} (is `chairlift serve` running there?)"
    sentence = f"{refusal.message} [{refusal.code.name}]"
    if refusal.retry_after_seconds is not None:
        sentence += f"; try again in {refusal.retry_after_seconds:.1f} s"
    return sentence
