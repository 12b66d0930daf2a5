import json
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.lab.step_times import (
    OVERHEAD_SECONDS,
    PRESETS,
    Linear,
    StepTimesError,
    Work,
    from_json,
    preset,
    work_of,
)
from scheduler.core import SchedulerCore
from scheduler.plan import BatchPlan, Capacity, StepResult
from scheduler.policy import Limits
from scheduler.sequence import Request


def capacity(budget: int) -> Capacity:
    return Capacity(1000, 4, 16, budget, 4000, 1, 100)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    budget=st.integers(1, 24),
    num_steps=st.integers(1, 8),
)
def test_the_work_of_a_plan_is_that_of_its_rows_added_up(
    lengths: list[int], budget: int, num_steps: int
) -> None:
    core = SchedulerCore(Limits(window=1, prefix_caching=False))
    core.attach("e", 1, capacity(budget), 0.0)
    for index, length in enumerate(lengths):
        prompt = array("I", [index] * length)
        core.submit(Request(bytes([index]) * 16, str(index), prompt, b"", 50), now=0.0)
    for step in range(num_steps):
        before = {seq.request.key: seq.num_computed_tokens for seq in core.sequences.values()}
        plan = core.schedule("e", float(step))
        assert plan is not None
        rows = [(before[seq.request.key], n) for seq, n in zip(plan.rows, plan.num_tokens, strict=True)]
        assert work_of(plan) == Work(
            num_tokens=sum(n for _, n in rows),
            num_context_tokens=sum(start + n for start, n in rows),
            num_pairs=sum(start + i + 1 for start, n in rows for i in range(n)),
        )
        sampled = [7] * sum(plan.num_samples)
        core.update("e", StepResult(1, plan.step_id, plan.seq_ids, plan.num_samples, sampled), float(step))


def plan_of(num_rows: int, num_tokens: int, positions_sum: int = 0) -> BatchPlan:
    """Of decoding rows, and of one chunk when there are more tokens than rows."""
    counts = [1] * num_rows
    counts[-1] += num_tokens - num_rows
    rows = [None] * num_rows
    filled = [(None, num_rows - 1, counts[-1])] if counts[-1] > 1 else []
    return BatchPlan(
        1, 1, 0, [], [], list(range(num_rows)), counts, [], [], [], positions_sum, [1] * num_rows,
        rows, filled, [], [],
    )  # type: ignore[arg-type] # fmt: skip


def test_a_linear_step_costs_its_prices() -> None:
    step = Linear(base_us=100, per_token_us=10, per_row_us=1, per_context_token_us=0.5)
    assert step.seconds(plan_of(4, 20, positions_sum=80)) == pytest.approx((100 + 200 + 4 + 50) / 1e6)


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_small_step_reads_the_weights_and_a_large_one_multiplies(name: str) -> None:
    model = preset(name)
    one, few, many = (model.seconds(plan_of(1, count)) for count in (1, 8, 8000))
    weights = model.model.num_params * 2 / (model.device.bytes_per_second * model.num_devices)
    assert one > weights + OVERHEAD_SECONDS
    assert few < 1.1 * one
    assert many > 10 * one
    assert 0 < model.num_kv_tokens() < 1e6


def test_context_costs_what_its_bytes_take() -> None:
    model = preset("opt-13b-a100-40")
    short, long = (model.seconds(plan_of(32, 32, positions_sum=total)) for total in (0, 10_000))
    assert long - short == pytest.approx(10_000 * 819_200 / (0.8 * 1.555e12), rel=0.01)


def test_an_unknown_preset_is_refused_with_those_there_are() -> None:
    with pytest.raises(StepTimesError, match="no preset is named 'gpt5'; there are gpt3-175b"):
        preset("gpt5")


def test_prices_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    path.write_text(json.dumps({"base_us": 900, "per_token_us": 20.5}))
    assert from_json(path) == Linear(900, 20.5)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[]", "an object with base_us, per_token_us, per_row_us, per_context_token_us is wanted"),
        ('{"base_us": 1}', "'per_token_us' is missing"),
        ('{"base_us": 1, "per_token_us": 1, "speed": 2}', "'speed' is unknown"),
        ('{"base_us": -1, "per_token_us": 1}', "base_us is -1, a number of microseconds >= 0 is wanted"),
        ('{"base_us": "x", "per_token_us": 1}', "base_us is 'x'"),
        ('{"base_us": NaN, "per_token_us": 1}', "base_us is nan"),
        ('{"base_us": true, "per_token_us": 1}', "base_us is True"),
        ('{"base_us": 0, "per_token_us": 0}', "time would stand still"),
    ],
)
def test_a_file_of_prices_that_cannot_be_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "steps.json"
    path.write_text(text)
    with pytest.raises(StepTimesError, match=complaint):
        from_json(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StepTimesError, match=r"cannot be read from .*absent\.json"):
        from_json(tmp_path / "absent.json")
