"""The calls of clients: from a request to its log, from its log to events.

Here a request is taken in, placed, waited for and let go; what it means is decided in `validation`, what
happened to it stands in its log, and the scheduler's side is the client's. Whatever way a call ends, its
scheduler is told (`_live`).
"""

import asyncio
import concurrent.futures
import contextlib
import secrets
import time
import uuid
from collections import abc
from dataclasses import dataclass
from typing import Any, Final

import grpc
import structlog

from protos.v1 import router_pb2, router_pb2_grpc
from router import validation, wire
from router.chat import ChatError
from router.request_log import End, FinishReason, RequestLog
from router.scheduler_client import SchedulerClient, SchedulerPool
from router.stop_strings import StopStrings
from router.text_stream import TextStream
from router.tokenizer import Tokenizer
from rpc.errors import RequestError, abort, invalid

# Texts up to this long are tokenized at once (well under a millisecond); longer ones in a thread.
_INLINE_CHARACTERS: Final = 2048
_INLINE_TOKENS: Final = 2048
_TOKENIZER_THREADS: Final = 2

Context = grpc.aio.ServicerContext[Any, Any]

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a router knows of its model without a scheduler."""

    name: str
    tokenizer: Tokenizer
    defaults: validation.Defaults


class _LiveRequest:
    """One request under way: its log, and a bell that rings when the log has something new."""

    def __init__(self, log: RequestLog) -> None:
        self.log = log
        self.changed = asyncio.Event()
        self._prompt_told = False
        self._ends_told: set[int] = set()

    @property
    def all_told(self) -> bool:
        """Whether the client has been told the end of each choice."""
        return len(self._ends_told) == len(self.log.choices)

    async def until_taken_in(self) -> None:
        """Returns when a scheduler has taken every choice in. Raises RequestError when it refused one."""
        while not self.log.taken_in and not self.log.ended:
            self.raise_failure()
            self.changed.clear()
            await self.changed.wait()
        self.raise_failure()

    def new_events(self) -> list[router_pb2.GenerateEvent]:
        """What has happened since the last call: at most one delta and one end for each choice.

        An end that fails the call is told by the status alone: gRPC clients may drop messages that arrive
        together with an error status.
        """
        events: list[router_pb2.GenerateEvent] = []
        for choice in self.log.choices:
            piece = choice.take_delta()
            if piece is not None:
                events.append(router_pb2.GenerateEvent(delta=wire.delta(piece)))
            if choice.end and choice.index not in self._ends_told and wire.failure(choice.end) is None:
                self._ends_told.add(choice.index)
                events.append(router_pb2.GenerateEvent(finished=wire.finished(self.log, choice)))
        if not self._prompt_told and (events or self.log.num_cached_tokens is not None):
            self._prompt_told = True
            events.insert(0, router_pb2.GenerateEvent(prompt_info=wire.prompt_info(self.log)))
        return events

    def raise_failure(self) -> None:
        """Raises the RequestError with which a choice ended, if one did."""
        for choice in self.log.choices:
            error = wire.failure(choice.end) if choice.end is not None else None
            if error is not None:
                raise error


class RouterServicer(router_pb2_grpc.RouterServicer):
    """The service `chairlift.v1.Router`."""

    def __init__(self, *, model: ServedModel, schedulers: SchedulerPool, max_message_bytes: int) -> None:
        """`max_message_bytes` is told to clients; the server enforces it."""
        self._model = model
        self._schedulers = schedulers
        self._max_message_bytes = max_message_bytes
        self._live_ids: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._threads = concurrent.futures.ThreadPoolExecutor(_TOKENIZER_THREADS, "tokenizer")

    @property
    def num_live(self) -> int:
        """Requests under way."""
        return len(self._live_ids)

    async def drain(self) -> None:
        """Returns when no request is left."""
        await self._idle.wait()

    def close(self) -> None:
        """Gives the tokenizer's threads back."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- generation ---------------------------------------------------------------------------------

    # Not an async generator: the call's own task writes, so that a cancel is met here, at once.
    async def Generate(  # type: ignore[override]  # the stubs know no handler that writes
        self, request: router_pb2.GenerateRequest, context: Context
    ) -> None:
        """Streams events as the log grows. A slow reader gets fewer and larger deltas."""
        async with _answering(context), self._live(request, context) as live:
            await live.until_taken_in()
            await context.write(router_pb2.GenerateEvent(accepted=wire.accepted(live.log)))
            live.log.accepted = True
            while not live.all_told:
                live.changed.clear()
                for event in live.new_events():
                    await context.write(event)
                live.raise_failure()
                if not live.all_told:
                    await live.changed.wait()

    async def Complete(
        self, request: router_pb2.GenerateRequest, context: Context
    ) -> router_pb2.GenerateResponse:
        """The same, once, at the end. A choice that fails fails the call."""
        async with _answering(context), self._live(request, context) as live:
            log = live.log
            await live.until_taken_in()
            log.accepted = True  # this client is told nothing before the end, and must lose nothing either
            while not log.ended:
                live.raise_failure()
                live.changed.clear()
                await live.changed.wait()
            live.raise_failure()
            return wire.response(log)

    @contextlib.asynccontextmanager
    async def _live(
        self, request: router_pb2.GenerateRequest, context: Context
    ) -> abc.AsyncIterator[_LiveRequest]:
        """Takes a request in and, when the call is over in whatever way, lets it go."""
        received_at = time.monotonic()
        remaining_seconds = context.time_remaining()
        deadline = None if remaining_seconds is None else received_at + remaining_seconds
        validation.check_request_id(request.request_id)
        request_id = request.request_id or uuid.uuid4().hex
        with structlog.contextvars.bound_contextvars(request_id=request_id), self._reserved(request_id):
            scheduler = self._schedulers.place(request_id)
            log = await self._begun(request, request_id, scheduler, received_at, deadline)
            live = _LiveRequest(log)
            scheduler.submit(log, live.changed.set)
            try:
                yield live
            finally:
                late = deadline is not None and time.monotonic() >= deadline
                scheduler.release(log, End(FinishReason.DEADLINE if late else FinishReason.ABORT))
                _log_end(log)

    @contextlib.contextmanager
    def _reserved(self, request_id: str) -> abc.Iterator[None]:
        """Keeps the id for one request. Raises RequestError, ALREADY_EXISTS, when it has one."""
        if request_id in self._live_ids:
            raise RequestError(
                grpc.StatusCode.ALREADY_EXISTS,
                f"request_id is {request_id!r}, and a request of this id is still running",
                field="request_id",
            )
        self._live_ids.add(request_id)
        self._idle.clear()
        try:
            yield
        finally:
            self._live_ids.discard(request_id)
            if not self._live_ids:
                self._idle.set()

    async def _begun(
        self,
        request: router_pb2.GenerateRequest,
        request_id: str,
        scheduler: SchedulerClient,
        received_at: float,
        deadline: float | None,
    ) -> RequestLog:
        """The log of a request that is right in every respect. Raises RequestError when it is not."""
        welcome = scheduler.welcome
        assert welcome is not None, "a scheduler that takes requests has been welcomed"
        limits = validation.Limits(welcome.max_total_tokens, welcome.vocab_size)
        checked = validation.checked(wire.generate_request(request), model=self._model.name, limits=limits)
        wire.refuse_unknown_fields(request)
        valid = validation.fitted(
            checked,
            await self._prompt_token_ids(checked.prompt),
            limits=limits,
            defaults=self._model.defaults,
            drawn_seed=secrets.randbits(64) - (1 << 63),
        )
        tokenizer = self._model.tokenizer
        return RequestLog(
            request_id=request_id,
            tenant="",
            prompt_token_ids=valid.prompt_token_ids,
            sampling=valid.sampling,
            texts=[
                TextStream(tokenizer.detokenizer(), StopStrings(valid.stop, include=valid.include_stop))
                for _ in range(valid.n)
            ],
            eos_token_ids=frozenset(welcome.eos_token_ids),
            priority=valid.priority,
            cache_salt=valid.cache_salt,
            body_digest=wire.body_digest(request),
            deadline=deadline,
            received_at=received_at,
        )

    async def _prompt_token_ids(self, prompt: str | tuple[int, ...] | validation.Chat) -> abc.Sequence[int]:
        """Ids of a checked prompt. What may take long runs in a thread, and the loop goes on."""
        tokenizer = self._model.tokenizer
        loop = asyncio.get_running_loop()
        match prompt:
            case tuple():
                return prompt
            case str() if len(prompt) <= _INLINE_CHARACTERS:
                return tokenizer.encode(prompt)
            case str():
                return await loop.run_in_executor(self._threads, tokenizer.encode, prompt)
            case validation.Chat(messages, tools, add_generation_prompt):
                try:
                    return await loop.run_in_executor(
                        self._threads, tokenizer.encode_chat, messages, tools, add_generation_prompt
                    )
                except ChatError as error:
                    raise invalid("chat", str(error)) from error

    # --- ids and text -------------------------------------------------------------------------------

    async def Tokenize(
        self, request: router_pb2.TokenizeRequest, context: Context
    ) -> router_pb2.TokenizeResponse:
        """Ids as Generate would make them."""
        async with _answering(context):
            validation.check_model(request.model, self._model.name)
            welcome = self._schedulers.welcome()
            limits = validation.Limits(welcome.max_total_tokens, welcome.vocab_size)
            prompt = validation.checked_prompt(wire.prompt(request), limits)
            wire.refuse_unknown_fields(request)
            return router_pb2.TokenizeResponse(
                token_ids=await self._prompt_token_ids(prompt), max_total_tokens=welcome.max_total_tokens
            )

    async def Detokenize(
        self, request: router_pb2.DetokenizeRequest, context: Context
    ) -> router_pb2.DetokenizeResponse:
        """Text as Generate would make it."""
        async with _answering(context):
            validation.check_model(request.model, self._model.name)
            validation.check_token_ids("token_ids", request.token_ids, self._schedulers.welcome().vocab_size)
            wire.refuse_unknown_fields(request)
            token_ids = list(request.token_ids)

            def decode() -> str:
                return self._model.tokenizer.decode(token_ids, include_special=request.include_special)

            if len(token_ids) <= _INLINE_TOKENS:
                return router_pb2.DetokenizeResponse(text=decode())
            text = await asyncio.get_running_loop().run_in_executor(self._threads, decode)
            return router_pb2.DetokenizeResponse(text=text)

    async def GetModel(
        self, request: router_pb2.GetModelRequest, context: Context
    ) -> router_pb2.GetModelResponse:
        """The model as the router and its scheduler know it."""
        async with _answering(context):
            validation.check_model(request.model, self._model.name)
            welcome = self._schedulers.welcome()
            return router_pb2.GetModelResponse(
                model=self._model.name,
                max_total_tokens=welcome.max_total_tokens,
                vocab_size=welcome.vocab_size,
                eos_token_ids=welcome.eos_token_ids,
                defaults=wire.defaults(self._model.defaults),
                fingerprints=wire.fingerprints(welcome.fingerprints),
                dtype=welcome.dtype,
                has_chat_template=self._model.tokenizer.has_chat_template,
                max_message_bytes=self._max_message_bytes,
            )

    # --- relays -------------------------------------------------------------------------------------

    async def Explain(
        self, request: router_pb2.ExplainRequest, context: Context
    ) -> router_pb2.ExplainResponse:
        """Asks the scheduler that the request was placed at."""
        async with _answering(context):
            validation.check_request_id(request.request_id)
            return await self._schedulers.place(request.request_id).explain(request)

    async def Watch(  # type: ignore[override]  # the stubs know no handler that writes
        self, request: router_pb2.WatchRequest, context: Context
    ) -> None:
        """Hands on the step summaries of every scheduler that serves, as fast as the watcher takes them."""
        async with _answering(context):
            serving = [client for client in self._schedulers.clients if client.refusal is None]
            if not serving:
                raise RequestError(grpc.StatusCode.UNAVAILABLE, self._schedulers.refusal or "not serving")
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


@contextlib.asynccontextmanager
async def _answering(context: Context) -> abc.AsyncIterator[None]:
    """Turns what a call fails with into its status; a defect becomes INTERNAL and a line in the log."""
    try:
        yield
    except RequestError as error:
        _log.info("request_failed", code=error.code.name, field=error.field)
        await abort(context, error)
    except Exception:  # noqa: BLE001 - the outermost frame of ours; it is logged and answered
        _log.exception("defect")
        await abort(context, RequestError(grpc.StatusCode.INTERNAL, "the router failed; its log says where"))


def _log_end(log: RequestLog) -> None:
    _log.info(
        "request_ended",
        reasons=[choice.end.reason.name.lower() for choice in log.choices if choice.end is not None],
        num_prompt_tokens=len(log.prompt_token_ids),
        num_output_tokens=sum(len(choice.output_token_ids) for choice in log.choices),
        seconds=round(time.monotonic() - log.received_at, 3),
    )
