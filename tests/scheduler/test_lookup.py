from array import array

from hypothesis import given
from hypothesis import strategies as st

from scheduler.lookup import LONGEST_MATCH, SHORTEST_MATCH, Guesses, continuation

FEW_IDS = st.lists(st.integers(0, 3), max_size=40)
WIDE_IDS = st.lists(st.sampled_from([0, 1, 256, 257, 65_536, 65_537, 2**24, 2**32 - 1]), max_size=40)


def ids(*values: int) -> "array[int]":
    return array("I", values)


def naive(log: list[int], count: int) -> list[int]:
    """What `continuation` says it does, one comparison after the other."""
    for size in range(LONGEST_MATCH, SHORTEST_MATCH - 1, -1):
        for begin in range(len(log) - size - 1, -1, -1):
            if log[begin : begin + size] == log[-size:]:
                since = log[begin + size :]
                return [since[i % len(since)] for i in range(count)]
    return []


@given(log=st.one_of(FEW_IDS, WIDE_IDS), count=st.integers(1, 9))
def test_a_log_goes_on_as_after_the_newest_of_its_longest_matches(log: list[int], count: int) -> None:
    """Ids whose bytes look alike across their borders are told apart."""
    assert continuation(array("I", log), count).tolist() == naive(log, count)


def test_the_longest_match_counts_before_a_newer_one() -> None:
    log = ids(1, 2, 3, 4, 50, 9, 3, 4, 60, 9, 1, 2, 3, 4)
    assert continuation(log, 2).tolist() == [50, 9]


def test_what_repeats_itself_is_taken_to_go_on_so() -> None:
    assert continuation(ids(7, 8, 9, 7, 8, 9, 7, 8), 7).tolist() == [9, 7, 8, 9, 7, 8, 9]


def test_nothing_is_guessed_where_nothing_came_before() -> None:
    for log in (ids(), ids(1), ids(1, 2), ids(1, 2, 3, 4, 5)):
        assert not continuation(log, 4)


def fed(guesses: Guesses, log: "array[int]", *tokens: int) -> None:
    for token in tokens:
        log.append(token)
        guesses.learn(log)


def test_guesses_that_come_true_grow_and_count() -> None:
    guesses, log = Guesses(max_length=8), ids(1, 2, 3)
    fed(guesses, log, *[1, 2, 3] * 20)
    assert guesses.length == 8
    assert 6 < guesses.right <= guesses.tried <= 8
    rest = guesses.rest(log).tolist()
    assert rest == ([1, 2, 3] * 3)[: len(rest)]


def test_guesses_that_do_not_come_true_shrink_and_do_not_count() -> None:
    guesses, log = Guesses(max_length=8), ids(1, 2, 9)
    for token in range(10, 40):
        fed(guesses, log, 1, 2, token)  # "1 2" was there before, and goes on in another way each time
    assert guesses.length == 1
    assert guesses.right < 0.1 * guesses.tried


def test_a_guess_is_scored_by_the_tokens_until_the_first_wrong_one() -> None:
    log = ids(1, 2, 3, 4, 5, 1, 2)
    guesses = Guesses(max_length=8, length=3)
    guesses.learn(log)
    assert guesses.rest(log).tolist() == [3, 4, 5]
    log.extend([3, 4])
    guesses.learn(log)
    assert guesses.rest(log).tolist() == [5]  # not settled yet: its rest still stands
    assert guesses.right == 0
    log.append(6)
    guesses.learn(log)
    assert (guesses.right, guesses.tried) == (0.5, 0.75)
    assert guesses.made_at == len(log)


@given(
    steps=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=40), most=st.integers(1, 8)
)
def test_a_score_never_has_more_right_than_tried_nor_more_than_may_be(
    steps: list[list[int]], most: int
) -> None:
    """However many tokens a step brings."""
    guesses, log = Guesses(most), ids(0, 1)
    for step in steps:
        log.extend(step)
        guesses.learn(log)
        assert 0 <= guesses.right <= guesses.tried <= most
        assert 1 <= guesses.length <= most
        assert len(guesses.rest(log)) <= len(guesses.ids)
