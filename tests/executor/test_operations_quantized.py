"""Products with weights in 8 and 4 bits, in every instruction set here: against float64, and bit by bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from executor.inputs import build_inputs
from executor.model.quantized import BLOCK_SIZE, QuantizedMatrix, quantized
from executor.operations.base import Activation, Norm
from executor.operations.cpu import CpuOperations
from executor.plan import SamplingParams
from executor.rows import Row, SampleRow
from tests.executor.test_operations import (
    DTYPES,
    either_dtype,
    empty_step,
    every_set,
    kernels,
    random,
    relative_error,
    rows_in,
    spec,
)

either_bits = pytest.mark.parametrize("bits", [8, 4])


def matrix_of(rng: np.random.Generator, num_rows: int, num_columns: int, bits: int) -> QuantizedMatrix:
    """Codes of every value, scales and offsets such as weights have."""
    num_blocks = -(-num_columns // BLOCK_SIZE)
    codes = torch.from_numpy(rng.integers(0, 2**bits, (num_rows, num_blocks * BLOCK_SIZE), dtype=np.uint8))
    scales = torch.from_numpy(rng.uniform(0.5, 2.0, (num_rows, num_blocks))).half() / 2**bits
    offsets = scales * -torch.from_numpy(rng.uniform(0.3, 0.7, (num_rows, num_blocks))).half() * 2**bits
    return QuantizedMatrix(codes, scales, offsets, num_columns, bits)


def in_codes(rows: Tensor) -> Tensor:
    """What rows are multiplied as: the nearest of -127 to 127 times the scale of their block; float64."""
    num_rows, num_columns = rows.shape
    padded = torch.zeros(num_rows, -(-num_columns // BLOCK_SIZE) * BLOCK_SIZE)
    padded[:, :num_columns] = rows.float()
    blocks = padded.view(num_rows, -1, BLOCK_SIZE)
    largest = blocks.abs().amax(-1, keepdim=True)
    steps = (blocks * (127 / largest)).nan_to_num(0.0)  # a block of zeros
    return (torch.round(steps).double() * (largest / 127).double()).view(num_rows, -1)[:, :num_columns]


def rows_of_codes(under_test: CpuOperations, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows none of whose numbers is near the middle of two codes, where one more rounding would decide."""
    rows = rows_in(under_test, values, dtype)
    return rows.copy_(in_codes(rows))


@every_set
@either_dtype
@either_bits
@settings(max_examples=15, deadline=None)
@given(
    num_rows=st.integers(1, 70),
    in_features=st.sampled_from([16, 32, 40, 144, 576]),
    out_features=st.sampled_from([16, 24, 96, 130]),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_projections_equal_float64(
    kind: str,
    dtype: torch.dtype,
    bits: int,
    num_rows: int,
    in_features: int,
    out_features: int,
    has_bias: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    under_test = CpuOperations(kernels(kind), spec(dtype))
    weight = matrix_of(rng, out_features, in_features, bits)
    bias = random(rng, out_features, dtype=dtype) if has_bias else None
    rows = rows_of_codes(under_test, random(rng, num_rows, in_features), dtype)
    expected = in_codes(rows) @ weight.dequantized().double().T
    expected = expected + (0 if bias is None else bias.double())
    assert relative_error(under_test.linear(rows, under_test.pack(weight, bias)), expected) < DTYPES[dtype]


@every_set
@either_bits
@pytest.mark.parametrize("out_features", [16, 40, 128])
def test_gated_projections_equal_float64(kind: str, bits: int, out_features: int) -> None:
    rng = np.random.default_rng(out_features)
    under_test = CpuOperations(kernels(kind), spec())
    weight = matrix_of(rng, 2 * out_features, 64, bits)
    bias = random(rng, 2 * out_features)
    rows = rows_of_codes(under_test, random(rng, 37, 64), torch.float32)
    gate, up = (in_codes(rows) @ weight.dequantized().double().T + bias.double()).chunk(2, dim=-1)
    result = under_test.gated(rows, under_test.pack_gated(weight, bias), Activation.SILU)
    assert relative_error(result, torch.nn.functional.silu(gate) * up) < 2e-6


@every_set
@either_bits
def test_logits_are_those_of_the_sampling_rows(kind: str, bits: int) -> None:
    rng = np.random.default_rng(0)
    under_test = CpuOperations(kernels(kind), spec(torch.bfloat16))
    weight = matrix_of(rng, 272, 64, bits)
    rows = rows_of_codes(under_test, random(rng, 40, 64), torch.bfloat16)
    logits = under_test.logits(rows, empty_step(40, [3, 39]), under_test.pack(weight, None), 3.0)
    expected = 3.0 * torch.tanh(in_codes(rows[[3, 39]]) @ weight.dequantized().double().T / 3.0)
    assert logits.dtype == torch.float32
    assert relative_error(logits, expected) < DTYPES[torch.bfloat16]


@every_set
@either_bits
def test_embeddings_are_rows_of_the_packed_table(kind: str, bits: int) -> None:
    of = spec(torch.bfloat16)
    under_test = CpuOperations(kernels(kind), of)
    table = matrix_of(np.random.default_rng(0), 266, 40, bits)
    token_ids = [0, 265, 16, 16, 15, 100]
    row = Row(0, token_ids, 0, np.zeros(6, dtype=np.int32), (SampleRow(SamplingParams(max_tokens=1), 0, ()),))
    step = under_test.prepare(build_inputs([row], of.block_size).inputs)
    embedded = under_test.embed(step, under_test.pack(table, None), 1.5)
    torch.testing.assert_close(embedded, table.dequantized()[token_ids] * 1.5, rtol=1e-6, atol=1e-6)


@every_set
@either_dtype
@either_bits
def test_b63_a_row_has_the_same_bits_in_every_company(kind: str, dtype: torch.dtype, bits: int) -> None:
    rng = np.random.default_rng(bits)
    under_test = CpuOperations(kernels(kind), spec(dtype))
    layer = under_test.pack(matrix_of(rng, 96, 576, bits), None)
    hidden, ones = random(rng, 200, 576), Norm(torch.ones(576), 1e-5)

    def computed(rows: Tensor) -> Tensor:
        return under_test.linear(under_test.norm(rows.contiguous(), ones), layer).clone()

    together = computed(hidden)
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 16, 17, 31, 32, 33, 64, 130):
        assert torch.equal(computed(hidden[200 - count :]), together[200 - count :])


@every_set
def test_codes_of_4_bits_give_the_bits_that_they_give_as_8(kind: str) -> None:
    rng = np.random.default_rng(0)
    under_test = CpuOperations(kernels(kind), spec())
    four = matrix_of(rng, 96, 576, 4)
    eight = QuantizedMatrix(four.codes, four.scales, four.offsets, four.num_columns, 8)
    rows = rows_in(under_test, random(rng, 9, 576), torch.float32)
    in_four = under_test.linear(rows, under_test.pack(four, None)).clone()
    assert torch.equal(under_test.linear(rows, under_test.pack(eight, None)), in_four)


@every_set
@either_bits
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_seen_in_its_own_row_alone(kind: str, bits: int, broken: float) -> None:
    rng = np.random.default_rng(0)
    under_test = CpuOperations(kernels(kind), spec())
    layer = under_test.pack(matrix_of(rng, 32, 64, bits), None)
    rows = rows_in(under_test, random(rng, 5, 64), torch.float32)
    whole = under_test.linear(rows, layer).clone()
    rows[2, 40] = broken
    result = under_test.linear(rows, layer)
    assert result[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(result[others], whole[others])


@every_set
@either_bits
def test_rows_of_zeros_and_of_tiny_numbers_give_what_is_added_to_them(kind: str, bits: int) -> None:
    rng = np.random.default_rng(0)
    under_test = CpuOperations(kernels(kind), spec())
    bias = random(rng, 32)
    layer = under_test.pack(matrix_of(rng, 32, 64, bits), bias)
    rows = rows_in(under_test, random(rng, 2, 64), torch.float32)
    rows[0], rows[1] = 0.0, 1e-38
    assert torch.equal(under_test.linear(rows, layer), bias.expand(2, 32))


@every_set
def test_a_products_error_is_that_of_8_bits(kind: str) -> None:
    rng = np.random.default_rng(0)
    under_test = CpuOperations(kernels(kind), spec())
    weight, rows = random(rng, 96, 576), rows_in(under_test, random(rng, 33, 576), torch.float32)
    result = under_test.linear(rows, under_test.pack(quantized(weight), None))
    assert relative_error(result, rows.double() @ weight.double().T) < 0.01
