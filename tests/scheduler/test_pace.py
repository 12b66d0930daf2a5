import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.pace import SHORT_STEP_SECONDS, Pace, Quantile
from scheduler.policy import Admission, Limits
from scheduler.step_clock import StepClock
from tests.scheduler.harness import EXECUTOR, Harness

STEP = 0.05
ROUND_TRIP = 0.002


def steady(
    num_steps: int, step: float = STEP, round_trip: float = ROUND_TRIP
) -> tuple[StepClock, Pace, float]:
    """A pace after so many steps, each sent when the one before was answered; the next is just on its way."""
    clock, now = StepClock(), 0.0
    pace = Pace(clock)
    for _ in range(num_steps):
        clock.sent(step, now)
        now += round_trip + step
        pace.answered(now, step, round_trip)
    clock.sent(step, now)
    return clock, pace, now


@given(st.lists(st.floats(0, 1), min_size=1, max_size=400))
def test_a_quantile_is_that_of_the_newest(values: list[float]) -> None:
    quantile = Quantile(0.99)
    for value in values:
        quantile.observe(value)
    newest = sorted(values[-64:])
    assert quantile.value == newest[min(int(0.99 * len(newest)), len(newest) - 1)]


def test_nothing_is_held_before_anything_is_known() -> None:
    clock = StepClock()
    pace = Pace(clock)
    assert pace.held_until(0.0) is None
    clock.sent(None, 0.0)
    assert pace.held_until(0.0) is None
    pace.answered(0.1, 0.05, 0.0)
    clock.sent(None, 0.1)  # the way is known, the step is not
    assert pace.held_until(0.1) is None


def test_the_plan_behind_a_step_leaves_before_its_end_less_the_way() -> None:
    _, pace, began = steady(5)
    until = pace.held_until(began)
    assert until is not None
    assert began + STEP / 2 < until <= began + STEP - ROUND_TRIP
    assert pace.held_until(until) is None


def test_short_steps_are_not_waited_for() -> None:
    """However near the executor is: a timer is no finer than a millisecond."""
    near = SHORT_STEP_SECONDS / 100
    _, pace, began = steady(5, step=SHORT_STEP_SECONDS * 0.9, round_trip=near)
    assert pace.held_until(began) is None
    _, pace, began = steady(5, step=SHORT_STEP_SECONDS * 1.1, round_trip=near)
    assert pace.held_until(began) is not None


def test_nothing_is_held_when_nothing_runs() -> None:
    _, pace, began = steady(5)
    pace.answered(began + STEP, STEP, 0.0)
    assert pace.held_until(began + STEP) is None


def test_steps_that_end_before_their_time_widen_the_margin() -> None:
    clock, pace, now = steady(5)
    on_time = pace.held_until(now)
    assert on_time is not None
    for _ in range(50):
        now += STEP - 0.01  # of a second less than was foretold
        clock.sent(STEP, now - 0.001)
        pace.answered(now, STEP - 0.01, 0.0)
    until = pace.held_until(now)
    assert until is not None
    assert STEP - 0.015 < until - now + ROUND_TRIP < STEP - 0.005


class Line:
    """An executor behind a network, in its own time; a plan leaves when the pace lets it."""

    def __init__(self) -> None:
        self.clock = StepClock()
        self.pace = Pace(self.clock)
        self.ended = 0.0  # the step that was computed last, by the executor's clock
        self.sent_at = 0.0
        self.idle = 0.0
        self.leads: list[float] = []
        self.clock.sent(STEP, 0.0)

    def run(self, num_steps: int, way: Callable[[], float], pause: Callable[[], float]) -> None:
        """So many steps; `way` is how long a message takes, `pause` the executor to go on."""
        for _ in range(num_steps):
            begin = max(self.sent_at + way(), self.ended + pause())
            idle, self.ended = begin - self.ended, begin + STEP
            until = self.pace.held_until(self.clock.began)
            answered = self.ended + way()
            self.sent_at = min(answered, self.clock.began if until is None else until)
            self.clock.sent(STEP, self.sent_at)
            self.pace.answered(answered, STEP, idle)
            self.idle += idle
            self.leads.append(answered - self.sent_at)


@given(st.integers(0, 2**32), st.floats(0.0001, 0.01), st.floats(0, 0.002))
def test_plans_leave_late_and_the_executor_hardly_waits(seed: int, way: float, pause: float) -> None:
    rng = random.Random(seed)
    line = Line()
    line.run(300, lambda: way * rng.uniform(0.7, 1.3), lambda: pause * rng.random())
    line.idle, line.leads = 0.0, []
    line.run(400, lambda: way * rng.uniform(0.7, 1.3), lambda: pause * rng.random())
    assert line.idle < 400 * (0.03 * STEP + pause)
    assert sum(line.leads) / len(line.leads) < 3 * way + 0.008


@pytest.mark.parametrize("way", [0.0005, 0.005, 0.01])
def test_a_steady_way_stays_known(way: float) -> None:
    line = Line()
    for _ in range(20):
        line.idle = 0.0
        line.run(250, lambda: way, lambda: 0.0)
        assert line.idle < 250 * 0.001
        assert line.pace.margin is not None
        assert line.pace.margin < 2 * way + 0.006


@pytest.mark.parametrize(("pause", "every"), [(0.0009, 1), (0.004, 1), (0.01, 15), (0.06, 40)])
def test_an_executor_that_pauses_between_steps_is_not_waiting_for_plans(pause: float, every: int) -> None:
    line, numbers = Line(), itertools.count()
    line.run(2000, lambda: 0.001, lambda: pause if next(numbers) % every == 0 else 0.0)
    assert line.pace.margin is not None
    assert line.pace.margin < 0.01


def test_a_way_that_has_become_long_is_learnt_and_forgotten() -> None:
    line = Line()
    line.run(200, lambda: 0.001, lambda: 0.0)
    line.run(1, lambda: 0.02, lambda: 0.0)
    assert line.pace.margin is not None
    assert line.pace.margin < 0.006, "one is no reason"
    line.run(40, lambda: 0.01, lambda: 0.0)
    line.idle = 0.0
    line.run(100, lambda: 0.01, lambda: 0.0)
    assert line.idle < 100 * 0.002
    line.run(400, lambda: 0.001, lambda: 0.0)
    assert line.pace.margin < 0.008


def test_a_stream_that_broke_is_no_long_way() -> None:
    clock, pace, now = steady(5)
    margin = pace.margin
    assert margin is not None
    clock.resumed(now + 5.0)
    pace.answered(now + 5.0 + STEP, STEP, 0.0)
    assert pace.margin is not None
    assert pace.margin <= margin + 0.001


# --- the whole core in logical time ---------------------------------------------------------------


def late(**more: object) -> Limits:
    return Limits(watermark=0.0, admission=Admission.OPTIMISTIC, late_plans=True, **more)  # type: ignore[arg-type]


class Clocked:
    """A harness whose executor takes `step` seconds for each plan that has rows."""

    def __init__(self, limits: Limits) -> None:
        self.harness = Harness(limits, num_blocks=400)
        self.harness.executor.step_us = round(STEP * 1e6)
        self.free_at = 0.0

    def answer(self) -> None:
        """Time goes on to the end of the oldest plan's step."""
        self.harness.now = max(self.harness.now, self.free_at) + STEP
        self.free_at = self.harness.now
        self.harness.result()

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.ask()
            self.answer()

    def ask(self) -> None:
        while self.harness.plan() is not None:
            pass


@pytest.mark.parametrize("is_late", [False, True])
def test_a_newcomer_waits_for_one_step_and_not_for_two(is_late: bool) -> None:
    limits = late() if is_late else Limits(watermark=0.0, admission=Admission.OPTIMISTIC)
    clocked = Clocked(limits)
    harness = clocked.harness
    harness.submit("old", [5, 6, 7], 200)
    clocked.run(20)
    clocked.ask()
    harness.now += STEP / 10  # the step has only just begun
    harness.submit("new", [8, 9], 20)
    clocked.ask()
    began = harness.core.executors[EXECUTOR].session.acked_step_id + 1
    clocked.answer()
    clocked.ask()
    clocked.answer()
    clocked.ask()
    first = next(plan.step_id for plan in harness.plans if plan.admitted and plan.step_id >= began)
    assert first - began == (1 if is_late else 2)


def test_a_held_plan_leaves_when_its_time_comes_and_outputs_are_the_same() -> None:
    clocked = Clocked(late())
    harness = clocked.harness
    harness.submit("a", [5, 6, 7], 60)
    clocked.run(10)
    clocked.ask()
    state = harness.core.executors[EXECUTOR]
    assert state.session.num_unanswered == 1
    assert state.held_until is not None
    harness.now = state.held_until
    clocked.ask()
    assert state.session.num_unanswered == 2
    assert state.held_until is None
    clocked.answer()
    rng = random.Random(1)
    for number in range(30):
        harness.submit(f"n{number}", [rng.randrange(2, 90) for _ in range(rng.randint(1, 40))], 12)
        harness.now += rng.random() * STEP
        clocked.ask()
        clocked.answer()
    harness.run_to_end()
    harness.check_outputs()


def test_a_window_of_one_holds_nothing() -> None:
    clocked = Clocked(late(window=1))
    clocked.harness.submit("a", [5, 6, 7], 20)
    clocked.run(15)
    clocked.ask()
    state = clocked.harness.core.executors[EXECUTOR]
    assert state.held_until is None
    assert state.session.num_unanswered == 1
