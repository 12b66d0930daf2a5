"""Calls one executor and interprets its status codes. Knows the wire and the contract, decides nothing."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import grpc
import structlog

from protos.v1 import executor_pb2, executor_pb2_grpc
from rpc.address import Address
from rpc.cancel import heed_cancel
from rpc.channel import Line
from rpc.tls import Tls
from rpc.unconnected import explained
from scheduler import wire
from scheduler.executor_session import SessionBrokenError
from scheduler.plan import Capacity, StepResult

_log = structlog.get_logger()
OPEN_TIMEOUT_SECONDS = 5.0
_LOOK_SECONDS = 0.005
_EXECUTE = f"/{executor_pb2.DESCRIPTOR.services_by_name['Executor'].full_name}/Execute"


class ExecutorUnreachableError(Exception):
    """No answer, or the stream broke: the same epoch may still be there."""


class EpochLostError(Exception):
    """The executor restarted, or disagrees with a plan: open again, recompute."""


class HeldError(Exception):
    """Another scheduler holds the executor: step down. `term` is 0 when the executor does not say."""

    def __init__(self, message: str, holder: str = "", term: int = 0) -> None:
        super().__init__(message)
        self.holder = holder
        self.term = term


class LeftError(Exception):
    """The executor left on purpose, with nothing left to do: it will not come back with this epoch."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A fresh epoch."""

    epoch: int
    term: int
    capacity: Capacity


class ExecutorClient:
    """One channel to one executor."""

    def __init__(self, address: Address, *, max_message_bytes: int, tls: Tls | None = None) -> None:
        self._tls = tls
        self._line = Line(address, max_message_bytes=max_message_bytes, tls=tls)
        self._stub: executor_pb2_grpc.ExecutorAsyncStub = executor_pb2_grpc.ExecutorStub(self._line.channel)

    async def close(self) -> None:
        """Closes the connection."""
        await self._line.close()

    async def open(self, scheduler_id: str, term: int = 0) -> Opened:
        """Takes over the executor, at this term or (0) at the next.

        Raises ExecutorUnreachableError or HeldError.
        """
        request = executor_pb2.OpenRequest(
            scheduler_id=scheduler_id, term=term, protocol_revision=wire.PROTOCOL_REVISION
        )
        if await self._line.renew():
            self._stub = executor_pb2_grpc.ExecutorStub(self._line.channel)
        try:
            response = await self._stub.Open(request, timeout=OPEN_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise _meaning(error, self._tls) from error
        try:
            return Opened(response.epoch, response.term, wire.capacity_of(response))
        except wire.CapacityError as error:
            raise ExecutorUnreachableError(str(error)) from error

    def execute(self) -> "ExecuteStream":
        """Opens a new stream of plans; the newest one of an epoch wins."""
        # Plans are serialized by the sender, which needs to know their size.
        execute = self._line.channel.stream_stream(
            _EXECUTE, request_serializer=None, response_deserializer=executor_pb2.StepResult.FromString
        )
        return ExecuteStream(execute(None), self._line.channel, self._tls)


class ExecuteStream:
    """One stream: plans out, results in."""

    def __init__(
        self,
        call: "grpc.aio.StreamStreamCall[bytes, executor_pb2.StepResult]",
        channel: grpc.aio.Channel,
        tls: Tls | None = None,
    ) -> None:
        self._call = call
        self._channel = channel
        self._tls = tls

    async def connected(self) -> None:
        """Returns once there is a connection; without one, `results` raises. A call begins before that."""
        # Not with `channel_ready`: when it is cancelled, it complains about the next change of state.
        while self._channel.get_state() is not grpc.ChannelConnectivity.READY:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_SECONDS)

    async def send(self, message: bytes) -> None:
        """Sends one BatchPlan, serialized. Raises what the end of the stream means."""
        try:
            await self._call.write(message)
        except grpc.aio.AioRpcError as error:
            raise _meaning(error, self._tls) from error
        except asyncio.InvalidStateError as error:  # the call has ended; `results` says why
            raise ExecutorUnreachableError("the stream has ended") from error

    async def results(self) -> AsyncIterator[StepResult]:
        """Results in order; ends only by raising what the end of the stream means.

        Raises SessionBrokenError for bytes that are not a result.
        """
        try:
            async for message in self._call:
                if message is None:  # grpc's way to report bytes that it cannot parse
                    raise SessionBrokenError("what came is no StepResult")
                yield wire.result_of(message)
        except grpc.aio.AioRpcError as error:
            raise _meaning(error, self._tls) from error
        raise ExecutorUnreachableError("the executor closed the stream")

    def cancel(self) -> None:
        """Cancels the stream."""
        self._call.cancel()


def _meaning(error: grpc.aio.AioRpcError, tls: Tls | None) -> Exception:
    heed_cancel()
    details = error.details() or ""
    text = explained(details, tls) or f"{error.code().name}: {details}"
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        text = "it takes the call and does not answer in time"
    trailers: dict[str, Any] = dict(error.trailing_metadata() or ())  # type: ignore[arg-type]  # pairs
    if error.code() is grpc.StatusCode.PERMISSION_DENIED:
        holder, term = trailers.get("chairlift-scheduler-id", ""), trailers.get("chairlift-term", "")
        return HeldError(text, unquote(holder), int(term) if term.isdecimal() else 0)
    if error.code() in {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.DATA_LOSS}:
        return EpochLostError(text)
    if "chairlift-leaving" in trailers:
        return LeftError(text)
    return ExecutorUnreachableError(text)
