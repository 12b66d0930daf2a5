"""Matrices in blocks of codes: what GGUF files hold, said in this form; and numbers quantised to 8 bits."""

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.model.gguf_blocks import blocks_of, is_in_blocks
from executor.model.quantized import BLOCK_SIZE, QuantizedMatrix, quantized, stacked

Kind = gguf.GGMLQuantizationType
EXACT = {Kind.Q4_0: 4, Kind.Q4_1: 4, Kind.Q5_0: 8, Kind.Q5_1: 8, Kind.Q8_0: 8}
"""Types whose numbers stay as they are, and the bits that their codes take."""


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float()


def blocks(data: np.ndarray, kind: Kind, num_columns: int) -> QuantizedMatrix | None:
    return blocks_of(data, kind.name, gguf.GGML_QUANT_SIZES[kind][1], num_columns)


@pytest.mark.parametrize("kind", EXACT)
def test_what_a_file_holds_in_blocks_of_32_is_the_same_numbers(kind: Kind) -> None:
    data = gguf.quants.quantize(random(24, 96).numpy(), kind)
    matrix = blocks(data, kind, 96)
    assert matrix is not None
    assert (matrix.bits, matrix.shape) == (EXACT[kind], (24, 96))
    assert int(matrix.codes.max()) < 2**matrix.bits
    expected = torch.from_numpy(gguf.quants.dequantize(data, kind))
    torch.testing.assert_close(matrix.dequantized(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("kind", "bits"), [(Kind.Q4_K, 4), (Kind.Q5_K, 8)], ids=["Q4_K", "Q5_K"])
def test_scales_of_eight_blocks_are_products_rounded_to_half(kind: Kind, bits: int) -> None:
    rng = np.random.default_rng(1)
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    data = rng.integers(0, 256, (6, 2 * block_bytes), dtype=np.uint8)
    halves = rng.uniform(0.001, 0.01, (6, 2, 2)).astype(np.float16)
    data.reshape(6, 2, block_bytes)[:, :, :4] = halves.view(np.uint8).reshape(6, 2, 4)
    matrix = blocks(data, kind, 512)
    assert matrix is not None
    assert (matrix.bits, matrix.scales.shape) == (bits, (6, 16))
    expected = torch.from_numpy(gguf.quants.dequantize(data, kind))
    # A number is the difference of two products, each of which is rounded.
    largest = (matrix.scales.float() * 31 - matrix.offsets.float()).repeat_interleave(BLOCK_SIZE, dim=1)
    assert ((matrix.dequantized() - expected).abs() <= largest / 2000).all()


def test_a_scale_that_half_precision_cannot_hold_leaves_no_blocks() -> None:
    data = np.full((1, 144), 255, dtype=np.uint8)
    data[0, :4] = np.array([60000.0, 1.0], dtype=np.float16).view(np.uint8)
    assert blocks(data, Kind.Q4_K, 256) is None


def test_a_scale_of_8_bits_whose_offset_half_precision_cannot_hold_leaves_no_blocks() -> None:
    data = gguf.quants.quantize(np.full((1, 32), 520.0 * 127, dtype=np.float32), Kind.Q8_0)
    assert blocks(data, Kind.Q8_0, 32) is None


@pytest.mark.parametrize("kind", [Kind.Q6_K, Kind.Q2_K, Kind.IQ4_NL, Kind.F16])
def test_types_of_other_blocks_are_not_said_in_this_form(kind: Kind) -> None:
    assert not is_in_blocks(kind.name)


@settings(deadline=None)
@given(
    num_rows=st.integers(1, 40),
    num_columns=st.integers(1, 100),
    exponent=st.integers(-6, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_numbers_in_8_bits_are_off_by_half_a_step_of_their_block(
    num_rows: int, num_columns: int, exponent: int, seed: int
) -> None:
    numbers = random(num_rows, num_columns, seed=seed) * 10.0**exponent
    matrix = quantized(numbers)
    assert matrix.shape == (num_rows, num_columns)
    step = matrix.scales.float().repeat_interleave(BLOCK_SIZE, dim=1)[:, :num_columns]
    # The largest number of a block may be cut by what float16 rounds its scale by; below 2^-14 that is more.
    off = (matrix.dequantized() - numbers).abs()
    assert (off <= 0.5 * step + 127 * step / 2000 + 127 * 2.0**-25).all()


def test_many_rows_are_quantised_as_few_are() -> None:
    numbers = random(2500, 40)
    whole, some = quantized(numbers), quantized(numbers[1020:1030])
    assert torch.equal(whole.codes[1020:1030], some.codes)
    assert torch.equal(whole.scales[1020:1030], some.scales)


def test_what_was_8_bits_in_a_file_is_the_same_8_bits_again() -> None:
    data = gguf.quants.quantize(random(16, 64).numpy(), Kind.Q8_0)
    matrix = blocks(data, Kind.Q8_0, 64)
    assert matrix is not None
    again = quantized(matrix.dequantized())
    assert torch.equal(again.codes, matrix.codes)
    assert torch.equal(again.scales, matrix.scales)


def test_zeros_are_zeros() -> None:
    assert torch.equal(quantized(torch.zeros(3, 50)).dequantized(), torch.zeros(3, 50))


def test_parts_are_those_of_the_numbers() -> None:
    matrix = quantized(random(12, 100))
    numbers = matrix.dequantized()
    assert torch.equal(matrix.part(slice(2, 9), slice(32, 100)).dequantized(), numbers[2:9, 32:100])
    assert torch.equal(matrix.part(slice(0, 4), slice(0, 64)).dequantized(), numbers[:4, :64])


def test_matrices_under_each_other_keep_their_numbers() -> None:
    in_four = blocks(gguf.quants.quantize(random(8, 64).numpy(), Kind.Q4_1), Kind.Q4_1, 64)
    assert in_four is not None
    in_eight = quantized(random(4, 64, seed=1))
    both = stacked([in_four, in_eight])
    assert (both.bits, both.shape) == (8, (12, 64))
    assert torch.equal(both.dequantized(), torch.cat([in_four.dequantized(), in_eight.dequantized()]))
    assert stacked([in_four, in_four]).bits == 4


def test_what_a_matrix_takes_is_its_codes_and_two_halves_for_each_block() -> None:
    matrix = quantized(random(8, 64))
    assert matrix.num_bytes == 8 * 2 * (32 + 4)
