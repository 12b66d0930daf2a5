import pytest

from router.latencies import Latencies


def test_the_first_id_counts_as_such_and_those_that_came_with_it_as_no_wait() -> None:
    latencies = Latencies()
    latencies.tokens(3, since=10.0, first=True, now=10.4)
    assert sum(latencies.time_to_first_token.counts) == 1
    assert latencies.time_to_first_token.total == pytest.approx(0.4)
    assert (sum(latencies.inter_token.counts), latencies.inter_token.total) == (2, 0.0)


def test_ids_that_come_together_share_the_time_since_the_one_before() -> None:
    latencies = Latencies()
    latencies.tokens(4, since=0.0, first=False, now=0.4)
    assert latencies.inter_token.total == pytest.approx(0.4)
    assert latencies.inter_token.counts[latencies.inter_token.bounds.index(0.1)] == 4
    assert latencies.num_tokens == 4


def test_no_ids_are_no_news() -> None:
    latencies = Latencies()
    latencies.tokens(0, since=0.0, first=True, now=1.0)
    assert latencies == Latencies()
