"""The loop decides nothing, loses nothing, and is the same every time."""

import math
from array import array
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.lab.loads import Load, fresh_prompt
from chairlift.lab.loop import Arrival, LogicalLoop, Step
from chairlift.lab.step_times import Linear
from scheduler import audit
from scheduler.batching import Batching
from scheduler.core import SchedulerCore
from scheduler.plan import Capacity
from scheduler.policy import Admission, Limits
from scheduler.tenants import TenantLimits
from scheduler.waiting import Policy

STEP = Linear(base_us=10_000, per_token_us=100)


def capacity(num_blocks: int = 64, *, seats: int = 4, budget: int = 32, window: int = 2) -> Capacity:
    return Capacity(num_blocks, 4, seats, budget, 1 << 20, window, 1 << 31)


def loop_of(
    limits: Limits | None = None,
    *capacities: Capacity,
    batching: Batching = Batching.ITERATION,
    seen: list[Step] | None = None,
) -> LogicalLoop:
    core = SchedulerCore(limits or Limits(window=1), batching, cache_secret=b"test")
    on_step = None if seen is None else seen.append
    return LogicalLoop(core, capacities or [capacity()], STEP, on_step=on_step)


def test_one_alone_takes_a_step_for_its_prompt_and_one_for_each_further_token() -> None:
    loop = loop_of()
    records = loop.run([Arrival(1.0, fresh_prompt(1, 20), 3, 10)])
    assert records.first_token[0] == pytest.approx(1.0 + 0.012)
    assert records.ended[0] == pytest.approx(1.0 + 0.012 + 2 * 0.0101)
    assert list(records.num_output_tokens) == [3]
    assert list(records.in_time) == [1]
    assert records.gaps.count == 2
    assert records.gaps.quantile(0.5) == pytest.approx(0.0101, rel=0.003)
    totals = loop.totals
    assert (totals.num_steps, totals.num_rows, totals.num_computed_tokens) == (3, 3, 22)
    assert totals.filled_slot_seconds == pytest.approx(20 * 0.012 + (21 + 22) * 0.0101)


def test_what_the_client_allows_ends_it() -> None:
    records = loop_of().run([Arrival(0.0, fresh_prompt(1, 5), 100, 7)])
    assert list(records.num_output_tokens) == [7]


arrivals = st.lists(
    st.builds(
        lambda time, prompt, output, room, tenant, priority, slack: Arrival(
            time / 100,
            fresh_prompt(prompt, prompt) if prompt % 3 else array("I", range(prompt)),  # some begin alike
            output,
            output + room,
            tenant,
            priority,
            None if slack is None else time / 100 + slack,
        ),
        st.integers(0, 200),
        st.integers(1, 60),
        st.integers(1, 40),
        st.integers(0, 20),
        st.sampled_from("xy"),
        st.integers(0, 1),
        st.none() | st.floats(0.01, 3),
    ),
    max_size=20,
).map(lambda items: sorted(items, key=lambda item: item.time))


@settings(deadline=None, max_examples=60)
@given(
    arrivals,
    st.sampled_from(Policy),
    st.sampled_from(Admission),
    st.sampled_from(Batching),
    st.integers(1, 3),
    st.integers(1, 2),
    st.booleans(),
    st.booleans(),
)
def test_every_token_is_delivered_or_accounted_for(
    items: list[Arrival],
    policy: Policy,
    admission: Admission,
    batching: Batching,
    num_executors: int,
    window: int,
    prefix_caching: bool,
    late_plans: bool,
) -> None:
    limits = Limits(
        policy=policy,
        admission=admission,
        window=window,
        prefix_caching=prefix_caching,
        late_plans=late_plans,
    )
    steps: list[Step] = []
    loop = loop_of(limits, *[capacity()] * num_executors, batching=batching, seen=steps)
    records = loop.run(items)
    assert loop.core.is_idle
    assert not loop.core.sequences
    for state in loop.core.executors.values():
        audit.check_counts(state)
        state.blocks.check([])
    assert len(records) == len(items)
    assert sum(records.num_output_tokens) == loop.totals.num_output_tokens
    tenants = [loop.core.tenants.get(name, loop.now) for name in "xy"]
    if batching is not Batching.REQUEST_PADDED:  # whose padding is charged as well
        assert sum(tenant.num_output_tokens for tenant in tenants) == loop.totals.num_output_tokens
    assert loop.totals.num_computed_tokens == loop.core.counters.scheduled_tokens
    assert loop.totals.num_steps == len(steps)
    num_firsts = sum(not math.isnan(time) for time in records.first_token)
    assert records.gaps.count == loop.totals.num_output_tokens - num_firsts
    for index, item in enumerate(items):
        wanted = min(item.num_output_tokens, item.max_tokens)
        if records.in_time[index] or item.deadline is None:
            assert records.num_output_tokens[index] == wanted
        assert records.num_output_tokens[index] <= wanted


@settings(deadline=None, max_examples=25)
@given(arrivals, st.integers(1, 2), st.integers(1, 3))
def test_the_same_load_gives_the_same_records(items: list[Arrival], window: int, num_executors: int) -> None:
    runs = [loop_of(Limits(window=window), *[capacity()] * num_executors).run(items) for _ in range(2)]
    columns = [(bytes(run.first_token), bytes(run.ended), bytes(run.num_output_tokens)) for run in runs]
    assert columns[0] == columns[1]


def test_steps_of_one_executor_come_one_after_the_other_and_two_work_side_by_side() -> None:
    steps: list[Step] = []
    load = Load(60, prompt="30", output="20", arrivals="at-once")
    loop = loop_of(Limits(window=2), capacity(), capacity(), seen=steps)
    loop.run(load)
    for executor in loop.core.executors.values():
        own = [step for step in steps if step.state is executor]
        assert own
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(own))
    alone = loop_of(Limits(window=2), capacity())
    alone.run(load)
    assert loop.now == pytest.approx(alone.now / 2, rel=0.1)


def test_a_window_of_two_changes_no_token_and_computes_a_row_too_many_for_each_end() -> None:
    load = Load(20, prompt="10", output="5", arrivals="poisson", rate=3.0, max_tokens=9)
    one, two = loop_of(Limits(window=1)), loop_of(Limits(window=2))
    assert list(one.run(load).num_output_tokens) == list(two.run(load).num_output_tokens)
    assert one.core.counters.wasted_tokens == 0
    assert two.core.counters.wasted_tokens == 20


def test_one_that_is_too_long_is_refused_and_the_others_go_on() -> None:
    loop = loop_of(Limits(window=1), capacity(num_blocks=8))
    records = loop.run([Arrival(0.0, fresh_prompt(1, 30), 5, 5), Arrival(0.0, fresh_prompt(2, 20), 5, 5)])
    assert records.num_refused == 1
    assert list(records.num_output_tokens) == [0, 5]


def test_deadlines_end_those_who_run_and_those_who_wait() -> None:
    items = [Arrival(0.0, fresh_prompt(i, 10), 50, 50, deadline=0.2) for i in range(6)]
    records = loop_of(Limits(window=2)).run(items)
    assert not any(records.in_time)
    assert all(end == pytest.approx(0.2, abs=0.02) for end in records.ended)


def test_a_deadline_that_passed_during_the_step_before_is_no_trouble() -> None:
    items = [
        Arrival(0.0, fresh_prompt(1, 30), 3, 3),
        Arrival(0.001, fresh_prompt(2, 5), 3, 3, deadline=0.002),
    ]
    records = loop_of().run(items)
    assert list(records.in_time) == [1, 0]


def test_tenants_at_their_limits_wait_and_get_all() -> None:
    limits = Limits(window=1, tenants={"x": TenantLimits(max_running=1)})
    records = loop_of(limits).run([Arrival(0.0, fresh_prompt(i, 9), 4, 4, "x") for i in range(5)])
    assert list(records.num_output_tokens) == [4] * 5


def test_arrivals_are_drawn_as_time_goes_on_and_must_be_in_order() -> None:
    drawn: list[float] = []

    def items() -> Iterator[Arrival]:
        for number in range(5):
            drawn.append(loop.now)
            yield Arrival(float(number), fresh_prompt(number, 4), 2, 2)

    loop = loop_of()
    loop.run(items())
    assert drawn == [0.0, 0.0, 1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="an arrival at 1 s comes after one at 2 s"):
        loop_of().run([Arrival(2, fresh_prompt(1, 4), 1, 1), Arrival(1, fresh_prompt(2, 4), 1, 1)])


def test_a_later_load_goes_on_where_the_first_has_ended() -> None:
    loop = loop_of()
    prompt = array("I", range(40))
    loop.run([Arrival(0.0, prompt, 1, 1)])
    loop.run([Arrival(loop.now, prompt, 1, 1)])
    (state,) = loop.core.executors.values()
    assert state.cache.num_hit_tokens == 36
    assert len(loop.records) == 2


def test_a_prompt_whose_names_take_several_steps_gets_in() -> None:
    loop = LogicalLoop(
        SchedulerCore(Limits(window=1), cache_secret=b"x"), [capacity(20_000, budget=1 << 17)], STEP
    )
    prompt = array("I", range(60_000))
    for _ in range(2):
        loop.run([Arrival(loop.now, prompt, 1, 1)])
    (state,) = loop.core.executors.values()
    assert state.cache.num_hit_tokens == 59_996
