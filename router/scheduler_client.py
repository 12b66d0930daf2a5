"""The stream to one scheduler: connecting, reconnecting, deadlines.

The one place where a session meets the clock and the network. The session decides what is sent and what an
answer means; which scheduler gets which request is `scheduler_pool`'s business.
"""

import asyncio
import contextlib
import random
import time
from collections import OrderedDict, abc
from functools import partial
from typing import Final

import grpc
import structlog

from protos.v1 import router_pb2, scheduler_pb2_grpc
from protos.v1.scheduler_pb2 import GetLoadRequest, RouterMessage, SchedulerMessage
from router import wire
from router.request_log import End, RequestLog
from router.ride import Changes
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
from rpc.cancel import heed_cancel
from rpc.channel import Line
from rpc.errors import RequestError, from_call
from rpc.tls import Tls
from rpc.unconnected import explained

_MIN_RETRY_SECONDS: Final = 0.05
_MAX_RETRY_SECONDS: Final = 1.0
_RELAY_TIMEOUT_SECONDS: Final = 5.0
_STATUS_SECONDS: Final = 2.0
# A token takes each a tenth of a millisecond, an end half of one.
_WOKEN_TOGETHER: Final = 16
# A write, and what is read, need a few turns of the loop to get through gRPC's own threads.
_TURNS_BETWEEN: Final = 8
# A scheduler that is away this long is lost: its shard's requests may go on elsewhere. By then it has given
# them up itself (its --orphan-grace-seconds), so that going elsewhere costs nothing that waiting would save.
RECONNECT_SECONDS: Final = 10.0

# What a session is told when a stream has ended.
Lost = abc.Callable[[str, float], list[Event]]

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
        shard: str = "",
        reconnect_seconds: float = RECONNECT_SECONDS,
        tls: Tls | None = None,
    ) -> None:
        """`on_serving_changed` is called whenever `refusal` may have changed.

        Clients of one `shard` (absent: its address) lead to a scheduler and its standbys.
        """
        self.address = address
        self.shard = shard or address.target
        self.on_changed: abc.Callable[[], None] = lambda: None
        """Set by the pool that places requests; called when `refusal` or `is_lost` may have changed."""
        self._reconnect_seconds = reconnect_seconds
        self._tls = tls
        self._line = Line(address, max_message_bytes=max_message_bytes, tls=tls)
        self._stub = scheduler_pb2_grpc.SchedulerStub(self._line.channel)
        self._session = SchedulerSession(
            router_id=router_id, tokenizer=tokenizer, recovery_timeout_seconds=recovery_timeout_seconds
        )
        self._on_serving_changed = on_serving_changed
        self._wakes: dict[RequestLog, abc.Callable[[], None]] = {}
        # Have news that they were not woken for. While there are any, `_wake_some` is due.
        self._to_wake: OrderedDict[RequestLog, None] = OrderedDict()
        self._outgoing = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

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
    def term(self) -> int:
        """The leadership term that the scheduler told with its last Welcome; 0 before."""
        return 0 if self._session.welcome is None else self._session.welcome.term

    @property
    def is_lost(self) -> bool:
        """Whether the scheduler has been away for so long that it need not be waited for."""
        since = self._session.away_since
        return since is not None and time.monotonic() >= since + self._reconnect_seconds

    @property
    def requests(self) -> list[RequestLog]:
        """Those under way here, in the order in which they came."""
        return self._session.requests

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
        """Lets a request go: choices that have not ended end with `end`, and the scheduler is told.

        A request that is not here, because it was never taken or has gone elsewhere, is no error.
        """
        if self._wakes.pop(request, None) is None:
            return
        for choice in request.choices:
            self._session.cancel(choice.key, end, time.monotonic())
        self._outgoing.set()

    def hand_over(self, request: RequestLog) -> None:
        """Lets a request go that a newer log of it goes on with, here; the scheduler hears nothing of it."""
        if self._wakes.pop(request, None) is not None:
            self._session.hand_over(request)

    def abandon(self, request: RequestLog) -> abc.Callable[[], None]:
        """Lets a request go that goes on at another scheduler; returns its `wake`."""
        self._session.abandon(request)
        self._outgoing.set()
        wake = self._wakes.pop(request)
        if request in self._to_wake:
            wake()
        return wake

    # --- relays -------------------------------------------------------------------------------------

    async def explain(self, request: router_pb2.ExplainRequest) -> router_pb2.ExplainResponse:
        """The scheduler's answer. Raises RequestError with the scheduler's status."""
        try:
            return await self._stub.Explain(request, timeout=_RELAY_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise from_call(error) from error

    async def status(self) -> router_pb2.SchedulerStatus:
        """How it is; its address and refusal alone when it does not answer."""
        told = router_pb2.SchedulerStatus()
        with contextlib.suppress(grpc.aio.AioRpcError):
            load = await self._stub.GetLoad(GetLoadRequest(), timeout=_STATUS_SECONDS)
            told.CopyFrom(load.status)
        told.address, told.refusal = str(self.address), self.refusal or ""
        return told

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

    async def follow(self) -> abc.AsyncGenerator[Changes]:
        """The same in local words, and for less. Raises RequestError when the scheduler is away or goes."""
        call = self._stub.Follow(router_pb2.WatchRequest())
        try:
            async for message in call:
                yield wire.changes(message)
        except grpc.aio.AioRpcError as error:
            raise from_call(error) from error
        finally:
            call.cancel()

    # --- the stream ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Connects, and connects again, until cancelled."""
        retry_seconds = _MIN_RETRY_SECONDS
        last_reason = ""
        try:
            while True:
                began = time.monotonic()
                reason, lost = await self._hold_stream()
                heed_cancel()
                if reason != last_reason:  # a scheduler that stays away is no news each second
                    _log.warning("scheduler_lost", scheduler=self.address.target, reason=reason)
                last_reason = reason
                self._dispatch(lost(reason, time.monotonic()))
                self._arm_timer()
                held_long = time.monotonic() - began > _MAX_RETRY_SECONDS
                retry_seconds = (
                    _MIN_RETRY_SECONDS if held_long else min(2 * retry_seconds, _MAX_RETRY_SECONDS)
                )
                await asyncio.sleep(retry_seconds * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, no secret
        finally:
            if self._timer is not None:
                self._timer.cancel()
            await self._line.close()

    async def _hold_stream(self) -> tuple[str, Lost]:
        """Keeps one stream for as long as it lives.

        Returns why it ended, as the rest of a sentence, and what the session is to be told with it.
        """
        if await self._line.renew():
            self._stub = scheduler_pb2_grpc.SchedulerStub(self._line.channel)
        call = self._stub.Connect()  # type: ignore[call-arg]  # without an iterator: we call write()
        connection = self._session.connected()
        self._outgoing.set()
        async with asyncio.TaskGroup() as group:  # a defect in the writer must not pass in silence
            writer = group.create_task(self._write(call))
            try:
                async for proto in call:
                    if proto is None:  # what gRPC gives for bytes that are no message of this type
                        raise SessionError("a message could not be read")  # noqa: TRY301 - one way out
                    if wire.is_long(proto):  # others go on meanwhile, but for the messages behind this one
                        message = await asyncio.to_thread(wire.scheduler_message, proto)
                    else:
                        message = wire.scheduler_message(proto)
                    if message is not None:
                        events = self._session.receive(connection, message, time.monotonic())
                        self._outgoing.set()
                        self._dispatch(events)
            except SessionError as error:
                return f"it broke the protocol: {error}", self._session.broke_protocol
            except grpc.aio.AioRpcError as error:
                details = error.details() or ""
                why = explained(details, self._tls) or f"{error.code().name}: {details}"
                return f"it cannot be reached ({why})", self._session.disconnected
            else:
                return "it ended the stream", self._session.disconnected
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
        is_waking = bool(self._to_wake)
        for event in events:
            match event:
                case Progressed(request):
                    self._to_wake[request] = None
                case ServingChanged(refusal):
                    _log.info("scheduler_serving", scheduler=self.address.target, refusal=refusal)
                    self._on_serving_changed()
                    self.on_changed()
        if self._to_wake and not is_waking:
            self._wake_some()

    def _wake_some(self) -> None:
        """Wakes the calls that have waited longest; the rest a few turns of the event loop later.

        Meanwhile the woken calls write and the stream is read. When writing cannot keep up, reading gets
        ahead, and a call is then woken once for everything that has come: its messages grow, not its delay.
        """
        for _ in range(min(_WOKEN_TOGETHER, len(self._to_wake))):
            request, _ = self._to_wake.popitem(last=False)
            if (wake := self._wakes.get(request)) is not None:
                wake()
        if self._to_wake:
            self._give_way(_TURNS_BETWEEN)

    def _give_way(self, num_turns: int) -> None:
        """Goes on waking when the event loop has turned so many times."""
        go_on = partial(self._give_way, num_turns - 1) if num_turns > 1 else self._wake_some
        asyncio.get_running_loop().call_soon(go_on)

    def _arm_timer(self) -> None:
        """Sets a timer for when the scheduler counts as lost, and for when its requests expire.

        Without it nothing might look at the time: an attempt to connect may bring no event for a long while.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        since, deadline = self._session.away_since, self._session.recovery_deadline
        if since is None or deadline is None:
            return
        now = time.monotonic()
        # Once it is lost, each second: its standbys may be lost a little later.
        due = min(deadline, max(since + self._reconnect_seconds, now + _MAX_RETRY_SECONDS))
        delay = max(0.0, due - now)
        self._timer = asyncio.get_running_loop().call_later(delay, self._look_at_time)

    def _look_at_time(self) -> None:
        self.on_changed()
        self._dispatch(self._session.expire(time.monotonic()))
        self._arm_timer()  # a timer may be a little early
