"""Whoever kills executors is found within log2(n) + 2 crashes, and nobody else is found guilty."""

import math

from hypothesis import given
from hypothesis import strategies as st

from scheduler.suspects import MAX_EXCUSES, NUM_STEPS_TO_CLEAR, Suspects


def run_until_quiet(
    num_seqs: int, guilty: set[int], rng_rows: list[float], max_crashes: int
) -> tuple[list[int], int]:
    """A machine with room for all that dies in the first step of anybody guilty; returns (found, crashes).

    `rng_rows` says how many of those who may run have a row in a step: a plan seldom holds everybody.
    """
    suspects: Suspects[int] = Suspects()
    living = list(range(num_seqs))
    num_steps = dict.fromkeys(living, 0)
    found: list[int] = []
    crashes = step = 0
    while any(num_steps[item] < 4 for item in living):
        may_run = [i for i in living if i in suspects.trial] if suspects.trial else living
        may_run = [i for i in may_run if num_steps[i] < 4] or may_run
        count = max(1, math.ceil(rng_rows[step % len(rng_rows)] * len(may_run)))
        step += 1
        rows = sorted(may_run, key=lambda item: num_steps[item])[:count]
        if guilty & set(rows):
            crashes += 1
            assert crashes <= max_crashes
            culprit = suspects.crashed(rows)
            if culprit is not None:
                found.append(culprit)
                living.remove(culprit)
            for item in living:
                num_steps[item] = 0
        else:
            for item in rows:
                num_steps[item] += 1
                suspects.completed(item, is_past=True)
    return found, crashes


@given(data=st.data(), num_seqs=st.integers(1, 64))
def test_the_guilty_one_is_found_within_log2_n_plus_two_crashes(data: st.DataObject, num_seqs: int) -> None:
    guilty = data.draw(st.integers(0, num_seqs - 1))
    found, crashes = run_until_quiet(num_seqs, {guilty}, [1.0], max_crashes=100)
    assert found == [guilty]
    assert crashes <= math.log2(num_seqs) + 2


@given(
    data=st.data(),
    num_seqs=st.integers(1, 40),
    rows=st.lists(st.sampled_from([0.1, 0.5, 1.0]), min_size=1, max_size=5),
)
def test_it_is_found_also_when_plans_hold_only_some(
    data: st.DataObject, num_seqs: int, rows: list[float]
) -> None:
    guilty = data.draw(st.integers(0, num_seqs - 1))
    found, crashes = run_until_quiet(num_seqs, {guilty}, rows, max_crashes=100)
    assert found == [guilty]
    assert crashes <= math.log2(num_seqs) + 2


@given(data=st.data(), num_seqs=st.integers(2, 24))
def test_several_guilty_are_all_found_and_nobody_else(data: st.DataObject, num_seqs: int) -> None:
    guilty = data.draw(st.sets(st.integers(0, num_seqs - 1), max_size=3))
    found, _ = run_until_quiet(num_seqs, guilty, [1.0], max_crashes=100)
    assert sorted(found) == sorted(guilty)


def test_a_crash_that_nobody_is_to_blame_for_leaves_no_trace() -> None:
    suspects: Suspects[str] = Suspects()
    assert suspects.crashed(["a", "b"]) is None
    assert suspects.group == []  # one crash is an accident
    for item in ("a", "b"):
        assert not suspects.completed(item, is_past=True)
        assert suspects.completed(item, is_past=True)
    assert not suspects


def test_who_has_not_got_past_where_it_was_is_not_cleared() -> None:
    suspects: Suspects[str] = Suspects()
    suspects.crashed(["a"])
    for _ in range(10):
        assert not suspects.completed("a", is_past=False)
    assert suspects.completed("a", is_past=True)


def test_newcomers_are_tried_first_and_the_others_wait() -> None:
    suspects: Suspects[str] = Suspects()
    suspects.crashed(["new", "newer", "old", "older"])
    suspects.crashed(["new", "newer", "old", "older"])
    assert suspects.group == ["new", "newer", "old", "older"]
    assert suspects.trial == ["new", "newer"]


def test_one_that_only_came_with_the_second_crash_is_not_searched_for() -> None:
    suspects: Suspects[str] = Suspects()
    suspects.crashed(["a", "b"])
    suspects.crashed(["c", "a", "b"])
    assert suspects.group == ["a", "b"]
    assert suspects.num_crashes("c") == 1


def test_a_suspect_that_is_cancelled_makes_way_for_the_next_trial() -> None:
    suspects: Suspects[str] = Suspects()
    for _ in range(2):
        suspects.crashed(["a", "b"])
    assert suspects.trial == ["a"]
    suspects.ended("a")
    assert suspects.trial == ["b"]
    suspects.ended("b")
    assert not suspects


def test_other_crashes_during_a_search_wait_for_their_turn() -> None:
    suspects: Suspects[str] = Suspects()
    for _ in range(2):
        suspects.crashed(["a", "b"])
    for _ in range(2):
        suspects.crashed(["x", "y"])
    assert suspects.group == ["a", "b", "x", "y"]


def test_one_alone_is_excused_where_it_was_not_hit_before_but_not_for_ever() -> None:
    suspects: Suspects[str] = Suspects()
    suspects.crashed(["a"])
    for _ in range(MAX_EXCUSES):
        assert suspects.crashed(["a"], is_elsewhere=True) is None
    assert suspects.crashed(["a"], is_elsewhere=True) == "a"


def test_in_company_nobody_is_excused() -> None:
    suspects: Suspects[str] = Suspects()
    suspects.crashed(["a", "b"])
    suspects.crashed(["a", "b"], is_elsewhere=True)
    assert suspects.trial == ["a"]


def test_who_is_cleared_may_be_excused_anew() -> None:
    suspects: Suspects[str] = Suspects()
    for _ in range(2):
        suspects.crashed(["a"])
        for _ in range(MAX_EXCUSES):
            assert suspects.crashed(["a"], is_elsewhere=True) is None
        for _ in range(NUM_STEPS_TO_CLEAR):
            suspects.completed("a", is_past=True)
    assert not suspects
