import asyncio

import grpc
import pytest

from router.request_log import End, FinishReason
from router.tally import Outcome
from router.traces import CallTrace
from router.validation import Conversation, GenerateRequest
from rpc.errors import RequestError, invalid
from tests.rig import spans
from tests.rig.spans import Recorder, parent_of, told
from tests.router.test_request_log import new_log

PARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
INTERNAL = int(grpc.StatusCode.INTERNAL.value[0])


def call(recorder: Recorder, *requests: GenerateRequest) -> CallTrace:
    return CallTrace(recorder.tracer, requests, model="m", received_at=10.0, parent=(PARENT, "vendor=1"))


def test_each_request_of_a_call_has_a_span_in_the_words_of_the_conventions() -> None:
    recorder = Recorder()
    chat = GenerateRequest(prompt=Conversation([], [], add_generation_prompt=True))
    trace = call(recorder, chat, GenerateRequest(prompt="secret"))
    for traceparent in trace.traceparents:
        log = new_log()
        log.traceparent, log.submitted_at = traceparent, 10.5
        log.choices[0].append([65, 66], (), 11.0)
        log.choices[0].finish(End(FinishReason.LENGTH), 12.0)
        trace.left(log, 12.5)
    assert [span.name for span in recorder.spans] == ["chat m", "text_completion m"]
    for span, traceparent in zip(recorder.spans, trace.traceparents, strict=True):
        assert parent_of(span) == "b" * 16
        assert span.context is not None
        assert f"{span.context.span_id:016x}" in traceparent
        assert spans.phases(span) == ["submitted", "first_token", "finished"]
        assert told(span, "gen_ai.usage.output_tokens") == 2
        assert told(span, "gen_ai.response.finish_reasons") == ("length",)
        assert told(span, "gen_ai.response.time_to_first_chunk") == pytest.approx(1.0)
        assert told(span, "chairlift.outcome") == "ok"
        assert span.status.is_unset
        assert "secret" not in span.to_json()


@pytest.mark.parametrize(
    ("error", "outcome", "why"),
    [
        (invalid("stop", "it is 'my secret'"), Outcome.REFUSED, "INVALID_ARGUMENT"),
        (RequestError(grpc.StatusCode.UNAVAILABLE, "no"), Outcome.REFUSED, "UNAVAILABLE"),
        (asyncio.CancelledError(), Outcome.CANCELLED, None),
        (ZeroDivisionError(), Outcome.FAILED, "failed"),
    ],
)
def test_what_was_never_begun_ends_with_the_reason_and_not_its_sentence(
    error: BaseException, outcome: Outcome, why: str | None
) -> None:
    recorder = Recorder()
    call(recorder, GenerateRequest()).not_begun(outcome, error, 11.0)
    assert told(recorder.only, "error.type") == why
    assert told(recorder.only, "chairlift.outcome") == outcome.value
    assert "my secret" not in recorder.only.to_json()


def test_a_failure_is_an_error_by_its_status() -> None:
    recorder = Recorder()
    trace = call(recorder, GenerateRequest())
    log = new_log()
    log.traceparent, log.accepted = trace.traceparents[0], True
    log.choices[0].finish(End(FinishReason.ERROR, message="of a prompt", status_code=INTERNAL), 11.0)
    trace.left(log, 12.0)
    assert told(recorder.only, "error.type") == "INTERNAL"
    assert "of a prompt" not in recorder.only.to_json()


def test_without_a_tracer_nothing_is_told() -> None:
    trace = CallTrace(None, [GenerateRequest()] * 2, model="m", received_at=1.0, parent=(PARENT, ""))
    assert trace.traceparents == ["", ""]
    trace.left(new_log(), 2.0)
    trace.not_begun(Outcome.FAILED, ZeroDivisionError(), 2.0)
