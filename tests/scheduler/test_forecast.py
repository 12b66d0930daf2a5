import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.forecast import LengthModel, peak_blocks

MEMBERS = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), max_size=8)


def simulated(members: list[tuple[int, int]], block_size: int) -> int:
    """Blocks held at the worst step: each wins a token a step, and leaves after its last."""
    longest = max((remaining for _, remaining in members), default=0)
    return max(
        sum(-(-(tokens + step) // block_size) for tokens, remaining in members if step <= remaining)
        for step in range(longest + 1)
    )


@given(MEMBERS)
def test_the_peak_is_that_of_the_simulation_where_a_block_is_one_token(
    members: list[tuple[int, int]],
) -> None:
    assert peak_blocks(members, 1) == simulated(members, 1)


@given(MEMBERS, st.sampled_from([2, 4, 16, 64]))
def test_the_peak_is_that_of_the_simulation_within_half_a_block_a_member(
    members: list[tuple[int, int]], block_size: int
) -> None:
    """A block is taken to be half full on average: off by less than half a block for each member."""
    expected = simulated(members, block_size)
    assert abs(peak_blocks(members, block_size) - expected) <= len(members) / 2 + 1


@given(MEMBERS, st.sampled_from([1, 4, 16]))
def test_the_peak_covers_all_the_tokens_ever_held_at_once(
    members: list[tuple[int, int]], block_size: int
) -> None:
    assert peak_blocks(members, block_size) * block_size >= simulated(members, 1)


@given(MEMBERS, st.sampled_from([1, 4, 16]), st.randoms())
def test_the_peak_does_not_depend_on_the_order(
    members: list[tuple[int, int]], block_size: int, rng: object
) -> None:
    shuffled = list(members)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    assert peak_blocks(members, block_size) == peak_blocks(shuffled, block_size)


# --- lengths --------------------------------------------------------------------------------------------


@given(
    seen=st.lists(st.integers(0, 5000), max_size=60),
    num_output=st.integers(0, 3000),
    left=st.integers(0, 3000),
)
def test_what_is_expected_is_between_nothing_and_the_limit(
    seen: list[int], num_output: int, left: int
) -> None:
    model = LengthModel()
    for length in seen:
        model.observe(length)
    assert 0 <= model.remaining(num_output, num_output + left) <= left
    assert left == 0 or model.remaining(num_output, num_output + left) >= 1


def test_with_little_seen_a_first_guess_stands_in_for_limits_that_are_hardly_reached() -> None:
    model = LengthModel()
    for _ in range(10):
        model.observe(5)
    assert model.remaining(0, 100) == 100
    assert model.remaining(0, 4096) == 256
    assert model.remaining(1000, 4096) == 1000


@pytest.mark.parametrize("length", [1, 10, 100, 1000])
def test_when_all_end_alike_that_is_expected(length: int) -> None:
    model = LengthModel()
    for _ in range(100):
        model.observe(length)
    assert model.remaining(0, 4096) == length
    assert model.remaining(length // 2, 4096) == pytest.approx(length - length // 2, abs=1)


def test_who_has_outlived_the_short_is_expected_to_be_one_of_the_long() -> None:
    model = LengthModel()
    for _ in range(100):
        model.observe(10)
        model.observe(1000)
    assert model.remaining(0, 4096) == pytest.approx(505, abs=5)
    assert model.remaining(20, 4096) == pytest.approx(980, abs=5)


def test_who_has_outlived_all_may_go_on_to_its_limit() -> None:
    model = LengthModel()
    for _ in range(100):
        model.observe(10)
    assert model.remaining(500, 700) == 200


def test_nobody_is_expected_to_go_beyond_its_limit() -> None:
    model = LengthModel()
    for _ in range(100):
        model.observe(600)
    assert [model.remaining(num_output, 30) for num_output in (0, 25, 30)] == [30, 5, 0]
    assert model.remaining(1000, 1050) == 50


def test_the_longer_one_runs_beyond_what_is_usual_the_longer_it_is_expected_to_go_on() -> None:
    model = LengthModel()
    for _ in range(100):
        model.observe(600)
    assert model.remaining(1000, 4096) == 101


def test_the_model_follows_when_lengths_change() -> None:
    model = LengthModel()
    for _ in range(3000):
        model.observe(1000)
    for _ in range(3000):
        model.observe(10)
    assert model.remaining(0, 4096) < 150
