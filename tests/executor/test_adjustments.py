"""Bias, penalties and lists, against transformers where it defines the same, and by their own laws."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from executor import sampler
from executor.adjustments import SeenTokens, adjustment_of
from executor.plan import SamplingParams
from executor.rows import Sampled, SampleRow
from executor.stopping import StopRule
from tests.executor.test_operations import operations, spec

torch.set_num_threads(1)

VOCAB_SIZE = 40
PROMPT, OUTPUT = [3, 3, 7, 11, 20], [5, 7, 5, 5, 30]
SEEN = [*PROMPT, *OUTPUT]
LOGITS = (np.random.default_rng(5).standard_normal(VOCAB_SIZE) * 2).astype(np.float32)


def row(
    output_index: int = 0,
    prompt: Sequence[int] = PROMPT,
    output: Sequence[int] = OUTPUT,
    masked_ids: tuple[int, ...] = (),
    **params: Any,
) -> SampleRow:
    sampling = SamplingParams(max_tokens=64, **params)
    return SampleRow(sampling, output_index, masked_ids, adjustment_of(sampling, prompt, output))


def adjusted(*rows: SampleRow, logits: np.ndarray = LOGITS) -> np.ndarray:
    """What each row may choose from, having started from the same logits."""
    table = torch.from_numpy(logits).repeat(len(rows), 1)
    sampler.adjust(table, rows)
    return table.numpy()


def by_transformers(*processors: Any) -> np.ndarray:
    scores = LogitsProcessorList(processors)(torch.tensor([SEEN]), torch.from_numpy(LOGITS)[None].clone())
    return scores[0].numpy()


# --- one value at a time --------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [0.5, 1.3, 100.0])
def test_repetition_is_transformers_over_prompt_and_output(penalty: float) -> None:
    expected = by_transformers(RepetitionPenaltyLogitsProcessor(penalty))
    assert np.allclose(adjusted(row(repetition_penalty=penalty))[0], expected, rtol=1e-6)


def test_bias_comes_before_repetition_as_in_transformers() -> None:
    bias = {3: 4.0, 5: -6.5, 39: 100.0}
    expected = by_transformers(
        SequenceBiasLogitsProcessor([[[token_id], value] for token_id, value in bias.items()]),
        RepetitionPenaltyLogitsProcessor(1.7),
    )
    result = adjusted(row(repetition_penalty=1.7, logit_bias=tuple(bias.items())))[0]
    assert np.allclose(result, expected, rtol=1e-6)


def test_presence_counts_a_token_once_and_frequency_each_time() -> None:
    counts = np.bincount(OUTPUT, minlength=VOCAB_SIZE)
    presence = adjusted(row(presence_penalty=1.5))[0]
    assert np.allclose(presence, LOGITS - 1.5 * (counts > 0), atol=1e-6)
    frequency = adjusted(row(frequency_penalty=-0.5))[0]
    assert np.allclose(frequency, LOGITS + 0.5 * counts, atol=1e-6)
    everything = adjusted(row(presence_penalty=0.25, frequency_penalty=2, repetition_penalty=1.2))[0]
    repeated = by_transformers(RepetitionPenaltyLogitsProcessor(1.2))
    assert np.allclose(everything, repeated - 0.25 * (counts > 0) - 2 * counts, atol=1e-5)


def test_b57_presence_and_frequency_do_not_count_the_prompt_and_repetition_does() -> None:
    first = row(prompt=[7] * 30, output=[], presence_penalty=2, frequency_penalty=2)
    repeated = row(prompt=[7] * 30, output=[], repetition_penalty=1.5)
    results = adjusted(first, repeated)
    assert np.array_equal(results[0], LOGITS)
    changed = results[1] != LOGITS
    assert np.flatnonzero(changed).tolist() == [7]
    assert results[1][7] == pytest.approx(LOGITS[7] * 1.5 if LOGITS[7] < 0 else LOGITS[7] / 1.5)


def test_allowed_banned_and_masked_tokens_are_excluded_together() -> None:
    result = adjusted(
        row(allowed_token_ids=frozenset({1, 2, 3}), banned_token_ids=frozenset({2}), masked_ids=(3,)),
        row(banned_token_ids=frozenset({0, 39})),
        row(masked_ids=(5,)),
    )
    assert [np.flatnonzero(np.isfinite(each)).tolist() for each in result] == [
        [1],
        list(range(1, 39)),
        [*range(5), *range(6, 40)],
    ]
    assert result[0][1] == LOGITS[1]


def test_a_bias_of_a_hundred_wins_and_of_minus_a_hundred_loses() -> None:
    rows = [row(temperature=0.0, logit_bias=((17, 100.0),))]
    rows += [row(temperature=0.0, logit_bias=((int(LOGITS.argmax()), -100.0),))]
    table = torch.from_numpy(LOGITS).repeat(2, 1)
    assert sampler.sample(table, rows).token_ids == [17, int(np.argsort(LOGITS)[-2])]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nothing_left_errs_alone(temperature: float) -> None:
    table = torch.from_numpy(LOGITS).repeat(2, 1)
    rows = [
        row(temperature=temperature, allowed_token_ids=frozenset({4}), masked_ids=(4,)),
        row(temperature=0.0),
    ]
    sampled = sampler.sample(table, rows)
    assert sampled.errors == [sampler.ALL_MASKED, None]
    assert sampled.token_ids[1] == LOGITS.argmax()


def test_b58_an_end_token_with_a_large_bias_is_held_back_by_min_tokens_and_by_nothing_more() -> None:
    rule = StopRule(end_token_ids=frozenset({9}), min_tokens=4, max_tokens=32, max_seq_len=100)
    chosen = []
    for index in range(6):
        table = torch.from_numpy(LOGITS)[None].clone()
        wish = row(
            index, temperature=0.0, logit_bias=((9, 100.0),), masked_ids=rule.masked_ids(index), output=[]
        )
        chosen += sampler.sample(table, [wish]).token_ids
    assert [token_id == 9 for token_id in chosen] == [False] * 4 + [True] * 2


def test_b66_alternatives_are_of_the_raw_distribution_and_finite_whatever_is_excluded() -> None:
    table = torch.from_numpy(LOGITS).repeat(3, 1)
    rows = [
        row(temperature=0.0, logprobs=5),
        row(temperature=0.0, logprobs=5, allowed_token_ids=frozenset({1, 2})),
        row(temperature=0.0, logprobs=5, logit_bias=tuple((i, -100.0) for i in range(39)), top_k=1),
    ]
    plain, limited, biased = sampler.sample(table, rows).logprobs
    assert plain is not None
    assert limited is not None
    assert biased is not None
    assert plain.top_token_ids == limited.top_token_ids == biased.top_token_ids
    assert plain.top_logprobs == limited.top_logprobs == biased.top_logprobs
    assert (limited.token_id in {1, 2}, biased.token_id) == (True, 39)
    expected = torch.from_numpy(LOGITS).double().log_softmax(-1)
    for report in (limited, biased):
        assert report.logprob == pytest.approx(float(expected[report.token_id]))
        assert all(math.isfinite(value) for value in report.top_logprobs)


# --- laws -----------------------------------------------------------------------------------------

tokens = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=60)
wishes = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([1.0, 0.5, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 2.0]),
        "frequency_penalty": st.sampled_from([0.0, -1.05]),
        "logit_bias": st.sampled_from([(), ((1, 5.0), (8, -100.0))]),
        "allowed_token_ids": st.sampled_from([frozenset(), frozenset({1, 2, 8, 33})]),
        "banned_token_ids": st.sampled_from([frozenset(), frozenset({2, 39})]),
        "temperature": st.sampled_from([0.0, 0.9]),
        "logprobs": st.sampled_from([None, 2]),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "prompt": tokens,
        "output": tokens,
        "masked_ids": st.sampled_from([(), (0, 5)]),
    }
)


@settings(max_examples=60, deadline=None)
@given(prompt=tokens, output=tokens, cut=st.integers(0, 60))
def test_seen_tokens_are_the_same_built_at_once_or_token_by_token(
    prompt: list[int], output: list[int], cut: int
) -> None:
    grown = SeenTokens(prompt, output[:cut])
    for token_id in output[cut:]:
        grown.add(token_id)
    for seen in (grown, SeenTokens(prompt, output)):
        assert sorted(seen.ids.tolist()) == sorted({*prompt, *output})
        counts = dict(zip(seen.ids.tolist(), seen.counts.tolist(), strict=True))
        assert counts == {token_id: output.count(token_id) for token_id in counts}


@pytest.mark.parametrize("penalty", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_behind_guesses_it_is_what_it_is_once_they_were_taken_and_the_present_stays(penalty: str) -> None:
    params = SamplingParams(max_tokens=64, **{penalty: 1.5})  # type: ignore[arg-type]  # all of one type
    now = row(**{penalty: 1.5})
    before = adjusted(now)
    assert now.adjustment is not None
    guessed = now.adjustment
    for end, token_id in enumerate((5, 39, 39), start=1):
        guessed = guessed.after(token_id)
        told = adjustment_of(params, PROMPT, [*OUTPUT, 5, 39, 39][: len(OUTPUT) + end])
        behind = adjusted(*(dataclasses.replace(now, adjustment=each) for each in (guessed, told)))
        np.testing.assert_array_equal(behind[0], behind[1])
    np.testing.assert_array_equal(adjusted(now), before)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(wishes, min_size=2, max_size=6))
def test_b56_a_rows_wishes_never_change_its_neighbours(rows: list[dict[str, Any]]) -> None:
    together = sampler.sample(torch.from_numpy(LOGITS).repeat(len(rows), 1), [row(**each) for each in rows])
    for index, each in enumerate(rows):
        alone = sampler.sample(torch.from_numpy(LOGITS)[None].clone(), [row(**each)])
        assert alone.errors == together.errors[index : index + 1]
        if alone.errors[0] is None:
            assert alone.token_ids == together.token_ids[index : index + 1]
        assert alone.logprobs == together.logprobs[index : index + 1]


def test_a_row_without_wishes_keeps_its_bits_and_its_way() -> None:
    plain = row(seed=1)
    assert plain.adjustment is None
    result = adjusted(row(repetition_penalty=2.0, banned_token_ids=frozenset({1})), plain)
    assert np.array_equal(result[1], LOGITS)


# --- the distribution over 20,000 draws -----------------------------------------------------------

COUNT = 20_000


def expected_shares(params: dict[str, Any]) -> np.ndarray:
    """By transformers' processors, in its order; by formula what it does not have."""
    steps: list[Any] = []
    if "logit_bias" in params:
        steps.append(SequenceBiasLogitsProcessor([[[i], bias] for i, bias in params["logit_bias"]]))
    if "repetition_penalty" in params:
        steps.append(RepetitionPenaltyLogitsProcessor(params["repetition_penalty"]))
    excluded = set(params.get("banned_token_ids", ())) | set(params.get("masked_ids", ()))
    if "allowed_token_ids" in params:
        excluded |= set(range(VOCAB_SIZE)) - params["allowed_token_ids"]
    if excluded:
        steps.append(SuppressTokensLogitsProcessor(sorted(excluded)))
    if "temperature" in params:
        steps.append(TemperatureLogitsWarper(params["temperature"]))
    if "top_k" in params:
        steps.append(TopKLogitsWarper(params["top_k"]))
    if "top_p" in params:
        steps.append(TopPLogitsWarper(params["top_p"]))
    if "min_p" in params:
        steps.append(MinPLogitsWarper(params["min_p"]))
    counts = np.bincount(OUTPUT, minlength=VOCAB_SIZE)
    scores = by_transformers(*steps)
    scores -= params.get("frequency_penalty", 0) * counts + params.get("presence_penalty", 0) * (counts > 0)
    return torch.from_numpy(scores).double().softmax(-1).numpy()


@pytest.mark.parametrize("kind", ["plain", "avx2"])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.8},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.6},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.8},
        {"frequency_penalty": -0.8, "presence_penalty": -1.0},
        {"logit_bias": ((2, 3.0), (7, -2.0))},
        {"allowed_token_ids": frozenset({0, 1, 7, 30})},
        {"banned_token_ids": frozenset(range(0, 40, 3))},
        {"masked_ids": (int(LOGITS.argmax()),)},
        {"logit_bias": ((2, 3.0),), "repetition_penalty": 1.3, "temperature": 0.8, "top_k": 12, "top_p": 0.9},
    ],
    ids=lambda params: "_".join(params) or "nothing",
)
def test_20000_draws_follow_the_distribution(kind: str, params: dict[str, Any]) -> None:
    wish = row(seed=23, **params)
    rows = [dataclasses.replace(wish, output_index=index) for index in range(COUNT)]
    table = torch.from_numpy(LOGITS).repeat(COUNT, 1)
    sampled: Sampled = sampler.sample(table, rows, operations(kind, spec()).choose)
    assert not any(sampled.errors)
    counts = np.bincount(sampled.token_ids, minlength=VOCAB_SIZE)
    wanted = expected_shares(params) * COUNT
    assert counts[wanted == 0].sum() == 0
    # Rare tokens are looked at together: chi-square wants five expected draws in each class.
    rare, common = (wanted > 0) & (wanted < 5), wanted >= 5
    seen, due = np.append(counts[common], counts[rare].sum()), np.append(wanted[common], wanted[rare].sum())
    seen, due = seen[due > 0.5], due[due > 0.5]
    chi_square = float(((seen - due) ** 2 / due).sum())
    freedom = max(1, len(due) - 1)
    # Wilson and Hilferty: one in ten thousand for so many degrees of freedom. The seed fixes the draws.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square < limit
