"""Taking requests in, waiting for what becomes of them, letting them go: the same for every door.

A door (gRPC, HTTP) turns what its client sent into `validation.GenerateRequest`s and what comes back into its
own words. Everything between is here, once. Several requests may be one call (a list of prompts): they are
taken in together or not at all. Whatever way a call ends, its schedulers are told (`Intake.call`).

A name (tenant and request id) belongs to one call at a time. A request that comes again under its name gets
what there is: the result while it is kept, the sequence that a dead router has left at the scheduler, else a
new computation with the same seed. A resume may do more: it takes the name over from a call that has it.

It must not know: proto types, JSON, how a client is reached.
"""

import asyncio
import concurrent.futures
import contextlib
import secrets
import time
import uuid
from collections import abc
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import grpc
import structlog

from router import aside, keys, validation
from router.call import Call
from router.chat import ChatError
from router.constraint_checks import ConstraintChecks
from router.kept_results import KeptResult, KeptResults, Name
from router.keys import ANYBODY, Caller
from router.latencies import Latencies
from router.request_log import End, FinishReason, OverrunError, RequestLog, drawn_seed
from router.resume import Resume, ResumeTokens, checked_received
from router.scheduler_client import SchedulerClient
from router.scheduler_pool import SchedulerPool, placing_name
from router.scheduler_session import Welcome
from router.stop_strings import StopStrings
from router.tally import Tally, outcome_of_error
from router.text_stream import TextStream
from router.tokenizer import Tokenizer, TooManyTokensError
from router.tool_calls import TAGS, CallWriting, ToolCallForm, writing_of
from router.traces import CallTrace
from rpc.errors import RequestError, invalid
from rpc.tracing import Tracer

# Texts up to this long are tokenized at once (well under a millisecond); longer ones in a thread.
_INLINE_CHARACTERS: Final = 2048
_INLINE_MESSAGES: Final = 64
_TOKENIZER_THREADS: Final = 2
# A client whose time is up hangs up, and we may learn it before our own clock says so.
_LATE_SECONDS: Final = 0.05

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a router knows of its model without a scheduler."""

    name: str
    tokenizer: Tokenizer
    defaults: validation.Defaults
    tool_call_form: ToolCallForm | None = None
    """How it writes calls of tools; None when they are not to be found."""
    chat_template: str | None = None

    @property
    def call_writing(self) -> CallWriting | None:
        """How it is to write them where it is held to it."""
        return writing_of(self.tool_call_form, self.chat_template)


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a door knows of a call beside what is asked; times are seconds on the monotonic clock.

    `body_digest` is the same for two calls only when they ask the same. `refuse_unknown` raises RequestError
    when the message has parts that the door does not know; it is called once the lengths of its lists have
    been checked.
    """

    received_at: float
    deadline: float | None
    body_digest: bytes
    refuse_unknown: abc.Callable[[], None] = lambda: None
    caller: Caller = ANYBODY
    trace: tuple[str, str] = ("", "")
    """The `traceparent` and `tracestate` that came with it."""


@dataclass(eq=False, slots=True)
class _Holder:
    """A call that has a name; its log and its call come once the request is taken in."""

    log: RequestLog | None = None
    call: Call | None = None


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A request that may be submitted, and where."""

    scheduler: SchedulerClient
    log: RequestLog
    is_resumed: bool


class Intake:
    """The requests under way in this router, and the way in."""

    def __init__(
        self,
        *,
        model: ServedModel,
        schedulers: SchedulerPool,
        tokens: ResumeTokens | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """Without `tokens`, those of this router can be verified by nobody else."""
        self.model = model
        form = model.tool_call_form
        self._tags = frozenset[int]() if form is None else model.tokenizer.special_ids(TAGS[form])
        self.latencies = Latencies()
        self.tally = Tally()
        self._tracer = tracer
        self._schedulers = schedulers
        self._tokens = tokens or ResumeTokens(secrets.token_bytes(32))
        self._holders: dict[Name, _Holder] = {}
        self._kept = KeptResults()
        self._num_calls = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._constraint_checks = ConstraintChecks()
        self._threads = concurrent.futures.ThreadPoolExecutor(_TOKENIZER_THREADS, "tokenizer")

    @property
    def refusal(self) -> str | None:
        """Why no new request can be taken, as a sentence; None when one can."""
        return self._schedulers.refusal

    @property
    def num_live(self) -> int:
        """Requests under way."""
        return len(self._holders)

    def welcome(self) -> Welcome:
        """What a scheduler has told of the model. Raises RequestError, UNAVAILABLE, before any has."""
        return self._schedulers.welcome()

    async def drain(self) -> None:
        """Returns when no request is left."""
        await self._idle.wait()

    async def close(self) -> None:
        """Gives the tokenizer's threads back, and the processes that try constraints."""
        await self._constraint_checks.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- generation ---------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def call(
        self, requests: abc.Sequence[validation.GenerateRequest], arrival: Arrival
    ) -> abc.AsyncIterator[Call]:
        """Takes requests in and, when their client's call is over in whatever way, lets them go.

        A request without an id is given one. Raises RequestError, before any of them is submitted, when one
        is wrong or its id is in use.
        """
        # Until then nothing of this call is counted as left: the outer except counts it as not begun.
        all_submitted = False
        self.tally.num_received += len(requests)
        trace = CallTrace(
            self._tracer,
            requests,
            model=self.model.name,
            received_at=arrival.received_at,
            parent=arrival.trace,
        )
        try:
            tenant, named = arrival.caller.tenant, _named(requests)
            with (
                structlog.contextvars.bound_contextvars(request_id=named[0].request_id),
                self._held([(tenant, asked.request_id) for asked in named if asked.resume is None]),
            ):
                prepared = await self._prepare_all(named, arrival, trace.traceparents)
                call = Call(tuple(one.log for one in prepared))
                try:
                    for one in prepared:
                        self._submit(one, call)
                    all_submitted = True
                    yield call
                finally:
                    self._let_go(call, arrival, trace, all_submitted=all_submitted)
        except BaseException as error:
            if not all_submitted:
                now = time.monotonic()
                is_late = _is_late(arrival, now)
                self.tally.not_begun(len(requests), error, is_late=is_late)
                trace.not_begun(outcome_of_error(error, is_late=is_late), error, now)
            raise

    @contextlib.contextmanager
    def _held(self, names: list[Name]) -> abc.Iterator[None]:
        """Reserves names while a call lasts. Raises RequestError, ALREADY_EXISTS, when one is in use."""
        for name in names:
            if name in self._holders:
                raise _in_use(name)
        holders = {name: _Holder() for name in names}
        self._holders |= holders
        self._num_calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            for name, holder in holders.items():
                if self._holders.get(name) is holder:
                    del self._holders[name]
            self._num_calls -= 1
            if not self._num_calls:
                self._idle.set()

    async def _prepare_all(
        self,
        named: abc.Sequence[validation.GenerateRequest],
        arrival: Arrival,
        traceparents: abc.Sequence[str],
    ) -> list[_Prepared]:
        """Every request of a call, in order. Raises RequestError when one is wrong or they ask too much."""
        prepared: list[_Prepared] = []
        for asked, traceparent in zip(named, traceparents, strict=True):
            if prepared:
                await asyncio.sleep(0)  # there may be a hundred of them
            prepared.append(await self._prepare(asked, arrival, traceparent))
        validation.check_prompt_logprobs(sum(one.log.num_prompt_numbers for one in prepared))
        return prepared

    async def _prepare(
        self, asked: validation.GenerateRequest, arrival: Arrival, traceparent: str
    ) -> _Prepared:
        """A request's log, and where it goes. Raises RequestError when it is not right in every respect."""
        tenant = arrival.caller.tenant
        self._schedulers.check_serving()
        age_seconds = self._age(asked.request_id, asked.resume, arrival) if asked.resume else None
        limits = _limits(self._schedulers.welcome())

        def looked_at() -> validation.CheckedRequest:
            checked = validation.checked(asked, model=self.model.name, limits=limits)
            keys.check_priority(arrival.caller, checked.priority)
            arrival.refuse_unknown()
            return checked

        checked = await aside.run(looked_at, is_long=_is_long(asked.prompt))
        if checked.sampling.constraint is not None:
            await self._constraint_checks.check(checked.sampling.constraint)
        try:
            prompt_token_ids = await self._prompt_token_ids(checked.prompt, limits.max_total_tokens)
        except TooManyTokensError as error:
            validation.check_prompt_length("prompt", error.num_tokens, limits, whole=error.whole)
            raise
        scheduler = self._schedulers.place(placing_name(tenant, tuple(prompt_token_ids)))
        welcome = scheduler.welcome
        assert welcome is not None, "a scheduler that takes requests has been welcomed"
        limits = _limits(welcome)
        valid = validation.fitted(
            checked,
            prompt_token_ids,
            limits=limits,
            defaults=self.model.defaults,
            drawn_seed=drawn_seed(tenant, asked.request_id, arrival.body_digest),
        )
        has_tools = isinstance(checked.prompt, validation.Chat) and checked.prompt.tools
        detokenizer = partial(
            self.model.tokenizer.detokenizer, shown=self._tags if has_tools else frozenset()
        )
        log = RequestLog(
            request_id=asked.request_id,
            tenant=tenant,
            prompt_token_ids=valid.prompt_token_ids,
            sampling=valid.sampling,
            texts=[
                TextStream(detokenizer(), StopStrings(valid.stop, include=valid.include_stop))
                for _ in range(valid.n)
            ],
            eos_token_ids=frozenset(welcome.eos_token_ids),
            priority=valid.priority,
            # No tenant can tell by the time to the first token what another has asked.
            cache_salt=f"{tenant}\0{valid.cache_salt}" if tenant else valid.cache_salt,
            body_digest=arrival.body_digest,
            deadline=arrival.deadline,
            received_at=arrival.received_at,
            latencies=self.latencies,
            resume_token=asked.resume.resume_token if asked.resume else self._token(asked, arrival),
            traceparent=traceparent,
        )
        if asked.resume is not None and age_seconds is not None:
            await self._resume(log, asked.resume, limits.vocab_size)
            log.accepted = True
            log.submitted_at = time.monotonic() - age_seconds  # its place in the queue is as old as it is
        return _Prepared(scheduler, log, asked.resume is not None)

    # --- what comes again ---------------------------------------------------------------------------

    def _token(self, asked: validation.GenerateRequest, arrival: Arrival) -> str:
        return self._tokens.issue(arrival.caller.tenant, asked.request_id, arrival.body_digest, time.time())

    def _age(self, request_id: str, resume: Resume, arrival: Arrival) -> float:
        """Seconds since a request that is resumed was accepted. Raises RequestError when it is not theirs."""
        accepted_at = self._tokens.accepted_at(
            resume.resume_token, arrival.caller.tenant, request_id, arrival.body_digest
        )
        return max(0.0, time.time() - accepted_at)

    async def _resume(self, log: RequestLog, resume: Resume, vocab_size: int) -> None:
        """Begins every choice after what its client has.

        Raises RequestError for what cannot have been received: wrong choices, wrong ids, ids behind an end.
        """

        def run_again() -> None:
            received = checked_received(
                resume,
                num_choices=len(log.choices),
                vocab_size=vocab_size,
                max_tokens=log.choices[0].sampling.max_tokens,
            )
            now = time.monotonic()
            for choice, token_ids in zip(log.choices, received, strict=True):
                try:
                    choice.resume(token_ids, now)
                except OverrunError as error:
                    raise invalid(
                        "resume.received",
                        f"the ids received of choice {choice.index} go on at [{error.position}] behind "
                        "the end of the choice; send what the deltas brought",
                    ) from error

        num_received = sum(len(token_ids) for _, token_ids in resume.received)
        await aside.run(run_again, is_long=num_received > aside.INLINE_TOKENS)

    def _submit(self, prepared: _Prepared, call: Call) -> None:
        """Hands a request to its scheduler, or answers it from a kept result. Raises RequestError.

        When it is resumed and an older call still has its name (that client is gone, and nobody has noticed
        yet), the older call ends ABORTED.
        """
        log, scheduler = prepared.log, prepared.scheduler
        name, now = (log.tenant, log.request_id), time.monotonic()
        if scheduler.refusal is not None:  # before anything is taken from anybody
            raise RequestError(grpc.StatusCode.UNAVAILABLE, scheduler.refusal)
        known = self._kept.find(name, log.body_digest, now)
        if prepared.is_resumed:
            older = self._holders.get(name)
            if older is not None:
                if older.log is None or older.call is None or older.log.body_digest != log.body_digest:
                    raise _in_use(name)
                known = KeptResult.of(older.log)
                self._schedulers.supersede(older.log, scheduler)
                older.call.fail(_taken_over())
            self._holders[name] = _Holder()
        holder = self._holders[name]
        holder.log, holder.call = log, call
        for choice, kept in zip(log.choices, known.choices if known else (), strict=False):
            if kept is not None:
                kept.tell(choice, now)
        self._schedulers.submit(scheduler, log, call.ring)

    def _let_go(self, call: Call, arrival: Arrival, trace: CallTrace, *, all_submitted: bool) -> None:
        """The call is over: each of its requests is released, and counted if the call was taken in."""
        now = time.monotonic()
        reason = FinishReason.DEADLINE if _is_late(arrival, now) else FinishReason.ABORT
        for log in call.logs:
            self._release(log, End(reason), now)
            if all_submitted:
                self.tally.left(log, now)
                trace.left(log, now)

    def _release(self, log: RequestLog, end: End, now: float) -> None:
        """A request of a call that is over: its schedulers are told, its name is free, its result is kept."""
        name = (log.tenant, log.request_id)
        self._schedulers.release(log, end)
        holder = self._holders.get(name)
        if holder is not None and holder.log is log:
            del self._holders[name]
            self._kept.keep(log, now)
        _log_end(log)

    async def _prompt_token_ids(
        self, prompt: str | tuple[int, ...] | validation.Chat, at_most: int
    ) -> abc.Sequence[int]:
        """Ids of a checked prompt. What may take long runs in a thread, and the loop goes on.

        Raises TooManyTokensError when a text has more, and RequestError.
        """
        tokenizer = self.model.tokenizer
        loop = asyncio.get_running_loop()
        match prompt:
            case tuple():
                return prompt
            case str() if len(prompt) <= _INLINE_CHARACTERS:
                return tokenizer.encode(prompt)
            case str():
                encode = partial(tokenizer.encode, prompt, at_most=at_most)
                return await loop.run_in_executor(self._threads, encode)
            case validation.Chat(messages, tools, opened, continued, variables):
                encode_chat = partial(
                    tokenizer.encode_chat, messages, tools, opened, continued, variables, at_most=at_most
                )
                try:
                    return await loop.run_in_executor(self._threads, encode_chat)
                except ChatError as error:
                    raise invalid(error.field, str(error)) from error

    @property
    def defaults(self) -> validation.Defaults:
        """What absent fields mean now. Raises RequestError while that is not known."""
        return self.model.defaults.within(_limits(self.welcome()))

    # --- ids and text -------------------------------------------------------------------------------

    def check_model(self, name: str) -> None:
        """Refuses a model that is not served here. Raises RequestError, NOT_FOUND."""
        validation.check_model(name, self.model.name)

    async def tokenize(
        self,
        prompt: str | validation.Conversation | None,
        refuse_unknown: abc.Callable[[], None] = lambda: None,
    ) -> abc.Sequence[int]:
        """Ids as generation would make them. Raises RequestError."""
        limits = _limits(self.welcome())

        def looked_at() -> str | tuple[int, ...] | validation.Chat:
            checked = validation.checked_prompt(prompt, limits)
            refuse_unknown()
            return checked

        checked = await aside.run(looked_at, is_long=_is_long(prompt))
        try:
            return await self._prompt_token_ids(checked, validation.MAX_TOKENIZED)
        except TooManyTokensError as error:
            raise invalid(
                "prompt",
                f"{validation.length_told(error.num_tokens, whole=error.whole)}; "
                f"at most {validation.MAX_TOKENIZED} are told",
            ) from error

    async def detokenize(self, token_ids: abc.Sequence[int], *, include_special: bool = False) -> str:
        """Text as generation would make it. Raises RequestError, naming the first id that is none."""
        validation.check_num_token_ids("token_ids", len(token_ids))
        vocab_size = self.welcome().vocab_size

        def decode() -> str:
            ids = validation.copied(token_ids)
            validation.check_token_ids("token_ids", ids, vocab_size)
            return self.model.tokenizer.decode(ids, include_special=include_special)

        return await aside.run(decode, is_long=len(token_ids) > aside.INLINE_TOKENS)


def _is_long(prompt: str | abc.Sequence[int] | validation.Conversation | None) -> bool:
    """Whether to look at all parts of a prompt takes milliseconds. Nobody looks into a text here."""
    match prompt:
        case None | str():
            return False
        case validation.Conversation(messages=messages):
            num_calls = sum(len(turn.tool_calls) for turn in messages[:_INLINE_MESSAGES])
            return len(messages) > _INLINE_MESSAGES or num_calls > _INLINE_MESSAGES
        case _:
            return len(prompt) > aside.INLINE_TOKENS


def _limits(welcome: Welcome) -> validation.Limits:
    return validation.Limits(
        max_total_tokens=welcome.max_total_tokens,
        vocab_size=welcome.vocab_size,
        eos_token_ids=frozenset(welcome.eos_token_ids),
        features=welcome.features,
    )


def _is_late(arrival: Arrival, now: float) -> bool:
    return arrival.deadline is not None and now >= arrival.deadline - _LATE_SECONDS


def _named(requests: abc.Sequence[validation.GenerateRequest]) -> list[validation.GenerateRequest]:
    """The requests, each with an id. Raises RequestError for one that cannot be."""
    for request in requests:
        validation.check_request_id(request.request_id)
        if request.resume is not None and not request.request_id:
            raise invalid("request_id", "a resume needs the request_id that Accepted told")
    return [replace(asked, request_id=asked.request_id or uuid.uuid4().hex) for asked in requests]


def _in_use(name: Name) -> RequestError:
    return RequestError(
        grpc.StatusCode.ALREADY_EXISTS,
        f"request_id is {name[1]!r}, and a request of this id is still running",
        field="request_id",
    )


def _taken_over() -> RequestError:
    return RequestError(grpc.StatusCode.ABORTED, "another stream goes on with this request")


def _log_end(log: RequestLog) -> None:
    _log.info(
        "request_ended",
        request_id=log.request_id,
        reasons=[choice.end.reason.name.lower() for choice in log.choices if choice.end is not None],
        num_prompt_tokens=len(log.prompt_token_ids),
        num_output_tokens=sum(len(choice.output_token_ids) for choice in log.choices),
        seconds=round(time.monotonic() - log.received_at, 3),
    )
