"""What top-k, top-p and min-p leave, by our kernel in Triton's interpreter and by a sort in plain torch.

Both are held against the rule in fractions. Of its numbers only mass is rounded: where the mass before a
token is as good as top_p of the whole, sums of another order may differ on the token, and nowhere else.
"""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed (extra `triton`)")

from executor.attention.reference import ReferenceAttention
from executor.operations import fused
from executor.operations.fused import FusedOperations
from executor.operations.plain import PlainOperations
from executor.plan import SamplingParams
from tests.executor.attending import spec
from tests.executor.interpreter import like_a_gpu
from tests.executor.late import load_late
from tests.executor.test_captured import decode_step
from tests.executor.test_late_sampler import large_rows, sample_late

torch.set_num_threads(1)

SLACK: Final = Fraction(1, 10**12)
"""Where the mass before a token, as a share of the whole, is as near to top_p, either answer is right."""
SMALL_TILE: Final = (2, 64)
"""So that rows of the tests are longer than one."""


@pytest.fixture(scope="module", autouse=True)
def _like_a_gpu() -> Iterator[None]:
    with like_a_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "FILTER_TILE", SMALL_TILE)
        yield


def filtered(
    kind: type[PlainOperations], weights: Tensor, rows: list[int], filters: list[tuple[float, float, float]]
) -> Tensor:
    """What an operation leaves of `weights`; `filters` are top-k (0: off), top-p and min-p of `rows`."""
    vocab_size = weights.shape[1]
    own = [(top_k if 0 < top_k < vocab_size else vocab_size, top_p, min_p) for top_k, top_p, min_p in filters]
    left = weights.clone()
    operations = kind(ReferenceAttention(spec()))
    operations.filter_rows(left, torch.tensor(rows), torch.tensor(own, dtype=torch.float64))
    return left


def by_rule(weights: Tensor, top_k: int, top_p: float, min_p: float) -> tuple[set[int], set[int]]:
    """The tokens with any weight that stay, and those of which sums that were rounded cannot be sure."""
    values = weights.tolist()
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))[: top_k or None]
    whole = sum(Fraction(values[i]) for i in order)
    before = Fraction(0)
    stay, unsure = {order[0]} if values[order[0]] > 0 else set(), set()
    for place, token_id in enumerate(order):
        value = values[token_id]
        if place and value > 0 and value >= min_p * values[order[0]]:
            distance = before - Fraction(top_p) * whole
            if top_p < 1 and abs(distance) <= SLACK * whole:
                unsure.add(token_id)
            elif top_p >= 1 or distance < 0:
                stay.add(token_id)
        before += Fraction(value)
    return stay, unsure


def assert_by_rule(left: Tensor, weights: Tensor, own: tuple[int, float, float]) -> None:
    stay, unsure = by_rule(weights, *own)
    kept = set(left.nonzero().squeeze(-1).tolist())
    assert stay <= kept <= stay | unsure
    assert left[list(kept)].equal(weights[list(kept)])


def row_of(kind: str, size: int, rng: np.random.Generator) -> np.ndarray:
    """Weights, the largest of which is 1 where they are likelihoods."""
    logits = rng.standard_normal(size) * 3
    if kind == "ties":
        logits = np.round(logits)
    if kind in {"many", "ties"}:
        return np.exp(logits - logits.max())
    if kind == "equal":
        return np.full(size, rng.choice([1.0, 0.1]))
    if kind == "one":
        return np.where(np.arange(size) == rng.integers(size), 1.0, 0.0)
    if kind == "mostly zeros":
        return np.where(rng.random(size) < 0.8, 0.0, np.exp(logits - logits.max()))
    if kind == "denormal":
        weights = rng.integers(0, 4, size) * 2.0**-149
        weights[rng.integers(size)] = rng.choice([1.0, 2.0**-148])
        return weights
    assert kind == "eighths"
    return rng.integers(0, 9, size) / 8


row_kinds = st.sampled_from(["many", "many", "ties", "equal", "one", "mostly zeros", "denormal", "eighths"])
top_ks = st.sampled_from([0, 0, 0, 1, 2, 7, 50, 10_000])
top_ps = st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.999, 1e-300, 1e-3, 1 - 2.0**-53])
min_ps = st.sampled_from([0.0, 0.0, 0.0, 0.05, 0.5, 1.0])
filters_of_a_row = st.tuples(top_ks, top_ps, min_ps)
some_rows = st.tuples(
    st.lists(st.tuples(row_kinds, st.one_of(st.none(), filters_of_a_row)), max_size=2),
    st.tuples(row_kinds, filters_of_a_row),
).map(lambda rows: [*rows[0], rows[1]])


@settings(max_examples=20)
@given(asked=some_rows, size=st.sampled_from([1, 2, 50, 128, 129, 300]), seed=st.integers(0, 2**32 - 1))
def test_what_stays_is_what_the_rule_says_and_rows_without_filters_are_left_alone(
    asked: list[tuple[str, tuple[int, float, float] | None]], size: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    weights = torch.from_numpy(np.stack([row_of(kind, size, rng) for kind, _ in asked])).float()
    rows = [index for index, (_, own) in enumerate(asked) if own is not None]
    filters = [own for _, own in asked if own is not None]
    for kind in (FusedOperations, PlainOperations):
        left = filtered(kind, weights, rows, filters)
        for index, (_, own) in enumerate(asked):
            if own is None:
                assert left[index].equal(weights[index])
            else:
                assert_by_rule(left[index], weights[index], own)


@settings(max_examples=20)
@given(
    levels=st.integers(1, 16),
    size=st.sampled_from([1, 5, 64, 150]),
    top_k=top_ks,
    top_p=st.sampled_from([1.0, 0.125, 0.25, 0.5, 0.75]),
    min_p=st.sampled_from([0.0, 0.0, 0.25, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_where_sums_are_exact_the_sort_and_the_kernel_leave_the_same(
    levels: int, size: int, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    """A token before which there is just top_p of the whole is one too many."""
    numbers = np.random.default_rng(seed).integers(0, levels + 1, (1, size)) / 16
    weights = torch.from_numpy(numbers).float()
    found, expected = (
        filtered(kind, weights, [0], [(top_k, top_p, min_p)]) for kind in (FusedOperations, PlainOperations)
    )
    assert found.equal(expected)


TIES: Final = [0.25] * 3 + [1.0] * 2 + [0.25] * 4 + [0.5] * 2 + [0.0] * 2
"""Sums of these are exact; the whole is 4.75."""
DECIDED: Final[list[tuple[list[float], tuple[int, float, float], list[int]]]] = [
    ([1.0] * 5, (0, 0.5, 0.0), [0, 1, 2]),
    ([1.0] * 4, (0, 0.5, 0.0), [0, 1]),  # what is before the third is just half
    ([1.0] * 5, (3, 1.0, 0.0), [0, 1, 2]),
    ([1.0] * 5, (4, 0.25, 0.0), [0]),  # of what top-k left
    ([0.3] * 5, (0, 1.0, 1.0), [0, 1, 2, 3, 4]),
    (TIES, (1, 1.0, 0.0), [3]),
    (TIES, (2, 1.0, 0.0), [3, 4]),
    (TIES, (3, 1.0, 0.0), [3, 4, 9]),
    (TIES, (6, 1.0, 0.0), [0, 1, 3, 4, 9, 10]),
    (TIES, (12, 1.0, 0.0), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
    (TIES, (6, 0.5, 0.0), [3, 4]),
    (TIES, (7, 0.875, 0.0), [0, 1, 3, 4, 9, 10]),  # 3.25 are before the second of the last ties, 3.28 wanted
    (TIES, (0, 1.0, 0.25), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
    (TIES, (0, 1.0, 0.26), [3, 4, 9, 10]),
    (TIES, (0, 0.75, 0.0), [0, 1, 2, 3, 4, 9, 10]),
    (TIES, (0, 1e-300, 0.0), [3]),
    (TIES, (6, 0.9, 0.5), [3, 4, 9, 10]),
    ([0.0, 2.0**-148, 2.0**-149, 2.0**-148], (0, 1e-300, 0.0), [1]),
    ([0.0, 2.0**-148, 2.0**-149, 2.0**-148], (0, 0.5, 0.0), [1, 3]),
    ([0.0, 2.0**-148, 2.0**-149, 2.0**-148], (2, 1.0, 0.0), [1, 3]),
    ([2.0**-149, 1.0, 1.0, 2.0**-149], (3, 1.0, 0.0), [0, 1, 2]),
]
"""Weights, filters, and which tokens stay: the end is before, among and behind ties."""


@pytest.mark.parametrize("kind", [FusedOperations, PlainOperations])
def test_where_the_cut_falls_among_ties(kind: type[PlainOperations]) -> None:
    behind = 122  # so that the ties lie on both sides of a tile's end, at 128
    size = max(len(weights) for weights, _, _ in DECIDED)
    weights = torch.zeros(len(DECIDED), behind + size)
    for row, (own, _, _) in enumerate(DECIDED):
        weights[row, behind : behind + len(own)] = torch.tensor(own)
    left = filtered(kind, weights, list(range(len(DECIDED))), [own for _, own, _ in DECIDED])
    for row, (_, own, stay) in enumerate(DECIDED):
        assert (row, (left[row].nonzero().squeeze(-1) - behind).tolist()) == (row, stay), own


def test_a_row_is_filtered_alike_alone_and_among_others() -> None:
    weights = torch.from_numpy(np.stack([row_of("many", 300, np.random.default_rng(i)) for i in range(3)]))
    own = [(0, 0.9, 0.0), (40, 0.7, 0.01), (7, 1.0, 0.0)]
    together = filtered(FusedOperations, weights.float(), [2, 0, 1], own)
    for place, row in enumerate([2, 0, 1]):
        alone = filtered(FusedOperations, weights[row : row + 1].float(), [0], [own[place]])
        assert alone[0].equal(together[row])


def test_a_large_vocabulary_in_tiles_as_on_a_gpu_is_filtered_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "FILTER_TILE", (4, 2048))
    logits, rows = large_rows(9000)
    operations = FusedOperations(ReferenceAttention(spec()))
    by_kernel = sample_late(logits, rows, [0] * 6, [False] * 6, operations.filter_rows)
    assert by_kernel == sample_late(logits, rows, [0] * 6, [False] * 6)


def test_a_pipeline_filters_by_the_kernel_which_is_built_before_the_first_step(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Tensor] = []
    filter_rows = FusedOperations.filter_rows

    def seen(self: FusedOperations, weights: Tensor, rows: Tensor, filters: Tensor) -> None:
        launched.append(weights)
        filter_rows(self, weights, rows, filters)

    monkeypatch.setattr(FusedOperations, "filter_rows", seen)
    monkeypatch.setattr(FusedOperations, "refusal", classmethod(lambda *_: None))
    runner = load_late(tiny_folder, monkeypatch)
    (built,) = launched
    assert built.shape == (1, runner.vocab_size)
    params = SamplingParams(max_tokens=9, temperature=1.3, top_p=0.7, top_k=40, seed=5)
    batch = decode_step([3, 17], runner.num_blocks, runner.block_size, 0, params)
    assert runner.pipeline is not None
    output = runner.pipeline.collect(runner.pipeline.launch(batch, lambda: None))
    assert output.sampled == runner.step(batch.inputs, batch.sample_rows).sampled
    assert len(launched) == 2
    assert int((launched[1] > 0).sum(dim=-1).max()) <= 40
