import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.drain_rate import DrainRate


def drained(per_second: float, seconds: float, start: float = 100.0) -> tuple[DrainRate, float]:
    """After a steady drain, and the time of its last start."""
    rate = DrainRate()
    rate.queue_is(start, empty=False)
    now = start
    for i in range(int(per_second * seconds)):
        now = start + i / per_second
        rate.observe(now)
    return rate, now


def test_nothing_known_is_a_second() -> None:
    assert DrainRate().predicted_wait(5, 1000.0) == 1.0


@pytest.mark.parametrize("per_second", [0.5, 2.0, 50.0])
@pytest.mark.parametrize("seconds", [20.0, 200.0])
def test_a_steady_drain_predicts_its_own_pace(per_second: float, seconds: float) -> None:
    rate, now = drained(per_second, seconds)
    assert rate.predicted_wait(9, now) == pytest.approx(10 / per_second, rel=0.15)


def test_a_queue_that_stands_still_is_predicted_to_take_longer_and_longer() -> None:
    rate, now = drained(10.0, 60.0)
    waits = [rate.predicted_wait(9, now + later) for later in (0, 10, 30, 60, 600, 1e9)]
    assert waits == sorted(waits)
    assert waits[-1] == 60.0


def test_the_prediction_follows_a_change_of_pace() -> None:
    rate, now = drained(1.0, 300.0)
    for _ in range(1200):
        now += 0.1
        rate.observe(now)
    assert rate.predicted_wait(0, now) == pytest.approx(0.1, rel=0.15)


@given(
    gaps=st.lists(st.floats(0, 1000), max_size=30),
    ahead=st.integers(0, 10_000),
    later=st.floats(-10, 1e6),
)
def test_a_wait_is_between_its_bounds_and_grows_with_those_ahead(
    gaps: list[float], ahead: int, later: float
) -> None:
    rate = DrainRate()
    rate.queue_is(0.0, empty=False)
    now = 0.0
    for gap in gaps:
        now += gap
        rate.observe(now)
    wait = rate.predicted_wait(ahead, now + later)
    assert 0.05 <= wait <= 60.0
    assert rate.predicted_wait(ahead + 1, now + later) >= wait


@given(
    quiet=st.lists(st.tuples(st.floats(0.1, 1000), st.booleans()), max_size=20),
    per_second=st.sampled_from([0.5, 2.0, 50.0]),
)
def test_what_starts_while_nobody_waits_tells_nothing(
    quiet: list[tuple[float, bool]], per_second: float
) -> None:
    """However many came in a quiet time, before or between, the drain is that of the busy one."""
    rate, now = drained(per_second, 100.0)
    busy, then = drained(per_second, 100.0)
    rate.queue_is(now, empty=True)
    for gap, starts in quiet:
        now += gap
        if starts:
            rate.observe(now)
            rate.queue_is(now, empty=True)
    assert rate.predicted_wait(9, now) == pytest.approx(busy.predicted_wait(9, then))
    rate.queue_is(now, empty=False)
    assert rate.predicted_wait(9, now + 5.0) == pytest.approx(busy.predicted_wait(9, then + 5.0))


def test_a_queue_from_which_nobody_has_started_yet_takes_at_least_as_long_again() -> None:
    rate = DrainRate()
    rate.observe(1000.0)  # it found an empty queue
    assert rate.predicted_wait(5, 1000.0) == 1.0
    rate.queue_is(1000.0, empty=False)
    assert [rate.predicted_wait(5, 1000.0 + later) for later in (0.5, 20.0, 1e6)] == [1.0, 20.0, 60.0]
