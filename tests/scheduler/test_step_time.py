import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.step_time import StepTimeModel


@given(
    base=st.floats(0, 50_000),
    per_token=st.floats(0.1, 1_000),
    sizes=st.lists(st.integers(1, 512), min_size=4, max_size=60).filter(lambda s: len(set(s)) > 2),
)
def test_a_line_is_recovered_from_the_steps_on_it(base: float, per_token: float, sizes: list[int]) -> None:
    model = StepTimeModel()
    for size in sizes:
        model.observe(size, base + per_token * size)
    for size in (1, 64, 512):
        assert model.predict_us(size) == pytest.approx(base + per_token * size, rel=1e-3, abs=1.0)


@given(
    steps=st.lists(st.tuples(st.integers(0, 512), st.floats(1, 1e6)), max_size=40),
    limit=st.floats(1, 1e6),
)
def test_predictions_are_never_negative_and_tokens_within_a_limit_are_predicted_within_it(
    steps: list[tuple[int, float]], limit: float
) -> None:
    model = StepTimeModel()
    for size, duration in steps:
        model.observe(size, duration)
    predicted = model.predict_us(100)
    assert predicted is None or predicted >= 0
    count = model.tokens_within(limit)
    if count is None:
        return
    assert count >= 0
    inside, outside = model.predict_us(count), model.predict_us(count + 1)
    assert inside is not None
    assert outside is not None
    assert count == 0 or inside <= limit * (1 + 1e-9)
    assert outside > limit * (1 - 1e-9)


def test_nothing_is_predicted_before_a_few_steps_are_known() -> None:
    model = StepTimeModel()
    for _ in range(3):
        assert model.predict_us(10) is None
        assert model.tokens_within(1000) is None
        model.observe(10, 100)
    model.observe(10, 100)
    assert model.predict_us(10) == pytest.approx(100)


def test_steps_that_are_all_alike_are_blamed_on_their_tokens() -> None:
    model = StepTimeModel()
    for _ in range(20):
        model.observe(8, 400)
    assert model.predict_us(16) == pytest.approx(800)
    assert model.tokens_within(1000) == 20


def test_time_that_tokens_do_not_explain_limits_nothing() -> None:
    model = StepTimeModel()
    for size in range(1, 30):
        model.observe(size, 1000)
    assert model.tokens_within(500) is None or model.tokens_within(500) == 0


def test_the_model_follows_a_machine_that_slows_down() -> None:
    model = StepTimeModel()
    for step in range(400):
        size = 1 + step % 50
        model.observe(size, (10 if step < 200 else 40) * size)
    assert model.predict_us(50) == pytest.approx(2000, rel=0.05)


# --- a slope is forgotten for spread, not for time -------------------------------------------------------

SIZES = st.integers(1, 8192)


@given(
    base=st.floats(100, 50_000),
    per_token=st.floats(0.1, 500),
    seen=st.lists(SIZES, min_size=2, max_size=6, unique=True),
    alike=SIZES,
    num_alike=st.sampled_from([10, 500, 10_000]),
)
def test_any_number_of_like_steps_leaves_the_line_as_it_is(
    base: float, per_token: float, seen: list[int], alike: int, num_alike: int
) -> None:
    """An hour of decoding says nothing of a long prompt, and an hour of full steps nothing of decoding."""
    model = StepTimeModel()
    for size in [*seen, *[alike] * num_alike]:
        model.observe(size, base + per_token * size)
    for size in (1, 8, 512, 8192):
        assert model.predict_us(size) == pytest.approx(base + per_token * size, rel=1e-3)


@pytest.mark.parametrize("wide", [512, 2048])
@pytest.mark.parametrize("alike", [1, 8, 256])
@pytest.mark.parametrize("noise", [0.02, 0.05])
@pytest.mark.parametrize("seed", range(3))
def test_noise_of_like_steps_does_not_build_up_to_a_slope(
    wide: int, alike: int, noise: float, seed: int
) -> None:
    rng = random.Random(seed)
    model = StepTimeModel()
    for size in [wide, wide, 64, 3]:
        model.observe(size, 20_000 + 20 * size)
    for _ in range(5_000):
        model.observe(alike + rng.randrange(2), (20_000 + 20 * alike) * (1 + noise * rng.gauss(0, 1)))
    for size in (1, 8, 512, 2048):
        assert model.predict_us(size) == pytest.approx(20_000 + 20 * size, rel=0.25)


@given(
    factor=st.floats(0.05, 20),
    alike=SIZES,
    seen=st.lists(SIZES, min_size=2, max_size=6, unique=True),
)
def test_when_like_steps_change_the_line_goes_through_them_and_nothing_is_out_of_proportion(
    factor: float, alike: int, seen: list[int]
) -> None:
    """Slower or faster: the base is blamed, and tokens only where that would take a base below 0."""
    base, per_token = 20_000.0, 20.0
    model = StepTimeModel()
    for size in [*seen, *[alike] * 500]:
        model.observe(size, base + per_token * size)
    now = factor * (base + per_token * alike)
    for _ in range(500):
        model.observe(alike, now)
    assert model.line is not None
    assert model.predict_us(alike) == pytest.approx(now, rel=1e-3)
    assert model.line[1] == pytest.approx(min(per_token, now / alike), rel=1e-3)
    assert model.line[0] >= 0


def test_one_wide_step_that_was_slow_by_chance_is_outvoted_by_a_few_that_were_not() -> None:
    model = StepTimeModel()
    model.observe(1000, 5_000_000)
    for _ in range(1000):
        model.observe(1, 20_000)
    assert model.predict_us(1000) == pytest.approx(5_000_000, rel=0.01)
    for _ in range(10):
        model.observe(1000, 40_000)
        for _ in range(200):
            model.observe(1, 20_000)
    assert model.predict_us(1000) < 0.2 * 5_000_000
