"""What was recorded, told again, gives the same plans: under load, under random calls, under faults."""

import dataclasses
import io
import json
import math
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from chairlift.lab.loads import Load, Row
from chairlift.lab.loop import Arrival, LogicalLoop
from chairlift.lab.replay import DifferentError, Report, replay
from chairlift.lab.step_times import Linear
from scheduler import recorder
from scheduler.batching import Batching
from scheduler.core import SchedulerCore
from scheduler.door import RefusedError
from scheduler.plan import BatchPlan, Capacity, FinishedSequence, StepResult
from scheduler.policy import Admission, Limits
from scheduler.record_events import line
from scheduler.record_file import MAGIC, RecordError, Sealer, chunks
from scheduler.recorder import Recorder, RecordingCore
from scheduler.sequence import FinishReason, Request
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
    loop = LogicalLoop(
        core, [Capacity(60, 16, 8, 128, 1 << 20, 2, 1 << 31)] * 2, Linear(base_us=400_000, per_token_us=500)
    )
    rows = tuple(
        Row(None, 60 + 25 * i % 400, 10 + 37 * i % 150, (i % 7,)) for i in range(61)
    )  # which share beginnings
    load = Load(170, rows=rows, arrivals="gamma:3", rate=0.2, max_tokens=200)

    def arrivals() -> Iterator[Arrival]:
        for index, arrival in enumerate(load):
            deadline = arrival.time + 40.0 if index % 9 == 0 else None
            yield dataclasses.replace(arrival, tenant="ab"[index % 2], deadline=deadline, priority=index % 3)

    loop.run(arrivals())
    (report,) = records.replay_all()
    assert report.seconds >= 1000
    assert report.num_plans >= 2000
    assert report.num_tokens == core.counters.scheduled_tokens
    assert report.preemptions == core.counters.preemptions > 5
    assert sum(seen.num_output_tokens for seen in report.seen) == loop.totals.num_output_tokens
    assert len({seen.reason for seen in report.seen}) == 2
    caches = [state.cache for state in core.executors.values()]
    assert sum(cache.num_hit_tokens for cache in caches) > 2_000
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


def test_a_block_that_is_filled_by_a_last_step_of_many_tokens_is_found_in_the_replay(
    records: _Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With draft tokens, a step that ends a sequence may fill blocks before its last one: these are named."""
    monkeypatch.setattr(harness, "SchedulerCore", lambda *a, **f: records.of(RecordingCore, *a, **f))
    for length in range(50, 62):
        h = harness.Harness(block_size=4, num_blocks=64, features=frozenset({"draft_tokens"}))
        first = h.submit("first", [3, 1, 2, 5], length, ignore_eos=True)
        h.run_to_end()
        assert h.core.counters.draft_tokens_accepted > 10
        h.submit("goes on", first.token_ids.tolist(), 4, ignore_eos=True)
        h.run_to_end()
        h.check_outputs()
        records.replay_all()


def test_whatever_is_cut_or_crashes_replays_equal(records: _Records, monkeypatch: pytest.MonkeyPatch) -> None:
    class Core(scheduler_node.WatchedCore, RecordingCore):
        pass

    monkeypatch.setattr(scheduler_node, "WatchedCore", lambda *a, **f: records.of(Core, *a, **f))
    reports = []
    for seed in (*range(30), 45):  # the last one preempts
        Scenario(seed).run()
        reports += records.replay_all()
    assert len(reports) > 30
    assert sum(report.num_lost for report in reports) > 5
    assert sum(report.preemptions for report in reports) > 0


def request(number: int, prompt: list[int], **fields: Any) -> Request:
    values = {"max_tokens": 50, "accepted_before": True} | fields
    return Request(number.to_bytes(16), str(number), array("I", prompt), b"", **values)


def step(core: SchedulerCore, executor_id: str, now: float, token_id: int = 5, *, ends: bool = False) -> None:
    plan = core.schedule(executor_id, now)
    assert plan is not None
    finished = [FinishedSequence(seq_id, FinishReason.STOP) for seq_id in plan.seq_ids] if ends else []
    ids = [token_id] * sum(plan.num_samples)
    result = StepResult(
        plan.epoch, plan.step_id, plan.seq_ids, plan.num_samples, ids, finished=finished, total_us=10_000
    )
    core.update(executor_id, result, now + 0.01)


def capacity(**fields: Any) -> Capacity:
    return dataclasses.replace(Capacity(64, 4, 8, 64, 256, 2, 1 << 31), **fields)


def recorded_core(records: _Records, limits: Limits | None = None) -> RecordingCore:
    core = records.of(RecordingCore, limits or Limits(window=1), cache_secret=b"any")
    core.attach("a", 1, capacity(eos_token_ids=frozenset({9})), 0.0)
    return core


def test_an_executor_that_is_away_is_away_in_the_replay(records: _Records) -> None:
    """Who waits is left to an idle executor, unless its stream is broken: only the loop knows that."""
    core = recorded_core(records)
    core.attach("b", 2, capacity(), 0.0)
    core.submit(request(1, list(range(60)), max_tokens=100), now=1.0)
    step(core, "a", 1.0)
    core.executors["b"].is_away = True
    core.submit(request(2, list(range(100, 140))), now=2.0)
    plan = core.schedule("a", 2.0)
    assert plan is not None
    assert len(plan.rows) == 2
    (report,) = records.replay_all()
    assert report.num_plans == 2


def test_how_many_were_refused_and_the_time_from_first_to_last_are_told(records: _Records) -> None:
    limits = Limits(window=1, default_tenant=TenantLimits(requests_per_minute=1))
    core = records.of(RecordingCore, limits, cache_secret=b"any")
    core.attach("a", 1, capacity(), 100.0)
    core.submit(request(1, [1, 2, 3]), now=101.0)
    for now in (102.0, 103.0):
        with pytest.raises(RefusedError):
            core.submit(request(2, [1, 2, 3], accepted_before=False), now=now)
    (report,) = records.replay_all()
    assert (report.num_refused, report.seconds, len(report.seen)) == (2, 3.0, 1)


def test_a_stream_that_came_back_is_told_before_the_answer_that_it_brought(records: _Records) -> None:
    """How long a step took, and so when the next plan is late enough, is counted from there."""
    core = recorded_core(records, Limits(window=2, late_plans=True))
    state = core.executors["a"]
    core.submit(request(1, [1, 2, 3], max_tokens=200), now=0.0)
    for index in range(6):
        step(core, "a", 0.1 * index)

    def answer(plan: BatchPlan | None, now: float) -> None:
        assert plan is not None
        ids = [5] * sum(plan.num_samples)
        answered = StepResult(plan.epoch, plan.step_id, plan.seq_ids, plan.num_samples, ids, total_us=100_000)
        core.update("a", answered, now)

    sent = core.schedule("a", 1.0)
    state.clock.resumed(1.5)  # as the loop does; the answer is there while it sends again what was lost
    answer(sent, 1.6)
    now = 1.6
    for _ in range(6):
        plans = [core.schedule("a", now + after) for after in (0.0, 0.02, 0.04, 0.06, 0.08, 0.095)]
        for plan in filter(None, plans):
            now += 0.1
            answer(plan, now)
    (report,) = records.replay_all()
    assert max(cost.seconds for cost in report.costs) < 0.2  # not the outage


def test_a_key_that_was_forgotten_begins_anew(records: _Records) -> None:
    core = recorded_core(records)
    for now in (1.0, 2.0):
        seq = core.submit(request(1, [1, 2, 3]), now=now)
        step(core, "a", now, ends=True)
        core.forget(seq)
    assert len(records.replay_all()[0].seen) == 2


@pytest.mark.parametrize("output", [[7, 9], [7, 7, 7, 9]], ids=["stretch not full", "full"])
def test_ids_that_end_a_request_end_it_in_the_replay(records: _Records, output: list[int]) -> None:
    """Known at once, by its own stop ids or the model's; and found when an executor comes."""
    core = recorded_core(records)
    core.submit(request(1, [1] * 4), array("I", output), now=1.0)
    core.submit(request(2, [1] * 4, stop_token_ids=frozenset({8})), array("I", [8]), now=1.0)
    core.submit(request(3, [1] * 4), array("I", output[:-1]), now=1.0)
    core.detach("a", 2.0)
    core.submit(request(4, [1] * 4), array("I", output), now=3.0)
    core.submit(request(5, [1] * 4), array("I", output[:-1]), now=3.0)
    core.attach("a", 3, capacity(eos_token_ids=frozenset({9})), 4.0)
    step(core, "a", 5.0)
    (report,) = records.replay_all()
    assert [seen.reason for seen in report.seen] == [FinishReason.STOP] * 2 + [None, FinishReason.STOP, None]


@pytest.mark.parametrize("output", [[5, 5, 6], [5, 5, 5, 6]], ids=["stretch not full", "full"])
def test_who_has_other_ids_begins_anew_and_who_has_the_same_goes_on(
    records: _Records, output: list[int]
) -> None:
    core = recorded_core(records)
    seq = core.submit(request(1, [1] * 4), now=1.0)
    for now in range(1, len(output) + 1):
        step(core, "a", float(now))
    core.orphan(seq, 5.5)
    assert core.submit(request(1, [1] * 4), array("I", [5] * len(output)), now=6.0) is seq
    assert core.submit(request(1, [1] * 4), array("I", output), now=7.0) is not seq
    step(core, "a", 8.0)
    (report,) = records.replay_all()
    assert len(report.seen) == 2


def sealed(events: list[dict[str, Any]]) -> bytes:
    """A record that says this, with every checksum right."""
    return MAGIC + Sealer().seal(b"".join(map(line, events)), is_last=True)


@pytest.fixture
def events(records: _Records) -> list[dict[str, Any]]:
    """Of a short run of two requests."""
    core = recorded_core(records)
    core.submit(request(1, [1] * 6), now=1.0)
    core.submit(request(2, [2] * 6), now=1.0)
    step(core, "a", 1.0)
    step(core, "a", 2.0, ends=True)
    (item,) = records.recorders
    item.close()
    return events_of(item.path)


def test_a_plan_that_differs_is_named_with_its_place(events: list[dict[str, Any]]) -> None:
    at = next(index for index, event in enumerate(events) if event.get("plan"))
    events[at]["plan"] = "0" * 16
    place = f"chunk 1 at byte {len(MAGIC)}, line {at + 1}"
    wanted = rf"{place}: for a plan 1 was 0{{16}}, now it is \w+: step 1 with 2 rows"
    with pytest.raises(DifferentError, match=wanted):
        replay(chunks(io.BytesIO(sealed(events))))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"prompt": 7}, "'1' was taken in|plan 1 was"),
        ({"refused": True}, "'1' was refused, and is not now"),
        ({"goes_on": True}, "'1' was taken up again, and is not now"),
        ({"max_tokens": 10**6, "accepted_before": False}, "'1' was taken in; now: prompt has 6 tokens"),
    ],
)
def test_what_clients_sent_otherwise_makes_a_difference_that_is_told(
    events: list[dict[str, Any]], change: dict[str, Any], complaint: str
) -> None:
    at = next(index for index, event in enumerate(events) if event.get("e") == "submit")
    events[at] |= change
    with pytest.raises(DifferentError, match=complaint):
        replay(chunks(io.BytesIO(sealed(events))))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"e": "dance"}, "line 3: the event cannot be told: KeyError"),
        ({"t": "noon"}, "line 3: the event cannot be told: ValueError"),
        ({"digests": "AAAA"}, "6 ids have 1 digests, not 0.375"),
        ({"key": None}, "line 3: the event cannot be told: TypeError"),
    ],
)
def test_an_event_that_makes_no_sense_is_refused_with_its_place(
    events: list[dict[str, Any]], change: dict[str, Any], complaint: str
) -> None:
    events[2] |= change
    with pytest.raises(RecordError, match=complaint):
        replay(chunks(io.BytesIO(sealed(events))))


def test_a_header_of_another_format_or_none_is_refused(events: list[dict[str, Any]]) -> None:
    with pytest.raises(RecordError, match="the record has format 2; this is read: 1"):
        replay(chunks(io.BytesIO(sealed([events[0] | {"format": 2}]))))
    with pytest.raises(RecordError, match="it holds nothing: its scheduler was killed before"):
        replay(chunks(io.BytesIO(MAGIC), may_be_cut=True))
    for told in ([{}], [{"format": 1}], [events[0] | {"limits": {"policy": "luck"}}]):
        with pytest.raises(RecordError, match="the header cannot be read"):
            replay(chunks(io.BytesIO(sealed(told))))
    for text in (b"[]\n", b"{\n"):
        data = MAGIC + Sealer().seal(text, is_last=True)
        with pytest.raises(RecordError, match="chunk 1 at byte 19, line 1"):
            replay(chunks(io.BytesIO(data)))
