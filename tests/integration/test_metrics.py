"""Metrics of a whole server: numbers add up, gauges come back to zero, no label is a client's word."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from protos.v1 import router_pb2
from tests.integration.prompts import prompt, sized
from tests.rig import cluster
from tests.rig.client import Answer, Client, client_of, request
from tests.rig.cluster import Cluster
from tests.rig.scrape import Scrape, get
from tests.rig.scripted_executor import RequestScript, Script

FAILING = tuple(prompt(9, salt=90))
SCRIPT = Script(
    step_seconds=0.004,
    requests=tuple(RequestScript(prompt=FAILING, row_errors={2: "it cannot be"}) for _ in range(2)),
)


@pytest.fixture(scope="module")
def running(tiny_model_folder: Path) -> Iterator[Cluster]:
    """One seat, so that all but one wait."""
    with cluster.assembling(tiny_model_folder, has_metrics=True) as one:
        one.start_scripted_executor(SCRIPT)
        one.start_scheduler("--max-num-seqs", "1")
        one.start_router("--http", f"unix:{one.folder}/http.sock")
        one.wait()
        yield one


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def waiting_and_running(running: Cluster) -> tuple[float, float, float]:
    told = running.scrape("scheduler")
    usage = told.value("kv_cache_usage_ratio")
    return told.value("num_requests_waiting"), told.value("num_requests_running"), usage


async def quiet(running: Cluster) -> None:
    await until(
        lambda: (
            running.scrape("router").value("router_requests_open") == 0
            and waiting_and_running(running) == (0, 0, 0)
        )
    )


class Grown:
    """How much a process' counts have grown since it was made."""

    def __init__(self, running: Cluster, name: str) -> None:
        self._running, self._name = running, name
        self._before = running.scrape(name)

    def by(self, name: str, label: str) -> dict[str, float]:
        before = self._before.by(name, label)
        now = self._running.scrape(self._name).by(name, label)
        return {key: value - before.get(key, 0) for key, value in now.items() if value != before.get(key, 0)}

    def value(self, name: str) -> float:
        return self._running.scrape(self._name).value(name) - self._before.value(name)


async def cancelled(client: Client, message: router_pb2.GenerateRequest) -> None:
    stream = client.growing(message)
    await anext(stream)
    await stream.aclose()


async def test_b113_who_waits_is_not_shown_as_running(running: Cluster) -> None:
    async with client_of(running) as client:
        streams = [client.growing(sized(8, 1_000, salt=i)) for i in range(10)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        await until(lambda: waiting_and_running(running)[:2] == (9, 1))
        told = running.scrape("scheduler")
        assert told.value("num_requests_waiting", reason="queued_for_seat") == 9
        assert told.value("kv_blocks", state="held") > 0
        assert running.scrape("router").value("router_requests_open") == 10
        assert running.scrape("executor").value("executor_num_sequences") == 1
        for stream in streams:
            await stream.aclose()
    await quiet(running)


async def test_b109_gauges_are_zero_when_everything_has_been_cancelled(running: Cluster) -> None:
    async with client_of(running) as client:
        await asyncio.gather(*(cancelled(client, sized(30, 500, salt=i)) for i in range(50)))
    await quiet(running)
    blocks = running.scrape("scheduler").by("kv_blocks", "state")
    assert blocks["held"] == 0
    assert running.scrape("executor").value("executor_num_sequences") == 0


async def test_b110_every_request_is_counted_once_by_its_outcome(running: Cluster) -> None:
    router, scheduler = Grown(running, "router"), Grown(running, "scheduler")
    async with client_of(running) as client:
        await asyncio.gather(*(client.generate(sized(8, 4, salt=i)) for i in range(20)))
        await asyncio.gather(*(cancelled(client, sized(20, 900, salt=i)) for i in range(10)))
        await quiet(running)
        refused = [client.complete(sized(20, 2**31 - 1)) for _ in range(5)]
        failed = [client.complete(request(FAILING, max_tokens=8)) for _ in range(2)]
        outcomes = await asyncio.gather(*refused, *failed, return_exceptions=True)
        assert all(isinstance(outcome, grpc.aio.AioRpcError) for outcome in outcomes)
        late = [client.generate(sized(20, 2_000, salt=i), 0.5) for i in range(3)]
        assert not any(
            isinstance(outcome, Answer) for outcome in await asyncio.gather(*late, return_exceptions=True)
        )
    await quiet(running)
    assert router.by("requests_total", "outcome") == {
        "ok": 20, "cancelled": 10, "refused": 5, "deadline": 3, "failed": 2,
    }  # fmt: skip
    assert router.value("requests_received_total") == 40
    assert scheduler.by("sequences_total", "reason") == {"length": 20, "abort": 10, "error": 2, "deadline": 3}
    assert scheduler.value("deadline_misses_total") == 3
    codes = router.by("grpc_calls_total", "code")
    assert codes["OK"] == 20
    assert codes["INVALID_ARGUMENT"] == 7  # the refused, and those whose rows failed
    assert sum(codes.values()) == 40


async def test_b111_histograms_count_what_really_happened(running: Cluster) -> None:
    """Those that end before their first token have none; several tokens at once have no negative gap."""
    router = Grown(running, "router")
    async with client_of(running) as client:
        blocking = client.growing(sized(8, 400))
        await anext(blocking)
        await asyncio.gather(*(cancelled(client, sized(9, 5, salt=i)) for i in range(5)))  # all of them wait
        await blocking.aclose()
        await quiet(running)
        first_tokens = router.value("time_to_first_token_seconds_count")
        assert first_tokens <= 1
        answers = await asyncio.gather(*(client.generate(sized(9, 6, salt=i)) for i in range(8)))
        await quiet(running)
    assert router.value("time_to_first_token_seconds_count") == first_tokens + 8
    num_tokens = router.value("generation_tokens_total")
    gaps = router.value("inter_token_latency_seconds_count")
    assert gaps == num_tokens - router.value("time_to_first_token_seconds_count")
    assert router.value("request_generation_tokens_count") == len(answers)


async def test_sums_agree_with_the_usage_told_to_clients(running: Cluster) -> None:
    router, scheduler = Grown(running, "router"), Grown(running, "scheduler")
    async with client_of(running) as client:
        answers = await asyncio.gather(
            *(client.generate(sized(5 + i, 3 + i, salt=i, n=1 + i % 2)) for i in range(12)),
            client.complete(sized(40, 7, salt=50)),
            client.complete(sized(40, 7, salt=50)),
        )
    await quiet(running)
    usages = [[choice.finished.usage for choice in answer.choices if choice.finished] for answer in answers]
    assert router.value("prompt_tokens_total") == sum(usage[0].num_prompt_tokens for usage in usages)
    told = sum(one.num_output_tokens for usage in usages for one in usage)
    assert router.value("generation_tokens_total") == told
    assert router.value("request_generation_tokens_sum") == told
    assert scheduler.by("tenant_service_tokens_total", "kind")["output"] == told
    cached = sum(one.num_cached_tokens for usage in usages for one in usage)
    assert scheduler.value("prefix_cache_hits_total") == cached
    asked = sum(one.num_prompt_tokens for usage in usages for one in usage)
    assert scheduler.value("prefix_cache_queries_total") == asked
    assert scheduler.by("tenant_service_tokens_total", "kind")["input"] == asked - cached
    assert scheduler.value("step_time_seconds_count") <= scheduler.value("steps_total")
    assert scheduler.value("plan_bytes_total") > scheduler.value("plans_sent_total") > 0


async def test_b112_no_label_is_what_a_client_sends(running: Cluster) -> None:
    def series() -> dict[str, set[object]]:
        return {name: set(running.scrape(name).samples) for name in ("router", "scheduler", "executor")}

    async with client_of(running) as client:
        await client.complete(sized(3, 1))
        before = series()

        async def ask(i: int) -> None:
            model = f"model-{i}" if i % 2 else ""
            message = sized(3, 1, salt=i, model=model, request_id=f"id-{i}", cache_salt=f"salt-{i}")
            with contextlib.suppress(grpc.aio.AioRpcError):
                await client.complete(message)

        for start in range(0, 400, 50):
            await asyncio.gather(*(ask(i) for i in range(start, start + 50)))
        unknown = await asyncio.gather(client.complete(sized(3, 1, model="other")), return_exceptions=True)
        assert isinstance(unknown[0], grpc.aio.AioRpcError)
        assert unknown[0].code() is grpc.StatusCode.NOT_FOUND
    for i in range(200):
        status, _ = await asyncio.to_thread(get, f"unix:{running.folder}/http.sock", f"/path-{i}")
        assert status == 404
    await quiet(running)
    after = series()
    assert sum(len(after[name] - before[name]) for name in after) <= 20
    assert running.scrape("router").value("http_responses_total", code="404") == 200


async def test_a_lost_executor_shows_and_counts_go_on(running: Cluster) -> None:
    scheduler = Grown(running, "scheduler")
    async with client_of(running) as client:
        stream = client.growing(sized(8, 60, salt=3))
        for _ in range(4):
            await anext(stream)
        running.kill("executor")
        running.restart("executor")
        async for answer in stream:
            last = answer
    assert len(last.token_ids) == 60
    assert scheduler.by("executors_lost_total", "why") == {"crash": 1}
    assert scheduler.value("recoveries_total") == 1
    assert scheduler.value("tenant_service_tokens_total") > 0
    await quiet(running)


def test_every_process_tells_what_it_is(running: Cluster) -> None:
    for name in ("router", "scheduler", "executor"):
        told: Scrape = running.scrape(name)
        assert told.value("build_info") == 1
        assert "process_cpu_seconds_total" in told.names
        assert "chairlift_event_loop_lag_seconds_count" in told.names
