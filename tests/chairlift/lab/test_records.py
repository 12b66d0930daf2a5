"""Figures of many requests in few bytes: as exact as they say, and of those alone that they are of."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.lab.records import Histogram, Records, quantile

shares = st.sampled_from([0.0, 0.01, 0.5, 0.9, 0.99, 1.0])


@given(st.lists(st.tuples(st.floats(1e-6, 1e5), st.integers(1, 9)), min_size=1, max_size=40), shares)
def test_a_quantile_of_many_durations_is_within_a_quarter_per_cent(
    durations: list[tuple[float, int]], share: float
) -> None:
    histogram = Histogram()
    for seconds, count in durations:
        histogram.add(seconds, count)
    ordered = sorted(seconds for seconds, count in durations for _ in range(count))
    assert histogram.quantile(share) == pytest.approx(quantile(ordered, share), rel=0.00251)
    assert histogram.count == len(ordered)
    assert histogram.total == pytest.approx(math.fsum(ordered))


@given(st.lists(st.integers(0, 99), min_size=1), shares)
def test_a_quantile_is_the_least_value_that_a_share_of_them_does_not_exceed(
    values: list[int], share: float
) -> None:
    found = quantile(sorted(map(float, values)), share)
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    assert sum(value < found for value in values) < max(1.0, share * len(values))


def test_of_nothing_there_is_no_quantile() -> None:
    assert math.isnan(Histogram().quantile(0.5))
    assert math.isnan(quantile([], 0.5))


def test_times_are_those_of_the_requests_that_came_so_far() -> None:
    records = Records()
    for arrival, first_token, ended, num_output_tokens, tenant in (
        (10.0, 14.0, 16.0, 3, "a"),
        (11.0, 12.0, 13.0, 1, "b"),
        (12.0, 19.0, math.nan, 5, "a"),  # it runs on
        (13.0, math.nan, 20.0, 0, "b"),  # ended while it waited
    ):
        index = records.add(arrival, 5, tenant)
        records.first_token[index], records.ended[index] = first_token, ended
        records.num_output_tokens[index] = num_output_tokens
    assert records.first_token_seconds() == [1.0, 4.0, 7.0]
    assert records.first_token_seconds("a") == [4.0, 7.0]
    assert records.first_token_seconds("nobody") == []
    assert records.total_seconds() == [2.0, 6.0]
    assert records.seconds_per_output_token() == [2.0, 2.0]
