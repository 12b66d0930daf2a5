"""The router's spans: one for each request, from its arrival to its end.

Its words are those of OpenTelemetry's conventions for generative models (`gen_ai.*`), and our own
(`chairlift.*`) where they have none.

A listener: the intake says that requests have arrived, that one was refused, that one has left; everything
else stands in the request's log by then. No prompt, answer, stop string or error sentence is told.
"""

from collections import abc
from typing import Any

from router.call import failure
from router.request_log import ChoiceLog, RequestLog
from router.tally import Outcome, outcome_of
from router.validation import Conversation, GenerateRequest
from rpc.errors import RequestError
from rpc.tracing import Span, Tracer

# How a request can leave without anything being wrong.
_WELL = frozenset({Outcome.OK, Outcome.CANCELLED, Outcome.TAKEN_OVER})


class CallTrace:
    """The spans of one client's call, one for each of its requests; none without a tracer."""

    def __init__(
        self,
        tracer: Tracer | None,
        requests: abc.Sequence[GenerateRequest],
        *,
        model: str,
        received_at: float,
        parent: tuple[str, str],
    ) -> None:
        """They have arrived. `parent`: the `traceparent` and `tracestate` that the client sent, or ""."""
        self.traceparents = [""] * len(requests)
        """What names each request's span to its scheduler."""
        self._spans: dict[str, Span] = {}
        if tracer is None:
            return
        for position, asked in enumerate(requests):
            operation = "chat" if isinstance(asked.prompt, Conversation) else "text_completion"
            span = tracer.begin(
                f"{operation} {model}",
                received_at,
                {
                    "gen_ai.operation.name": operation,
                    "gen_ai.provider.name": "chairlift",
                    "gen_ai.request.model": model,
                },
                traceparent=parent[0],
                tracestate=parent[1],
            )
            self.traceparents[position] = span.traceparent
            self._spans[span.traceparent] = span

    def not_begun(self, outcome: Outcome, error: BaseException, now: float) -> None:
        """The call ended before any of its requests was begun."""
        told, why = {"chairlift.outcome": outcome.value}, outcome.value
        if isinstance(error, RequestError):
            told["chairlift.field"], why = error.field or "", error.code.name
        for span in self._spans.values():
            span.end(now, told, error="" if outcome in _WELL else why)

    def left(self, log: RequestLog, now: float) -> None:
        """A request's call is over."""
        span = self._spans.get(log.traceparent)
        if span is None:
            return
        outcome = outcome_of(log)
        if span.is_recorded:
            if log.submitted_at is not None:
                span.event("submitted", log.submitted_at)
            for choice in log.choices:
                _tell_choice(span, choice)
        span.end(now, _attributes(log, outcome), error="" if outcome in _WELL else _error(log, outcome))


def _tell_choice(span: Span, choice: ChoiceLog) -> None:
    which: dict[str, str | int] = {"chairlift.choice": choice.index}
    if choice.first_token_at is not None:
        span.event("first_token", choice.first_token_at, which)
    if choice.end is not None and choice.ended_at is not None:
        told = {**which, "chairlift.finish_reason": choice.end.reason.name.lower()}
        span.event("finished", choice.ended_at, told)


def _attributes(log: RequestLog, outcome: Outcome) -> dict[str, Any]:
    sampling = log.choices[0].sampling
    told: dict[str, Any] = {
        "gen_ai.response.id": log.request_id,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.choice.count": len(log.choices),
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.response.finish_reasons": tuple(
            choice.end.reason.name.lower() for choice in log.choices if choice.end is not None
        ),
        "gen_ai.usage.input_tokens": len(log.prompt_token_ids),
        "gen_ai.usage.output_tokens": sum(len(choice.output_token_ids) for choice in log.choices),
        "gen_ai.usage.cache_read.input_tokens": log.num_cached_tokens or 0,
        "chairlift.outcome": outcome.value,
        "chairlift.priority": log.priority,
        "chairlift.tenant": log.tenant,
    }
    first_tokens = [choice.first_token_at for choice in log.choices if choice.first_token_at is not None]
    if first_tokens:
        told["gen_ai.response.time_to_first_chunk"] = min(first_tokens) - log.received_at
    return told


def _error(log: RequestLog, outcome: Outcome) -> str:
    """A word of few: the status of the first choice that failed."""
    failures = (failure(choice.end) for choice in log.choices if choice.end is not None)
    return next((failed.code.name for failed in failures if failed is not None), outcome.value)
