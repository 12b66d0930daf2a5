"""What a result brings its sequences: for the admission it was planned for, and all of it or nothing."""

from dataclasses import replace

import pytest

from scheduler.counters import Counters
from scheduler.executor_session import ExecutorSession
from scheduler.plan import SequenceError, StepResult
from scheduler.results import append_tokens, take_prompt_logprobs
from scheduler.sequence import Sequence, StatusCode
from tests.scheduler.sequences import running
from tests.scheduler.test_executor_session import EPOCH, plan_of


def row(seq_id: int, **fields: object) -> Sequence:
    seq = running(f"r{seq_id}", **({"prompt_len": 8} | fields))  # type: ignore[arg-type]
    seq.seq_id = seq_id
    return seq


# --- tokens ---------------------------------------------------------------------------------------------


def test_ids_go_to_their_rows_and_are_charged_to_their_tenants_with_or_without_log_probabilities() -> None:
    plain, chunk, asking = row(1), row(2), row(3, want_logprobs=True)
    result = StepResult(EPOCH, 1, [1, 2, 3], [1, 0, 1], [51, 53], logprobs={3: ["of 53"]})
    progressed: list[Sequence] = []
    counters = Counters()
    assert append_tokens([plain, chunk, asking], result, progressed, counters) == []
    assert [list(seq.token_ids[8:]) for seq in (plain, chunk, asking)] == [[51], [], [53]]
    assert asking.logprobs == ["of 53"]
    assert [seq.tenant.num_output_tokens for seq in (plain, chunk, asking)] == [1, 0, 1]
    assert progressed == [plain, asking]
    assert counters.wasted_tokens == 0


def test_an_admission_that_is_over_wins_nothing_and_those_behind_it_win_their_own() -> None:
    readmitted, other = row(1), row(2)
    readmitted.seq_id = 9
    progressed: list[Sequence] = []
    counters = Counters()
    result = StepResult(EPOCH, 1, [1, 2], [1, 1], [51, 52])
    assert append_tokens([readmitted, other], result, progressed, counters) == []
    assert (list(readmitted.token_ids[8:]), list(other.token_ids[8:])) == ([], [52])
    assert (progressed, counters.wasted_tokens) == ([other], 1)
    assert readmitted.tenant.num_output_tokens == 0


@pytest.mark.parametrize("entries", [{}, {1: []}, {1: ["one", "too many"]}, {2: ["another's"]}])
def test_an_id_without_just_its_log_probability_is_not_taken(entries: dict[int, list[object]]) -> None:
    asking, other = row(1, want_logprobs=True), row(2)
    progressed: list[Sequence] = []
    result = StepResult(EPOCH, 1, [1, 2], [1, 1], [51, 52], logprobs=entries)
    assert append_tokens([asking, other], result, progressed, Counters()) == [asking]
    assert (list(asking.token_ids[8:]), asking.logprobs, progressed) == ([], [], [other])


# --- log-probabilities of prompts -----------------------------------------------------------------------


def taken(
    seq: Sequence, num_computed_tokens: int, told: tuple[int, list[object]] | None, *, failed: int = 0
) -> str:
    """What becomes of `seq`, of whose eight tokens of prompt sequence 1's row has computed so many."""
    plan = replace(plan_of(ExecutorSession(EPOCH, 2)), filled=[(seq, 1, num_computed_tokens)])
    errors = [SequenceError(failed, "", StatusCode.INTERNAL)] if failed else []
    prompt_logprobs = {} if told is None else {1: told}
    result = StepResult(EPOCH, 1, [], [], [], prompt_logprobs=prompt_logprobs, errors=errors)
    progressed: list[Sequence] = []
    unfit = take_prompt_logprobs(plan, result, progressed)
    assert progressed in ([], [seq])
    assert unfit in ([], [seq])
    assert not (progressed and unfit)
    return "progressed" if progressed else "unfit" if unfit else "nothing due"


def test_a_chunk_tells_of_its_tokens_but_the_first_and_of_the_one_behind_it() -> None:
    seq = row(1, want_prompt_logprobs=True)
    assert taken(seq, 3, (1, ["1", "2", "3"])) == "progressed"
    assert taken(seq, 3, None) == "nothing due"  # it was preempted, and computes that again
    assert taken(seq, 4, (4, ["4"])) == "progressed"
    assert taken(seq, 8, (5, ["5", "6", "7"])) == "progressed"
    assert seq.prompt_logprobs == ["1", "2", "3", "4", "5", "6", "7"]
    assert taken(seq, 8, None) == "nothing due"


@pytest.mark.parametrize("told", [None, (1, ["1", "2"]), (1, ["1"] * 4), (2, ["2", "3", "4"])])
def test_a_chunk_that_does_not_tell_just_what_is_due_is_unfit(told: tuple[int, list[object]] | None) -> None:
    seq = row(1, want_prompt_logprobs=True)
    assert taken(seq, 3, told) == "unfit"
    assert seq.prompt_logprobs == []


def test_nothing_is_due_from_a_row_that_failed_or_an_admission_that_is_over() -> None:
    seq = row(1, want_prompt_logprobs=True)
    assert taken(seq, 3, None, failed=1) == "nothing due"
    assert taken(seq, 3, None, failed=2) == "unfit"
    seq.seq_id = 9
    assert taken(seq, 3, (1, ["1", "2", "3"])) == "nothing due"
    assert seq.prompt_logprobs == []
    assert taken(row(1), 3, None) == "nothing due", "it did not ask"
