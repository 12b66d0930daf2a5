import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.philox import philox4x32, uniforms

seeds = st.integers(-(2**63), 2**63 - 1)
output_indices = st.integers(0, 2**31 - 1)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_words_equal_the_published_vectors(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = philox4x32(np.array([counter], dtype=np.uint64), np.array([key], dtype=np.uint64))
    assert words.tolist() == [expected]


@given(st.lists(st.tuples(seeds, output_indices), min_size=1, max_size=20))
def test_a_rows_number_depends_on_the_row_alone(rows: list[tuple[int, int]]) -> None:
    together = uniforms([seed for seed, _ in rows], [index for _, index in rows])
    alone = [uniforms([seed], [index])[0] for seed, index in rows]
    assert together.tolist() == alone
    assert all(0.0 <= number < 1.0 for number in alone)


def test_b61_every_signed_64_bit_seed_is_a_key_of_its_own() -> None:
    keys = [-(2**63), -(2**63) + 1, -1, 0, 1, 2**32, 2**63 - 1]
    assert len(set(uniforms(keys, [0] * len(keys)).tolist())) == len(keys)


def test_numbers_of_one_seed_are_spread_evenly() -> None:
    numbers = uniforms([7] * 16_000, list(range(16_000)))
    counts, _ = np.histogram(numbers, bins=16, range=(0.0, 1.0))
    chi_square = float(((counts - 1000.0) ** 2 / 1000.0).sum())
    assert chi_square < 37.7  # 15 degrees of freedom, one in a thousand


def test_a_number_is_made_of_the_first_two_words() -> None:
    bits = 0x6627E8D5 >> 5 << 26 | 0xE169C58D >> 6  # of the published vector of zeros
    assert uniforms([0], [0], stream=0).tolist() == [bits * 2.0**-53]


def test_each_of_the_53_bits_of_a_number_is_drawn() -> None:
    bits = [int(number * 2**53) for number in uniforms([7] * 1000, list(range(1000)))]
    for place in range(53):
        assert 400 < sum(one >> place & 1 for one in bits) < 600, place


def test_streams_and_neighbouring_seeds_do_not_repeat_each_other() -> None:
    indices = list(range(1000))
    columns = [
        uniforms([1] * 1000, indices),
        uniforms([2] * 1000, indices),
        uniforms([1] * 1000, indices, stream=2),
    ]
    assert np.abs(np.corrcoef(columns) - np.eye(3)).max() < 0.1


def test_no_rows_give_no_numbers() -> None:
    assert uniforms([], []).shape == (0,)
