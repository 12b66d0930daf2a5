from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.lab.capacity import Targets, TargetsError, fewest_executors, highest_rate
from chairlift.lab.loads import Load
from chairlift.lab.run import Setup, Summary, simulate
from chairlift.lab.step_times import Linear

SETUP = Setup(Linear(10_000, 100), num_blocks=500, max_num_seqs=16)
SOME = simulate(SETUP, Load(5, prompt="10", output="5", arrivals="at-once"))
TARGETS = Targets(first_token_p99=1.0)


def summary(first_token_p99: float, refused: int = 0) -> Summary:
    return replace(SOME, first_token_p99=first_token_p99, refused=refused)


@settings(deadline=None)
@given(st.floats(1e-3, 1e5), st.floats(1e-2, 1e3))
def test_the_highest_rate_is_found_within_the_tolerance(limit: float, start: float) -> None:
    found = highest_rate(lambda rate: summary(rate / limit), TARGETS, start=start)
    assert found.rate <= limit
    assert found.missed_at is not None
    assert limit < found.missed_at <= found.rate * 1.02


@settings(deadline=None)
@given(st.integers(1, 64))
def test_the_fewest_executors_are_found(needed: int) -> None:
    count, _ = fewest_executors(lambda count: summary(needed / count), TARGETS, at_most=64)
    assert count == needed


def test_what_can_not_be_kept_is_told_with_what_was_missed() -> None:
    with pytest.raises(
        TargetsError, match=r"not even .* requests a second keep .*: first_token_p99 2 s > 1 s"
    ):
        highest_rate(lambda _: summary(2.0), TARGETS)
    with pytest.raises(TargetsError, match="not even 8 executors keep the limits: 3 refused"):
        fewest_executors(lambda _: summary(0.5, refused=3), TARGETS, at_most=8)


def test_what_no_rate_keeps_is_found_at_once() -> None:
    tried: list[float] = []

    def at(rate: float) -> Summary:
        tried.append(rate)
        return summary(2.0)

    with pytest.raises(TargetsError):
        highest_rate(at, TARGETS)
    assert len(tried) == 2


def test_a_limit_that_nobody_came_to_is_not_kept() -> None:
    one_token_each = simulate(SETUP, Load(5, prompt="10", output="1", arrivals="at-once"))
    targets = Targets(first_token_p99=1.0, between_tokens_p99=1.0)
    missed = targets.missed(one_token_each)
    assert missed == "between_tokens_p99 is not known: nobody had tokens enough"
    with pytest.raises(TargetsError, match="between_tokens_p99 is not known"):
        highest_rate(lambda _: one_token_each, targets)


def test_where_nothing_is_too_much_that_is_said() -> None:
    found = highest_rate(lambda _: summary(0.0), TARGETS)
    assert found.missed is None
    assert found.missed_at is None


def test_more_executors_take_more() -> None:
    load = Load(80, prompt="50", output="30", rate=1.0)
    rates = []
    for count in (1, 2):
        setup = replace(SETUP, num_executors=count)
        found = highest_rate(
            lambda rate, setup=setup: simulate(setup, replace(load, rate=rate)), Targets(first_token_p99=0.2)
        )
        rates.append(found.rate)
    assert rates[1] > 1.6 * rates[0]
