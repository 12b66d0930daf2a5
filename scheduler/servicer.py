"""The Scheduler service: moves messages between streams and session objects, decides nothing."""

import asyncio
from array import array
from collections.abc import AsyncIterator
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from protos.v1 import router_pb2, scheduler_pb2, scheduler_pb2_grpc
from rpc.errors import RequestError, abort
from scheduler import wire
from scheduler.door import RefusedError
from scheduler.feed import FeedReader
from scheduler.parts import PartAssembler
from scheduler.promise import Promise
from scheduler.router_session import RouterSession, SessionError, StepOutput, session_of
from scheduler.running_scheduler import RunningScheduler, Watcher
from scheduler.sequence import Finish, FinishReason, Request, Sequence, StatusCode

_log = structlog.get_logger()
Context = grpc.aio.ServicerContext[Any, Any]


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServicer):
    """Serves routers."""

    def __init__(
        self, scheduler: RunningScheduler, *, scheduler_id: str, router_stall_seconds: float
    ) -> None:
        self._scheduler = scheduler
        self._scheduler_id = scheduler_id
        self._router_stall_seconds = router_stall_seconds

    async def Connect(  # type: ignore[override]  # it writes through the context; the stubs know generators only
        self, request_iterator: AsyncIterator[scheduler_pb2.RouterMessage], context: Context
    ) -> None:
        """One router's stream, until either side ends it."""
        hello = await anext(aiter(request_iterator), None)
        if hello is None or hello.WhichOneof("message") != "hello":
            await abort(
                context, RequestError(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be Hello")
            )
        session = RouterSession(hello.hello.router_id, hello.hello.stream)
        stream = _RouterStream(self._scheduler, session, self._scheduler_id)
        log = _log.bind(router_id=stream.session.router_id)
        log.info("router_connected")
        reader = asyncio.ensure_future(stream.read(request_iterator))
        end: RequestError | None = None
        try:
            await stream.write(context, reader, self._router_stall_seconds)
        except (SessionError, wire.SubmitError, DecodeError) as error:
            log.warning("router_broke_the_rules", error=str(error))
            end = RequestError(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except _SteppedDownError:
            end = RequestError(
                grpc.StatusCode.UNAVAILABLE, self._scheduler.standing_by or "another one leads"
            )
        except _SupersededError:
            message = "a newer stream of the same router has taken the place of this one"
            end = RequestError(grpc.StatusCode.ABORTED, message)
        except _OtherPromiseError:
            message = "the executors can do other things than before; connect again to be told"
            end = RequestError(grpc.StatusCode.UNAVAILABLE, message)
        except TimeoutError:
            log.warning("router_stalled", seconds=self._router_stall_seconds)
            message = f"nothing was taken for {self._router_stall_seconds:g} seconds"
            end = RequestError(grpc.StatusCode.ABORTED, message)
        finally:
            # Before the status is sent: with a router that takes nothing, that may last for ever.
            stream.close()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            log.info("router_disconnected")
        if end is not None:
            await abort(context, end)

    async def Watch(
        self, request: router_pb2.WatchRequest, context: Context
    ) -> AsyncIterator[router_pb2.StepSummary]:
        """Step summaries from now on."""
        watcher = Watcher(request.executor_id)
        self._scheduler.watchers.add(watcher)
        try:
            while True:
                yield await watcher.queue.get()
        finally:
            self._scheduler.watchers.discard(watcher)

    async def Follow(
        self, request: router_pb2.WatchRequest, context: Context
    ) -> AsyncIterator[scheduler_pb2.BatchChanges]:
        """The same at less cost: only what changes, several steps in a message."""
        reader = FeedReader(request.executor_id)
        self._scheduler.feed.join(reader)
        try:
            while True:
                yield await reader.queue.get()
        finally:
            self._scheduler.feed.leave(reader)

    async def GetLoad(
        self, request: scheduler_pb2.GetLoadRequest, context: Context
    ) -> scheduler_pb2.GetLoadResponse:
        """How busy this scheduler is."""
        scheduler = self._scheduler
        return wire.load_message(
            scheduler.core, scheduler_id=self._scheduler_id, term=scheduler.term, missing=scheduler.missing
        )

    async def Explain(
        self, request: router_pb2.ExplainRequest, context: Context
    ) -> router_pb2.ExplainResponse:
        """Where the time went of the tenant's newest request with this id."""
        lines = self._scheduler.core.explain(request.request_id, self._scheduler.now(), request.tenant)
        if not lines:
            message = (
                f"nothing is known of request {request.request_id!r}: it never was here, or is long over"
            )
            await abort(context, RequestError(grpc.StatusCode.NOT_FOUND, message, field="request_id"))
        return wire.explain_response(request.request_id, lines)


class _SteppedDownError(Exception):
    """This scheduler leads no longer: what was begun on the stream continues elsewhere."""


class _SupersededError(Exception):
    """The router has left the stream for a newer one."""


class _OtherPromiseError(Exception):
    """What the router was told when it was welcomed is no longer true."""


class _RouterStream:
    """One Connect call: its session, and when to look at it again."""

    def __init__(self, scheduler: RunningScheduler, session: RouterSession, scheduler_id: str) -> None:
        self.session = session
        self._scheduler = scheduler
        self._scheduler_id = scheduler_id
        self._wake = asyncio.Event()
        self._parts: PartAssembler[scheduler_pb2.Submit] = PartAssembler()
        self._told: tuple[bool, str] | None = None
        self._promise: Promise | None = None  # as of the welcome
        self._num_step_downs = scheduler.num_step_downs
        scheduler.join(session, self._wake)

    def close(self) -> None:
        """The stream is over."""
        self._scheduler.leave(self.session)

    @property
    def _is_over(self) -> bool:
        """Whether what still arrives is ignored."""
        return self.session.is_superseded or self._has_stepped_down

    @property
    def _has_stepped_down(self) -> bool:
        """Whether the scheduler has stepped down since the welcome; a router without a welcome may stay."""
        return self._promise is not None and self._num_step_downs != self._scheduler.num_step_downs

    # --- in ------------------------------------------------------------------------------------------------

    async def read(self, messages: AsyncIterator[scheduler_pb2.RouterMessage]) -> None:
        """Receives messages until the router closes its side."""
        async for message in messages:
            if self._is_over:
                return
            match message.WhichOneof("message"):
                case "submit":
                    self._submit(message.submit)
                case "cancel":
                    self._cancel(message.cancel)
                case "ack":
                    for seq in self.session.acked(message.ack.message_id):
                        self._scheduler.core.forget(seq)
                    self._wake.set()
                case "hello":
                    raise SessionError("Hello came a second time")
                case None:
                    pass  # from a newer revision

    def _submit(self, message: scheduler_pb2.Submit) -> None:
        token_ids = array("I", message.prompt_token_ids)
        if message.HasField("part"):
            part = message.part
            whole = self._parts.add(message.handle, part.index, part.count, message, message.key, token_ids)
            if whole is None:
                return
            message, token_ids = whole
        self.session.check_new(message.handle)
        now = self._scheduler.now()
        request = wire.request_of(message, token_ids, now)
        log = _log.bind(request_id=request.request_id, index=request.sample_index)
        live = self._scheduler.core.sequences.get(request.key)
        try:
            self._check_may_read(request, live)
            seq = self._scheduler.core.submit(request, array("I", message.output_token_ids), now=now)
        except RefusedError as error:
            log.info("sequence_refused", error=error.message)
            self._refuse(message.handle, error)
            return
        if live is not None and live is not seq:
            self._scheduler.deliver([live])  # its reader, if it has one, learns that it was aborted
        older_reader = self.session.attach(message.handle, seq, len(message.output_token_ids))
        if older_reader is not None:
            self._scheduler.wake_router(older_reader)
        log.info("sequence_submitted", num_prompt_tokens=seq.num_prompt_tokens, max_tokens=request.max_tokens)
        self._wake.set()
        self._scheduler.queue_changed()

    def _check_may_read(self, request: Request, live: Sequence | None) -> None:
        """Raises RefusedError for a new request during shutdown, or for a key that another router is reading.

        A router that reconnects takes over its own streams, and accepted requests are never refused.
        """
        if live is None:
            if self._scheduler.is_leaving:
                raise RefusedError(StatusCode.UNAVAILABLE, "the scheduler is shutting down; try again")
            return
        reader = session_of(live)
        if reader is not None and reader.router_id != self.session.router_id and not request.accepted_before:
            raise RefusedError(
                StatusCode.ALREADY_EXISTS,
                f"request_id {request.request_id!r} is in use at another router; choose another",
            )

    def _refuse(self, handle: int, error: RefusedError) -> None:
        finish = Finish(
            FinishReason.ERROR,
            message=error.message,
            status_code=error.status_code,
            retry_after_seconds=error.retry_after_seconds,
        )
        self.session.refuse(handle, finish)
        self._wake.set()

    def _cancel(self, message: scheduler_pb2.Cancel) -> None:
        """Aborts a sequence, unless another router has taken it over meanwhile."""
        live = self._scheduler.core.sequences.get(message.key)
        reader = session_of(live) if live is not None else None
        if reader is not None and reader.router_id != self.session.router_id:
            return
        for handle in self._parts.give_up(message.key):
            self.session.refuse(handle, Finish(FinishReason.ABORT))
            self._wake.set()
        seq = self._scheduler.core.cancel(
            message.key, wire.cancel_reason(message.reason), self._scheduler.now()
        )
        if seq is None:
            return
        _log.info(
            "sequence_cancelled",
            request_id=seq.request.request_id,
            index=seq.request.sample_index,
            step_id=self._scheduler.last_step_id,
        )
        self._scheduler.deliver([seq])
        self._scheduler.queue_changed()

    # --- out -----------------------------------------------------------------------------------------------

    async def write(self, context: Context, reader: "asyncio.Future[None]", stall_seconds: float) -> None:
        """Sends what is owed until the router closes its side. Raises TimeoutError when it takes nothing."""
        reader.add_done_callback(lambda _: self._wake.set())
        while True:
            self._wake.clear()
            self._check_holds()
            for message in self._status_messages():
                await self._send(context, message, stall_seconds)
            while (output := self._taken()) is not None:
                await self._send(
                    context, wire.output_message(output, self._scheduler.last_step_id), stall_seconds
                )
            if reader.done():
                reader.result()
                return
            async with asyncio.timeout(self._seconds_to_stall(stall_seconds)):
                await self._wake.wait()

    def _check_holds(self) -> None:
        """Raises when nothing more may be sent on this stream."""
        if self.session.is_superseded:
            raise _SupersededError
        if self._has_stepped_down:
            raise _SteppedDownError
        if self._promise is not None and self._promise != self._scheduler.promise:
            raise _OtherPromiseError

    def _taken(self) -> StepOutput | None:
        """What the router is owed, if anything. Checks again after each write, which may have taken long.

        A scheduler that steps down aborts all it had, and the router must not see these ends: its requests
        continue elsewhere.
        """
        self._check_holds()
        return self.session.take(self._scheduler.now())

    def _seconds_to_stall(self, stall_seconds: float) -> float | None:
        oldest = self.session.oldest_unacked()
        return None if oldest is None else max(0.0, oldest + stall_seconds - self._scheduler.now())

    @staticmethod
    async def _send(context: Context, message: scheduler_pb2.SchedulerMessage, stall_seconds: float) -> None:
        async with asyncio.timeout(stall_seconds):
            await context.write(message)

    def _status_messages(self) -> list[scheduler_pb2.SchedulerMessage]:
        scheduler = self._scheduler
        messages = []
        if self._promise is None and scheduler.is_serving and scheduler.promise is not None:
            self._num_step_downs, self._promise = scheduler.num_step_downs, scheduler.promise
            messages.append(wire.welcome_message(self._scheduler_id, scheduler.term, scheduler.promise))
        told = (scheduler.is_serving, scheduler.reason)
        if told != self._told:
            self._told = told
            messages.append(wire.serving_message(*told))
        return messages
