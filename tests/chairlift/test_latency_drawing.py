from hypothesis import given
from hypothesis import strategies as st

from chairlift.latency_drawing import Waits, lines
from router.latencies import FIRST_TOKEN_BOUNDS, INTER_TOKEN_BOUNDS, Latencies


def test_bars_stand_over_their_bounds_and_shares_are_told() -> None:
    bars, axis = (line.plain for line in lines("first token", Waits((0.01, 0.5, 2.0), (1, 96, 2, 1))))
    assert bars.split() == ["first", "token", "▁▁▁▁▁", "█████", "▁▁▁▁▁", "▁▁▁▁▁"]
    assert axis.startswith("half ≤ 500ms, 99 % ≤ 2s ")
    assert axis.split()[-4:] == ["10ms", "500ms", "2s", "more"]
    assert axis.rindex("500ms") == bars.index("█")


def test_what_lies_in_the_open_bucket_is_more_than_the_last_bound() -> None:
    _, axis = lines("between tokens", Waits((0.01,), (1, 9)))
    assert axis.plain.startswith("half > 10ms, 99 % > 10ms ")


def test_before_anybody_has_waited_there_is_nothing_to_draw() -> None:
    assert lines("first token", Waits((), ())) == []
    assert lines("first token", Waits((1.0,), (0, 0))) == []


@given(st.lists(st.integers(0, 10**6), min_size=4, max_size=4))
def test_a_share_is_within_the_bound_that_is_told(counts: list[int]) -> None:
    waits = Waits((1.0, 2.0, 3.0), counts)
    for share in (0.5, 0.9, 0.99):
        bound = waits.within(share)
        num_within = sum(counts) if bound is None else sum(counts[: int(bound)])
        assert num_within >= share * sum(counts)


def test_each_bound_of_a_router_has_room() -> None:
    for bounds in (FIRST_TOKEN_BOUNDS, INTER_TOKEN_BOUNDS):
        waits = Waits(bounds, [1] * (len(bounds) + 1))
        _, axis = lines("x", waits)
        assert len(axis.plain.split()[7:]) == len(bounds) + 1
    assert len(Latencies().inter_token.counts) == len(INTER_TOKEN_BOUNDS) + 1
