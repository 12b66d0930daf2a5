from array import array

import pytest

from scheduler.drafting import MAX_ROWS, Drafting
from scheduler.lookup import Guesses
from scheduler.sequence import Sequence, State
from scheduler.step_time import Line
from scheduler.token_ids import NO_IDS
from tests.scheduler.sequences import running

CPU: Line = (9_000.0, 2_000.0)
"""Microseconds of a step on two cores: without tokens, and for each of them."""


def guessing(right: float, tried: float, name: str = "r") -> Sequence:
    """One whose guesses have been so good."""
    seq = running(name, prompt_len=8, max_tokens=40)
    seq.num_computed_tokens = len(seq.token_ids) - 1
    seq.guesses = Guesses(8, 4, right, tried, len(seq.token_ids), array("I", [5, 6, 7, 8]))
    return seq


def waits(*members: Sequence, line: Line | None = CPU, way_us: float | None = 500.0) -> bool:
    drafting = Drafting(8)
    way_seconds = None if way_us is None else way_us / 1e6
    drafting.learn(dict(enumerate(members)), [], line, way_seconds)
    return drafting.waits


def test_one_row_pays_with_few_right_guesses_and_a_full_batch_with_hardly_any_wrong_ones() -> None:
    drafting = Drafting(8)
    half_right = guessing(2.0, 4.0)
    assert drafting.guess(half_right, 1, CPU).tolist() == [5, 6, 7, 8]
    assert drafting.guess(half_right, 4, CPU)
    assert not drafting.guess(half_right, 16, CPU)
    assert drafting.guess(guessing(3.6, 4.0), 16, CPU)


def test_a_guess_continues_what_is_known() -> None:
    seq = guessing(2.0, 4.0)
    seq.token_ids.extend([5, 6])
    assert Drafting(8).guess(seq, 1, CPU).tolist() == [7, 8]


def test_nothing_is_sent_before_steps_and_guesses_are_known() -> None:
    drafting = Drafting(8)
    assert drafting.guess(running(prompt_len=8, max_tokens=40), 1, CPU) == NO_IDS
    assert drafting.guess(guessing(2.0, 4.0), 1, None) == NO_IDS
    assert drafting.guess(guessing(0.0, 0.0), 1, CPU) == NO_IDS
    assert not waits(guessing(2.0, 4.0), line=None)
    assert not waits()


def test_waiting_has_to_win_more_than_the_way_takes() -> None:
    """A token is worth 11 ms here, and costs 2: 0.3 right ones of 1 win 1.3 ms."""
    weak = guessing(0.3, 1.0)
    assert waits(weak, way_us=1_200.0)
    assert not waits(weak, way_us=1_400.0)
    assert waits(weak, guessing(0.3, 1.0, "other"), way_us=1_000.0) is False  # two share the step
    assert not waits(guessing(0.05, 4.0))
    assert waits(guessing(0.05, 4.0), guessing(4.0, 4.0, "good"))  # a bad one takes nothing from a good one


def test_beside_a_prompt_in_progress_nobody_waits_for_guesses_that_it_leaves_no_tokens() -> None:
    """At 9 ms for 200 tokens, a right guess is worth hardly more than the token that it costs."""
    prompt = running("prompt", prompt_len=200, max_tokens=40)
    assert waits(guessing(3.0, 4.0), way_us=500.0)
    assert not waits(guessing(3.0, 4.0), prompt, way_us=500.0)
    prompt.num_computed_tokens = 199
    assert waits(guessing(3.0, 4.0), prompt, way_us=500.0)


def test_in_a_large_batch_nothing_is_looked_up() -> None:
    members = [guessing(4.0, 4.0, f"r{i}") for i in range(MAX_ROWS + 1)]
    before = [seq.guesses for seq in members]
    drafting = Drafting(8)
    members[0].token_ids.append(9)  # the guess was wrong
    drafting.learn(dict(enumerate(members)), members, CPU, 0.0)
    assert not drafting.waits
    assert [seq.guesses for seq in members] == before
    del members[1]
    drafting.learn(dict(enumerate(members)), members, CPU, 0.0)
    assert members[0].guesses is not None
    assert members[0].guesses.right == pytest.approx(3.0)


def test_those_that_ended_or_only_fill_a_batch_are_not_looked_up() -> None:
    over, padding = running("over", prompt_len=8, max_tokens=40), running("pad", prompt_len=8, max_tokens=40)
    over.state, padding.is_padding = State.FINISHED, True
    alive = running("alive", prompt_len=8, max_tokens=40)
    Drafting(8).learn({1: alive}, [over, padding, alive], CPU, 0.0)
    assert (over.guesses, padding.guesses) == (None, None)
    assert alive.guesses is not None
