import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.lab.fit import Fit, FitError, Measured, fit
from chairlift.lab.step_times import Linear


def steps(prices: Linear, *, noise: float = 0.0, seed: int = 0) -> list[Measured]:
    """Of many shapes, at these prices."""
    rng = random.Random(seed)
    made = []
    for rows in (1, 2, 4, 8, 16, 32):
        for context in (16, 128, 1000):
            for chunk in (0, 64):
                tokens = rows + chunk
                total = rows * context + chunk
                us = (
                    prices.base_us
                    + prices.per_token_us * tokens
                    + prices.per_row_us * (rows + (chunk > 0))
                    + prices.per_context_token_us * total
                )
                made.append(Measured(tokens, rows + (chunk > 0), total, us * rng.lognormvariate(0.0, noise)))
    return made


price = st.floats(0.0, 1000.0)


@given(st.floats(1.0, 1e5), price, price, st.floats(0.0, 1.0))
def test_exact_steps_give_their_prices_back(base: float, token: float, row: float, context: float) -> None:
    wanted = Linear(base, token, row, context)
    found = fit(steps(wanted))
    for step in steps(wanted):
        columns = step.columns
        got = sum(
            value * column
            for value, column in zip(
                (found.prices.base_us, found.prices.per_token_us, found.prices.per_row_us,
                 found.prices.per_context_token_us), columns, strict=True,
            )
        )  # fmt: skip
        assert got == pytest.approx(step.microseconds, rel=1e-3)
    assert found.error_p90 < 1e-3
    assert abs(found.error_of_total) < 1e-3


def test_disturbed_steps_are_told_and_do_not_pull_the_prices_to_one_side() -> None:
    wanted = Linear(20_000, 300, 100, 1.0)
    found = [fit(steps(wanted, noise=0.3, seed=seed)) for seed in range(20)]
    assert all(0.05 < item.error_p50 < 0.4 for item in found)
    mean = sum(item.error_of_total for item in found) / len(found)
    assert abs(mean) < 0.03


def test_how_far_prices_are_off_is_told_in_percent() -> None:
    told = Fit(Linear(1.0, 1.0, 1.0, 1.0), 12, error_p50=0.05, error_p90=0.2, error_of_total=-0.013)
    assert told.sentence == ("12 steps: 5.0 % off in the median, 20.0 % for 9 in 10, -1.3 % all together")


@given(st.lists(st.floats(1.0, 1e6), min_size=8, max_size=30), st.randoms(use_true_random=False))
def test_no_price_is_below_zero_whatever_was_measured(durations: list[float], rng: random.Random) -> None:
    measured = [
        Measured(rng.randint(1, 300), rng.randint(1, 60), rng.randint(1, 9000), us) for us in durations
    ]
    prices = fit(measured).as_json()
    assert min(prices.values()) >= 0
    assert set(prices) == {"base_us", "per_token_us", "per_row_us", "per_context_token_us"}


def test_too_few_steps_or_a_clock_that_stands_still_are_refused() -> None:
    with pytest.raises(FitError, match="3 steps were measured: at least 8 are wanted"):
        fit([Measured(1, 1, 1, 5.0)] * 3)
    with pytest.raises(FitError, match="a step took no time"):
        fit([Measured(1, 1, 1, 0.0)] * 8)
    alike = fit([Measured(4, 4, 40, 500.0)] * 8)
    assert alike.error_p90 == pytest.approx(0, abs=1e-9)
