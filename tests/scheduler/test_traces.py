from rpc.tracing import Tracer
from scheduler.explain import Entry, Reason
from scheduler.policy import Limits
from scheduler.sequence import FinishReason
from scheduler.traces import SequenceTraces, phases
from tests.rig import spans
from tests.rig.spans import Recorder, parent_of, told
from tests.scheduler.harness import Harness

PARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


def traced(tracer: Tracer, limits: Limits | None = None, **capacities: int) -> Harness:
    harness = Harness(limits, **capacities)
    harness.core.witness = SequenceTraces(tracer)
    return harness


def test_a_time_line_in_the_words_of_a_trace() -> None:
    told = phases(
        [
            Entry(0.0, 1.0, Reason.QUEUED_FOR_SEAT, 0, ""),
            Entry(1.0, 0.5, Reason.QUEUED_FOR_BLOCKS, 0, ""),
            Entry(1.5, 0.5, Reason.PREFILL, 7, "9 tokens, 0 cached"),
            Entry(2.0, 1.0, Reason.DECODE, 8, ""),
            Entry(3.0, 1.0, Reason.QUEUED_FOR_BLOCKS, 0, "blocks ran out"),
            Entry(4.0, 1.0, Reason.PREFILL, 11, "12 tokens, 8 cached"),
            Entry(5.0, 1.0, Reason.DECODE, 12, ""),
        ]
    )
    assert [(phase.name, phase.start) for phase in told] == [
        ("queued", 0.0),
        ("queued", 1.0),
        ("admitted", 1.5),
        ("prefill", 1.5),
        ("first_token", 2.0),
        ("preempted", 3.0),
        ("queued", 3.0),
        ("resumed", 4.0),
        ("prefill", 4.0),
        ("decode", 5.0),
    ]
    assert told[5].attributes == {"chairlift.detail": "blocks ran out"}
    assert told[1].attributes["chairlift.reason"] == "queued_for_blocks"
    assert told[2].attributes == {"chairlift.step": 7}


def test_a_sequence_has_one_span_under_its_routers_and_tells_executors_its_own() -> None:
    recorder = Recorder()
    harness = traced(recorder.tracer)
    harness.submit("a", [1, 2, 3], 4, traceparent=PARENT)
    plan = harness.plan()
    assert plan is not None
    (admitted,) = plan.admitted
    harness.run_to_end()
    span = recorder.only
    assert parent_of(span) == "b" * 16
    assert span.context is not None
    assert admitted.traceparent == f"00-{'a' * 32}-{span.context.span_id:016x}-01"
    assert (told(span, "chairlift.finish_reason"), told(span, "chairlift.num_output_tokens")) == ("length", 4)
    assert spans.phases(span)[-1] == "finished"


def test_without_a_tracer_executors_are_told_what_the_router_told() -> None:
    harness = Harness()
    harness.submit("a", [1, 2, 3], 4, traceparent=PARENT)
    plan = harness.plan()
    assert plan is not None
    assert plan.admitted[0].traceparent == PARENT


def test_every_way_to_end_ends_the_span() -> None:
    recorder = Recorder()
    harness = traced(recorder.tracer, max_num_seqs=1)
    harness.submit("runs", [1, 2, 3], 40)
    harness.step()
    harness.submit("cancelled", [4, 5], 4)
    harness.core.cancel(harness.sequences["cancelled"].request.key, FinishReason.ABORT, harness.now)
    harness.submit("late", [6, 7], 4, deadline=harness.now + 1.0)
    harness.now += 2.0
    harness.core.expire(harness.now)
    harness.core.cancel(harness.sequences["runs"].request.key, FinishReason.STOP, harness.now)
    ended = {
        told(span, "gen_ai.response.id"): (told(span, "chairlift.finish_reason"), told(span, "error.type"))
        for span in recorder.spans
    }
    assert ended == {
        "cancelled": ("abort", None),
        "late": ("deadline", "DEADLINE_EXCEEDED"),
        "runs": ("stop", None),
    }
    witness = harness.core.witness
    assert isinstance(witness, SequenceTraces)
    assert not witness._spans
