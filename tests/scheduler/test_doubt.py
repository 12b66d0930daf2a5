"""A prediction refuses, and once in a minute of refusing it is put to the test."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from scheduler.doubt import Doubt


@given(st.lists(st.floats(0, 100), max_size=60))
def test_one_a_minute_is_the_test_and_no_two_within_a_minute(gaps: list[float]) -> None:
    doubt = Doubt()
    now, tests, refused = 1000.0, [], []
    for gap in gaps:
        now += gap
        (refused if doubt.may_refuse(now) else tests).append(now)
        since = [time for time in refused if not tests or time > tests[-1]]
        assert not since or now < since[0] + 60, "a test is due, and was not made"
    assert all(later - earlier >= 60 for earlier, later in pairwise(tests))
    assert not tests or tests[0] >= 1060
