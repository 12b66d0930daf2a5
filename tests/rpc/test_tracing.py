import logging
import subprocess
import sys
import time
from pathlib import Path

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc import tracing
from rpc.errors import StartError
from tests.rig.collector import Collector
from tests.rig.spans import Recorder, parent_of, phases, told
from tests.rpc.greeter import GreeterSettings

PARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


def settings(traces: str = "") -> GreeterSettings:
    return GreeterSettings(listen="127.0.0.1:0", traces=traces)


def test_a_span_has_the_times_and_words_it_was_told() -> None:
    recorder = Recorder()
    now = time.monotonic()
    span = recorder.tracer.begin("ride", now - 3, {"seats": 2}, traceparent=PARENT, tracestate="lift=1")
    span.event("half way", now - 2, {"height": 1.5})
    span.end(now - 1, {"is_over": True}, error="WIND")
    done = recorder.only
    assert done.start_time is not None
    assert done.end_time is not None
    assert done.end_time - done.start_time == pytest.approx(2e9, abs=1e6)
    assert done.events[0].timestamp - done.start_time == pytest.approx(1e9, abs=1e6)
    assert abs(time.time_ns() - done.end_time - 1e9) < 1e9  # the clock on the wall
    assert parent_of(done) == "b" * 16
    assert (told(done, "seats"), told(done, "is_over"), told(done, "error.type")) == (2, True, "WIND")
    assert not done.status.is_ok
    assert phases(done) == ["half way"]


def test_what_names_a_span_makes_others_its_children() -> None:
    recorder = Recorder()
    first = recorder.tracer.begin("first", 1.0, {})
    second = recorder.tracer.begin("second", 1.0, {}, traceparent=first.traceparent)
    linked = recorder.tracer.begin("linked", 1.0, {}, links=[first.traceparent, second.traceparent])
    for span in (first, second, linked):
        span.end(2.0)
    one, two, three = recorder.spans
    assert parent_of(one) == parent_of(three) == ""
    assert parent_of(two) == first.traceparent.split("-")[2]
    assert [f"{link.context.span_id:016x}" for link in three.links] == [
        first.traceparent.split("-")[2],
        second.traceparent.split("-")[2],
    ]


def test_who_was_not_sampled_has_children_that_are_not_either() -> None:
    recorder = Recorder(is_on=False)
    span = recorder.tracer.begin("ride", 1.0, {})
    assert not span.is_recorded
    child = recorder.tracer.begin("seat", 1.0, {}, traceparent=span.traceparent)
    child.end(2.0)
    span.end(2.0)
    assert recorder.spans == []


@hypothesis.settings(deadline=None)
@given(st.text(max_size=80))
def test_whatever_is_no_traceparent_begins_a_trace_of_its_own(text: str) -> None:
    recorder = Recorder()
    recorder.tracer.begin("ride", 1.0, {}, traceparent=text, tracestate=text).end(2.0)
    assert recorder.only.parent is None


def test_off_there_is_no_tracer() -> None:
    with tracing.opened(settings(), "greeter") as tracer:
        assert tracer is None


@pytest.mark.parametrize("address", ["nowhere", "https://", "http://host:1/v1/traces", "host:99999"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(StartError, match=r"^--traces is "), tracing.opened(settings(address), "greeter"):
        pass


def test_libraries_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with (
        pytest.raises(StartError, match=r"pip install 'chairlift\[tracing\]'"),
        tracing.opened(settings("127.0.0.1:4317"), "greeter"),
    ):
        pass


def test_what_was_recorded_is_sent_at_the_end_with_the_operators_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "valley")
    collector = Collector(tmp_path)
    try:
        with tracing.opened(settings(collector.address), "greeter") as tracer:
            assert tracer is not None
            tracer.begin("ride", time.monotonic(), {}).end(time.monotonic())
        (span,) = collector.wait_for(lambda _: True)
        assert (span.name, span.service) == ("ride", "valley")
    finally:
        collector.close()


def test_more_spans_than_a_dead_collector_takes_are_dropped_and_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    monkeypatch.setattr(tracing, "_FAREWELL_SECONDS", 0.2)
    with (
        caplog.at_level(logging.INFO),
        tracing.opened(settings(f"unix:{tmp_path}/nobody.sock"), "greeter") as tracer,
    ):
        assert tracer is not None
        for _ in range(1000):
            tracer.begin("ride", 1.0, {}).end(2.0)
    lines = [record for record in caplog.records if "traces_lost" in record.getMessage()]
    assert len(lines) <= 1
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


def test_nothing_of_it_is_imported_while_it_is_off() -> None:
    program = (
        "import sys, router.__main__, scheduler.__main__, executor.__main__, executor.servicer\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
