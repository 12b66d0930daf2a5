"""Steps that are launched before the ones before them are settled, beside steps one after the other."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executor.constraints import Choice, JsonSchema, Regex
from executor.device_thread import Later
from executor.late_work import LateEpochWork
from executor.plan import BatchPlan, NewSequence, SamplingParams, StepResult
from executor.runner import ModelRunner
from executor.sequences import PlanError
from executor.work import EpochWork
from tests.executor.late import load_late
from tests.rig.fake_device import FakeDevice
from tests.rig.planning_ahead import Window2, run, table, tokens_of
from tests.rig.tiny_model import EOS_ID

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture(scope="module")
def runner(tiny_folder: Path, device: FakeDevice) -> Any:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield load_late(tiny_folder, monkeypatch, device, num_blocks=400)


some_params = st.builds(
    dict,
    max_tokens=st.integers(1, 9),
    temperature=st.sampled_from([0.0, 1.0, 1.5]),
    seed=st.integers(0, 99),
    top_p=st.sampled_from([1.0, 0.9]),
    stop_token_ids=st.sampled_from([frozenset(), frozenset(range(0, 272, 5)), frozenset(range(0, 272, 3))]),
    min_tokens=st.sampled_from([0, 0, 1]),
    logprobs=st.sampled_from([None, None, 2]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 1.0]),
    constraint=st.sampled_from([None, None, None, Regex("[a-c]{1,4}"), Choice(("ab", "abc", "zebra"))]),
    prompt_logprobs=st.sampled_from([None, None, None, 1]),
)
some_sequences = st.lists(
    st.tuples(some_params, st.lists(st.integers(0, 255), min_size=1, max_size=20), st.integers(0, 6)),
    min_size=1,
    max_size=5,
)


def without_numbers(results: list[StepResult]) -> list[StepResult]:
    return [replace(result, logprobs=(), prompt_logprobs=()) for result in results]


def numbers(results: list[StepResult]) -> list[float]:
    """Log-probabilities in their order: of the chosen tokens, then of those of prompts."""
    return [
        chances.logprob
        for result in results
        for chances in [
            *(each for _, each in result.logprobs),
            *(each for stretch in result.prompt_logprobs for each in stretch.tokens),
        ]
    ]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sequences=some_sequences,
    budget=st.sampled_from([1, 5, 64]),
    cancelled=st.sampled_from([0, 0, 4, 7]),
)
def test_late_steps_answer_every_plan_as_steps_one_after_the_other_do(
    runner: ModelRunner, sequences: list[Any], budget: int, cancelled: int
) -> None:
    """The same plans, result by result: the window is the same for both."""
    pipeline = runner.pipeline
    assert pipeline is not None
    late = run(LateEpochWork(runner, pipeline, table(runner)), sequences, 2, budget, cancelled)
    waiting = run(EpochWork(runner, table(runner)), sequences, 2, budget, cancelled)
    assert without_numbers(late) == without_numbers(waiting)
    # The rows of a ghost are computed here and not there: a batch of another size rounds otherwise.
    assert np.allclose(numbers(late), numbers(waiting), atol=1e-4)


def admitting(seq_id: int, prompt: bytes, block: int, **options: Any) -> NewSequence:
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **options})
    return NewSequence(seq_id, tuple(prompt), len(prompt), 0, (block, block + 1), params)


def late_work(runner: ModelRunner) -> LateEpochWork:
    assert runner.pipeline is not None
    return LateEpochWork(runner, runner.pipeline, table(runner))


def test_nothing_is_waited_for_between_two_launches(runner: ModelRunner, device: FakeDevice) -> None:
    driver = Window2(late_work(runner), window=3)
    device.log.clear()
    options: dict[str, Any] = {"temperature": 1.0, "repetition_penalty": 1.2, "logprobs": 3}
    driver.step([admitting(1, b"nobody waits", 0, **options)], [], 64)
    first_step = {line.removeprefix("record ") for line in device.log}
    device.log.clear()
    driver.step([], [], 64)
    # A pinned buffer is filled anew when its copy of three steps ago is done; nothing waits for the step
    # before.
    assert not {line.removeprefix("wait ") for line in device.log if line.startswith("wait")} & first_step
    assert device.log.count("bring") == 1
    driver.drain()
    assert [len(ids) for ids in tokens_of(driver.results).values()] == [2]


def test_a_constrained_row_alone_waits_for_the_step_before(runner: ModelRunner, device: FakeDevice) -> None:
    driver = Window2(late_work(runner), window=3)
    driver.step([admitting(1, b"x", 0, constraint=Regex("[ab]{3}"))], [], 64)
    device.log.clear()
    driver.step([], [], 64)
    brought = device.log.index("bring")
    waits = [index for index, line in enumerate(device.log) if line.startswith("wait")]
    assert waits
    assert max(waits) < brought  # for the step before, between forward pass and choice
    driver.drain()
    assert set(tokens_of(driver.results)[1]) <= {ord("a"), ord("b")}


def test_an_end_found_late_makes_a_ghost_of_the_row_behind_it(runner: ModelRunner) -> None:
    work = late_work(runner)
    everything = frozenset(range(runner.vocab_size))
    first = work.execute(
        BatchPlan(
            1, 1, admitted=(admitting(1, b"ab", 0, stop_token_ids=everything),), seq_ids=(1,), num_tokens=(2,)
        )
    )
    second = work.execute(BatchPlan(1, 2, 0, seq_ids=(1,), num_tokens=(1,), positions_sum=2))
    result, _ = first.finish()
    assert [each.seq_id for each in result.finished] == [1]
    result, _ = second.finish()
    assert (result.seq_ids, result.token_ids) == ((), ())
    # It is a ghost until a plan acknowledges its end, and its rows count.
    third = work.execute(BatchPlan(1, 3, 0, seq_ids=(1,), num_tokens=(1,), positions_sum=3))
    assert third.finish()[0].seq_ids == ()
    with pytest.raises(PlanError, match="not known here"):
        work.execute(BatchPlan(1, 4, 3, seq_ids=(1,), num_tokens=(1,), positions_sum=4)).finish()


def test_what_goes_wrong_comes_behind_the_results_before_it(runner: ModelRunner) -> None:
    work = late_work(runner)
    first = work.execute(BatchPlan(1, 1, admitted=(admitting(1, b"ab", 0),), seq_ids=(1,), num_tokens=(2,)))
    wrong = work.execute(BatchPlan(1, 2, 0, seq_ids=(1,), num_tokens=(1,), positions_sum=77))
    behind = work.execute(BatchPlan(1, 3, 0))
    assert first.finish()[0].seq_ids == (1,)
    with pytest.raises(PlanError, match="positions_sum"):
        wrong.finish()
    with pytest.raises(PlanError, match="the step before it failed"):
        behind.finish()


def test_a_plan_without_rows_is_answered_in_its_turn(runner: ModelRunner) -> None:
    result, timings = late_work(runner).execute(BatchPlan(1, 1)).finish()
    assert (result.step_id, result.seq_ids, timings.forward_us) == (1, (), 0)


def test_timings_are_the_devices_own(runner: ModelRunner) -> None:
    driver = Window2(late_work(runner), window=1)
    driver.step([admitting(1, b"ab", 0)], [], 64)
    outcome = driver.work.execute(BatchPlan(1, 2, 1, seq_ids=(1,), num_tokens=(1,), positions_sum=2))
    assert isinstance(outcome, Later)
    _, timings = outcome.finish()
    assert timings.total_us == timings.forward_us + timings.sample_us > 0


def test_an_end_token_and_a_constraint_that_is_done_end_it(runner: ModelRunner) -> None:
    schema = JsonSchema('{"type": "boolean"}')
    work: LateEpochWork | EpochWork
    texts = []
    for work in (late_work(runner), EpochWork(runner, table(runner))):
        driver = Window2(work, window=2)
        driver.step([admitting(1, b"true?", 0, constraint=schema, max_tokens=12)], [], 64)
        for _ in range(8):
            driver.step([], [], 64)
        driver.drain()
        texts.append(tokens_of(driver.results)[1])
    assert texts[0] == texts[1]
    assert texts[0][-1] == EOS_ID
    assert bytes(texts[0][:-1]) in {b"true", b"false"}
