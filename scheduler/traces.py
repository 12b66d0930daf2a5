"""Traces sequences: one span each, from its arrival to its end, with an event for each phase.

A listener that the core tells when a sequence arrives and when it ends. All that happened in between is in
its time line, which is kept for `Explain` anyway; so a trace costs nothing while the sequence waits and runs.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from rpc.tracing import Span, Tracer
from scheduler.explain import Entry, Reason
from scheduler.sequence import FinishReason, Sequence

_RUNNING = frozenset({Reason.PREFILL, Reason.DECODE})


@dataclass(frozen=True, slots=True)
class Phase:
    """Something that a trace shows; `start` in seconds since the sequence arrived."""

    name: str
    start: float
    attributes: dict[str, str | int | float]


def phases(entries: Iterable[Entry]) -> list[Phase]:
    """A time line in the terms of a trace.

    These are queued, admitted, prefill, first_token, preempted, resumed and decode. A sequence counts as
    preempted when it goes from a batch back to waiting, for whatever reason, which is given.
    """
    told: list[Phase] = []
    before: Reason | None = None
    has_run = has_decoded = False
    for entry in entries:
        if entry.reason is Reason.PREFILL:
            name = "resumed" if has_run else "admitted"
            told.append(Phase(name, entry.start, {"chairlift.step": entry.step_id}))
            told.append(_stretch("prefill", entry))
            has_run = True
        elif entry.reason is Reason.DECODE:
            told.append(_stretch("decode" if has_decoded else "first_token", entry))
            has_run = has_decoded = True
        else:
            if before in _RUNNING:
                told.append(Phase("preempted", entry.start, {"chairlift.detail": entry.detail}))
            told.append(_stretch("queued", entry))
        before = entry.reason
    return told


def _stretch(name: str, entry: Entry) -> Phase:
    attributes: dict[str, str | int | float] = {
        "chairlift.reason": entry.reason.value,
        "chairlift.seconds": entry.duration,
    }
    if entry.detail:
        attributes["chairlift.detail"] = entry.detail
    return Phase(name, entry.start, attributes)


class SequenceTraces:
    """The spans of live sequences."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._spans: dict[Sequence, Span] = {}

    def arrived(self, seq: Sequence) -> None:
        """Begins its span, under the one that its router named."""
        request = seq.request
        span = self._tracer.begin(
            "schedule",
            request.arrival,
            {
                "gen_ai.response.id": request.request_id,
                "chairlift.choice": request.sample_index,
                "chairlift.tenant": request.tenant,
                "chairlift.priority": request.priority,
                "chairlift.num_prompt_tokens": seq.num_prompt_tokens,
                "chairlift.num_resumed_tokens": seq.num_resumed_tokens,
            },
            traceparent=request.traceparent,
        )
        span.event("accepted", request.arrival)
        seq.traceparent = span.traceparent
        self._spans[seq] = span

    def ended(self, seq: Sequence, now: float) -> None:
        """Adds its phases, and ends its span."""
        span = self._spans.pop(seq, None)
        if span is None or seq.finish is None:
            return
        if span.is_recorded and seq.time_line is not None:
            for phase in phases(seq.time_line.entries):
                span.event(phase.name, seq.request.arrival + phase.start, phase.attributes)
            span.event("finished", now, {"chairlift.finish_reason": seq.finish.reason.name.lower()})
        span.end(
            now,
            {
                "chairlift.finish_reason": seq.finish.reason.name.lower(),
                "chairlift.num_output_tokens": seq.num_output_tokens,
                "chairlift.num_cached_tokens": seq.num_cached_tokens,
                "chairlift.num_preemptions": seq.num_preemptions + seq.num_displacements,
                "chairlift.num_wasted_tokens": seq.num_wasted_tokens,
            },
            error=seq.finish.status_code.name if _is_failure(seq.finish.reason) else "",
        )


def _is_failure(reason: FinishReason) -> bool:
    return reason in {FinishReason.ERROR, FinishReason.DEADLINE}
