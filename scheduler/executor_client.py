"""Calls to one executor, and what its status codes mean. Knows the wire and the contract, decides nothing."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import structlog

from protos.v1 import executor_pb2, executor_pb2_grpc
from rpc.address import Address
from rpc.channel import Line
from rpc.tls import Tls, explained
from scheduler import wire
from scheduler.plan import Capacity, StepResult

_log = structlog.get_logger()
OPEN_TIMEOUT_SECONDS = 5.0


class ExecutorUnreachableError(Exception):
    """No answer, or the stream broke: the same epoch may still be there."""


class EpochLostError(Exception):
    """The executor restarted, or disagrees with a plan: open again, recompute."""


class HeldError(Exception):
    """Another scheduler holds the executor: step down."""


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
        """Gives the connection back."""
        await self._line.close()

    async def open(self, scheduler_id: str) -> Opened:
        """Takes the executor over. Raises ExecutorUnreachableError or HeldError."""
        request = executor_pb2.OpenRequest(
            scheduler_id=scheduler_id, protocol_revision=wire.PROTOCOL_REVISION
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
        """A new stream of plans; the newest one of an epoch wins."""
        return ExecuteStream(self._stub.Execute(None), self._tls)


class ExecuteStream:
    """Plans out, results in."""

    def __init__(
        self,
        call: "grpc.aio.StreamStreamCall[executor_pb2.BatchPlan, executor_pb2.StepResult]",
        tls: Tls | None = None,
    ) -> None:
        self._call = call
        self._tls = tls

    async def send(self, message: executor_pb2.BatchPlan) -> None:
        """Sends one plan. Raises what the end of the stream means."""
        try:
            await self._call.write(message)
        except grpc.aio.AioRpcError as error:
            raise _meaning(error, self._tls) from error
        except asyncio.InvalidStateError as error:  # the call has ended; `results` says why
            raise ExecutorUnreachableError("the stream has ended") from error

    async def results(self) -> AsyncIterator[StepResult]:
        """Results in order; never ends but by raising what the end of the stream means."""
        try:
            async for message in self._call:
                if message is None:  # how grpc tells of bytes that it cannot parse
                    raise EpochLostError("what came is no StepResult")
                yield wire.result_of(message)
        except grpc.aio.AioRpcError as error:
            raise _meaning(error, self._tls) from error
        raise ExecutorUnreachableError("the executor closed the stream")

    def cancel(self) -> None:
        """Breaks the stream off."""
        self._call.cancel()


def _meaning(error: grpc.aio.AioRpcError, tls: Tls | None) -> Exception:
    details = error.details() or ""
    text = explained(details, tls) or f"{error.code().name}: {details}"
    if error.code() is grpc.StatusCode.PERMISSION_DENIED:
        return HeldError(text)
    if error.code() in {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.DATA_LOSS}:
        return EpochLostError(text)
    return ExecutorUnreachableError(text)
