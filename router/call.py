"""One client's call: the logs of its requests, and their news since the client last took any.

The same for every door; each puts the news into its own words. It must not know proto types or JSON.
"""

import asyncio
from collections import abc
from dataclasses import dataclass
from typing import Final, NamedTuple

import grpc

from router import aside
from router.request_log import ChoiceLog, Delta, End, FinishReason, RequestLog
from rpc.errors import RequestError, invalid

# Log-probabilities up to so many numbers become messages on the event loop (a millisecond or two).
INLINE_NUMBERS: Final = 1024
# A whole answer with more is given up: a client that reads as they come keeps them from piling up.
MAX_WHOLE_NUMBERS: Final = 524_288
_STATUS_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True, slots=True)
class PromptSeen:
    """A scheduler has begun with this request: its log tells what the prompt came to."""

    log: RequestLog


class Grown(NamedTuple):
    """More of one choice."""

    log: RequestLog
    delta: Delta


@dataclass(frozen=True, slots=True)
class Ended:
    """One choice has come to a proper end."""

    log: RequestLog
    choice: ChoiceLog


News = PromptSeen | Grown | Ended


def num_numbers(item: News) -> int:
    """Log-probabilities that it tells: one a token, and its alternatives."""
    match item:
        case Grown(_, Delta(logprobs=entries)) if entries:
            return len(entries) * (1 + len(entries[0].top_logprobs))
        case PromptSeen(log):
            return log.num_prompt_numbers
    return 0


class Call:
    """What one client waits for: the logs of its requests, in its order, and a bell for all of them."""

    def __init__(self, logs: tuple[RequestLog, ...]) -> None:
        self.logs = logs
        self._bell = asyncio.Event()
        self._prompts_untold = set(logs)
        self._ends_untold = {choice for log in logs for choice in log.choices}
        self._failure: RequestError | None = None

    @property
    def num_unread_logprobs(self) -> int:
        """Log-probabilities that wait for the client, of the choice with the most."""
        return max(choice.num_unread_logprobs for log in self.logs for choice in log.choices)

    @property
    def is_long(self) -> bool:
        """Whether the whole answer, of which nothing was told yet, is so long that a thread converts it."""
        num_tokens = sum(choice.num_unread for log in self.logs for choice in log.choices)
        num_numbers = sum(log.num_prompt_numbers + log.num_unread_numbers for log in self.logs)
        return num_tokens > aside.INLINE_TOKENS or num_numbers > INLINE_NUMBERS

    def fail(self, failure: RequestError) -> None:
        """Nothing more will come: whoever waits gets this failure."""
        self._failure = failure
        self.ring()

    def ring(self) -> None:
        """Something new is in a log."""
        self._bell.set()

    async def until_taken_in(self) -> None:
        """Returns when schedulers have taken every choice in. Raises RequestError when one was refused."""
        await self._until(lambda: all(log.taken_in or log.ended for log in self.logs))
        for log in self.logs:
            log.accepted = True

    async def until_ended(self) -> None:
        """Returns when every choice has ended.

        Raises RequestError as soon as one has failed, and when they have more log-probabilities than are kept
        for a whole answer.
        """

        def ended() -> bool:
            if sum(log.num_unread_numbers for log in self.logs) > MAX_WHOLE_NUMBERS:
                raise invalid(
                    "sampling.logprobs",
                    f"sampling.logprobs asks for more than the {MAX_WHOLE_NUMBERS} numbers that a whole "
                    "answer may have: output tokens x (1 + alternatives); ask for fewer, or for a stream",
                )
            return all(log.ended for log in self.logs)

        await self._until(ended)

    async def news(self) -> list[News]:
        """What has happened since the last call, once something has; empty when all has been told.

        At most one delta and one end for each choice, however long nobody asked. Raises RequestError when a
        choice has failed, once everything that came before has been returned; a failed end is never in the
        list.
        """
        if self._failure is not None:
            raise self._failure
        while True:
            self._bell.clear()
            self._failure = self._first_failure()
            news = [item for log in self.logs for item in self._news_of(log)]
            if news or not self._ends_untold:
                return news
            if self._failure is not None:
                raise self._failure
            await self._bell.wait()
            if self._failure is not None:
                raise self._failure

    def _news_of(self, log: RequestLog) -> list[News]:
        if log.lacks_prompt_logprobs and log.choices[0].end is None:
            return []  # they are part of what is told first
        news: list[News] = []
        for choice in log.choices:
            delta = choice.take_delta()
            if delta is not None:
                news.append(Grown(log, delta))
            if choice.end and choice in self._ends_untold and failure(choice.end) is None:
                self._ends_untold.discard(choice)
                news.append(Ended(log, choice))
        if log in self._prompts_untold and (news or log.num_cached_tokens is not None):
            self._prompts_untold.discard(log)
            news.insert(0, PromptSeen(log))
        return news

    async def _until(self, reached: abc.Callable[[], bool]) -> None:
        while True:
            self._bell.clear()
            if (failed := self._failure or self._first_failure()) is not None:
                raise failed
            if reached():
                return
            await self._bell.wait()

    def _first_failure(self) -> RequestError | None:
        for log in self.logs:
            for choice in log.choices:
                if choice.end is not None and (failed := failure(choice.end)) is not None:
                    return failed
        return None


def failure(end: End) -> RequestError | None:
    """The status with which a choice's end fails its call; None when it is a proper end."""
    match end.reason:
        case FinishReason.STOP | FinishReason.LENGTH:
            return None
        case FinishReason.DEADLINE:
            code, otherwise = grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline of the call passed"
        case FinishReason.ABORT:
            code, otherwise = grpc.StatusCode.ABORTED, "the server gave the request up"
        case FinishReason.ERROR:
            code, otherwise = grpc.StatusCode.INTERNAL, "the request could not be computed"
    code = _STATUS_CODES.get(end.status_code, code) if end.status_code else code
    retry_after_seconds = end.retry_after_ms / 1000 if end.retry_after_ms else None
    return RequestError(code, end.message or otherwise, retry_after_seconds=retry_after_seconds)
