"""Taking requests in, waiting for what becomes of them, letting them go: the same for every door.

A door (gRPC, HTTP) turns what its client sent into `validation.GenerateRequest`s and what comes back into its
own words. Everything between is here, once. Several requests may be one call (a list of prompts): they are
taken in together or not at all. Whatever way a call ends, its schedulers are told (`Intake.call`).

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
from typing import Final

import grpc
import structlog

from router import keys, validation
from router.call import Call
from router.chat import ChatError
from router.constraint_checks import ConstraintChecks
from router.keys import ANYBODY, Caller
from router.latencies import Latencies
from router.request_log import End, FinishReason, RequestLog
from router.scheduler_client import SchedulerClient, SchedulerPool
from router.scheduler_session import Welcome
from router.stop_strings import StopStrings
from router.text_stream import TextStream
from router.tokenizer import Tokenizer
from rpc.errors import RequestError, invalid

# Texts up to this long are tokenized at once (well under a millisecond); longer ones in a thread.
_INLINE_CHARACTERS: Final = 2048
_INLINE_TOKENS: Final = 2048
_TOKENIZER_THREADS: Final = 2

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a router knows of its model without a scheduler."""

    name: str
    tokenizer: Tokenizer
    defaults: validation.Defaults


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


class Intake:
    """The requests under way in this router, and the way in."""

    def __init__(self, *, model: ServedModel, schedulers: SchedulerPool) -> None:
        self.model = model
        self.latencies = Latencies()
        self._schedulers = schedulers
        self._live_ids: set[tuple[str, str]] = set()  # tenant and request id
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
        return len(self._live_ids)

    def welcome(self) -> Welcome:
        """What a scheduler has told of the model. Raises RequestError, UNAVAILABLE, before any has."""
        return self._schedulers.welcome()

    async def drain(self) -> None:
        """Returns when no request is left."""
        await self._idle.wait()

    def close(self) -> None:
        """Gives the tokenizer's threads back, and the processes that try constraints."""
        self._constraint_checks.close()
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
        for request in requests:
            validation.check_request_id(request.request_id)
        named = [replace(asked, request_id=asked.request_id or uuid.uuid4().hex) for asked in requests]
        ids = [(arrival.caller.tenant, asked.request_id) for asked in named]
        with structlog.contextvars.bound_contextvars(request_id=ids[0][1]), self._reserved(ids):
            begun = [await self._begun(asked, arrival) for asked in named]
            validation.check_prompt_logprobs(sum(log.num_prompt_numbers for _, log in begun))
            call = Call(tuple(log for _, log in begun))
            try:
                for scheduler, log in begun:
                    scheduler.submit(log, call.ring)
                yield call
            finally:
                late = arrival.deadline is not None and time.monotonic() >= arrival.deadline
                for scheduler, log in begun:
                    scheduler.release(log, End(FinishReason.DEADLINE if late else FinishReason.ABORT))
                    _log_end(log)

    @contextlib.contextmanager
    def _reserved(self, ids: list[tuple[str, str]]) -> abc.Iterator[None]:
        """Keeps ids, each for one request of its tenant. Raises RequestError for one in use."""
        for tenant, request_id in ids:
            if (tenant, request_id) in self._live_ids:
                raise RequestError(
                    grpc.StatusCode.ALREADY_EXISTS,
                    f"request_id is {request_id!r}, and a request of this id is still running",
                    field="request_id",
                )
        self._live_ids.update(ids)
        self._idle.clear()
        try:
            yield
        finally:
            self._live_ids.difference_update(ids)
            if not self._live_ids:
                self._idle.set()

    async def _begun(
        self, asked: validation.GenerateRequest, arrival: Arrival
    ) -> tuple[SchedulerClient, RequestLog]:
        """Where a request goes, and its log. Raises RequestError when it is not right in every respect."""
        scheduler = self._schedulers.place(asked.request_id)
        welcome = scheduler.welcome
        assert welcome is not None, "a scheduler that takes requests has been welcomed"
        limits = _limits(welcome)
        checked = validation.checked(asked, model=self.model.name, limits=limits)
        keys.check_priority(arrival.caller, checked.priority)
        arrival.refuse_unknown()
        if checked.sampling.constraint is not None:
            await self._constraint_checks.check(checked.sampling.constraint)
        valid = validation.fitted(
            checked,
            await self._prompt_token_ids(checked.prompt),
            limits=limits,
            defaults=self.model.defaults,
            drawn_seed=secrets.randbits(64) - (1 << 63),
        )
        tokenizer, tenant = self.model.tokenizer, arrival.caller.tenant
        log = RequestLog(
            request_id=asked.request_id,
            tenant=tenant,
            prompt_token_ids=valid.prompt_token_ids,
            sampling=valid.sampling,
            texts=[
                TextStream(tokenizer.detokenizer(), StopStrings(valid.stop, include=valid.include_stop))
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
        )
        return scheduler, log

    async def _prompt_token_ids(self, prompt: str | tuple[int, ...] | validation.Chat) -> abc.Sequence[int]:
        """Ids of a checked prompt. What may take long runs in a thread, and the loop goes on."""
        tokenizer = self.model.tokenizer
        loop = asyncio.get_running_loop()
        match prompt:
            case tuple():
                return prompt
            case str() if len(prompt) <= _INLINE_CHARACTERS:
                return tokenizer.encode(prompt)
            case str():
                return await loop.run_in_executor(self._threads, tokenizer.encode, prompt)
            case validation.Chat(messages, tools, opened, continued):
                try:
                    return await loop.run_in_executor(
                        self._threads, tokenizer.encode_chat, messages, tools, opened, continued
                    )
                except ChatError as error:
                    raise invalid("chat", str(error)) from error

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
        welcome = self.welcome()
        limits = _limits(welcome)
        checked = validation.checked_prompt(prompt, limits)
        refuse_unknown()
        return await self._prompt_token_ids(checked)

    async def detokenize(self, token_ids: abc.Sequence[int], *, include_special: bool = False) -> str:
        """Text as generation would make it. Raises RequestError, naming the first id that is none."""
        validation.check_token_ids("token_ids", token_ids, self.welcome().vocab_size)

        def decode() -> str:
            return self.model.tokenizer.decode(token_ids, include_special=include_special)

        if len(token_ids) <= _INLINE_TOKENS:
            return decode()
        return await asyncio.get_running_loop().run_in_executor(self._threads, decode)


def _limits(welcome: Welcome) -> validation.Limits:
    return validation.Limits(
        max_total_tokens=welcome.max_total_tokens,
        vocab_size=welcome.vocab_size,
        eos_token_ids=frozenset(welcome.eos_token_ids),
        features=welcome.features,
    )


def _log_end(log: RequestLog) -> None:
    _log.info(
        "request_ended",
        request_id=log.request_id,
        reasons=[choice.end.reason.name.lower() for choice in log.choices if choice.end is not None],
        num_prompt_tokens=len(log.prompt_token_ids),
        num_output_tokens=sum(len(choice.output_token_ids) for choice in log.choices),
        seconds=round(time.monotonic() - log.received_at, 3),
    )
