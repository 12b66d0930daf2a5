import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor import sampler
from executor.plan import SamplingParams
from executor.rows import Sampled, SampleRow

torch.set_num_threads(1)

NAN, INF = math.nan, math.inf


def sample(logits: torch.Tensor, rows: list[SampleRow]) -> Sampled:
    """Leaves the logits as they are, so that they can be used again."""
    return sampler.sample(logits.clone(), rows)


def row(output_index: int = 0, masked_ids: tuple[int, ...] = (), **params: Any) -> SampleRow:
    return SampleRow(SamplingParams(max_tokens=64, **params), output_index, masked_ids)


def sample_one(logits: list[float], **params: Any) -> Sampled:
    return sample(torch.tensor([logits]), [row(**params)])


def draws(logits: list[float], count: int, **params: Any) -> list[int]:
    """Ids of `count` tokens in a row from the same logits."""
    rows = [row(output_index=index, **params) for index in range(count)]
    return sample(torch.tensor(logits).repeat(count, 1), rows).token_ids


def fixed_logits(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((num_rows, vocab_size)) * 3).float()


# --- the distribution -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.6}, [4 / 7, 3 / 7, 0, 0]),
        ({"min_p": 0.45}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"top_k": 3, "top_p": 0.75}, [4 / 7, 3 / 7, 0, 0]),  # 0.7 / 0.9 reaches top_p of what top-k left
        ({"temperature": 2.0, "min_p": 0.6}, None),
    ],
    ids=["plain", "temperature", "top_k", "top_p", "min_p", "top_k_then_top_p", "temperature_then_min_p"],
)
def test_draws_follow_the_distribution(params: dict[str, Any], expected: list[float] | None) -> None:
    if expected is None:
        roots = np.sqrt([0.4, 0.3, 0.2, 0])  # sqrt(0.1 / 0.4) is below 0.6
        expected = roots / roots.sum()
    count = 8000
    counts = np.bincount(draws(np.log([0.4, 0.3, 0.2, 0.1]).tolist(), count, seed=11, **params), minlength=4)
    likely = np.array(expected) > 0
    assert counts[~likely].sum() == 0
    wanted = np.array(expected)[likely] * count
    chi_square = float(((counts[likely] - wanted) ** 2 / wanted).sum())
    assert chi_square < 16.3  # at most 3 degrees of freedom, one in a thousand


def test_a_top_p_that_the_first_tokens_reach_exactly_needs_no_more() -> None:
    assert set(draws([0.0, 0.0, 0.0, 0.0], 200, top_p=0.5)) == {0, 1}


# --- greedy ---------------------------------------------------------------------------------------


def test_b54_temperature_zero_takes_the_most_likely_token_whatever_else_is_set() -> None:
    result = sample_one([1.0, 4.0, 3.0], temperature=0.0, top_p=0.5, top_k=2, min_p=0.1, seed=9)
    assert result.token_ids == [1]


def test_greedy_ties_go_to_the_lowest_id() -> None:
    assert sample_one([1.0, 7.0, 7.0, 7.0], temperature=0.0).token_ids == [1]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-40, 1e-10])
def test_a_tiny_temperature_is_greedy_and_finite(temperature: float) -> None:
    assert set(draws([1.0, 1.5, -2.0], 50, temperature=temperature)) == {1}


# --- off values -----------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [272, 273, 10**7, 2**31 - 1, 0, -1])
def test_b53_b54_top_k_beyond_the_vocabulary_or_off_draws_as_without(top_k: int) -> None:
    logits = fixed_logits(64, 272)
    neighbours = [row(temperature=0.0), row(top_k=1, seed=3)]
    plain = [row(seed=index) for index in range(62)]
    wide = [row(seed=index, top_k=top_k) for index in range(62)]
    expected = sample(logits, neighbours + plain).token_ids
    assert sample(logits, neighbours + wide).token_ids == expected
    assert expected[:2] == logits[:2].argmax(-1).tolist()
    assert len(set(draws(logits[0].tolist(), 200, top_k=top_k))) > 1


@pytest.mark.parametrize("top_p", [1e-300, 1e-9, 0.01])
def test_a_tiny_top_p_keeps_the_most_likely_token(top_p: float) -> None:
    assert set(draws([1.0, 2.0, 1.9], 50, top_p=top_p)) == {1}


def test_top_k_one_and_min_p_one_are_greedy_up_to_ties() -> None:
    assert set(draws([1.0, 2.0, 2.0], 50, top_k=1)) == {1}
    assert set(draws([1.0, 2.0, 2.0], 50, min_p=1.0)) == {1, 2}


# --- a row is a function of itself ----------------------------------------------------------------

sampling = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_p": st.sampled_from([0.1, 0.9, 1.0]),
        "top_k": st.sampled_from([0, 1, 5, 1000]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "logprobs": st.sampled_from([None, 0, 3]),
        "output_index": st.integers(0, 10_000),
        "masked_ids": st.sampled_from([(), (0,), (3, 7)]),
    }
)


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(sampling, min_size=2, max_size=8), logits_seed=st.integers(0, 1000))
def test_b56_b59_neighbours_never_change_a_rows_token_or_logprobs(
    rows: list[dict[str, Any]], logits_seed: int
) -> None:
    logits = fixed_logits(len(rows), 64, logits_seed)
    together = sample(logits, [row(**params) for params in rows])
    for index, params in enumerate(rows):
        alone = sample(logits[index : index + 1], [row(**params)])
        assert alone.token_ids == together.token_ids[index : index + 1]
        assert alone.logprobs == together.logprobs[index : index + 1]


def test_b60_the_same_seed_and_place_draw_the_same_token_again() -> None:
    logits = fixed_logits(1, 272)[0].tolist()
    assert draws(logits, 50, seed=1, temperature=1.2) == draws(logits, 50, seed=1, temperature=1.2)


def test_b62_other_seeds_and_other_places_draw_other_tokens() -> None:
    logits = [0.0] * 1000
    assert len(set(draws(logits, 100, seed=1))) > 80
    assert draws(logits, 30, seed=1) != draws(logits, 30, seed=2)


# --- masks and errors -----------------------------------------------------------------------------


def test_b58_masked_ids_are_not_chosen_even_when_they_are_most_likely() -> None:
    logits = torch.tensor([[1.0, 100.0, 2.0], [1.0, 100.0, 2.0]])
    rows = [row(temperature=0.0, masked_ids=(1,)), row(temperature=0.0)]
    assert sample(logits, rows).token_ids == [2, 1]
    assert set(draws([1.0, 100.0, 2.0], 50, masked_ids=(1,))) == {0, 2}


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_errs_alone(bad: float, temperature: float) -> None:
    clean = fixed_logits(3, 16)
    dirty = clean.clone()
    dirty[1, 5] = bad
    rows = [row(temperature=temperature, seed=index, top_p=0.9, logprobs=2) for index in range(3)]
    expected, result = sample(clean, rows), sample(dirty, rows)
    assert result.errors == [None, sampler.NOT_FINITE, None]
    assert result.logprobs[1] is None
    for index in (0, 2):
        assert result.token_ids[index] == expected.token_ids[index]
        assert result.logprobs[index] == expected.logprobs[index]


def test_a_nan_behind_a_mask_is_still_an_error_where_it_reaches_the_choice() -> None:
    result = sample_one([1.0, NAN, 2.0], masked_ids=(2,))
    assert result.errors == [sampler.NOT_FINITE]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_every_token_masked_errs(temperature: float) -> None:
    result = sample_one([1.0, 2.0], temperature=temperature, masked_ids=(0, 1))
    assert result.errors == [sampler.ALL_MASKED]


def test_impossible_tokens_are_never_drawn() -> None:
    assert set(draws([-INF, 0.0, -INF, 0.0], 100)) == {1, 3}


def test_the_largest_uniform_still_draws_a_possible_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "uniforms", lambda seeds, indices: np.full(len(seeds), 1 - 2**-53))
    assert sample_one([0.0, 0.0, -INF]).token_ids == [1]
    assert sample_one([0.1] * 7 + [-INF]).token_ids == [6]


def test_the_smallest_uniform_draws_the_first_possible_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "uniforms", lambda seeds, indices: np.zeros(len(seeds)))
    assert sample_one([-INF, 0.0, 0.0]).token_ids == [1]


# --- log-probabilities ----------------------------------------------------------------------------


def test_b68_logprobs_rank_and_order_of_fixed_logits() -> None:
    logits = [9.0, 8.0, 7.0, 6.0]
    first = sample_one(logits, temperature=0.0, logprobs=2).logprobs[0]
    assert (first.token_id, first.rank, first.top_token_ids) == (0, 1, (0, 1))
    assert first.logprob == pytest.approx(-0.4402, abs=1e-4)
    assert first.top_logprobs == pytest.approx((-0.4402, -1.4402), abs=1e-4)
    last = sample_one(logits, temperature=0.0, masked_ids=(0, 1, 2), logprobs=2).logprobs[0]
    assert (last.token_id, last.rank, last.top_token_ids) == (3, 4, (0, 1))
    assert last.logprob == pytest.approx(-3.4402, abs=1e-4)


def test_b69_zero_alternatives_report_the_chosen_token() -> None:
    report = sample_one([9.0, 8.0], temperature=0.0, logprobs=0).logprobs[0]
    assert (report.top_token_ids, report.top_logprobs) == ((), ())
    assert report.logprob == pytest.approx(-0.3133, abs=1e-4)
    assert sample_one([9.0, 8.0], temperature=0.0).logprobs == [None]


@pytest.mark.parametrize(
    "params", [{"top_p": 0.5}, {"top_p": 0.01}, {"temperature": 0.1}, {"temperature": 2.0}]
)
def test_b67_temperature_and_filters_do_not_change_reported_logprobs(params: dict[str, Any]) -> None:
    logits = fixed_logits(1, 272)[0].tolist()
    plain = sample_one(logits, logprobs=3).logprobs[0]
    report = sample_one(logits, logprobs=3, **params).logprobs[0]
    assert report.top_token_ids == plain.top_token_ids
    assert report.top_logprobs == plain.top_logprobs
    assert len(report.top_token_ids) == 3


def test_b66_impossible_alternatives_are_left_out() -> None:
    report = sample_one([-INF, 1.0, -INF, 2.0], temperature=0.0, logprobs=4).logprobs[0]
    assert report.top_token_ids == (3, 1)
    assert all(math.isfinite(logprob) for logprob in report.top_logprobs)


def test_ties_rank_by_the_lower_id() -> None:
    report = sample_one([1.0, 3.0, 3.0, 3.0], temperature=0.0, masked_ids=(1,), logprobs=3).logprobs[0]
    assert (report.token_id, report.rank, report.top_token_ids) == (2, 2, (1, 2, 3))


def test_more_alternatives_than_tokens_give_all_tokens() -> None:
    assert sample_one([1.0, 2.0], logprobs=20).logprobs[0].top_token_ids == (1, 0)


@settings(max_examples=50, deadline=None)
@given(
    logits=st.lists(st.integers(-4, 4), min_size=1, max_size=12),
    num_top=st.integers(0, 12),
)
def test_alternatives_are_the_k_most_likely_in_order(logits: list[int], num_top: int) -> None:
    report = sample_one([float(value) for value in logits], temperature=0.0, logprobs=num_top).logprobs[0]
    order = sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))
    assert report.top_token_ids == tuple(order[:num_top])
    assert report.rank == 1 + order.index(report.token_id)


# --- candidates -----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    levels=st.integers(1, 40),
    rows=st.lists(sampling, min_size=1, max_size=6),
    num_candidates=st.integers(1, 80),
    seed=st.integers(0, 1000),
)
def test_sorting_few_candidates_first_keeps_the_same_tokens(
    levels: int, rows: list[dict[str, Any]], num_candidates: int, seed: int
) -> None:
    weights = torch.from_numpy(np.random.default_rng(seed).integers(1, levels + 1, (len(rows), 64)) / levels)
    params = [row(**options) for options in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "NUM_CANDIDATES", 64)
        whole = sampler.filtered(weights.float(), params)
        patch.setattr(sampler, "NUM_CANDIDATES", num_candidates)
        assert torch.equal(sampler.filtered(weights.float(), params), whole)


def test_a_flat_distribution_over_a_large_vocabulary_keeps_more_than_the_candidates() -> None:
    weights = torch.ones(2, 3 * sampler.NUM_CANDIDATES)
    kept = sampler.filtered(weights, [row(top_p=0.5), row(top_k=2 * sampler.NUM_CANDIDATES)])
    assert kept[0].nonzero().squeeze(-1).tolist() == list(range(3 * sampler.NUM_CANDIDATES // 2))
    assert kept[1].nonzero().squeeze(-1).tolist() == list(range(2 * sampler.NUM_CANDIDATES))


@pytest.mark.parametrize("top_k", [0, 40, 1500])
@pytest.mark.parametrize("top_p", [1.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("ties", [False, True])
def test_the_filters_leave_what_sorting_the_whole_vocabulary_leaves(
    top_k: int, top_p: float, ties: bool
) -> None:
    logits = fixed_logits(4, 5003) / 3
    weights = torch.exp(logits.round() if ties else logits).double()
    rows = [row(output_index=index, top_k=top_k, top_p=top_p) for index in range(4)]
    for kept, own in zip(sampler.filtered(weights, rows).numpy(), weights.numpy(), strict=True):
        order = np.lexsort((np.arange(own.size), -own))[: top_k or own.size]
        mass = np.cumsum(own[order])
        order = order if top_p == 1 else order[mass - own[order] < top_p * mass[-1]]
        assert set(np.flatnonzero(kept)) == set(order)
