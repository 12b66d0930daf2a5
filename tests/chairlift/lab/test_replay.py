"""What was recorded, told again, gives the same plans: under load, under random calls, under faults."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from chairlift.lab.loads import Load, Row
from chairlift.lab.loop import Arrival, LogicalLoop
from chairlift.lab.replay import Report, replay
from chairlift.lab.step_times import Linear
from scheduler import recorder
from scheduler.batching import Batching
from scheduler.plan import Capacity
from scheduler.policy import Admission, Limits
from scheduler.record_file import chunks
from scheduler.recorder import Recorder, RecordingCore
from scheduler.tenants import TenantLimits
from scheduler.waiting import Policy
from tests.scheduler import harness, test_core_machine
from tests.simulation import scheduler_node
from tests.simulation.scenario import Scenario


def replayed(path: Path) -> Report:
    with path.open("rb") as file:
        return replay(chunks(file))


def events_of(path: Path) -> list[dict[str, Any]]:
    with path.open("rb") as file:
        return [json.loads(text) for chunk in chunks(file) for text in chunk.lines.splitlines()]


class _Records:
    """Cores that record, each into a file of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.recorders: list[Recorder] = []

    def of(self, made: type[RecordingCore], *args: Any, **fields: Any) -> RecordingCore:
        return made(self._next(*args), *args, **fields)

    def _next(self, limits: Limits, batching: Batching = Batching.ITERATION, *_: object) -> Recorder:
        self.recorders.append(Recorder(self._folder / "record", limits, batching))
        return self.recorders[-1]

    def replay_all(self) -> list[Report]:
        reports = []
        for item in self.recorders:
            item.close()
            assert item.is_on
            reports.append(replayed(item.path))
            item.path.unlink()
        self.recorders.clear()
        return reports


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Records:
    monkeypatch.setattr(recorder, "MAX_PENDING", 10**9)  # logical time leaves the writer none
    return _Records(tmp_path)


def test_a_thousand_seconds_under_load_replay_equal(records: _Records) -> None:
    """Two executors, plans sent late, tenants, deadlines, turns of conversations, too little memory."""
    limits = Limits(window=2, late_plans=True, policy=Policy.FAIR, tenants={"b": TenantLimits(weight=2.0)})
    core = records.of(RecordingCore, limits, cache_secret=b"any")
    capacity = Capacity(60, 16, 8, 128, 1 << 20, 2, 1 << 31)
    loop = LogicalLoop(core, [capacity] * 2, Linear(base_us=300_000, per_token_us=500))
    rows = tuple(
        Row(None, 60 + 25 * i % 400, 10 + 37 * i % 150, (i % 7,)) for i in range(61)
    )  # which share beginnings
    load = Load(450, rows=rows, arrivals="gamma:3", rate=0.42, max_tokens=200)

    def arrivals() -> Iterator[Arrival]:
        for index, arrival in enumerate(load):
            deadline = arrival.time + 20.0 if index % 9 == 0 else None
            yield dataclasses.replace(arrival, tenant="ab"[index % 2], deadline=deadline, priority=index % 3)

    loop.run(arrivals())
    (report,) = records.replay_all()
    assert report.seconds >= 1000
    assert report.num_plans >= 4000
    assert report.num_tokens == core.counters.scheduled_tokens
    assert report.preemptions == core.counters.preemptions > 20
    assert sum(seen.num_output_tokens for seen in report.seen) == loop.totals.num_output_tokens
    assert len({seen.reason for seen in report.seen}) == 2
    caches = [state.cache for state in core.executors.values()]
    assert sum(cache.num_hit_tokens for cache in caches) > 10_000
    firsts = {seen.request.request_id: seen.first_token for seen in report.seen}
    for index, first in enumerate(loop.records.first_token):
        assert firsts[str(index)] == (None if math.isnan(first) else first)


@pytest.mark.parametrize(
    ("policy", "admission", "window"),
    [(Policy.FCFS, Admission.OPTIMISTIC, 2), (Policy.FAIR, Admission.FORECAST, 1),
     (Policy.DEADLINE, Admission.RESERVE, 2)],
)  # fmt: skip
def test_random_calls_replay_equal(
    policy: Policy, admission: Admission, window: int, records: _Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "SchedulerCore", lambda *a, **f: records.of(RecordingCore, *a, **f))

    class Machine(test_core_machine.CoreMachine):
        def teardown(self) -> None:
            super().teardown()
            records.replay_all()

    run_state_machine_as_test(  # type: ignore[no-untyped-call, unused-ignore]
        lambda: Machine(policy, admission, window),  # type: ignore[arg-type, return-value, unused-ignore]
        settings=settings(
            max_examples=25,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_whatever_is_cut_or_crashes_replays_equal(records: _Records, monkeypatch: pytest.MonkeyPatch) -> None:
    class Core(scheduler_node.WatchedCore, RecordingCore):
        pass

    monkeypatch.setattr(scheduler_node, "WatchedCore", lambda *a, **f: records.of(Core, *a, **f))
    reports = []
    for seed in range(60):
        Scenario(seed).run()
        reports += records.replay_all()
    assert len(reports) > 60
    assert sum(report.num_lost for report in reports) > 10
    assert sum(report.preemptions for report in reports) > 0
