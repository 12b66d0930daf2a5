"""What was computed once is computed again by one call, with the same bits and from the right places."""

from pathlib import Path
from typing import Any

import pytest
import torch

from executor.kernels.library import Kind, NormCall, Operation
from executor.operations.cpu import CpuOperations
from executor.operations.tape import MOST_TAPES, Tapes
from executor.runner import ModelRunner
from tests.executor.numerics import load, logits_by_steps

torch.set_num_threads(1)

NUM_LAYERS = 2
OPERATIONS = 2 + 8 * NUM_LAYERS
"""Embedding, first norm, and eight of each layer."""
FIRST, SECOND = [1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4]


class CountingKernels:
    """Notes how many operations each call asks for."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self.counts: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def compute(self, operations: Any, count: int, is_bfloat16: bool) -> None:
        self.counts.append(count)
        self._kernels.compute(operations, count, is_bfloat16)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runner(request: pytest.FixtureRequest, tiny_folder: Path) -> ModelRunner:
    return load(tiny_folder, dtype=request.param)


@pytest.fixture
def kernels(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> CountingKernels:
    operations = runner._model._operations
    if not isinstance(operations, CpuOperations):
        pytest.skip("there are no kernels here")
    operations._tapes.forget()
    counting = CountingKernels(operations._kernels)
    monkeypatch.setattr(operations, "_kernels", counting)
    return counting


def logits(runner: ModelRunner, token_ids: list[int], seed: int, num_tokens: int = 3) -> torch.Tensor:
    """In two steps of three tokens, or six of one, on blocks chosen by `seed`."""
    steps = [[(0, num_tokens)]] * (len(token_ids) // num_tokens)
    return logits_by_steps(runner, [token_ids], steps, seed=seed)[0]


def test_the_second_step_of_a_size_is_one_call_and_the_output_head(
    runner: ModelRunner, kernels: CountingKernels
) -> None:
    logits(runner, FIRST, seed=0)
    assert kernels.counts == [1] * (OPERATIONS + 1) + [OPERATIONS, 1]


def test_a_step_by_tape_has_the_bits_of_one_that_was_not(
    runner: ModelRunner, kernels: CountingKernels
) -> None:
    first, second = logits(runner, FIRST, seed=0), logits(runner, SECOND, seed=1)
    runner._model._operations._tapes.forget()  # type: ignore[attr-defined]
    assert torch.equal(logits(runner, SECOND, seed=2), second)
    assert torch.equal(logits(runner, FIRST, seed=3), first)
    assert kernels.counts.count(OPERATIONS) == 6, "all but one before, and all but one after"


def test_buffers_that_grow_take_no_tape_with_them(runner: ModelRunner, kernels: CountingKernels) -> None:
    before = logits(runner, FIRST, seed=0)
    long = [each % 50 for each in range(400)]
    logits_by_steps(runner, [long], [[(0, 400)]])
    kernels.counts.clear()
    assert torch.equal(logits(runner, FIRST, seed=1), before)
    assert kernels.counts[0] == 1, "a tape that points to the old buffers was played"


def operation() -> tuple[Operation, NormCall]:
    call = NormCall()
    return Operation(Kind.NORM), call


def record(tapes: Tapes, shape: int) -> None:
    assert tapes.find(shape) is None
    tapes.add(*operation())
    tapes.end(torch.zeros(1))


def test_the_shapes_met_last_are_kept() -> None:
    tapes = Tapes()
    for shape in range(MOST_TAPES):
        record(tapes, shape)
    assert tapes.find(0) is not None
    record(tapes, MOST_TAPES)
    assert tapes.find(0) is not None
    assert tapes.find(1) is None


def test_a_recording_that_was_broken_off_is_not_kept() -> None:
    tapes = Tapes()
    assert tapes.find(1) is None
    tapes.add(*operation())
    record(tapes, 2)
    assert tapes.find(1) is None


def test_a_tape_that_is_played_ends_no_recording_that_was_broken_off() -> None:
    tapes = Tapes()
    record(tapes, 1)
    assert tapes.find(2) is None
    tapes.add(*operation())  # and then the step failed
    assert tapes.find(1) is not None
    tapes.end(torch.zeros(1))
    assert tapes.find(2) is None


def test_what_is_computed_beside_a_recording_is_in_no_tape() -> None:
    tapes = Tapes()
    tapes.end(torch.zeros(1))
    tapes.add(*operation())
    assert tapes.find(1) is None
