import itertools
from dataclasses import replace

from executor.device import StepTimings
from executor.plan import BatchPlan, FinishedSequence, NewSequence, SamplingParams, SequenceError, StepResult
from executor.sequences import FinishReason
from executor.traces import MAX_LINKS, StepTraces
from tests.rig import spans
from tests.rig.spans import Recorder, parent_of, told

PARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
TIMINGS = StepTimings(idle_us=500, inputs_us=1_000, forward_us=7_000, sample_us=2_000, total_us=10_000)


def new(seq_id: int, traceparent: str = PARENT) -> NewSequence:
    return NewSequence(
        seq_id, (1, 2, 3), 3, 0, (seq_id,), SamplingParams(max_tokens=8), traceparent=traceparent
    )


def plan(
    step_id: int, *rows: int, admit: tuple[NewSequence, ...] = (), release: tuple[int, ...] = ()
) -> BatchPlan:
    return BatchPlan(
        epoch=1,
        step_id=step_id,
        acked_step_id=step_id - 1,
        released_seq_ids=release,
        admitted=admit,
        seq_ids=rows,
        num_tokens=(1,) * len(rows),
    )


def result(of: BatchPlan, num_sampled: int = 1) -> StepResult:
    counts = (num_sampled,) * len(of.seq_ids)
    return StepResult(1, of.step_id, of.seq_ids, counts, (5,) * sum(counts))


def test_an_admission_has_a_span_from_its_first_step_to_its_end() -> None:
    recorder = Recorder()
    traces = StepTraces(recorder.tracer, 0)
    first = plan(1, 4, admit=(new(4),))
    traces.step(first, result(first, num_sampled=0), TIMINGS, 10.0)
    second = plan(2, 4)
    traces.step(second, result(second), TIMINGS, 11.0)
    last = plan(3, 4)
    ended = (FinishedSequence(4, FinishReason.LENGTH, None),)
    traces.step(last, replace(result(last), finished=ended), TIMINGS, 12.0)
    span = recorder.only
    assert (span.name, parent_of(span)) == ("compute", "b" * 16)
    assert spans.phases(span) == ["first_token"]
    assert told(span, "chairlift.first_step") == 1
    assert told(span, "chairlift.last_step") == 3
    assert told(span, "chairlift.finish_reason") == "length"


def test_released_failed_and_lost_with_the_epoch() -> None:
    recorder = Recorder()
    traces = StepTraces(recorder.tracer, 0)
    first = plan(1, 1, 2, 3, admit=(new(1), new(2), new(3)))
    traces.step(first, result(first), TIMINGS, 10.0)
    second = plan(2, 2, release=(1,))
    errors = (SequenceError(2, "no number", 13),)
    traces.step(second, replace(result(second), errors=errors), TIMINGS, 11.0)
    traces.epoch_over(12.0)
    traces.epoch_over(13.0)
    ended = {told(span, "chairlift.seq_id"): told(span, "error.type") for span in recorder.spans}
    assert ended == {1: None, 2: "13", 3: "epoch_over"}


def test_one_step_of_so_many_is_told_of_and_linked_to_who_rode() -> None:
    recorder = Recorder()
    traces = StepTraces(recorder.tracer, 3)
    riders = tuple(range(1, MAX_LINKS + 11))
    admitting = plan(1, *riders, admit=tuple(map(new, riders)))
    traces.step(admitting, result(admitting), TIMINGS, 10.0)
    for step_id in range(2, 8):
        traces.step(plan(step_id, *riders), result(plan(step_id, *riders)), TIMINGS, 10.0 + step_id)
    traces.step(plan(9), result(plan(9)), TIMINGS, 20.0)  # without rows
    assert [told(span, "chairlift.step") for span in recorder.spans] == [3, 6]
    step = recorder.spans[0]
    assert step.parent is None
    assert len(step.links) == MAX_LINKS
    assert spans.phases(step) == ["inputs", "forward", "sample"]
    assert told(step, "chairlift.num_sequences") == len(riders)
    starts = [event.timestamp for event in step.events]
    assert [after - before for before, after in itertools.pairwise(starts)] == [
        1_000_000,
        7_000_000,
    ]
