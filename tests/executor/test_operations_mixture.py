"""Mixtures of experts, in every instruction set here and in plain torch: against float64, and bit by bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from executor.kernels.library import MOST_TOKENS_MIXED
from executor.model.config import Mixture
from executor.model.quantized import quantized
from executor.operations.base import Activation, Experts, Mlp, Norm, Operations
from executor.operations.cpu import CpuOperations
from executor.operations.plain import routed
from tests.executor.test_operations import (
    DTYPES,
    SETS,
    either_dtype,
    every_kind,
    every_set,
    kernels,
    operations,
    random,
    relative_error,
    rows_in,
    spec,
)
from tests.executor.test_operations_quantized import matrix_of

HIDDEN = 64


class Weights:
    """Random ones of a mixture, in the computation's type, and what they should give."""

    def __init__(self, mixture: Mixture, dtype: torch.dtype, rng: np.random.Generator) -> None:
        self.mixture = mixture
        shared = mixture.shared_intermediate_size
        sizes = [mixture.intermediate_size] * mixture.num_experts + ([] if shared is None else [shared])
        self.router = random(rng, len(sizes), HIDDEN)
        self.gate_up = [random(rng, 2 * size, HIDDEN, dtype=dtype) / 4 for size in sizes]
        self.down = [random(rng, HIDDEN, size, dtype=dtype) for size in sizes]

    def packed(self, by: Operations, *, in_codes: bool = False) -> Experts:
        mlps = [
            Mlp(
                by.pack_gated(quantized(gate_up) if in_codes else gate_up.clone(), None),
                by.pack(quantized(down) if in_codes else down.clone(), None),
            )
            for gate_up, down in zip(self.gate_up, self.down, strict=True)
        ]
        return by.pack_experts(self.router.clone(), mlps, self.mixture)

    def expected(self, rows: Tensor) -> Tensor:
        """In float64, token by token, by the words of `Mixture`."""
        mixture, total = self.mixture, torch.zeros(len(rows), HIDDEN, dtype=torch.float64)
        for token, row in enumerate(rows.double()):
            logits = self.router.double() @ row
            probabilities = logits[: mixture.num_experts].softmax(0)
            chosen = probabilities.argsort(descending=True)[: mixture.num_experts_per_token].tolist()
            weights = probabilities[chosen]
            if mixture.norm_topk_prob:
                weights = weights / weights.sum()
            pairs = list(zip(chosen, weights, strict=True))
            if mixture.shared_intermediate_size is not None:
                pairs.append((mixture.num_experts, logits[-1].sigmoid()))
            for expert, weight in pairs:
                gate, up = (self.gate_up[expert].double() @ row).chunk(2)
                middle = torch.nn.functional.silu(gate) * up
                total[token] += weight * (self.down[expert].double() @ middle)
        return total


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    num_experts = draw(st.sampled_from([1, 3, 8, 40]))
    return Mixture(
        num_experts=num_experts,
        num_experts_per_token=draw(st.integers(1, min(num_experts, 9))),
        intermediate_size=draw(st.sampled_from([16, 40, 96])),
        norm_topk_prob=draw(st.booleans()),
        shared_intermediate_size=draw(st.sampled_from([None, 24, 136])),
    )


@every_kind
@either_dtype
@settings(max_examples=15, deadline=None)
@given(mixture=mixtures(), num_rows=st.integers(1, 70), seed=st.integers(0, 2**32 - 1))
def test_mixtures_equal_float64(
    kind: str, dtype: torch.dtype, mixture: Mixture, num_rows: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    under_test, weights = operations(kind, spec(dtype)), Weights(mixture, dtype, rng)
    rows = rows_in(under_test, random(rng, num_rows, HIDDEN), dtype)
    result = under_test.mixture(rows, weights.packed(under_test), Activation.SILU)
    assert result.dtype == dtype
    assert relative_error(result, weights.expected(rows)) < 2 * DTYPES[dtype]


@every_kind
def test_of_equal_experts_the_first_are_chosen(kind: str) -> None:
    rng = np.random.default_rng(0)
    mixture = Mixture(6, 3, 16, norm_topk_prob=False)
    under_test, weights = operations(kind, spec()), Weights(mixture, torch.float32, rng)
    # One number each, so that equal logits are equal in whatever order their sums are made.
    weights.router.zero_()
    weights.router[1:, 9], weights.router[0, 9] = 1.0, -1.0
    rows = rows_in(under_test, random(rng, 40, HIDDEN), torch.float32)
    chosen, _ = routed(rows @ weights.router.T, mixture)
    likely = rows[:, 9] > 0
    assert chosen[likely].tolist() == [[1, 2, 3]] * int(likely.sum())
    assert chosen[~likely].tolist() == [[0, 1, 2]] * int((~likely).sum())
    expected = torch.zeros_like(rows)
    for token, experts in enumerate(chosen.tolist()):
        alone = Mixture(3, 3, 16, norm_topk_prob=False)
        part = Weights(alone, torch.float32, rng)
        part.router = weights.router[experts]
        part.gate_up, part.down = ([side[e] for e in experts] for side in (weights.gate_up, weights.down))
        odds = (rows[token] @ weights.router.T).softmax(0)[experts].sum()
        expected[token] = part.expected(rows[token : token + 1])[0] * odds
    result = under_test.mixture(rows, weights.packed(under_test), Activation.SILU)
    assert relative_error(result, expected.double()) < 1e-5


@every_set
@either_dtype
@pytest.mark.parametrize("in_codes", [False, True], ids=["numbers", "codes"])
def test_b63_a_token_has_the_same_bits_in_every_company(
    kind: str, dtype: torch.dtype, in_codes: bool
) -> None:
    rng = np.random.default_rng(1)
    under_test = CpuOperations(kernels(kind), spec(dtype))
    # Widths that are no multiples of a unit, one of them wider: what is left in a buffer must not be read.
    mixture = Mixture(16, 4, 40, norm_topk_prob=True, shared_intermediate_size=72)
    packed = Weights(mixture, dtype, rng).packed(under_test, in_codes=in_codes)
    hidden, ones = random(rng, MOST_TOKENS_MIXED + 150, HIDDEN), Norm(torch.ones(HIDDEN), 1e-5)

    def computed(rows: Tensor) -> Tensor:
        normed = under_test.norm(rows.contiguous(), ones)
        return under_test.mixture(normed, packed, Activation.SILU).clone()

    together = computed(hidden)
    for count in (1, 2, 3, 5, 13, 17, 32, 33, 64, 130, 513):
        start = len(hidden) - count
        assert torch.equal(computed(hidden[start:]), together[start:])
    order = torch.from_numpy(rng.permutation(len(hidden)))
    assert torch.equal(computed(hidden[order]), together[order])


@every_set
@pytest.mark.parametrize("bits", [8, 4])
def test_experts_in_codes_are_close_to_what_the_codes_stand_for(kind: str, bits: int) -> None:
    rng = np.random.default_rng(2)
    under_test = CpuOperations(kernels(kind), spec())
    weights = Weights(Mixture(8, 3, 96, norm_topk_prob=True), torch.float32, rng)
    mlps = []
    for expert in range(8):
        # Bits may differ from expert to expert: what float16 cannot hold is kept in 8.
        gate_up, down = (
            matrix_of(rng, *side[expert].shape, bits if expert else 8)
            for side in (weights.gate_up, weights.down)
        )
        mlps.append(Mlp(under_test.pack_gated(gate_up, None), under_test.pack(down, None)))
        weights.gate_up[expert], weights.down[expert] = gate_up.dequantized(), down.dequantized()
    packed = under_test.pack_experts(weights.router.clone(), mlps, weights.mixture)
    rows = rows_in(under_test, random(rng, 50, HIDDEN), torch.float32)
    # The router is not in codes: the same experts are chosen.
    result = under_test.mixture(rows, packed, Activation.SILU)
    assert 1e-4 < relative_error(result, weights.expected(rows)) < 0.02


@every_kind
def test_what_is_no_number_is_seen_in_its_own_token_alone(kind: str) -> None:
    rng = np.random.default_rng(3)
    under_test = operations(kind, spec())
    weights = Weights(Mixture(8, 2, 40, norm_topk_prob=True, shared_intermediate_size=16), torch.float32, rng)
    packed = weights.packed(under_test)
    rows = rows_in(under_test, random(rng, 30, HIDDEN), torch.float32)
    clean = under_test.mixture(rows, packed, Activation.SILU).clone()
    rows[7, 3] = torch.nan
    rows[20, 63] = torch.inf
    result = under_test.mixture(rows, packed, Activation.SILU)
    assert result[[7, 20]].isnan().all()
    others = [token for token in range(30) if token not in {7, 20}]
    torch.testing.assert_close(result[others], clean[others], rtol=1e-5, atol=1e-5)
    if kind in SETS:
        assert torch.equal(under_test.mixture(rows, packed, Activation.SILU)[others], clean[others])


@every_set
def test_the_number_of_threads_changes_no_bit(kind: str) -> None:
    rng = np.random.default_rng(0)
    mixture, hidden = Mixture(16, 4, 200, norm_topk_prob=True), random(rng, 100, HIDDEN)
    weights = Weights(mixture, torch.bfloat16, rng)
    results = []
    for num_threads in (1, 4):
        under_test = CpuOperations(kernels(kind), spec(torch.bfloat16))
        kernels(kind).start(num_threads)
        normed = under_test.norm(hidden, Norm(torch.ones(HIDDEN), 1e-5))
        results.append(under_test.mixture(normed, weights.packed(under_test), Activation.SILU).clone())
    assert torch.equal(*results)
