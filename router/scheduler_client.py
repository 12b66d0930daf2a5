"""The streams to the schedulers: connecting, reconnecting, deadlines.

The one place where a session meets the clock and the network; what is said and what it means, it decides.
One `SchedulerClient` for each scheduler; `SchedulerPool` places requests among them.
"""

import asyncio
import contextlib
import hashlib
import random
import time
from collections import abc
from typing import Final

import grpc
import structlog

from protos.v1 import router_pb2, scheduler_pb2_grpc
from protos.v1.scheduler_pb2 import RouterMessage, SchedulerMessage
from router import wire
from router.request_log import End, RequestLog
from router.ride import Step
from router.scheduler_session import (
    Event,
    Progressed,
    SchedulerSession,
    ServingChanged,
    SessionError,
    TokenizerIdentity,
    Welcome,
)
from rpc.address import Address
from rpc.channel import Line
from rpc.errors import RequestError, from_call
from rpc.tls import Tls, explained

_MIN_RETRY_SECONDS: Final = 0.05
_MAX_RETRY_SECONDS: Final = 1.0
_RELAY_TIMEOUT_SECONDS: Final = 5.0

_log = structlog.get_logger()


class SchedulerClient:
    """Holds the stream to one scheduler for as long as `run` runs."""

    def __init__(
        self,
        address: Address,
        *,
        router_id: str,
        tokenizer: TokenizerIdentity,
        recovery_timeout_seconds: float,
        max_message_bytes: int,
        on_serving_changed: abc.Callable[[], None],
        tls: Tls | None = None,
    ) -> None:
        """`on_serving_changed` is called whenever `refusal` may have changed."""
        self.address = address
        self._tls = tls
        self._line = Line(address, max_message_bytes=max_message_bytes, tls=tls)
        self._stub = scheduler_pb2_grpc.SchedulerStub(self._line.channel)
        self._session = SchedulerSession(
            router_id=router_id, tokenizer=tokenizer, recovery_timeout_seconds=recovery_timeout_seconds
        )
        self._on_serving_changed = on_serving_changed
        self._wakes: dict[RequestLog, abc.Callable[[], None]] = {}
        self._outgoing = asyncio.Event()
        self._recovery_timer: asyncio.TimerHandle | None = None

    @property
    def refusal(self) -> str | None:
        """Why a new request is not taken, as a sentence; None when it is."""
        reason = self._session.refusal
        return None if reason is None else f"scheduler {self.address.target}: {reason}"

    @property
    def welcome(self) -> Welcome | None:
        """What the scheduler last told of itself; None before it has."""
        return self._session.welcome

    @property
    def num_live(self) -> int:
        """Choices under way."""
        return self._session.num_live

    # --- requests -----------------------------------------------------------------------------------

    def submit(self, request: RequestLog, wake: abc.Callable[[], None]) -> None:
        """Hands a request to the scheduler; `wake` is called whenever its log has something new.

        Raises RequestError, UNAVAILABLE, when requests are not taken.
        """
        if self.refusal is not None:
            raise RequestError(grpc.StatusCode.UNAVAILABLE, self.refusal)
        self._session.submit(request, time.monotonic())
        self._wakes[request] = wake
        self._outgoing.set()

    def release(self, request: RequestLog, end: End) -> None:
        """Lets a request go: choices that have not ended end with `end`, and the scheduler is told."""
        for choice in request.choices:
            self._session.cancel(choice.key, end, time.monotonic())
        self._wakes.pop(request, None)
        self._outgoing.set()

    # --- relays -------------------------------------------------------------------------------------

    async def explain(self, request: router_pb2.ExplainRequest) -> router_pb2.ExplainResponse:
        """The scheduler's answer. Raises RequestError with the scheduler's status."""
        try:
            return await self._stub.Explain(request, timeout=_RELAY_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise from_call(error) from error

    async def time_line(self, request_id: str, tenant: str) -> dict[str, object]:
        """Where the time of one of a tenant's requests went, as plain values. Raises RequestError."""
        asked = router_pb2.ExplainRequest(request_id=request_id, tenant=tenant)
        return wire.time_line(await self.explain(asked))

    async def watch(self, request: router_pb2.WatchRequest) -> abc.AsyncGenerator[router_pb2.StepSummary]:
        """The scheduler's step summaries. Raises RequestError with the scheduler's status."""
        call = self._stub.Watch(request)
        try:
            async for summary in call:
                yield summary
        except grpc.aio.AioRpcError as error:
            raise from_call(error) from error
        finally:
            call.cancel()

    async def steps(self) -> abc.AsyncGenerator[Step]:
        """The same, in local words. Raises RequestError when the scheduler is away or goes."""
        async with contextlib.aclosing(self.watch(router_pb2.WatchRequest())) as summaries:
            async for summary in summaries:
                yield wire.step(summary)

    # --- the stream ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Connects, and connects again, until cancelled."""
        retry_seconds = _MIN_RETRY_SECONDS
        last_reason = ""
        try:
            while True:
                began = time.monotonic()
                reason = await self._hold_stream()
                if reason != last_reason:  # a scheduler that stays away is no news each second
                    _log.warning("scheduler_lost", scheduler=self.address.target, reason=reason)
                last_reason = reason
                self._dispatch(self._session.disconnected(reason, time.monotonic()))
                self._arm_recovery_timer()
                held_long = time.monotonic() - began > _MAX_RETRY_SECONDS
                retry_seconds = (
                    _MIN_RETRY_SECONDS if held_long else min(2 * retry_seconds, _MAX_RETRY_SECONDS)
                )
                await asyncio.sleep(retry_seconds * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, no secret
        finally:
            if self._recovery_timer is not None:
                self._recovery_timer.cancel()
            await self._line.close()

    async def _hold_stream(self) -> str:
        """Keeps one stream for as long as it lives; returns why it ended, as the rest of a sentence."""
        if await self._line.renew():
            self._stub = scheduler_pb2_grpc.SchedulerStub(self._line.channel)
        call = self._stub.Connect()  # type: ignore[call-arg]  # without an iterator: we call write()
        connection = self._session.connected()
        self._outgoing.set()
        async with asyncio.TaskGroup() as group:  # a defect in the writer must not pass in silence
            writer = group.create_task(self._write(call))
            try:
                async for proto in call:
                    message = wire.scheduler_message(proto)
                    if message is not None:
                        self._dispatch(self._session.receive(connection, message, time.monotonic()))
                        self._outgoing.set()
            except SessionError as error:
                return f"it broke the protocol: {error}"
            except grpc.aio.AioRpcError as error:
                details = error.details() or ""
                why = explained(details, self._tls) or f"{error.code().name}: {details}"
                return f"it cannot be reached ({why})"
            else:
                return "it ended the stream"
            finally:
                writer.cancel()
                call.cancel()

    async def _write(self, call: "grpc.aio.StreamStreamCall[RouterMessage, SchedulerMessage]") -> None:
        """Writes what the session has to say, until the stream breaks; the reader finds out why it did."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                while (message := self._session.next_message(time.monotonic())) is not None:
                    await call.write(wire.router_message(message))
                self._outgoing.clear()
                await self._outgoing.wait()

    def _dispatch(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Progressed(request):
                    if request in self._wakes:
                        self._wakes[request]()
                case ServingChanged(refusal):
                    _log.info("scheduler_serving", scheduler=self.address.target, refusal=refusal)
                    self._on_serving_changed()

    def _arm_recovery_timer(self) -> None:
        """Makes sure that `expire` is asked when the recovery timeout is over, whatever the network does."""
        deadline = self._session.recovery_deadline
        if self._recovery_timer is not None:
            self._recovery_timer.cancel()
            self._recovery_timer = None
        if deadline is not None:
            delay = max(0.0, deadline - time.monotonic())
            self._recovery_timer = asyncio.get_running_loop().call_later(delay, self._expire)

    def _expire(self) -> None:
        self._dispatch(self._session.expire(time.monotonic()))
        self._arm_recovery_timer()  # a timer may be a little early


class SchedulerPool:
    """Every scheduler this router knows, each a shard with executors of its own."""

    def __init__(self, clients: list[SchedulerClient]) -> None:
        """`clients` has at least one."""
        self._clients = clients

    @property
    def refusal(self) -> str | None:
        """Why no new request can be taken, as a sentence; None when one can."""
        refusals = [client.refusal for client in self._clients]
        return None if None in refusals else "; ".join(refusal for refusal in refusals if refusal)

    def place(self, name: str) -> SchedulerClient:
        """The scheduler for this name (a tenant, or a request), among those that take requests.

        Rendezvous hashing: a scheduler that leaves or comes back moves its own names alone. Raises
        RequestError, UNAVAILABLE, when none takes requests.
        """
        serving = [client for client in self._clients if client.refusal is None]
        if not serving:
            raise RequestError(grpc.StatusCode.UNAVAILABLE, self.refusal or "no scheduler is serving")
        return max(
            serving, key=lambda client: hashlib.sha256(f"{client.address.target}\0{name}".encode()).digest()
        )

    def welcome(self) -> Welcome:
        """What a scheduler has told of the model. Raises RequestError, UNAVAILABLE, before any has."""
        welcomes = [client.welcome for client in self._clients if client.welcome is not None]
        if not welcomes:
            raise RequestError(grpc.StatusCode.UNAVAILABLE, self.refusal or "no scheduler is serving")
        return welcomes[0]

    @property
    def clients(self) -> tuple[SchedulerClient, ...]:
        """All of them, serving or not."""
        return tuple(self._clients)

    async def run(self) -> None:
        """Holds all streams until cancelled."""
        async with asyncio.TaskGroup() as group:
            for client in self._clients:
                group.create_task(client.run())
