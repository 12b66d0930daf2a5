"""Counts how requests ended: each is counted once, when it leaves, by its outcome. Pure.

received = ok + cancelled + refused + deadline + failed + taken_over + those under way
"""

import asyncio
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import grpc

from router.call import failure
from router.request_log import FinishReason, RequestLog
from rpc.errors import RequestError
from rpc.histogram import Histogram

SECONDS_BOUNDS: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 600.0)
TOKENS_BOUNDS: Final = tuple(float(2**power) for power in range(18))


class Outcome(Enum):
    """How a request left."""

    OK = "ok"
    CANCELLED = "cancelled"  # by its client
    REFUSED = "refused"  # never accepted: wrong, or too much
    DEADLINE = "deadline"
    FAILED = "failed"  # accepted, and could not be finished
    TAKEN_OVER = "taken_over"  # another stream goes on with it


_BY_CODE: Final = {
    grpc.StatusCode.DEADLINE_EXCEEDED: Outcome.DEADLINE,
    grpc.StatusCode.CANCELLED: Outcome.CANCELLED,
    grpc.StatusCode.INTERNAL: Outcome.FAILED,
    grpc.StatusCode.ABORTED: Outcome.CANCELLED,
}


@dataclass(slots=True)
class Tally:
    """The requests of one router since it started."""

    num_received: int = 0
    num_by_outcome: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    num_prompt_tokens: int = 0  # of accepted requests, each prompt once
    num_cached_tokens: int = 0  # of them, not computed
    seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS_BOUNDS))  # of those that went well
    prompt_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS_BOUNDS))
    output_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS_BOUNDS))

    def not_begun(self, count: int, error: BaseException, *, is_late: bool) -> None:
        """So many requests ended before there was a log of them."""
        self.num_by_outcome[outcome_of_error(error, is_late=is_late)] += count

    def left(self, log: RequestLog, now: float) -> None:
        """A request whose call is over; its choices have their ends, unless another stream has them."""
        outcome = outcome_of(log)
        self.num_by_outcome[outcome] += 1
        if log.accepted and outcome is not Outcome.TAKEN_OVER:
            self.num_prompt_tokens += len(log.prompt_token_ids)
            self.num_cached_tokens += log.num_cached_tokens or 0
        if outcome is Outcome.OK:
            self.seconds.observe(now - log.received_at)
            self.prompt_tokens.observe(len(log.prompt_token_ids))
            for choice in log.choices:
                self.output_tokens.observe(len(choice.output_token_ids))


def outcome_of_error(error: BaseException, *, is_late: bool) -> Outcome:
    """The outcome of a request that ended before there was a log of it."""
    if isinstance(error, RequestError):
        return _BY_CODE.get(error.code, Outcome.REFUSED)
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return Outcome.DEADLINE if is_late else Outcome.CANCELLED
    return Outcome.FAILED


def outcome_of(log: RequestLog) -> Outcome:
    """The outcome of a request that has left: of several choices, the first that did not go well decides."""
    for choice in log.choices:
        if choice.end is None:
            return Outcome.TAKEN_OVER
        failed = failure(choice.end)
        if failed is None:
            continue
        if choice.end.reason is FinishReason.ERROR and not log.accepted:
            return _BY_CODE.get(failed.code, Outcome.REFUSED)
        return Outcome.FAILED if choice.end.reason is FinishReason.ERROR else _BY_CODE[failed.code]
    return Outcome.OK
