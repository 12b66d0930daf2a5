import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.adjustments import Adjustment
from executor.plan import (
    INTERNAL,
    INVALID_ARGUMENT,
    BatchPlan,
    FinishedSequence,
    NewSequence,
    PromptLogprobs,
    SamplingParams,
    StepResult,
    TokenLogprobs,
)
from executor.rows import NOT_FINITE, Sampled
from executor.sequences import PlanError, SequenceTable
from executor.stopping import FinishReason

EOS = 9


def table(**changes: Any) -> SequenceTable:
    values: dict[str, Any] = {
        "num_blocks": 32,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_seq_len": 40,
        "vocab_size": 100,
        "eos_token_ids": (EOS,),
    }
    return SequenceTable(**{**values, **changes})


def new(
    seq_id: int,
    token_ids: Iterable[int] = (1, 2, 3),
    *,
    block_ids: Iterable[int] = (0, 1, 2),
    num_prompt_tokens: int | None = None,
    num_computed: int = 0,
    **sampling: Any,
) -> NewSequence:
    token_ids = tuple(token_ids)
    unsupported = sampling.pop("unsupported", ())
    wanted_from = sampling.pop("prompt_logprobs_from", None)
    params = SamplingParams(**{"max_tokens": 8, **sampling})
    num_prompt = len(token_ids) if num_prompt_tokens is None else num_prompt_tokens
    return NewSequence(
        seq_id, token_ids, num_prompt, num_computed, tuple(block_ids), params, unsupported, wanted_from
    )


def plan(
    step_id: int,
    rows: dict[int, int] | None = None,
    *,
    positions_sum: int = 0,
    acked: int | None = None,
    **fields: Any,
) -> BatchPlan:
    rows = rows or {}
    return BatchPlan(
        epoch=1,
        step_id=step_id,
        acked_step_id=step_id - 1 if acked is None else acked,
        seq_ids=tuple(rows),
        num_tokens=tuple(rows.values()),
        positions_sum=positions_sum,
        **fields,
    )


def run(
    t: SequenceTable, p: BatchPlan, *token_ids: int, errors: list[str | None] | None = None
) -> StepResult:
    """Apply a plan and commit `token_ids`, one for each sample row of each row in the plan's order."""
    rows = t.apply(p)
    sampling = [row.seq_id for row in rows for _ in row.sample_rows]
    assert len(sampling) == len(token_ids), "the test must sample each sampling row"
    sampled = Sampled(list(token_ids), [None] * len(token_ids), errors or [None] * len(token_ids))
    return t.commit(p, sampling, sampled)


# --- rows -------------------------------------------------------------------------------------------


def test_a_row_carries_its_tokens_position_and_whole_block_table() -> None:
    t = table()
    (row,) = t.apply(plan(1, {5: 2}, admitted=(new(5, (7, 8, 6)),)))
    assert (row.seq_id, row.token_ids, row.first_position) == (5, [7, 8], 0)
    assert row.block_ids.tolist() == [0, 1, 2]
    assert row.sample_rows == ()


def test_b22_a_prompt_samples_only_with_its_last_token() -> None:
    t = table()
    first = run(t, plan(1, {5: 2}, admitted=(new(5),)))
    last = run(t, plan(2, {5: 1}, positions_sum=2), 42)
    assert (first.seq_ids, first.num_sampled, first.token_ids) == ((5,), (0,), ())
    assert (last.seq_ids, last.num_sampled, last.token_ids) == ((5,), (1,), (42,))


def test_a_decode_computes_the_token_that_the_step_before_sampled() -> None:
    t = table()
    run(t, plan(1, {5: 3}, admitted=(new(5),)), 42)
    (row,) = t.apply(plan(2, {5: 1}, positions_sum=3))
    assert (row.token_ids, row.first_position, row.sample_rows[0].output_index) == ([42], 3, 1)


def test_results_stand_in_the_plans_order_whatever_the_order_of_sampling() -> None:
    t = table()
    p = plan(1, {2: 3, 1: 2, 3: 3}, admitted=(new(1), new(2), new(3)))
    t.apply(p)
    result = t.commit(p, [3, 2], Sampled([33, 22], [None, None], [None, None]))
    assert (result.seq_ids, result.num_sampled, result.token_ids) == ((2, 1, 3), (1, 0, 1), (22, 33))


def test_a_plan_may_have_no_rows() -> None:
    result = run(table(), plan(1))
    assert (result.epoch, result.step_id, result.seq_ids) == (1, 1, ())


def test_resumed_output_counts_and_the_prompt_is_the_clients() -> None:
    t = table()
    resumed = new(5, (1, 2, 3, 50, 51), num_prompt_tokens=3, max_tokens=4, min_tokens=3)
    (row,) = t.apply(plan(1, {5: 5}, admitted=(resumed,)))
    assert (row.sample_rows[0].output_index, row.sample_rows[0].masked_ids) == (2, (EOS,))
    first = t.commit(plan(1), [5], Sampled([52], [None], [None]))
    second = run(t, plan(2, {5: 1}, positions_sum=5), 53)
    assert first.finished == ()
    assert second.finished == (FinishedSequence(5, FinishReason.LENGTH),)


def test_a_sequence_starts_where_its_computed_prefix_ends() -> None:
    t = table()
    (row,) = t.apply(plan(1, {5: 2}, positions_sum=4, admitted=(new(5, range(1, 7), num_computed=4),)))
    assert (row.token_ids, row.first_position, row.sample_rows[0].output_index) == ([5, 6], 4, 0)


def test_new_blocks_are_appended_in_order() -> None:
    t = table()
    run(t, plan(1, {1: 3, 2: 3}, admitted=(new(1, block_ids=[4]), new(2, block_ids=[5]))), 40, 41)
    rows = t.apply(
        plan(
            2,
            {1: 1, 2: 1},
            positions_sum=6,
            grown_seq_ids=(2, 1),
            num_new_blocks=(2, 1),
            new_block_ids=(7, 8, 6),
        )
    )
    assert [row.block_ids.tolist() for row in rows] == [[4, 6], [5, 7, 8]]


def test_logprobs_stand_with_their_sequence() -> None:
    t = table()
    p = plan(1, {1: 3, 2: 3}, admitted=(new(1), new(2, logprobs=1)))
    t.apply(p)
    chances = TokenLogprobs(41, -0.5, 1, (41,), (-0.5,))
    result = t.commit(p, [1, 2], Sampled([40, 41], [None, chances], [None, None]))
    assert result.logprobs == ((2, chances),)


# --- ends and ghosts --------------------------------------------------------------------------------


def test_b03_a_sequence_of_one_token_ends_in_the_step_of_its_prompt() -> None:
    t = table()
    result = run(t, plan(1, {5: 3}, admitted=(new(5, max_tokens=1),)), 42)
    assert result.finished == (FinishedSequence(5, FinishReason.LENGTH),)
    assert (t.num_sequences, t.num_ghosts) == (0, 1)


@pytest.mark.parametrize(("ignore_eos", "ends"), [(False, True), (True, False)])
def test_the_models_end_token_ends_unless_ignored(ignore_eos: bool, ends: bool) -> None:
    result = run(table(), plan(1, {5: 3}, admitted=(new(5, ignore_eos=ignore_eos),)), EOS)
    assert result.finished == ((FinishedSequence(5, FinishReason.STOP, EOS),) if ends else ())
    assert result.token_ids == (EOS,)


def test_b35_the_last_token_that_the_model_length_allows_ends_with_length() -> None:
    t = table(max_seq_len=5)
    first = run(t, plan(1, {5: 3}, admitted=(new(5),)), 40)
    second = run(t, plan(2, {5: 1}, positions_sum=3), 41)
    assert first.finished == ()
    assert second.finished == (FinishedSequence(5, FinishReason.LENGTH),)


def test_a_ghosts_row_reports_nothing_and_counts_in_positions_sum() -> None:
    t = table()
    run(t, plan(1, {1: 3, 2: 3}, admitted=(new(1), new(2))), EOS, 41)
    result = run(t, plan(2, {1: 1, 2: 1}, positions_sum=6, acked=0), 42)
    assert (result.seq_ids, result.token_ids, result.finished) == ((2,), (42,), ())


def test_a_ghost_keeps_counting_while_its_end_is_unacknowledged() -> None:
    t = table()
    run(t, plan(1, {1: 3}, admitted=(new(1),)), EOS)
    run(t, plan(2, {1: 1}, positions_sum=3, acked=0))
    run(t, plan(3, {1: 1}, positions_sum=4, acked=0))


def test_new_blocks_for_a_ghost_are_ignored() -> None:
    t = table()
    run(t, plan(1, {1: 3}, admitted=(new(1),)), EOS)
    grown = {"grown_seq_ids": (1,), "num_new_blocks": (1,), "new_block_ids": (9,)}
    run(t, plan(2, {1: 1}, positions_sum=3, acked=0, **grown))


def test_an_acknowledged_ghost_is_unknown() -> None:
    t = table()
    run(t, plan(1, {1: 3}, admitted=(new(1),)), EOS)
    with pytest.raises(PlanError, match="sequence 1 has a row and is not known"):
        t.apply(plan(2, {1: 1}, positions_sum=3, acked=1))


def test_acknowledging_forgets_ghosts_of_that_step_and_before_only() -> None:
    t = table()
    run(t, plan(1, {1: 3, 2: 3}, admitted=(new(1), new(2))), EOS, 41)
    run(t, plan(2, {2: 1}, positions_sum=3, acked=0), EOS)
    assert t.num_ghosts == 2
    run(t, plan(3, acked=1))
    assert t.num_ghosts == 1
    run(t, plan(4, acked=2))
    assert t.num_ghosts == 0


def test_a_released_sequence_is_unknown_and_a_second_release_is_no_error() -> None:
    t = table()
    run(t, plan(1, {1: 3}, admitted=(new(1),)), 41)
    run(t, plan(2, released_seq_ids=(1,)))
    run(t, plan(3, released_seq_ids=(1, 77)))
    assert t.num_sequences == 0
    with pytest.raises(PlanError, match="not known"):
        t.apply(plan(4, {1: 1}, positions_sum=3))


def test_releases_come_before_admissions_so_that_a_victims_blocks_can_be_given_on() -> None:
    t = table()
    run(t, plan(1, {1: 3}, admitted=(new(1),)), 41)
    result = run(t, plan(2, {2: 3}, released_seq_ids=(1,), admitted=(new(2),)), 43)
    assert result.seq_ids == (2,)


# --- draft tokens -------------------------------------------------------------------------------------


def drafting(**changes: Any) -> SequenceTable:
    return table(takes_draft_tokens=True, **changes)


def test_a_row_has_its_draft_tokens_behind_the_known_ones_and_a_choice_behind_each() -> None:
    t = drafting()
    admitted = (new(1, min_tokens=3, seed=5), new(2))
    (row, other) = t.apply(plan(1, {1: 5, 2: 2}, admitted=admitted, draft_tokens=((1, (40, 41)),)))
    assert (row.token_ids, row.draft_token_ids, row.first_position) == ([1, 2, 3, 40, 41], [40, 41], 0)
    assert [(each.output_index, each.masked_ids) for each in row.sample_rows] == [
        (0, (EOS,)),
        (1, (EOS,)),
        (2, (EOS,)),
    ]
    assert len({id(each.params) for each in row.sample_rows}) == 1
    assert (other.draft_token_ids, other.sample_rows) == ([], ())


def test_the_end_tokens_are_held_back_by_each_places_own_output_index() -> None:
    (row,) = drafting().apply(
        plan(1, {1: 6}, admitted=(new(1, min_tokens=2),), draft_tokens=((1, (4, 5, 6)),))
    )
    assert [each.masked_ids for each in row.sample_rows] == [(EOS,), (EOS,), (), ()]


@pytest.mark.parametrize(
    ("sampled", "num_taken"),
    [
        ((40, 41, 42), 3),
        ((40, 41, 40), 3),
        ((40, 50, 42), 2),
        ((50, 41, 42), 1),
        ((50, 40, 41), 1),
    ],
)
def test_one_token_is_taken_and_one_after_each_right_draft_token(
    sampled: tuple[int, ...], num_taken: int
) -> None:
    t = drafting()
    result = run(t, plan(1, {1: 5}, admitted=(new(1),), draft_tokens=((1, (40, 41)),)), *sampled)
    assert (result.num_sampled, result.token_ids) == ((num_taken,), sampled[:num_taken])
    (row,) = t.apply(plan(2, {1: 1}, positions_sum=2 + num_taken))
    assert (row.token_ids, row.first_position) == ([sampled[num_taken - 1]], 2 + num_taken)
    assert row.sample_rows[0].output_index == num_taken


def test_rows_with_draft_tokens_stand_beside_others_in_any_order_of_sampling() -> None:
    t = drafting()
    p = plan(
        1,
        {1: 4, 2: 2, 3: 5, 4: 3},
        admitted=tuple(new(seq_id) for seq_id in range(1, 5)),
        draft_tokens=((3, (30, 31)), (1, (10,))),
    )
    t.apply(p)
    ids = [40, 10, 11, 30, 99, 99]
    result = t.commit(p, [4, 1, 1, 3, 3, 3], Sampled(ids, [None] * 6, [None] * 6))
    assert (result.seq_ids, result.num_sampled) == ((1, 2, 3, 4), (2, 0, 2, 1))
    assert result.token_ids == (10, 11, 30, 99, 40)


def test_every_token_of_a_row_has_its_logprobs_and_none_that_was_not_taken() -> None:
    t = drafting()
    p = plan(1, {1: 5, 2: 3}, admitted=(new(1, logprobs=0), new(2)), draft_tokens=((1, (40, 41)),))
    t.apply(p)
    chances = [TokenLogprobs(token_id, -0.5, 1, (), ()) for token_id in (40, 50, 42)]
    result = t.commit(p, [1, 1, 1, 2], Sampled([40, 50, 42, 7], [*chances, None], [None] * 4))
    assert result.logprobs == ((1, chances[0]), (1, chances[1]))


@pytest.mark.parametrize(
    ("sampling", "reason", "matched"),
    [
        ({"max_tokens": 8}, FinishReason.STOP, EOS),
        ({"max_tokens": 3, "ignore_eos": True}, FinishReason.LENGTH, None),
        ({"max_tokens": 8, "ignore_eos": True, "stop_token_ids": frozenset({EOS})}, FinishReason.STOP, EOS),
    ],
)
def test_an_end_among_right_draft_tokens_is_the_rows_last_token(
    sampling: dict[str, Any], reason: FinishReason, matched: int | None
) -> None:
    t, draft = drafting(), (40, EOS, 42)[: sampling["max_tokens"] - 1]
    p = plan(1, {1: 3 + len(draft)}, admitted=(new(1, **sampling),), draft_tokens=((1, draft),))
    result = run(t, p, *draft, 43)
    assert result.token_ids == ((40, EOS) if reason is FinishReason.STOP else (40, EOS, 43))
    assert result.finished == (FinishedSequence(1, reason, matched),)
    assert (t.num_sequences, t.num_ghosts) == (0, 1)


def test_a_place_that_cannot_be_sampled_is_left_to_the_next_step_unless_it_is_the_first() -> None:
    def result_of(t: SequenceTable, *errors: str | None) -> StepResult:
        p = plan(1, {1: 5}, admitted=(new(1),), draft_tokens=((1, (40, 41)),))
        return run(t, p, 40, 41, 42, errors=list(errors))

    t = drafting()
    assert (result_of(t, None, NOT_FINITE, None).token_ids, t.num_sequences) == ((40,), 1)
    again = run(t, plan(2, {1: 1}, positions_sum=3), 0, errors=[NOT_FINITE])
    assert [(error.seq_id, error.message) for error in again.errors] == [(1, NOT_FINITE)]
    t = drafting()
    assert (result_of(t, None, None, "no token is left").token_ids, t.num_sequences) == ((40, 41), 1)
    first = result_of(drafting(), NOT_FINITE, None, None)
    assert (first.token_ids, [error.seq_id for error in first.errors]) == ((), [1])


def test_what_penalties_count_after_a_draft_token_is_what_they_count_once_it_was_taken() -> None:
    def counted(adjustment: Adjustment | None) -> dict[int, int]:
        assert adjustment is not None
        seen = adjustment.seen
        assert seen is not None
        return dict(zip(seen.ids.tolist(), seen.counts.tolist(), strict=True))

    t = drafting()
    admitted = (new(1, (1, 2), presence_penalty=1.0),)
    (row,) = t.apply(plan(1, {1: 4}, admitted=admitted, draft_tokens=((1, (40, 40)),)))
    seen = [counted(each.adjustment) for each in row.sample_rows]
    assert seen == [{}, {40: 1}, {40: 2}]
    t.commit(plan(1), [1, 1, 1], Sampled([40, 41, 7], [None] * 3, [None] * 3))
    (row,) = t.apply(plan(2, {1: 1}, positions_sum=3))
    assert counted(row.sample_rows[0].adjustment) == {40: 1, 41: 1}


def test_bias_alone_is_shared_by_all_places_of_a_row() -> None:
    admitted = (new(1, logit_bias=((5, 1.0),)),)
    (row,) = drafting().apply(plan(1, {1: 5}, admitted=admitted, draft_tokens=((1, (40, 41)),)))
    assert len({id(each.adjustment) for each in row.sample_rows}) == 1


def test_a_row_with_draft_tokens_scores_no_more_of_the_prompt_than_there_is() -> None:
    admitted = (new(1, range(10, 14), prompt_logprobs_from=1),)
    p = plan(1, {1: 6}, admitted=admitted, draft_tokens=((1, (40, 41)),))
    assert stretches(drafting(), p) == [(1, [11, 12, 13])]


def test_a_ghosts_draft_tokens_count_in_positions_sum_alone() -> None:
    t = drafting()
    run(t, plan(1, {1: 3, 2: 3}, admitted=(new(1), new(2))), EOS, 41)
    guessed = {"draft_tokens": ((1, (7, 8)), (2, (50,)))}
    result = run(t, plan(2, {1: 3, 2: 2}, positions_sum=6, acked=0, **guessed), 50, 51)
    assert (result.seq_ids, result.token_ids) == ((2,), (50, 51))


def test_a_sequence_has_a_row_again_once_its_draft_tokens_are_acknowledged() -> None:
    t = drafting()
    run(t, plan(1, {1: 4, 2: 3}, admitted=(new(1), new(2)), draft_tokens=((1, (40,)),)), 50, 51, 60)
    run(t, plan(2, {2: 1}, positions_sum=3, acked=0), 61)
    run(t, plan(3, {1: 1, 2: 1}, positions_sum=3 + 4, acked=1), 52, 62)


def test_before_that_the_sequence_may_have_no_row() -> None:
    t = drafting()
    run(t, plan(1, {1: 4}, admitted=(new(1),), draft_tokens=((1, (40,)),)), 50, 51)
    with pytest.raises(PlanError, match="step 1 with its draft tokens is not acknowledged"):
        t.apply(plan(2, {1: 1}, positions_sum=3, acked=0))


KNOWN = (new(1),)


@pytest.mark.parametrize(
    ("rows", "guessed", "sentence"),
    [
        ({1: 4}, ((1, (40,)), (1, (40,))), "two entries of draft tokens"),
        ({}, ((1, (40,)),), "sequence 1 has draft tokens and no row"),
        ({1: 3}, ((7, (40,)),), "sequence 7 has draft tokens and no row"),
        ({1: 3}, ((1, ()),), "sequence 1 has an entry of no draft tokens; it must have at least 1"),
        ({1: 5}, ((1, (40, 100)),), "has the draft token 100; the vocabulary has 100"),
        (
            {1: 3},
            ((1, (40,)),),
            "ends before position 3; with 3 known and 1 draft tokens it must end before 4",
        ),
        ({1: 2}, ((1, (40,)),), "ends before position 2"),
        ({1: 5}, ((1, (40,)),), "ends before position 5"),
        ({1: 3 + 8}, ((1, (40,) * 8),), "8 draft tokens and may sample 8 more tokens; it may have 7"),
    ],
)
def test_draft_tokens_that_do_not_fit_are_refused(
    rows: dict[int, int], guessed: tuple[tuple[int, tuple[int, ...]], ...], sentence: str
) -> None:
    with pytest.raises(PlanError, match=sentence):
        drafting().apply(plan(1, rows, admitted=KNOWN, draft_tokens=guessed))


def test_as_many_draft_tokens_as_are_left_but_one_are_taken_and_one_more_is_refused() -> None:
    for max_seq_len, max_tokens, most in ((40, 5, 4), (8, 20, 4), (8, 5, 4), (4, 20, 0), (40, 1, 0)):
        fields: dict[str, Any] = {"admitted": (new(1, max_tokens=max_tokens),)}
        if most:
            guessed = ((1, (40,) * most),)
            drafting(max_seq_len=max_seq_len).apply(plan(1, {1: 3 + most}, draft_tokens=guessed, **fields))
        guessed = ((1, (40,) * (most + 1)),)
        with pytest.raises(PlanError, match=f"it may have {most}"):
            drafting(max_seq_len=max_seq_len).apply(plan(1, {1: 4 + most}, draft_tokens=guessed, **fields))


def test_draft_tokens_without_a_slot_are_refused() -> None:
    p = plan(1, {1: 5}, admitted=(new(1, block_ids=[0]),), draft_tokens=((1, (40, 41)),))
    with pytest.raises(PlanError, match="its 1 blocks hold 4"):
        drafting().apply(p)


def test_draft_tokens_are_refused_where_they_are_not_taken() -> None:
    with pytest.raises(PlanError, match="does not have the feature draft_tokens"):
        table().apply(plan(1, {1: 4}, admitted=KNOWN, draft_tokens=((1, (40,)),)))


# --- one row's error --------------------------------------------------------------------------------


@pytest.mark.parametrize("bad_id", [100, 101, 2**31 - 1, 2**32 - 1])
def test_b97_a_token_id_outside_the_vocabulary_hurts_its_own_sequence_only(bad_id: int) -> None:
    t = table()
    result = run(t, plan(1, {1: 3, 2: 3}, admitted=(new(1, (1, bad_id, 2)), new(2))), 41)
    assert (result.seq_ids, result.token_ids) == ((2,), (41,))
    (error,) = result.errors
    assert (error.seq_id, error.status_code) == (1, INVALID_ARGUMENT)
    assert error.message == f"token 1 is {bad_id}; token ids are 0 to 99"
    assert run(t, plan(2, {1: 1, 2: 1}, positions_sum=6, acked=0), 42).seq_ids == (2,)


def test_a_row_that_cannot_be_sampled_ends_with_its_error_and_its_neighbour_goes_on() -> None:
    t = table()
    p = plan(1, {1: 3, 2: 3}, admitted=(new(1), new(2)))
    result = run(t, p, 0, 41, errors=[NOT_FINITE, None])
    assert (result.seq_ids, result.token_ids) == ((2,), (41,))
    assert [(e.seq_id, e.message, e.status_code) for e in result.errors] == [(1, NOT_FINITE, INTERNAL)]
    assert (t.num_sequences, t.num_ghosts) == (1, 1)


def test_a_request_that_excludes_every_token_is_its_clients_fault() -> None:
    result = run(table(), plan(1, {1: 3}, admitted=(new(1),)), 0, errors=["no token is left"])
    assert [(e.message, e.status_code) for e in result.errors] == [("no token is left", INVALID_ARGUMENT)]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"token_ids": ()}, "prompt is empty"),
        ({"token_ids": (1,) * 40, "block_ids": range(10)}, "the sequence has 40 tokens"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"token_ids": (1, 2, 3), "num_prompt_tokens": 1, "max_tokens": 2}, "2 output tokens are known"),
        ({"min_tokens": 9}, "min_tokens is 9"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"temperature": 1e40}, "temperature is 1e+40; it must be 0 to 100"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"top_p": 7.0}, "top_p is 7"),
        ({"min_p": math.nan}, "min_p is nan"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"top_k": -2}, "top_k is -2"),
        ({"stop_token_ids": frozenset({100})}, "stop_token_ids holds 100"),
        ({"stop_token_ids": frozenset({-1})}, "stop_token_ids holds -1"),
        ({"logprobs": 21}, "logprobs is 21"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition_penalty": math.nan}, "repetition_penalty is nan"),
        ({"repetition_penalty": 100.5}, "at most 100"),
        ({"presence_penalty": -2.1}, "presence_penalty is -2.1"),
        ({"frequency_penalty": math.nan}, "frequency_penalty is nan"),
        ({"logit_bias": ((5, 101.0),)}, "logit_bias of token 5 is 101.0"),
        ({"logit_bias": ((5, math.nan),)}, "logit_bias of token 5 is nan"),
        ({"logit_bias": ((100, 1.0),)}, "logit_bias holds 100"),
        ({"allowed_token_ids": frozenset({-1})}, "allowed_token_ids holds -1"),
        ({"banned_token_ids": frozenset({100})}, "banned_token_ids holds 100"),
        (
            {"allowed_token_ids": frozenset({1}), "banned_token_ids": frozenset({1, 2})},
            "no token is left to choose",
        ),
        ({"unsupported": ("adapter",)}, "adapter is not supported"),
    ],
)
def test_b55_a_request_that_cannot_be_computed_ends_with_a_sentence(
    fields: dict[str, Any], named: str
) -> None:
    result = run(table(), plan(1, admitted=(new(1, **fields),)))
    assert [(e.seq_id, e.status_code) for e in result.errors] == [(1, INVALID_ARGUMENT)]
    assert named in result.errors[0].message


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": (1,) * 39, "block_ids": range(10)},
        {"token_ids": (0, 99)},
        {"token_ids": (1, 2, 3), "num_prompt_tokens": 1, "max_tokens": 3},
        {"max_tokens": 1, "min_tokens": 1},
        {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 100.0, "top_p": 1e-9, "min_p": 1.0},
        {"stop_token_ids": frozenset({0, 99})},
        {"logprobs": 0, "prompt_logprobs": 0},
        {"logprobs": 20, "prompt_logprobs": 20},
        {"repetition_penalty": 100.0, "presence_penalty": -2.0, "frequency_penalty": -2.0},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"logit_bias": ((0, -100.0), (99, 100.0))},
        {"allowed_token_ids": frozenset({0, 99}), "banned_token_ids": frozenset({0})},
    ],
)
def test_a_request_may_ask_for_just_what_the_limits_say(fields: dict[str, Any]) -> None:
    assert run(table(), plan(1, admitted=(new(1, **fields),))).errors == ()


@pytest.mark.parametrize("top_k", [0, 100, 10**7, 2**31 - 1, 2**63 - 1])
def test_b53_a_top_k_above_the_vocabulary_is_no_error(top_k: int) -> None:
    assert run(table(), plan(1, admitted=(new(1, top_k=top_k),))).errors == ()


# --- what a request changes of its logits -----------------------------------------------------------


def test_a_sequence_without_wishes_has_no_adjustment() -> None:
    (row,) = table().apply(plan(1, {1: 3}, admitted=(new(1, logprobs=2, min_tokens=1),)))
    assert row.sample_rows[0].adjustment is None


@pytest.mark.parametrize("num_known", [0, 1, 2])
def test_b09_b57_what_was_seen_is_the_same_after_a_preemption(num_known: int) -> None:
    t, output = table(), [4, 5, 4]
    known = (1, 2, 2, *output[:num_known])
    admitted = new(1, known, num_prompt_tokens=3, repetition_penalty=1.5, frequency_penalty=1.0)
    run(t, plan(1, {1: len(known)}, admitted=(admitted,)), output[num_known])
    for step, token_id in enumerate(output[num_known + 1 :], start=2):
        run(t, plan(step, {1: 1}, positions_sum=len(known) + step - 2), token_id)
    step = 4 - num_known
    (row,) = t.apply(plan(step, {1: 1}, positions_sum=len(known) + step - 2))
    (sample_row,) = row.sample_rows
    assert sample_row.adjustment is not None
    seen = sample_row.adjustment.seen
    assert seen is not None
    assert dict(zip(seen.ids.tolist(), seen.counts.tolist(), strict=True)) == {1: 0, 2: 0, 4: 2, 5: 1}


# --- log-probabilities of the prompt ------------------------------------------------------------------


def stretches(t: SequenceTable, p: BatchPlan) -> list[tuple[int, list[int]] | None]:
    return [
        None if row.scored is None else (row.scored.first_position, row.scored.token_ids)
        for row in t.apply(p)
    ]


def commit(t: SequenceTable, p: BatchPlan, *token_ids: int, told: Iterable[PromptLogprobs]) -> StepResult:
    count = len(token_ids)
    sampled = Sampled(list(token_ids), [None] * count, [None] * count)
    return t.commit(p, list(p.seq_ids)[:count], sampled, list(told))


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([5], [(1, [11, 12, 13, 14])]),
        ([1, 1, 1, 1, 1], [(1, [11]), (2, [12]), (3, [13]), (4, [14]), None]),
        ([2, 3], [(1, [11, 12]), (3, [13, 14])]),
        ([4, 1], [(1, [11, 12, 13, 14]), None]),
    ],
)
def test_b71_each_chunk_tells_of_the_tokens_behind_its_own(
    chunks: list[int], expected: list[tuple[int, list[int]] | None]
) -> None:
    t, first, got = table(), 0, []
    for step, chunk in enumerate(chunks, start=1):
        admitted = (new(1, range(10, 15), prompt_logprobs_from=1),) if step == 1 else ()
        p = plan(step, {1: chunk}, admitted=admitted, positions_sum=first)
        (stretch,) = stretches(t, p)
        got.append(stretch)
        told = [] if stretch is None else [PromptLogprobs(1, stretch[0], [])]
        result = commit(t, p, *[42] * (first + chunk == 5), told=told)
        assert list(result.prompt_logprobs) == told
        first += chunk
    assert got == expected


def test_prompt_logprobs_begin_where_they_are_wanted_and_end_with_the_prompt() -> None:
    t = table()
    admitted = (
        new(1, range(10, 17), num_prompt_tokens=5, num_computed=2, prompt_logprobs_from=3),
        new(2, range(10, 14), prompt_logprobs_from=4),  # that is no position of its prompt
        new(3, (10,), prompt_logprobs_from=1),
    )
    p = plan(1, {1: 5, 2: 4, 3: 1}, admitted=admitted, positions_sum=2)
    assert stretches(t, p) == [(3, [13, 14]), None, None]


@pytest.mark.parametrize(("num_computed", "wanted_from"), [(0, 0), (4, 4), (4, 1)])
def test_a_distribution_that_was_computed_elsewhere_cannot_be_asked_for(
    num_computed: int, wanted_from: int
) -> None:
    asked = new(1, range(10, 16), num_computed=num_computed, prompt_logprobs_from=wanted_from)
    with pytest.raises(PlanError, match="prompt_logprobs_from of sequence 1"):
        table().apply(plan(1, admitted=(asked,)))


def test_a_prompt_whose_logits_are_no_numbers_ends_with_an_error_and_tells_nothing() -> None:
    t = table()
    p = plan(1, {1: 2, 2: 3}, admitted=(new(1, prompt_logprobs_from=1), new(2, prompt_logprobs_from=1)))
    t.apply(p)
    sampled = Sampled([42], [None], [None])
    result = t.commit(p, [2], sampled, [PromptLogprobs(2, 1, [])])
    assert [(e.seq_id, e.status_code) for e in result.errors] == [(1, INTERNAL)]
    assert (result.seq_ids, [told.seq_id for told in result.prompt_logprobs]) == ((2,), [2])


# --- the scheduler's faults -------------------------------------------------------------------------

ADMITTED = (new(1),)


@pytest.mark.parametrize(
    ("faulty", "sentence"),
    [
        (plan(1, {1: 3}, positions_sum=1, admitted=ADMITTED), "positions_sum is 1 in the plan and 0 here"),
        (plan(1, {7: 1}), "sequence 7 has a row and is not known"),
        (plan(1, {1: 4}, admitted=ADMITTED), "only 3 tokens are known"),
        (plan(1, {1: 0}, admitted=ADMITTED), "has 0 tokens"),
        (plan(1, {1: 3}, admitted=(new(1, block_ids=()),)), "its 0 blocks hold 0"),
        (plan(1, {1: 5}, admitted=(new(1, range(1, 6), block_ids=[3]),)), "its 1 blocks hold 4"),
        (plan(1, admitted=(new(1, block_ids=[32]),)), "block ids are 0 to 31"),
        (plan(1, admitted=(new(1), new(1))), "seq_id 1 is 0 or was used before"),
        (plan(1, admitted=(new(0),)), "seq_id 0 is 0 or was used before"),
        (plan(1, admitted=(new(1, num_computed=3),)), "at least one of its 3 known tokens"),
        (plan(1, admitted=(new(1, num_prompt_tokens=0),)), "it must be 1 to its 3 known tokens"),
        (plan(1, admitted=(new(1, num_prompt_tokens=4),)), "it must be 1 to its 3 known tokens"),
        (
            plan(1, dict.fromkeys(range(1, 6), 1), admitted=tuple(new(i) for i in range(1, 6))),
            "the plan has 5 rows; max_num_seqs is 4",
        ),
        (
            plan(1, {1: 17}, admitted=(new(1, range(1, 18), block_ids=range(5)),)),
            "the plan has 17 tokens; max_num_batched_tokens is 16",
        ),
        (dataclasses.replace(plan(1), seq_ids=(1,)), "seq_ids has 1 entries and num_tokens 0"),
        (
            dataclasses.replace(plan(1, admitted=ADMITTED), seq_ids=(1, 1), num_tokens=(1, 1)),
            "two rows in one plan",
        ),
        (plan(1, grown_seq_ids=(1,)), "grown_seq_ids has 1 entries, num_new_blocks 0"),
        (plan(1, grown_seq_ids=(1,), num_new_blocks=(2,), new_block_ids=(3,)), "add up to 2"),
        (
            plan(1, grown_seq_ids=(1,), num_new_blocks=(1,), new_block_ids=(3,)),
            "gets new blocks and is not known",
        ),
        (
            plan(1, admitted=ADMITTED, grown_seq_ids=(1,), num_new_blocks=(1,), new_block_ids=(32,)),
            "block ids are 0 to 31",
        ),
        (plan(1, reserved=("zero_block_ids",)), "zero_block_ids, reserved at protocol revision 1"),
    ],
)
def test_a_plan_that_disagrees_with_the_table_is_refused(faulty: BatchPlan, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        table().apply(faulty)


def test_a_seq_id_is_not_used_twice_even_after_its_release() -> None:
    t = table()
    run(t, plan(1, admitted=(new(1),)))
    run(t, plan(2, released_seq_ids=(1,)))
    with pytest.raises(PlanError, match="was used before"):
        t.apply(plan(3, admitted=(new(1),)))


# --- the law ----------------------------------------------------------------------------------------


@given(st.data())
def test_whatever_the_chunks_and_the_batch_each_sequence_computes_each_position_once(
    data: st.DataObject,
) -> None:
    """A scheduler with window 1 and random chunks: positions come one by one, outputs end at max_tokens."""
    t = table(max_num_seqs=4, max_num_batched_tokens=12, num_blocks=64)
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    limits = [data.draw(st.integers(1, 5)) for _ in lengths]
    admitted = tuple(
        new(
            seq_id,
            [seq_id] * length,
            block_ids=range(seq_id * 8, seq_id * 8 + 4),
            max_tokens=limit,
            ignore_eos=True,
        )
        for seq_id, (length, limit) in enumerate(zip(lengths, limits, strict=True), start=1)
    )
    known = {s.seq_id: len(s.token_ids) for s in admitted}
    computed = dict.fromkeys(known, 0)
    positions: dict[int, list[int]] = {seq_id: [] for seq_id in known}
    outputs = dict.fromkeys(known, 0)
    live = set(known)
    step_id = 0
    while live:
        step_id += 1
        rows, budget = {}, 12
        for seq_id in data.draw(st.permutations(sorted(live))):
            left = min(known[seq_id] - computed[seq_id], budget)
            if left:
                rows[seq_id] = data.draw(st.integers(1, left))
                budget -= rows[seq_id]
        p = plan(
            step_id,
            rows,
            positions_sum=sum(computed[s] for s in rows),
            admitted=admitted if step_id == 1 else (),
        )
        for row in t.apply(p):
            positions[row.seq_id] += range(row.first_position, row.first_position + len(row.token_ids))
        sampling = [s for s in rows if computed[s] + rows[s] == known[s]]
        result = t.commit(
            p, sampling, Sampled([50] * len(sampling), [None] * len(sampling), [None] * len(sampling))
        )
        for seq_id, num_tokens in rows.items():
            computed[seq_id] += num_tokens
        for seq_id in sampling:
            known[seq_id] += 1
            outputs[seq_id] += 1
        live -= {ended.seq_id for ended in result.finished}
    assert [outputs[s.seq_id] for s in admitted] == limits
    for seq_id, seen in positions.items():
        assert seen == list(range(known[seq_id] - 1))
