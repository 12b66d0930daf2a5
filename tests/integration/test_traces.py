"""Traces of a whole server: three real processes, and a collector that sees what a request went through."""

import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx2
import pytest

from tests.integration.prompts import sized
from tests.rig import cluster
from tests.rig.cluster import Cluster
from tests.rig.collector import Collector, Span
from tests.rig.scripted_executor import Script
from tests.rig.service_process import ServiceProcess

NUM_STEPS = 4  # every so many steps have a span


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    one = Collector(tmp_path_factory.mktemp("otlp"))
    yield one
    one.close()


@pytest.fixture(scope="module")
def running(tiny_model_folder: Path, collector: Collector) -> Iterator[Cluster]:
    traced = ("--traces", collector.address)
    with pytest.MonkeyPatch.context() as patch, cluster.assembling(tiny_model_folder) as one:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        patch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        one.start_executor(*traced, "--trace-steps", str(NUM_STEPS), "--num-blocks", "64")
        one.start_scheduler(*traced)
        one.start_router(*traced, "--http", f"unix:{one.folder}/http.sock")
        one.wait()
        yield one


def fresh_trace(flags: str = "01") -> tuple[str, str, str]:
    """Ids of a trace and of its client's span, and the header that tells them."""
    trace, span = secrets.token_hex(16), secrets.token_hex(8)
    return trace, span, f"00-{trace}-{span}-{flags}"


def whole(collector: Collector, trace: str) -> dict[str, Span]:
    """The spans of a trace of one request with one choice, by service."""
    spans = collector.wait_for(lambda span: span.trace == trace, 3)
    assert len(spans) == 3
    return {span.service: span for span in spans}


def complete(running: Cluster, *headers: tuple[str, str], max_tokens: int = 12, salt: int = 0) -> None:
    running.router.Complete(sized(20, max_tokens, salt=salt), timeout=30, metadata=headers)


def test_one_trace_goes_through_all_three(running: Cluster, collector: Collector) -> None:
    trace, client, header = fresh_trace()
    complete(running, ("traceparent", header), ("tracestate", "vendor=1"))
    spans = whole(collector, trace)
    router, scheduler, executor = (spans[f"chairlift-{tier}"] for tier in ("router", "scheduler", "executor"))
    assert (router.parent, scheduler.parent, executor.parent) == (client, router.span, scheduler.span)
    assert router.state == "vendor=1"
    assert router.phases == ["submitted", "first_token", "finished"]
    assert scheduler.phases == ["accepted", "queued", "admitted", "prefill", "first_token", "finished"]
    assert executor.phases == ["first_token"]
    assert router.name.startswith("text_completion ")
    assert router.attributes["gen_ai.usage.input_tokens"] == 20
    assert router.attributes["gen_ai.usage.output_tokens"] == 12
    assert router.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert router.attributes["gen_ai.response.id"] == scheduler.attributes["gen_ai.response.id"]
    assert executor.attributes["chairlift.finish_reason"] == "length"
    assert router.start_ns <= scheduler.start_ns <= executor.start_ns
    assert executor.end_ns <= router.end_ns
    assert not any(span.is_error for span in spans.values())


def test_over_http_it_is_the_same(running: Cluster, collector: Collector) -> None:
    trace, client, header = fresh_trace()
    transport = httpx2.HTTPTransport(uds=f"{running.folder}/http.sock")
    with httpx2.Client(transport=transport, base_url="http://router", timeout=30) as http:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
        answer = http.post("/v1/chat/completions", json=body, headers={"traceparent": header})
    assert answer.status_code == 200
    router = whole(collector, trace)["chairlift-router"]
    assert router.parent == client
    assert router.name.startswith("chat ")
    assert answer.headers["x-request-id"] in router.attributes["gen_ai.response.id"]


def test_every_choice_has_a_span_at_scheduler_and_executor(running: Cluster, collector: Collector) -> None:
    trace, _, header = fresh_trace()
    running.router.Complete(sized(9, 4, n=3), timeout=30, metadata=(("traceparent", header),))
    spans = collector.wait_for(lambda span: span.trace == trace, 7)
    parents = {span.span: span.parent for span in spans}
    choices = {span.span for span in spans if span.name == "schedule"}
    assert len(choices) == 3
    assert {parents[span.span] for span in spans if span.name == "compute"} == choices


def test_every_fourth_step_is_told_of_and_linked_to_its_riders(
    running: Cluster, collector: Collector
) -> None:
    trace, _, header = fresh_trace()
    complete(running, ("traceparent", header), max_tokens=40)
    compute = whole(collector, trace)["chairlift-executor"]
    first, last = compute.attributes["chairlift.first_step"], compute.attributes["chairlift.last_step"]
    due = [step for step in range(first, last + 1) if step % NUM_STEPS == 0]

    def is_ours(span: Span) -> bool:
        return span.name == "step" and (trace, compute.span) in span.links

    steps = collector.wait_for(is_ours, len(due))
    assert [span.attributes["chairlift.step"] for span in steps] == due
    assert all(not span.parent and span.trace != trace for span in steps)
    assert all(span.phases == ["inputs", "forward", "sample"] for span in steps)


def test_what_the_client_does_not_sample_nobody_does(running: Cluster, collector: Collector) -> None:
    unsampled, _, header = fresh_trace(flags="00")
    complete(running, ("traceparent", header))
    trace, _, header = fresh_trace()
    complete(running, ("traceparent", header))
    whole(collector, trace)
    assert collector.wait_for(lambda span: span.trace == unsampled, 0) == []


@pytest.mark.parametrize(
    "bad", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "ff-1-2-3", "00-é"]
)
def test_a_traceparent_that_is_none_is_ignored(running: Cluster, collector: Collector, bad: str) -> None:
    transport = httpx2.HTTPTransport(uds=f"{running.folder}/http.sock")
    with httpx2.Client(transport=transport, base_url="http://router", timeout=30) as http:
        body = {"prompt": "Hi", "max_tokens": 3}
        answer = http.post("/v1/completions", json=body, headers={"traceparent": bad.encode("latin-1")})
    assert answer.status_code == 200
    named = answer.headers["x-request-id"]

    def is_it(span: Span) -> bool:
        return str(span.attributes.get("gen_ai.response.id", "")).startswith(named)

    spans = collector.wait_for(is_it, 2)
    assert [span.parent for span in spans] == ["", spans[0].span]


def test_a_refused_request_and_one_that_was_given_up(running: Cluster, collector: Collector) -> None:
    trace, _, header = fresh_trace()
    with pytest.raises(grpc.RpcError):
        running.router.Complete(sized(7, 2**31 - 1), timeout=30, metadata=(("traceparent", header),))
    (refused,) = collector.wait_for(lambda span: span.trace == trace)
    assert refused.is_error
    assert refused.attributes["chairlift.outcome"] == "refused"
    assert refused.attributes["error.type"] == "INVALID_ARGUMENT"
    assert refused.attributes["chairlift.field"] == "sampling.max_tokens"
    trace, _, header = fresh_trace()
    stream = running.router.Generate(sized(7, 400), metadata=(("traceparent", header),))
    for event in stream:
        if event.HasField("delta"):
            break
    stream.cancel()
    spans = whole(collector, trace)
    assert spans["chairlift-router"].attributes["chairlift.outcome"] == "cancelled"
    assert spans["chairlift-scheduler"].attributes["chairlift.finish_reason"] == "abort"
    assert spans["chairlift-executor"].attributes["chairlift.ended_by"] == "release"
    assert not any(span.is_error for span in spans.values())


def test_a_lost_executor_shows_in_the_trace(running: Cluster, collector: Collector) -> None:
    """It is asked for more than an executor can have ready before the client has seen the first of it."""
    trace, _, header = fresh_trace()
    request, num_tokens = sized(8, 400, salt=3), 0
    for event in running.router.Generate(request, timeout=100, metadata=(("traceparent", header),)):
        if event.HasField("delta") and not num_tokens:
            running.kill("executor")
            running.restart("executor")
        num_tokens += len(event.delta.token_ids)
    assert num_tokens == 400
    spans = whole(collector, trace)
    scheduler = spans["chairlift-scheduler"]
    phases = [name for name in scheduler.phases if name != "queued"]
    again = ["preempted", "resumed", "prefill", "decode"]
    assert phases == ["accepted", "admitted", "prefill", "first_token", *again, "finished"]
    assert scheduler.event("preempted").attributes["chairlift.detail"] == "its executor was lost"
    assert spans["chairlift-executor"].attributes["chairlift.num_known_tokens"] > 8


def test_a_collector_that_is_away_costs_a_line_and_off_means_not_even_imported(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # every import is a line on stderr
    with cluster.assembling(tiny_model_folder, fresh=True) as one:
        one.start_scripted_executor(Script())  # the servicer of ours, without torch
        one.start_scheduler()
        one.start_router("--traces", f"unix:{tmp_path}/nobody.sock")
        one.start_router(name="untraced")
        one.wait()
        complete(one, ("traceparent", fresh_trace()[2]))
        router = one.process("router")
        until_logged(router, "traces_lost")
        complete(one, salt=1)
        assert one.stop("router") == 0
        assert router.stderr.count("traces_lost") == 1
        assert "Traceback" not in router.stderr
        assert "opentelemetry" in router.stderr
        for name in ("untraced", "scheduler", "executor"):
            assert " grpc\n" in one.process(name).stderr
            assert "opentelemetry" not in one.process(name).stderr


def until_logged(process: ServiceProcess, event: str) -> None:
    deadline = time.monotonic() + 30
    while event not in process.stderr:
        assert time.monotonic() < deadline, process.stderr
        time.sleep(0.02)
