import pytest

from rpc.histogram import Histogram


@pytest.mark.parametrize(
    ("seconds", "counts"), [(0.5, [1, 0, 0]), (1.0, [1, 0, 0]), (1.1, [0, 1, 0]), (3.0, [0, 0, 1])]
)
def test_an_observation_counts_at_the_first_bound_it_does_not_pass(seconds: float, counts: list[int]) -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(seconds)
    assert histogram.counts == counts
    assert histogram.total == seconds


def test_a_clock_that_went_backwards_counts_as_no_time() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(-5.0)
    assert (histogram.counts, histogram.total) == ([1, 0, 0], 0.0)
