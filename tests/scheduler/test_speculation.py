"""Draft tokens through the core: fewer steps, the same answers, and no limit passed for them."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.executor_session import SessionBrokenError
from scheduler.policy import Admission, Limits
from scheduler.sequence import FinishReason, State
from tests.scheduler.harness import EXECUTOR, Harness

TAKES = frozenset({"draft_tokens"})
REPEATS = [3, 1, 2, 5]
"""The checking executor's model repeats itself after a prompt whose first id is a multiple of 3."""
DOES_NOT = [1, 2, 5, 4]


def harness(limits: dict[str, Any] | None = None, **capacities: Any) -> Harness:
    fields = {"watermark": 0.0, "admission": Admission.OPTIMISTIC} | (limits or {})
    return Harness(Limits(**fields), features=TAKES, **({"block_size": 16} | capacities))


def num_steps(num_speculative_tokens: int, **capacities: Any) -> int:
    h = harness({"num_speculative_tokens": num_speculative_tokens}, **capacities)
    for i in range(3):
        h.submit(f"r{i}", [3 * i, *REPEATS], 60, ignore_eos=True)
    h.run_to_end()
    h.check_outputs()
    assert (h.core.counters.draft_tokens > 0) == (num_speculative_tokens > 0)
    return h.core.counters.steps


def test_text_that_repeats_itself_takes_a_fraction_of_the_steps() -> None:
    plain, few, many = num_steps(0), num_steps(2), num_steps(8)
    assert plain == 61
    assert many < few < 0.6 * plain
    assert many < plain / 2


def test_text_that_does_not_is_left_alone() -> None:
    h = harness()
    h.submit("r", DOES_NOT, 100, ignore_eos=True)
    h.run_to_end()
    h.check_outputs()
    assert h.core.counters.draft_tokens < 5
    assert not any(plan.draft_tokens for plan in h.plans[-20:])


def test_executors_that_take_none_get_none() -> None:
    h = Harness(Limits(watermark=0.0), block_size=16)
    h.submit("r", REPEATS, 60, ignore_eos=True)
    h.run_to_end()
    assert h.core.counters.draft_tokens == 0


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=12), min_size=1, max_size=4),
    max_tokens=st.lists(st.integers(1, 60), min_size=4, max_size=4),
    most=st.integers(1, 8),
    block_size=st.sampled_from([1, 2, 5, 16]),
    budget=st.sampled_from([1, 2, 5, 64]),
    seats=st.integers(1, 4),
)
def test_answers_are_the_same_whatever_is_guessed(
    prompts: list[list[int]], max_tokens: list[int], most: int, block_size: int, budget: int, seats: int
) -> None:
    """The executor checks every rule besides: positions, slots, blocks, lengths."""
    num_blocks = -(-80 // block_size) + 2
    h = harness(
        {"num_speculative_tokens": most},
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=seats,
    )
    for i, (prompt, length) in enumerate(zip(prompts, max_tokens, strict=False)):
        h.submit(f"r{i}", prompt, length)
    h.run_to_end()
    h.check_outputs()
    for plan in h.plans:
        assert sum(plan.num_tokens) <= budget
        assert all(len(draft) <= most for draft in plan.draft_tokens.values())


def guessing(h: Harness, name: str = "r", max_tokens: int = 120, **fields: Any) -> None:
    """Runs until a plan with draft tokens of this request is under way."""
    seq = h.submit(name, REPEATS, max_tokens, ignore_eos=True, **fields)
    for _ in range(60):
        while (plan := h.plan()) is not None:
            if plan.draft_tokens.get(seq.seq_id):
                return
        h.result()
    raise AssertionError("nothing was guessed")


def test_a_plan_with_draft_tokens_waits_for_all_results_and_none_is_made_behind_it() -> None:
    h = harness()
    guessing(h)
    assert h.plans[-1].acked_step_id == h.plans[-1].step_id - 1
    assert h.plan() is None
    h.result()
    assert h.plan() is not None


def test_no_plan_is_made_behind_draft_tokens_when_waiting_ceases_to_pay() -> None:
    """A plan behind them has no row of those that guess: the batch would fall into two that take turns."""
    h = harness()
    h.submit("guesses", REPEATS, 200, ignore_eos=True)
    h.submit("does not", DOES_NOT, 200, ignore_eos=True)
    while not h.core.is_idle:
        while h.plan() is not None:
            pass
        plan = h.executor.plans[0] if h.executor.plans else h.plans[-1]
        way_us = 0 if plan.step_id < 20 else 2_000  # more than guesses win
        h.now += (100 + 10 * sum(plan.num_tokens) + way_us) / 1e6
        h.result()
    h.check_outputs()
    for plan, behind in pairwise(h.plans):
        if plan.draft_tokens:
            assert plan.acked_step_id == plan.step_id - 1
            assert behind.acked_step_id == plan.step_id
    assert 0 < sum(1 for plan in h.plans if plan.draft_tokens) < 10


def test_an_executor_of_one_plan_at_a_time_loses_nothing_by_waiting() -> None:
    """So guesses need not win a way's time there, however long it is."""
    h = harness(max_window=1)
    h.submit("r", REPEATS, 120, ignore_eos=True)
    while not h.core.is_idle:
        plan = h.plan()
        assert plan is not None
        h.now += (100 + 10 * sum(plan.num_tokens) + 10_000) / 1e6
        h.result()
    h.check_outputs()
    assert h.core.counters.draft_tokens_accepted > 60


def test_a_newcomer_enters_beside_draft_tokens_and_its_prompt_comes_before_them() -> None:
    h = harness(max_num_batched_tokens=12)
    guessing(h)
    h.result()
    h.submit("new", DOES_NOT * 6, 4)
    plan = h.plan()
    assert plan is not None
    assert (plan.num_tokens, plan.draft_tokens) == ([1, 11], {})
    while h.sequences["new"].state is not State.FINISHED:
        h.step()
    h.run_to_end()
    h.check_outputs()


def test_a_step_stays_within_its_time() -> None:
    """A step of n tokens takes 100 + 10 n us."""
    h = harness({"max_step_us": 145.0})
    h.submit("r", REPEATS, 100, ignore_eos=True)
    h.run_to_end()
    h.check_outputs()
    assert h.core.counters.draft_tokens_accepted > 50
    assert max(sum(plan.num_tokens) for plan in h.plans[1:]) == 4


def test_a_length_is_reached_to_the_token() -> None:
    h = harness()
    seq = h.submit("r", REPEATS, 200)  # its cycle has no end token
    h.run_to_end()
    output = seq.output_token_ids().tolist()
    assert h.core.counters.draft_tokens_accepted > 100
    assert seq.finish is not None
    assert (len(output), seq.finish.reason) == (200, FinishReason.LENGTH)


def test_draft_tokens_take_a_block_ahead_only_where_there_is_plenty() -> None:
    """A sequence alone has plenty; where blocks are short, a guess ends with the slots that there are."""
    for num_blocks, has_plenty in ((64, True), (8, False)):
        h = harness(block_size=4, num_blocks=num_blocks, max_num_seqs=8)
        num = 1 if has_plenty else 2
        for i in range(num):
            h.submit(f"r{i}", REPEATS, 11 if not has_plenty else 60, ignore_eos=True)
        h.run_to_end()
        h.check_outputs()
        ahead = [seq_id for plan in h.plans for seq_id in plan.grown_seq_ids if seq_id in plan.draft_tokens]
        assert bool(ahead) == has_plenty


def test_what_was_under_way_when_an_executor_died_is_not_guessed_again() -> None:
    h = harness()
    guessing(h)
    assert not h.core.detach(EXECUTOR, h.now, is_crash=True)
    seq = h.sequences["r"]
    assert seq.num_tokens_at_crash > len(seq.token_ids)  # the guesses were under way too
    h.attach()
    h.plans.clear()
    h.run_to_end()
    h.check_outputs()
    assert not any(plan.draft_tokens for plan in h.plans)


def test_one_that_is_given_up_while_its_draft_is_under_way_leaves_nothing() -> None:
    h = harness()
    guessing(h)
    seq = h.sequences.pop("r")
    h.core.cancel(seq.request.key, FinishReason.ABORT, h.now)
    h.run_to_end()
    state = h.core.executors[EXECUTOR]
    assert state.blocks.num_free == state.blocks.num_blocks
    assert h.core.counters.wasted_tokens > 1  # what the step brought, several at once


def test_a_failed_row_counts_no_guess_as_right() -> None:
    h = harness()
    guessing(h)
    before = h.core.counters.draft_tokens_accepted
    row = h.plans[-1].seq_ids.index(h.sequences["r"].seq_id)
    (ended,) = h.result(fail=row)
    assert ended.finish is not None
    assert ended.finish.reason is FinishReason.ERROR
    assert h.core.counters.draft_tokens_accepted == before
    h.sequences.clear()
    h.run_to_end()


def test_more_tokens_than_were_guessed_break_the_session() -> None:
    h = harness()
    guessing(h)
    result = h.executor.run()
    at = result.seq_ids.index(h.sequences["r"].seq_id)
    most = 1 + len(h.plans[-1].draft_tokens[result.seq_ids[at]])
    result.token_ids.extend([7] * (most + 1 - result.num_sampled[at]))
    result.num_sampled[at] = most + 1
    with pytest.raises(SessionBrokenError, match=f"sampled {most + 1}, 1 to {most} due"):
        h.core.update(EXECUTOR, result, h.now)
