"""The part of the GPU check for the fused operations, on the CPU in Triton's interpreter."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (extra `triton`)")

from executor.operations.fused import FusedOperations
from tests.executor.interpreter import like_a_gpu
from tests.gpu.machine import Machine, WrongError
from tests.gpu.operations_part import operations
from tests.rig.fake_device import FakeDevice

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the check itself is for a GPU")


@pytest.fixture(autouse=True)
def _like_a_gpu() -> Iterator[None]:
    with like_a_gpu():
        yield


def test_all_operations_are_asked_and_near_plain_torch() -> None:
    found = operations(Machine(FakeDevice()))
    assert found["wrong"] == []
    assert list(found["worst_roundings"]["float32"]) == [
        "norm", "add", "add_norm", "normed update", "heads", "normed heads", "silu", "gelu_tanh", "experts",
    ]  # fmt: skip


def test_an_operation_that_is_off_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rotate = FusedOperations.rotate_and_store

    def off_by_little(self: FusedOperations, *args: Any, **options: Any) -> torch.Tensor:
        return rotate(self, *args, **options) * 1.0001

    monkeypatch.setattr(FusedOperations, "rotate_and_store", off_by_little)
    with pytest.raises(WrongError, match="small float32 heads: other bits"):
        operations(Machine(FakeDevice()))
