"""Whatever comes and goes: runs never overlap, nothing is lost, and what is free is joined again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.lab.ranges import Buddy, FirstFit, Ranges

KINDS = pytest.mark.parametrize("kind", [FirstFit, Buddy])


@KINDS
@given(
    num_slots=st.integers(1, 300),
    moves=st.lists(st.tuples(st.booleans(), st.integers(1, 80)), max_size=60),
)
def test_runs_never_overlap_and_all_of_it_can_be_had_again(
    kind: type[FirstFit | Buddy], num_slots: int, moves: list[tuple[bool, int]]
) -> None:
    ranges: Ranges = kind(num_slots)
    held: dict[int, int] = {}
    for takes, number in moves:
        if takes:
            start = ranges.take(number)
            if start is not None:
                size = number if kind is FirstFit else 1 << (number - 1).bit_length()
                assert 0 <= start <= num_slots - size
                assert all(start + size <= s or s + n <= start for s, n in held.items())
                held[start] = size
        elif held:
            start = sorted(held)[number % len(held)]
            ranges.give_back(start)
            del held[start]
        assert ranges.num_held == sum(held.values())
    for start in held:
        ranges.give_back(start)
    assert ranges.num_held == 0
    assert ranges.take(ranges.longest) == 0


def test_first_fit_takes_the_first_gap_that_is_long_enough_and_a_fragmented_one_is_not() -> None:
    ranges = FirstFit(100)
    a, b, c = (ranges.take(30) for _ in range(3))
    assert (a, b, c) == (0, 30, 60)
    ranges.give_back(0)
    ranges.give_back(60)
    assert ranges.num_held == 30
    assert ranges.take(41) is None  # 70 are free, in runs of 30 and 40
    assert ranges.take(35) == 60
    assert ranges.take(30) == 0


def test_buddy_rounds_up_halves_and_joins() -> None:
    ranges = Buddy(64)
    assert ranges.take(17) == 0
    assert ranges.num_held == 32
    assert ranges.take(9) == 32
    assert ranges.take(17) is None  # 16 are free
    ranges.give_back(0)
    assert ranges.take(33) is None  # 48 are free, in 32 and 16
    ranges.give_back(32)
    assert ranges.take(64) == 0
    assert Buddy(100).longest == 64
