"""What an executor's traces show: a span for each admission, and one for every so many steps.

A listener: the servicer reports that a step's result is in, and that an epoch is over. An admission's span is
a child of the sequence's own span, which the plan that brought it names. A step works for many sequences: its
span is the first of a trace of its own, linked to the admissions that took part in it. A step does not cost
more for having more admissions in it.
"""

from dataclasses import dataclass
from typing import Final

from executor.device import StepTimings
from executor.plan import BatchPlan, StepResult
from rpc.tracing import Span, Tracer

MAX_LINKS: Final = 64  # of a step: more than anybody follows


@dataclass(slots=True)
class _Admission:
    """One that is under way."""

    span: Span
    first_step_id: int


class StepTraces:
    """The spans of one executor."""

    def __init__(self, tracer: Tracer, every: int) -> None:
        """No step is told of when `every` is 0."""
        self._tracer = tracer
        self._every = every
        self._open: dict[int, _Admission] = {}
        self._before_first_token: set[int] = set()

    def step(self, plan: BatchPlan, result: StepResult, timings: StepTimings, now: float) -> None:
        """A step of the present epoch has answered, now."""
        began = now - timings.total_us / 1e6
        for seq_id in plan.released_seq_ids:
            self._end(seq_id, began, plan.step_id, {"chairlift.ended_by": "release"})
        for new in plan.admitted:
            span = self._tracer.begin(
                "compute",
                began,
                {
                    "chairlift.seq_id": new.seq_id,
                    "chairlift.num_known_tokens": len(new.token_ids),
                    "chairlift.num_computed_tokens": new.num_computed_tokens,
                },
                traceparent=new.traceparent,
            )
            self._open[new.seq_id] = _Admission(span, plan.step_id)
            self._before_first_token.add(new.seq_id)
        if self._every and plan.step_id % self._every == 0 and plan.seq_ids:
            self._tell_step(plan, timings, began, now)
        if self._before_first_token:
            self._tell_first_tokens(result, now)
        for finished in result.finished:
            reason = finished.reason.name.lower()
            self._end(finished.seq_id, now, plan.step_id, {"chairlift.finish_reason": reason})
        for error in result.errors:
            self._end(error.seq_id, now, plan.step_id, {}, error=str(error.status_code))

    def epoch_over(self, now: float) -> None:
        """Whatever was under way is so no longer."""
        for seq_id in list(self._open):
            self._end(seq_id, now, 0, {"chairlift.ended_by": "epoch"}, error="epoch_over")

    def _tell_first_tokens(self, result: StepResult, now: float) -> None:
        for seq_id, num_sampled in zip(result.seq_ids, result.num_sampled, strict=True):
            if num_sampled and seq_id in self._before_first_token:
                self._before_first_token.discard(seq_id)
                self._open[seq_id].span.event("first_token", now)

    def _tell_step(self, plan: BatchPlan, timings: StepTimings, began: float, now: float) -> None:
        riders = [self._open[seq_id].span for seq_id in plan.seq_ids if seq_id in self._open]
        span = self._tracer.begin(
            "step",
            began,
            {
                "chairlift.step": plan.step_id,
                "chairlift.num_sequences": len(plan.seq_ids),
                "chairlift.num_tokens": sum(plan.num_tokens),
                "chairlift.idle_seconds": timings.idle_us / 1e6,
            },
            links=[rider.traceparent for rider in riders[:MAX_LINKS]],
        )
        at = began
        for phase in ("inputs", "forward", "sample"):
            seconds = getattr(timings, f"{phase}_us") / 1e6
            span.event(phase, at, {"chairlift.seconds": seconds})
            at += seconds
        span.end(now)

    def _end(
        self, seq_id: int, at: float, step_id: int, attributes: dict[str, str | int], *, error: str = ""
    ) -> None:
        admission = self._open.pop(seq_id, None)
        self._before_first_token.discard(seq_id)
        if admission is None:
            return
        steps: dict[str, str | int] = {"chairlift.first_step": admission.first_step_id}
        if step_id:
            steps["chairlift.last_step"] = step_id
        admission.span.end(at, steps | attributes, error=error)
