"""The part of the GPU check for filters and alternatives, on the CPU in Triton's interpreter."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed (extra `triton`)")

from executor import late_logprobs
from executor.operations import fused
from executor.operations.fused import FusedOperations
from tests.executor.interpreter import like_a_gpu
from tests.gpu import filters_part
from tests.gpu.machine import Machine, WrongError
from tests.rig.fake_device import FakeDevice

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the check itself is for a GPU")


@pytest.fixture(autouse=True)
def _like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fused, "FILTER_TILE", (2, 256))
    with like_a_gpu():
        yield


def nobody(_: dict[str, Any]) -> None:
    """Nobody wants to know what was found so far."""


def test_what_is_selected_is_what_a_sort_leaves_and_both_are_timed() -> None:
    found = filters_part.filters(Machine(FakeDevice()), nobody)
    assert (found["wrong"], found["at_the_boundary"], found["not_run"]) == ([], 0, [])
    assert list(found["ms"]["1 rows of 300"]) == [
        "top-p, selected", "top-p, sorted", "top-k and top-p, selected", "top-k and top-p, sorted",
        "rank and 5 alternatives, selected", "all in order, sorted",
    ]  # fmt: skip


def one_token_less(self: FusedOperations, weights: Tensor, rows: Tensor, filters: Tensor) -> None:
    """The least likely of those that stay goes too."""
    fused_kernel(self, weights, rows, filters)
    kept = weights[rows]
    least = kept.where(kept > 0, torch.inf).argmin(dim=-1)
    weights[rows, least] = 0.0


fused_kernel = FusedOperations.filter_rows


def test_a_cut_that_is_off_by_one_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters_part, "SMALL", ((1, 300),))
    monkeypatch.setattr(FusedOperations, "filter_rows", one_token_less)
    with pytest.raises(WrongError, match="other tokens: 1 rows of 300, likely ones, row 0"):
        filters_part.filters(Machine(FakeDevice()), nobody)


def test_alternatives_in_another_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    report_parts = late_logprobs.report_parts

    def ties_reversed(table: Tensor, token_ids: Tensor, most: int) -> dict[str, Tensor]:
        parts = report_parts(table, token_ids, most)
        return parts | {"top_ids": parts["top_ids"].flip(-1)}

    monkeypatch.setattr(late_logprobs, "report_parts", ties_reversed)
    here = Machine(FakeDevice())
    assert len(list(filters_part.other_alternatives(here, 2, 300))) == 5


def test_only_at_the_boundary_may_a_token_stay_that_a_sort_removes() -> None:
    weights = torch.tensor([1.0, 0.5, 0.25, 0.25])
    three, two = torch.tensor([1.0, 0.5, 0.25, 0.0]), torch.tensor([1.0, 0.5, 0.0, 0.0])
    may_differ = filters_part.is_at_the_boundary
    # Before the third there are three quarters of the whole.
    assert may_differ(weights, three, two, 4, 0.75)
    assert may_differ(weights, two, three, 4, 0.75)
    for top_p in (0.74, 0.76, 1.0):
        assert not may_differ(weights, three, two, 4, top_p)
        assert not may_differ(weights, two, three, 4, top_p)
    assert not may_differ(weights, three, two, 2, 0.75), "top-k is exact"
    assert not may_differ(weights, three * 1.5, two, 4, 0.75), "what stays keeps its weight"
