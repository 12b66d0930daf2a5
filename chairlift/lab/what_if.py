"""A recorded load under other settings: the arrivals are those of the record, the time of steps is modelled.

Answers are as long as they were, from executors like those that were attached, with step times fitted to the
recorded steps. Requests that were given up or failed leave at the same time as in the record, and those still
running at the end of the record leave then; those that were refused are left out. For all of these, nobody
knows how long their answers would have been. No executor is lost. So the run under the recorded settings is
shown beside the record itself: a difference between these two is the model's error, not a finding. Pure.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from chairlift.lab.fit import Fit, Measured, fit
from chairlift.lab.loop import Arrival, LogicalLoop
from chairlift.lab.records import NEVER, Histogram, quantile
from chairlift.lab.replay import Report, Seen
from chairlift.lab.step_times import Linear
from scheduler.batching import Batching
from scheduler.core import SchedulerCore
from scheduler.policy import Limits
from scheduler.record_events import limits_of
from scheduler.sequence import FinishReason

_CACHE_SECRET = b"what if"
_BY_THEMSELVES = {FinishReason.STOP, FinishReason.LENGTH}
Change = Callable[[Limits], Limits]


@dataclass(frozen=True, slots=True)
class Latencies:
    """What clients got. Times in seconds; NaN where nobody came to that."""

    requests: int
    output_tokens: int
    first_token_p50: float
    first_token_p99: float
    between_tokens_p50: float
    between_tokens_p99: float
    total_mean: float
    in_time: int  # ended by themselves, within their deadline
    preemptions: int
    refused: int


def recorded(report: Report) -> Latencies:
    """What they got when it was recorded."""
    firsts = [seen.first_token - seen.submitted for seen in report.seen if seen.first_token is not None]
    totals = [
        seen.ended - seen.submitted
        for seen in report.seen
        if seen.first_token is not None and seen.ended is not None
    ]
    return _latencies(
        len(report.seen),
        sum(seen.num_output_tokens for seen in report.seen),
        firsts,
        report.gaps,
        totals,
        sum(seen.reason in _BY_THEMSELVES for seen in report.seen),
        report.preemptions,
        report.num_refused,
    )


def modelled(report: Report, step_times: Linear, change: Change) -> Latencies:
    """What they would get under other limits; those recorded when `change` leaves them."""
    # Nothing is guessed in a model: whether guesses are right depends on ids, which a record does not have.
    limits = replace(change(limits_of(report.header)), num_speculative_tokens=0)
    core = SchedulerCore(limits, Batching(report.header["batching"]), cache_secret=_CACHE_SECRET)
    loop = LogicalLoop(core, report.fleet, step_times)
    records = loop.run(_arrival(seen, report) for seen in report.seen)
    for index, seen in enumerate(report.seen):
        if seen.ended is None:
            records.ended[index] = NEVER  # as in the record
    return _latencies(
        len(records),
        loop.totals.num_output_tokens,
        records.first_token_seconds(),
        records.gaps,
        records.total_seconds(),
        sum(records.in_time),
        core.counters.preemptions,
        records.num_refused,
    )


def fitted(report: Report) -> Fit:
    """Step times as the scheduler saw them, the way to the executor and back included. Raises FitError."""
    return fit(
        [
            Measured(cost.num_tokens, cost.num_rows, cost.num_context_tokens, 1e6 * cost.seconds)
            for cost in report.costs
            if cost.seconds > 0
        ]
    )


def _arrival(seen: Seen, report: Report) -> Arrival:
    request, began = seen.request, report.began
    length, gives_up = request.max_tokens, None
    if seen.reason in _BY_THEMSELVES:
        length = max(1, seen.num_output_tokens)
    elif seen.reason is not FinishReason.DEADLINE:
        gives_up = (report.ended if seen.ended is None else seen.ended) - began
    return Arrival(
        seen.submitted - began,
        request.prompt_token_ids + seen.resumed,
        length,
        max(1, request.max_tokens - len(seen.resumed)),
        request.tenant,
        request.priority,
        None if request.deadline is None else request.deadline - began,
        gives_up,
    )


def _latencies(
    requests: int,
    output_tokens: int,
    firsts: list[float],
    gaps: Histogram,
    totals: list[float],
    in_time: int,
    preemptions: int,
    refused: int,
) -> Latencies:
    firsts = sorted(firsts)
    return Latencies(
        requests,
        output_tokens,
        quantile(firsts, 0.5),
        quantile(firsts, 0.99),
        gaps.quantile(0.5),
        gaps.quantile(0.99),
        sum(totals) / len(totals) if totals else float("nan"),
        in_time,
        preemptions,
        refused,
    )
