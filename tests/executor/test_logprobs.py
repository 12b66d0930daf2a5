"""Reports on tokens: what is told of one, and that slices change nothing."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor import logprobs
from executor.inputs import Scored
from executor.plan import PromptLogprobs
from executor.rows import PromptStretch

INF = math.inf


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(-3, 3), min_size=7, max_size=7), min_size=1, max_size=5),
    data=st.data(),
)
def test_ranks_and_alternatives_are_those_of_a_plain_sort(rows: list[list[int]], data: st.DataObject) -> None:
    token_ids = data.draw(st.lists(st.integers(0, 6), min_size=len(rows), max_size=len(rows)))
    num_tops = data.draw(st.lists(st.integers(0, 9), min_size=len(rows), max_size=len(rows)))
    reports = logprobs.reports(logprobs.table_of(torch.tensor(rows).float()), token_ids, num_tops)
    for logits, token_id, num_top, report in zip(rows, token_ids, num_tops, reports, strict=True):
        order = sorted(range(7), key=lambda i: (-logits[i], i))
        assert (report.token_id, report.rank) == (token_id, 1 + order.index(token_id))
        assert report.top_token_ids == tuple(order[:num_top])
        chances = torch.tensor(logits).double().log_softmax(-1)
        assert report.logprob == pytest.approx(float(chances[token_id]))
        assert report.top_logprobs == pytest.approx([float(chances[i]) for i in order[:num_top]])


def scored(token_ids: list[int], num_top: int = 2, first_index: int = 3) -> Scored:
    return Scored(first_index, PromptStretch(9, 1, token_ids, num_top))


def score(table: np.ndarray, each: Scored) -> PromptLogprobs | None:
    return logprobs.score(each, lambda indices: torch.from_numpy(table)[indices], table.shape[1])


@pytest.mark.parametrize("slice_numbers", [1, 60, 97, 10_000])
def test_slices_change_nothing(slice_numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    table = np.random.default_rng(1).standard_normal((20, 30)).astype(np.float32)
    each = scored([int(i) for i in np.random.default_rng(2).integers(0, 30, 15)])
    whole = score(table, each)
    asked: list[int] = []

    def logits_at(indices: torch.Tensor) -> torch.Tensor:
        asked.append(len(indices))
        return torch.from_numpy(table)[indices]

    monkeypatch.setattr(logprobs, "SLICE_NUMBERS", slice_numbers)
    assert logprobs.score(each, logits_at, 30) == whole
    assert sum(asked) == 15
    assert max(asked) <= max(1, slice_numbers // 30)
    assert whole is not None
    assert [report.token_id for report in whole.tokens] == each.stretch.token_ids
    expected = torch.from_numpy(table).double().log_softmax(-1)
    for place, report in enumerate(whole.tokens):
        assert report.logprob == pytest.approx(float(expected[3 + place, report.token_id]))


def test_an_impossible_token_of_a_prompt_is_told_as_finite() -> None:
    table = np.array([[0.0, -INF, 0.0]], dtype=np.float32)
    result = score(table, scored([1], num_top=3, first_index=0))
    assert result is not None
    (report,) = result.tokens
    assert (report.logprob, report.top_token_ids) == (logprobs.IMPOSSIBLE, (0, 2))


@pytest.mark.parametrize("bad", [math.nan, INF])
def test_logits_that_are_no_numbers_have_no_report(bad: float) -> None:
    table = np.zeros((8, 4), dtype=np.float32)
    table[5, 2] = bad
    assert score(table, scored([1, 1, 1])) is None
    assert score(table, scored([1, 1])) is not None
