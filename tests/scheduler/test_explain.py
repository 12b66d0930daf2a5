import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.explain import MAX_KEPT, SHARED, AsideClock, Entry, Reason, ReasonClocks, TimeLine, TimeLines
from scheduler.policy import Limits
from scheduler.sequence import FinishReason
from scheduler.tenants import TenantLimits
from tests.scheduler.harness import EXECUTOR, Harness

EXACT = 1e-9  # seconds


def check_line(entries: list[Entry], wall: float) -> None:
    """No gap, no overlap, no empty stretch; together the wall time."""
    at = 0.0
    for entry in entries:
        assert entry.duration > 0
        assert entry.start == pytest.approx(at, abs=EXACT)
        at = entry.start + entry.duration
    assert sum(entry.duration for entry in entries) == pytest.approx(wall, abs=EXACT)


# --- clocks ---------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0, 100), st.sampled_from(SHARED)), max_size=40))
def test_all_clocks_together_run_as_fast_as_time(changes: list[tuple[float, Reason]]) -> None:
    clocks = ReasonClocks()
    now = 0.0
    expected = dict.fromkeys(SHARED, 0.0)
    reason = Reason.QUEUED_FOR_EXECUTOR
    for gap, change in changes:
        now += gap
        expected[reason] += gap
        clocks.set(change, now)
        reason = change
        readings = clocks.readings(now + 3.0)
        assert sum(readings) == pytest.approx(now + 3.0, abs=1e-6)
        running = expected | {reason: expected[reason] + 3.0}
        assert readings == pytest.approx([running[item] for item in SHARED], abs=1e-6)


# --- one line -------------------------------------------------------------------------------------------

steps = st.lists(
    st.tuples(
        st.floats(0, 10).map(lambda seconds: round(seconds, 3)),
        st.one_of(
            st.tuples(st.just("clock"), st.sampled_from(SHARED)),
            st.tuples(
                st.just("wait"), st.sampled_from([None, Reason.QUEUED_FOR_PREFIX, Reason.QUEUED_FOR_TENANT])
            ),
            st.tuples(st.just("run"), st.sampled_from([Reason.PREFILL, Reason.DECODE])),
        ),
    ),
    max_size=40,
)


@given(steps, st.sampled_from([0.0, 0.5, 90.0]))
def test_the_durations_sum_to_the_time_since_arrival_whatever_happens(
    steps: list[tuple[float, tuple[str, Reason | None]]], waited_before: float
) -> None:
    clocks = ReasonClocks()
    now = start = 1000.0
    line = TimeLine(start - waited_before, now, clocks)
    for gap, (what, reason) in steps:
        now += gap
        if what == "clock" and reason is not None:
            clocks.set(reason, now)
        elif what == "wait":
            line.wait(now, clocks, step_id=1, detail="", own=reason)
        elif reason is not None:
            line.run(reason, now, clocks, step_id=1)
        check_line(line.so_far(now + 0.25, clocks), now + 0.25 - start + waited_before)
    line.close(now, clocks)
    check_line(line.entries, now - start + waited_before)
    line.close(now, clocks)
    check_line(line.entries, now - start + waited_before)


def test_asking_in_the_middle_changes_nothing() -> None:
    clocks = ReasonClocks()
    line = TimeLine(0.0, 0.0, clocks)
    clocks.set(Reason.QUEUED_FOR_SEAT, 1.0)
    assert [entry.reason for entry in line.so_far(3.0, clocks)] == [
        Reason.QUEUED_FOR_SEAT,
        Reason.QUEUED_FOR_EXECUTOR,
    ]
    assert line.entries == []


def test_a_wait_is_shared_out_among_the_reasons_that_held_everybody() -> None:
    clocks = ReasonClocks()
    clocks.set(Reason.QUEUED_FOR_STEP, 0.0)
    line = TimeLine(10.0, 10.0, clocks)
    clocks.set(Reason.QUEUED_FOR_SEAT, 11.0)
    clocks.set(Reason.QUEUED_FOR_BLOCKS, 15.0)
    line.run(Reason.PREFILL, 17.0, clocks, step_id=9, detail="5 tokens")
    line.run(Reason.DECODE, 18.0, clocks, step_id=10)
    line.close(20.0, clocks)
    spent = {entry.reason: entry.duration for entry in line.entries}
    assert spent == {
        Reason.QUEUED_FOR_STEP: 1.0,
        Reason.QUEUED_FOR_SEAT: 4.0,
        Reason.QUEUED_FOR_BLOCKS: 2.0,
        Reason.PREFILL: 1.0,
        Reason.DECODE: 2.0,
    }
    assert [(entry.step_id, entry.detail) for entry in line.entries[-2:]] == [(9, "5 tokens"), (10, "")]


def test_time_at_earlier_schedulers_is_told_apart() -> None:
    clocks = ReasonClocks()
    clocks.set(Reason.QUEUED_FOR_SEAT, 0.0)
    line = TimeLine(95.0, 100.0, clocks)
    line.close(101.0, clocks)
    assert [(entry.reason, entry.duration) for entry in line.entries] == [
        (Reason.QUEUED_FOR_EXECUTOR, 5.0),
        (Reason.QUEUED_FOR_SEAT, 1.0),
    ]
    assert "5.000 s of it at earlier schedulers" in line.entries[0].detail


# --- what is kept ---------------------------------------------------------------------------------------


def test_the_newest_lines_are_kept_by_choice() -> None:
    lines = TimeLines()
    entry = Entry(0.0, 1.0, Reason.DECODE, 1)
    lines.keep("", "n", 1, [entry])
    for i in range(MAX_KEPT - 1):
        lines.keep("", f"r{i}", 0, [])
    lines.keep("", "n", 0, [])
    lines.keep("", "one more", 0, [])
    assert lines.of("", "n") == {1: [entry], 0: []}
    assert lines.of("", "r0") == {}
    assert lines.of("", "r1") == {0: []}
    assert lines.of("", "never") == {}


# --- in the core ----------------------------------------------------------------------------------------


def reasons(h: Harness, name: str, tenant: str = "") -> dict[Reason, float]:
    spent: dict[Reason, float] = {}
    for entry in h.core.explain(name, h.now, tenant)[0]:
        spent[entry.reason] = spent.get(entry.reason, 0.0) + entry.duration
    return spent


def run(h: Harness, seconds: float = 1.0) -> None:
    """To the end, one step a second."""
    while not h.core.is_idle:
        h.plan()
        h.now += seconds
        if h.executor.plans:
            h.result()


def tick(h: Harness, steps: int = 1) -> None:
    for _ in range(steps):
        h.plan()
        h.now += 1.0
        h.result()


def one_step_at_a_time(**fields: object) -> Limits:
    return Limits(window=1, watermark=0.0, **fields)  # type: ignore[arg-type]


def test_a_lone_request_spent_its_time_on_its_prompt_and_its_output() -> None:
    h = Harness(one_step_at_a_time(), max_num_batched_tokens=16)
    h.submit("A", list(range(40)), 5, ignore_eos=True)
    run(h)
    assert reasons(h, "A") == {Reason.PREFILL: 3.0, Reason.DECODE: 4.0}


@pytest.mark.parametrize("length", [17, 33, 49])
def test_a_last_chunk_of_one_token_still_ends_the_prompt(length: int) -> None:
    h = Harness(one_step_at_a_time(), max_num_batched_tokens=16, block_size=16)
    h.submit("A", list(range(length)), 5, ignore_eos=True)
    run(h)
    assert reasons(h, "A") == {Reason.PREFILL: -(-length // 16), Reason.DECODE: 4.0}


def test_who_waits_for_a_seat_is_told_so() -> None:
    h = Harness(one_step_at_a_time(), max_num_seqs=1)
    h.submit("A", [1, 2], 10, ignore_eos=True)
    tick(h)
    h.submit("B", [1, 2], 2, ignore_eos=True)
    tick(h, 3)
    assert reasons(h, "B") == {Reason.QUEUED_FOR_SEAT: 3.0}
    run(h)
    spent = reasons(h, "B")
    assert spent[Reason.QUEUED_FOR_SEAT] == 9.0
    assert spent[Reason.PREFILL] + spent[Reason.DECODE] == 2.0


def test_who_waits_for_blocks_is_told_so() -> None:
    h = Harness(one_step_at_a_time(), num_blocks=8, block_size=4)
    h.submit("A", list(range(20)), 8, ignore_eos=True)
    tick(h)
    h.submit("B", list(range(30, 50)), 2, ignore_eos=True)
    run(h)
    assert reasons(h, "B")[Reason.QUEUED_FOR_BLOCKS] == 7.0


def test_who_waits_for_the_token_budget_is_told_so() -> None:
    h = Harness(one_step_at_a_time(), max_num_batched_tokens=4)
    h.submit("A", list(range(12)), 2, ignore_eos=True)
    tick(h)
    h.submit("B", [50, 51], 2, ignore_eos=True)
    run(h)
    assert reasons(h, "B")[Reason.QUEUED_FOR_TOKENS] == 2.0


def test_who_waits_for_its_own_tenants_limit_is_told_whose() -> None:
    h = Harness(one_step_at_a_time(tenants={"small": TenantLimits(max_running=1)}))
    h.submit("A", [1, 2], 5, ignore_eos=True, tenant="small")
    tick(h)
    h.submit("B", [3, 4], 2, ignore_eos=True, tenant="small")
    run(h)
    assert reasons(h, "B", "small")[Reason.QUEUED_FOR_TENANT] == 4.0
    assert h.core.explain("B", h.now, "another") == {}
    lines = h.core.explain("B", h.now, "small")
    (entry,) = [item for item in lines[0] if item.reason is Reason.QUEUED_FOR_TENANT]
    assert "'small'" in entry.detail


def test_all_of_a_tenant_at_its_limit_are_told_so_and_not_only_its_next() -> None:
    h = Harness(one_step_at_a_time(tenants={"small": TenantLimits(max_running=1)}))
    for name in "ABC":
        h.submit(name, [ord(name)], 5, ignore_eos=True, tenant="small")
    tick(h, 2)
    h.submit("D", [9], 5, ignore_eos=True, tenant="small")
    tick(h, 2)
    for name, seconds in (("B", 4.0), ("C", 4.0), ("D", 2.0)):
        assert reasons(h, name, "small") == {Reason.QUEUED_FOR_TENANT: seconds}
    run(h)
    for name, seconds in (("B", 5.0), ("C", 10.0), ("D", 13.0)):
        assert reasons(h, name, "small")[Reason.QUEUED_FOR_TENANT] == seconds


def test_who_waits_for_a_seat_after_its_tenants_limit_is_told_both() -> None:
    h = Harness(one_step_at_a_time(tenants={"small": TenantLimits(max_running=1)}), max_num_seqs=2)
    h.submit("A", [1], 3, ignore_eos=True, tenant="small")
    h.submit("B", [2], 3, ignore_eos=True, tenant="small")
    h.submit("long", [3], 30, ignore_eos=True)
    tick(h)
    h.submit("important", [4], 20, priority=-1, ignore_eos=True)
    tick(h, 12)
    assert reasons(h, "B", "small") == {Reason.QUEUED_FOR_TENANT: 3.0, Reason.QUEUED_FOR_SEAT: 10.0}


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.5, 7.0, 1 / 3]), st.sampled_from(["turn", "line", *SHARED])),
        max_size=40,
    )
)
def test_a_tenants_clock_runs_in_place_of_the_shared_ones_while_it_is_passed_over(
    changes: list[tuple[float, str | Reason]],
) -> None:
    clocks, aside, now = ReasonClocks(), AsideClock(), 1000.0
    reason, is_aside = Reason.QUEUED_FOR_EXECUTOR, False
    lines: list[tuple[TimeLine, float, dict[Reason, float]]] = []
    for gap, change in changes:
        now += gap
        for _, _, spent in lines:
            told = Reason.QUEUED_FOR_TENANT if is_aside else reason
            spent[told] = spent.get(told, 0.0) + gap
        if isinstance(change, Reason):
            clocks.set(change, now)
            reason = change
        elif change == "turn":
            aside.turn(now, clocks)
            is_aside = not is_aside
        else:
            lines.append((TimeLine(now, now, clocks, aside), now, {}))
    for line, began, spent in lines:
        entries = line.so_far(now, clocks)
        check_line(entries, now - began)
        found = {entry.reason: entry.duration for entry in entries}
        assert found == pytest.approx({why: seconds for why, seconds in spent.items() if seconds}, abs=EXACT)


def test_who_waits_for_a_beginning_that_is_being_computed_is_told_by_whom() -> None:
    h = Harness(one_step_at_a_time(), max_num_batched_tokens=16)
    h.submit("leader", list(range(60)), 2, ignore_eos=True)
    tick(h)
    h.submit("B", list(range(60)), 2, ignore_eos=True)
    run(h)
    h.check_outputs()
    entries = h.core.explain("B", h.now)[0]
    (entry,) = [item for item in entries if item.reason is Reason.QUEUED_FOR_PREFIX]
    assert "leader" in entry.detail


def test_who_waits_for_an_executor_is_told_so_and_that_its_own_was_lost() -> None:
    h = Harness(one_step_at_a_time())
    h.submit("A", [1, 2], 5, ignore_eos=True)
    tick(h, 2)
    h.core.detach(EXECUTOR, h.now)
    h.now += 30.0
    h.attach()
    run(h)
    entries = h.core.explain("A", h.now)[0]
    (entry,) = [item for item in entries if item.reason is Reason.QUEUED_FOR_EXECUTOR]
    assert (entry.duration, entry.detail) == (30.0, "its executor was lost")


def drain(h: Harness) -> None:
    h.plan()
    result = replace(h.executor.run(), draining=True, seconds_to_leave=100.0)
    h.core.update(EXECUTOR, result, h.now)


def test_who_waits_while_the_only_executor_takes_no_newcomers_is_told_so() -> None:
    h = Harness(one_step_at_a_time())
    h.submit("A", [1, 2], 30, ignore_eos=True)
    h.submit("B", [3, 4], 2, ignore_eos=True)
    drain(h)
    h.core.cancel(h.sequences["B"].request.key, FinishReason.ABORT, h.now)
    h.submit("C", [5], 2, ignore_eos=True)
    for _ in range(3):
        h.now += 1.0
        drain(h)
    assert reasons(h, "C") == {Reason.QUEUED_FOR_EXECUTOR: 3.0}


def test_who_waits_for_another_executor_than_the_one_that_drains_is_told_what_that_one_lacks() -> None:
    h = Harness(one_step_at_a_time())
    h.core.attach("other", 9, replace(h.capacity, max_num_seqs=1), h.now)
    h.submit("A", [1, 2], 30, ignore_eos=True)
    h.submit("B", [3, 4], 30, ignore_eos=True)
    h.plan()
    h.core.schedule("other", h.now)
    h.submit("C", [5], 2, ignore_eos=True)
    assert {seq.executor_id for seq in h.sequences.values()} == {EXECUTOR, "other", ""}
    drain(h)
    for _ in range(3):
        h.core.schedule("other", h.now)
        h.now += 1.0
    assert Reason.QUEUED_FOR_EXECUTOR not in reasons(h, "C")


def test_every_request_under_load_is_accounted_for_to_the_nanosecond() -> None:
    h = Harness(Limits(watermark=0.0), num_blocks=24, max_num_batched_tokens=32)
    rng = random.Random(7)
    arrivals: dict[str, float] = {}
    ends: dict[str, float] = {}
    for i in range(300):
        name = f"r{i}"
        h.submit(name, [rng.randrange(90) for _ in range(rng.randrange(1, 50))], rng.randrange(1, 30))
        arrivals[name] = h.now
        for _ in range(rng.randrange(3)):
            while h.plan() is not None:
                pass
            h.now += rng.random() / 50
            if h.executor.plans:
                ends |= {seq.request.request_id: h.now for seq in h.result()}
        if rng.random() < 0.1:
            victim = f"r{rng.randrange(i + 1)}"
            if h.core.cancel(h.sequences[victim].request.key, FinishReason.ABORT, h.now):
                ends[victim] = h.now
    while not h.core.is_idle:
        h.plan()
        h.now += 0.013
        if h.executor.plans:
            ends |= {seq.request.request_id: h.now for seq in h.result()}
    assert ends.keys() == arrivals.keys()
    for name, end in ends.items():
        check_line(h.core.explain(name, h.now)[0], end - arrivals[name])
