"""Outcomes: one for each request, and together they are all that came in."""

import asyncio

import grpc
import pytest

from router.request_log import End, FinishReason
from router.tally import Outcome, Tally, outcome_of
from rpc.errors import RequestError, invalid
from tests.router.test_request_log import new_log

REFUSED = int(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
INTERNAL = int(grpc.StatusCode.INTERNAL.value[0])


@pytest.mark.parametrize(
    ("end", "accepted", "outcome"),
    [
        (End(FinishReason.STOP), True, Outcome.OK),
        (End(FinishReason.LENGTH), True, Outcome.OK),
        (End(FinishReason.ABORT), True, Outcome.CANCELLED),
        (End(FinishReason.DEADLINE), True, Outcome.DEADLINE),
        (End(FinishReason.DEADLINE), False, Outcome.DEADLINE),
        (End(FinishReason.ERROR, status_code=INTERNAL), True, Outcome.FAILED),
        (End(FinishReason.ERROR, status_code=REFUSED), True, Outcome.FAILED),
        (End(FinishReason.ERROR, status_code=REFUSED), False, Outcome.REFUSED),
    ],
)
def test_b110_an_end_has_one_outcome(end: End, *, accepted: bool, outcome: Outcome) -> None:
    log = new_log(n=2)
    log.accepted = accepted
    log.choices[0].finish(End(FinishReason.STOP), 11.0)
    log.choices[1].finish(end, 11.0)
    assert outcome_of(log) is outcome


def test_a_request_that_another_stream_goes_on_with_is_no_failure() -> None:
    assert outcome_of(new_log()) is Outcome.TAKEN_OVER


@pytest.mark.parametrize(
    ("error", "is_late", "outcome"),
    [
        (invalid("stop", "it is wrong"), False, Outcome.REFUSED),
        (RequestError(grpc.StatusCode.UNAVAILABLE, "no"), False, Outcome.REFUSED),
        (RequestError(grpc.StatusCode.DEADLINE_EXCEEDED, "late"), False, Outcome.DEADLINE),
        (asyncio.CancelledError(), False, Outcome.CANCELLED),
        (asyncio.CancelledError(), True, Outcome.DEADLINE),
        (ZeroDivisionError(), False, Outcome.FAILED),
    ],
)
def test_what_was_never_begun_is_counted_too(
    error: BaseException, *, is_late: bool, outcome: Outcome
) -> None:
    tally = Tally()
    tally.not_begun(3, error, is_late=is_late)
    assert tally.num_by_outcome[outcome] == 3
    assert sum(tally.num_by_outcome.values()) == 3


def test_prompts_of_refused_requests_are_no_tokens() -> None:
    tally = Tally()
    log = new_log()
    log.choices[0].finish(End(FinishReason.ERROR, status_code=REFUSED), 11.0)
    tally.left(log, 11.0)
    assert (tally.num_prompt_tokens, sum(tally.seconds.counts)) == (0, 0)
