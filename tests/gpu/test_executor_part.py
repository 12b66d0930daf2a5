"""What the GPU check finds of a whole executor, on the CPU in a GPU's place."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from executor.accelerator import DeviceMemory
from executor.runner import ModelRunner
from tests.gpu import executor_part
from tests.gpu.machine import Machine, WrongError
from tests.rig.fake_device import FakeDevice

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="`python -m tests.gpu.check` is for a GPU")


def nobody(_: dict[str, Any]) -> None:
    """Nobody wants to know what was found so far."""


def test_the_sequences_with_other_tokens_are_named() -> None:
    assert executor_part.difference({1: [3], 2: [4, 5]}, {1: [3], 2: [4, 5]}) is None
    assert executor_part.difference({1: [3], 2: [4, 6]}, {1: [3], 2: [4, 5], 3: [7]}) == (
        "sequences [2, 3] got other tokens, the first [4, 6] and not [4, 5]"
    )


def test_tokens_that_depend_on_where_the_blocks_lie_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = executor_part.tokens

    def misled(runner: ModelRunner, sequences: Sequence[Any], first_block: int = 0) -> dict[int, list[int]]:
        """As if the last blocks' keys were read from somewhere else."""
        return answer(runner, sequences, first_block) | ({1: [0]} if first_block > 0 else {})

    monkeypatch.setattr(executor_part, "tokens", misled)
    with pytest.raises(
        WrongError, match=r"1 things, the first: bfloat16, last blocks.*sequences \[1\] got"
    ) as raised:
        executor_part.executor(Machine.here(60.0), nobody)
    assert raised.value.result["float32, beside the CPU"] == "the same tokens"


def test_more_memory_than_was_allowed_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_part, "tokens", lambda *_, **__: {1: [5]})
    load, memory = executor_part.loaded, FakeDevice.memory

    def almost_none(device: FakeDevice) -> DeviceMemory:
        whole = memory(device)
        return DeviceMemory(whole.total // 20, whole.total)

    def loaded(*args: Any) -> ModelRunner:
        monkeypatch.setattr(FakeDevice, "memory", memory)
        runner = load(*args)
        monkeypatch.setattr(FakeDevice, "memory", almost_none)
        return runner

    monkeypatch.setattr(executor_part, "loaded", loaded)
    with pytest.raises(WrongError, match=r"0\.95 of the memory are taken, and 0\.9 were allowed"):
        executor_part.executor(Machine(FakeDevice()), nobody)


def test_without_time_the_second_model_is_left_out() -> None:
    found = executor_part.executor(Machine.here(-1.0), nobody)
    assert found["not_run"] == ["a cache of all memory"]
