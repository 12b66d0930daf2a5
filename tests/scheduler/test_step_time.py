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
