"""What a scheduler tells: from a core that a test drives, without a wire."""

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from scheduler.metrics import SchedulerMetrics
from scheduler.policy import Limits
from scheduler.running_scheduler import RunningScheduler
from scheduler.sequence import FinishReason
from scheduler.tenants import TenantLimits
from tests.rig.scrape import Scrape, parsed
from tests.scheduler.fleet import Fleet
from tests.scheduler.harness import EXECUTOR, Harness


class Told:
    def __init__(self, harness: Harness | Fleet) -> None:
        self.metrics = SchedulerMetrics(RunningScheduler(harness.core, on_serving=lambda *_: None))

    def collect(self) -> list[object]:
        return list(self.metrics.families())

    def now(self) -> Scrape:
        registry = CollectorRegistry()
        registry.register(self)  # type: ignore[arg-type]
        return parsed(generate_latest(registry).decode())


def test_those_who_wait_are_told_by_what_they_wait_for() -> None:
    limits = Limits(watermark=0.0, tenants={"small": TenantLimits(max_running=1)})
    harness = Harness(limits, max_num_seqs=3, num_blocks=64)
    told = Told(harness)
    prefix = list(range(1, 40))
    for name in ("s1", "s2", "s3"):
        harness.submit(name, [5, 6], 20, tenant="small")
    harness.submit("leader", prefix, 20)
    harness.submit("follower", prefix, 20)
    harness.plan()
    assert told.metrics.waiting_by_reason()["queued_for_tenant"] == 2
    assert told.metrics.waiting_by_reason()["queued_for_prefix"] == 1
    for number in range(4):
        harness.submit(f"more{number}", [9, number], 20)
    harness.step()
    harness.step()
    by_reason = told.now().by("num_requests_waiting", "reason")
    assert sum(by_reason.values()) == len(harness.core.waiting)
    assert by_reason["queued_for_seat"] > 0
    harness.run_to_end()
    assert told.now().value("num_requests_waiting") == 0


def test_steps_queue_time_and_ends_are_counted() -> None:
    harness = Harness(max_num_seqs=1, num_blocks=64)
    told = Told(harness)
    harness.submit("a", [1, 2, 3], 4)
    harness.submit("b", [4, 5, 6], 4)
    while not harness.core.is_idle:
        harness.now += 0.5
        harness.step()
    now = told.now()
    assert now.value("request_queue_time_seconds_count") == 2
    assert now.value("request_queue_time_seconds_sum") > 0.5
    assert sum(now.by("sequences_total", "reason").values()) == 2
    assert now.value("tenant_service_tokens_total", kind="output") == sum(
        seq.num_output_tokens for seq in harness.sequences.values()
    )
    assert now.value("tenant_service_tokens_total", kind="input") == 6
    assert now.value("batch_size_count") == now.value("step_time_seconds_count") > 0
    assert now.value("kv_blocks") == 64
    assert now.value("kv_blocks", state="held") == 0


def test_who_can_be_computed_by_no_executor_that_is_there_waits_for_an_executor() -> None:
    fleet = Fleet()
    fleet.attach("big", max_seq_len=300, num_blocks=200)
    for number in range(2):
        fleet.submit(f"long{number}", [number] * 20, 100)
    fleet.plan("big")
    fleet.attach("small", max_seq_len=40, num_blocks=200)
    fleet.lose("big")
    waiting = Told(fleet).metrics.waiting_by_reason()
    assert {reason: count for reason, count in waiting.items() if count} == {"queued_for_executor": 2}


def test_a_cancel_tells_how_many_steps_still_compute_it() -> None:
    harness = Harness(max_num_seqs=2, num_blocks=64)
    told = Told(harness)
    harness.submit("a", [1, 2, 3], 50)
    while harness.plan() is not None:
        pass
    in_flight = len(harness.executor.plans)
    harness.core.cancel(harness.requests[b"sampling of a"].key, FinishReason.ABORT, harness.now)
    now = told.now()
    assert (now.value("cancel_to_free_steps_count"), now.value("cancel_to_free_steps_sum")) == (1, in_flight)
    assert now.value("kv_cache_usage_ratio") == 0


def test_a_lost_executor_takes_no_count_with_it() -> None:
    harness = Harness(max_num_seqs=4, num_blocks=64)
    told = Told(harness)
    prompt = list(range(1, 40))
    harness.submit("a", prompt, 4)
    harness.run_to_end()
    harness.submit("b", prompt, 4)
    harness.step()
    before = told.now()
    assert before.value("prefix_cache_hits_total") > 0
    harness.core.detach(EXECUTOR, harness.now)
    after = told.now()
    assert after.value("recoveries_total") == after.value("executors_lost_total") == 1
    for name in ("prefix_cache_hits_total", "prefix_cache_queries_total", "steps_total"):
        assert after.value(name) == before.value(name)
    assert after.value("num_requests_waiting", reason="queued_for_executor") == 1


def test_b112_series_stay_few_after_ten_thousand_tenants_and_requests() -> None:
    harness = Harness(max_num_seqs=256, num_blocks=4096)
    told = Told(harness)
    num_series = 0
    for number in range(10_000):
        tenant = harness.core.tenants.get(f"tenant-{number}", 0.0)
        tenant.num_input_tokens += 1 + number % 7
        tenant.num_output_tokens += 3
        if number == 1:
            num_series = len(told.now().samples)
        if number % 2_500 == 0:
            told.now()
    now = told.now()
    assert len(now.samples) <= num_series + 2 * 20
    assert now.value("tenant_service_tokens_total", kind="output") == 30_000
