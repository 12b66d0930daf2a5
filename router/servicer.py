"""The gRPC door: turns calls of `chairlift.v1.Router` into local requests, and their results into messages.

What a request means is decided in `validation`; how it is taken in, waited for and let go, in `intake`.
"""

import asyncio
import contextlib
import hashlib
import time
from collections import abc
from functools import partial
from typing import Any

import grpc
import structlog

from protos.v1 import router_pb2, router_pb2_grpc
from router import aside, keys, validation, wire
from router.call import INLINE_NUMBERS, Call, num_numbers
from router.intake import Arrival, Intake
from router.key_file import Doorkeeper
from router.keys import Caller
from router.scheduler_client import SchedulerClient
from router.scheduler_pool import SchedulerPool
from router.stall import STALL_SECONDS, StalledError, StallGuard
from rpc.errors import RequestError, abort, invalid
from rpc.version import version

Context = grpc.aio.ServicerContext[Any, Any]

_log = structlog.get_logger()


class RouterServicer(router_pb2_grpc.RouterServicer):
    """The service `chairlift.v1.Router`."""

    def __init__(
        self,
        *,
        intake: Intake,
        schedulers: SchedulerPool,
        max_message_bytes: int,
        doorkeeper: Doorkeeper,
        client_stall_seconds: float = STALL_SECONDS,
    ) -> None:
        """`max_message_bytes` is told to clients; the server enforces it."""
        self._client_stall_seconds = client_stall_seconds
        self._intake = intake
        self._doorkeeper = doorkeeper
        self._schedulers = schedulers
        self._max_message_bytes = max_message_bytes

    # --- generation ---------------------------------------------------------------------------------

    # Not an async generator: the call's own task writes, so that a cancel is met here, at once.
    async def Generate(  # type: ignore[override]  # the stubs know no handler that writes
        self, request: router_pb2.GenerateRequest, context: Context
    ) -> None:
        """Streams events as the log grows. A slow reader gets fewer and larger deltas; a stalled one is cut.

        An end that fails the call is told by the status alone: gRPC clients may drop messages that arrive
        together with an error status.
        """
        async with self._answering(context) as caller, self._call(request, context, caller) as call:
            await call.until_taken_in()
            async with StallGuard(self._client_stall_seconds, lambda: call.num_unread_logprobs) as guard:
                first = router_pb2.GenerateEvent(accepted=wire.accepted(call.logs[0]))
                await guard.write(context.write(first))
                while news := await call.news():
                    for item in news:
                        is_long = num_numbers(item) > INLINE_NUMBERS
                        event = await aside.run(partial(wire.event, item), is_long=is_long)
                        await guard.write(context.write(event))

    async def Complete(
        self, request: router_pb2.GenerateRequest, context: Context
    ) -> router_pb2.GenerateResponse:
        """The same, once, at the end. A choice that fails fails the call."""
        async with self._answering(context) as caller:
            if request.HasField("resume"):
                raise invalid(
                    "resume",
                    "resume goes with Generate alone; Complete is asked again under the same request_id",
                )
            async with self._call(request, context, caller) as call:
                await call.until_taken_in()
                await call.until_ended()
                return await aside.run(partial(wire.response, call.logs[0]), is_long=call.is_long)

    @contextlib.asynccontextmanager
    async def _call(
        self, request: router_pb2.GenerateRequest, context: Context, caller: Caller
    ) -> abc.AsyncIterator[Call]:
        """The request as a call of one."""
        received_at = time.monotonic()
        remaining_seconds = context.time_remaining()
        body = wire.body(request)
        digest = await aside.run(
            lambda: hashlib.sha256(body).digest(), is_long=len(body) > aside.INLINE_BYTES
        )
        arrival = Arrival(
            received_at=received_at,
            deadline=None if remaining_seconds is None else received_at + remaining_seconds,
            body_digest=digest,
            refuse_unknown=partial(wire.refuse_unknown_fields, request),
            caller=caller,
            trace=(_header(context, "traceparent"), _header(context, "tracestate")),
        )
        async with self._intake.call([wire.generate_request(request)], arrival) as call:
            yield call

    # --- ids and text -------------------------------------------------------------------------------

    async def Tokenize(
        self, request: router_pb2.TokenizeRequest, context: Context
    ) -> router_pb2.TokenizeResponse:
        """Ids as Generate would make them."""
        async with self._answering(context):
            self._intake.check_model(request.model)
            token_ids = await self._intake.tokenize(
                wire.text_or_chat(request), partial(wire.refuse_unknown_fields, request)
            )
            max_total_tokens = self._intake.welcome().max_total_tokens
            return await aside.run(
                partial(wire.tokenized, token_ids, max_total_tokens),
                is_long=len(token_ids) > aside.INLINE_TOKENS,
            )

    async def Detokenize(
        self, request: router_pb2.DetokenizeRequest, context: Context
    ) -> router_pb2.DetokenizeResponse:
        """Text as Generate would make it."""
        async with self._answering(context):
            self._intake.check_model(request.model)
            wire.refuse_unknown_fields(request)
            text = await self._intake.detokenize(request.token_ids, include_special=request.include_special)
            return router_pb2.DetokenizeResponse(text=text)

    async def GetModel(
        self, request: router_pb2.GetModelRequest, context: Context
    ) -> router_pb2.GetModelResponse:
        """The model as the router and its scheduler know it."""
        async with self._answering(context):
            self._intake.check_model(request.model)
            wire.refuse_unknown_fields(request)
            welcome, model = self._intake.welcome(), self._intake.model
            return router_pb2.GetModelResponse(
                model=model.name,
                max_total_tokens=welcome.max_total_tokens,
                vocab_size=welcome.vocab_size,
                eos_token_ids=welcome.eos_token_ids,
                defaults=wire.defaults(self._intake.defaults),
                fingerprints=wire.fingerprints(welcome.fingerprints),
                dtype=welcome.dtype,
                has_chat_template=model.tokenizer.has_chat_template,
                max_message_bytes=self._max_message_bytes,
            )

    # --- relays -------------------------------------------------------------------------------------

    async def Explain(
        self, request: router_pb2.ExplainRequest, context: Context
    ) -> router_pb2.ExplainResponse:
        """Asks every scheduler until one knows the request, on behalf of its owner or of an admin."""
        async with self._answering(context) as caller:
            validation.check_request_id(request.request_id)
            tenant = keys.asked_of(caller, request.tenant)
            wire.refuse_unknown_fields(request)
            owned = router_pb2.ExplainRequest(request_id=request.request_id, tenant=tenant)
            return await self._schedulers.first_answer(lambda scheduler: scheduler.explain(owned))

    async def Watch(  # type: ignore[override]  # the stubs know no handler that writes
        self, request: router_pb2.WatchRequest, context: Context
    ) -> None:
        """Hands on the step summaries of every scheduler that serves, as fast as the watcher takes them."""
        async with self._answering(context) as caller:
            keys.check_admin(caller, "Watch")
            wire.refuse_unknown_fields(request)
            self._schedulers.check_serving()
            serving = self._schedulers.leaders
            writing = asyncio.Lock()

            async def relay(client: SchedulerClient) -> None:
                async with contextlib.aclosing(client.watch(request)) as summaries:
                    async for summary in summaries:
                        async with writing:
                            await context.write(summary)

            relays = [asyncio.create_task(relay(client)) for client in serving]
            try:
                await asyncio.gather(*relays)
            finally:
                for task in relays:
                    task.cancel()

    async def GetStatus(
        self, request: router_pb2.GetStatusRequest, context: Context
    ) -> router_pb2.GetStatusResponse:
        """Asks every scheduler at once; one that does not answer is told of by what is known here."""
        async with self._answering(context) as caller:
            keys.check_admin(caller, "GetStatus")
            wire.refuse_unknown_fields(request)
            schedulers = await asyncio.gather(*(client.status() for client in self._schedulers.clients))
            return router_pb2.GetStatusResponse(
                version=version(),
                refusal=self._intake.refusal or "",
                num_requests=self._intake.num_live,
                model=self._intake.model.name,
                schedulers=schedulers,
                time_to_first_token=wire.histogram(self._intake.latencies.time_to_first_token),
                inter_token=wire.histogram(self._intake.latencies.inter_token),
            )

    @contextlib.asynccontextmanager
    async def _answering(self, context: Context) -> abc.AsyncIterator[Caller]:
        """Who asks. What the call fails with becomes its status; a defect INTERNAL and a line in the log."""
        try:
            yield self._doorkeeper.caller(_header(context, "authorization"))
        except StalledError as error:
            _log.info("client_stalled", reason=error.message)
            await abort(context, error)
        except RequestError as error:
            _log.info("request_failed", code=error.code.name, field=error.field)
            await abort(context, error)
        except Exception:  # noqa: BLE001 - the outermost frame of ours; it is logged and answered
            _log.exception("defect")
            await abort(
                context, RequestError(grpc.StatusCode.INTERNAL, "the router failed; its log says where")
            )


def header(metadata: abc.Iterable[tuple[str, str | bytes]], wanted: str) -> str:
    """The header of that name; empty when there is none."""
    for name, value in metadata:
        if name == wanted:
            return value if isinstance(value, str) else value.decode(errors="replace")
    return ""


def _header(context: Context, wanted: str) -> str:
    return header(context.invocation_metadata() or (), wanted)
