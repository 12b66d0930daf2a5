import re
from array import array
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.executor_session import ExecutorSession, SessionBrokenError, check_ids, rows_that_ran
from scheduler.plan import BatchPlan, FinishedSequence, SequenceError, StepResult
from scheduler.sequence import FinishReason, StatusCode
from tests.rig.checking_executor import capacity
from tests.scheduler.sequences import running

EPOCH = 0xABC


def plan_of(session: ExecutorSession) -> BatchPlan:
    return BatchPlan(
        epoch=session.epoch,
        step_id=session.last_step_id + 1,
        acked_step_id=session.acked_step_id,
        released_seq_ids=[],
        admitted=[],
        seq_ids=[],
        num_tokens=[],
        grown_seq_ids=[],
        num_new_blocks=[],
        new_block_ids=[],
        positions_sum=0,
        num_samples=[],
        rows=[],
        filled=[],
        outgrown=[],
        left=[],
    )


def result_of(step_id: int, epoch: int = EPOCH) -> StepResult:
    return StepResult(epoch, step_id, [], [], [])


class SessionMachine(RuleBasedStateMachine):
    """A stream that delivers in order, breaks, and an executor that answers again what comes again."""

    @initialize(window=st.integers(1, 2))
    def start(self, window: int) -> None:
        self.session = ExecutorSession(EPOCH, window)
        self.on_the_wire: list[BatchPlan] = []
        self.applied: list[int] = []
        self.sent: dict[int, BatchPlan] = {}

    @precondition(lambda self: self.session.can_send)
    @rule()
    def send(self) -> None:
        plan = plan_of(self.session)
        self.session.sent(plan)
        self.sent[plan.step_id] = plan
        self.on_the_wire.append(plan)

    @precondition(lambda self: self.on_the_wire)
    @rule(again=st.booleans())
    def answer(self, again: bool) -> None:
        plan = self.on_the_wire.pop(0)
        answered = self.session.received(result_of(plan.step_id))
        if answered is not None:
            assert answered[0] is self.sent[plan.step_id]
            self.applied.append(plan.step_id)
        if again:
            assert self.session.received(result_of(plan.step_id)) is None

    @rule(lost=st.integers(0, 2))
    def break_the_stream(self, lost: int) -> None:
        """What was on its way is lost; a new stream carries what is unanswered, the same objects."""
        resent = self.session.resend()
        assert [plan.step_id for plan in resent] == sorted(self.sent.keys() - set(self.applied))
        assert all(plan is self.sent[plan.step_id] for plan in resent)
        self.on_the_wire = resent

    @rule(step_id=st.integers(-1, 40))
    def answer_wrongly(self, step_id: int) -> None:
        expected = self.session.unanswered[0].step_id if self.session.unanswered else None
        if step_id <= self.session.acked_step_id:
            assert self.session.received(result_of(step_id)) is None
        elif step_id != expected:
            with pytest.raises(SessionBrokenError, match=f"result of step {step_id}"):
                self.session.received(result_of(step_id))

    @invariant()
    def each_result_is_applied_once_and_in_order(self) -> None:
        if not hasattr(self, "session"):
            return
        assert self.applied == list(range(1, len(self.applied) + 1))
        assert self.session.acked_step_id == len(self.applied)
        assert self.session.num_unanswered == self.session.last_step_id - self.session.acked_step_id
        assert self.session.num_unanswered <= self.session.window
        assert all(step_id - plan.acked_step_id <= self.session.window for step_id, plan in self.sent.items())


TestSession = SessionMachine.TestCase
TestSession.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_result_of_another_epoch_breaks_the_session() -> None:
    session = ExecutorSession(EPOCH, 2)
    session.sent(plan_of(session))
    with pytest.raises(SessionBrokenError, match="0xdef"):
        session.received(result_of(1, epoch=0xDEF))


def test_a_plan_whose_result_does_not_fit_stays_unanswered() -> None:
    session = ExecutorSession(EPOCH, 2)
    session.sent(plan := plan_of(session))
    with pytest.raises(SessionBrokenError, match="token ids"):
        session.received(StepResult(EPOCH, 1, [], [], [7]))
    assert session.resend() == [plan]
    assert session.acked_step_id == 0


@pytest.mark.parametrize(
    ("seq_ids", "num_sampled", "failed", "fault"),
    [
        ([1, 2, 3], [1, 0, 1], None, None),
        ([1, 2], [1, 0], None, None),  # 3 was given up since: its row is no loss
        ([2, 3], [0, 1], None, "sequence 1 is running and has no row"),
        ([2, 3], [0, 1], 1, None),
        ([2], [0], None, "sequence 1 is running and has no row"),
        ([], [], None, "sequence 1 is running and has no row"),
        ([1, 3], [1, 1], None, "sequence 2 is running and has no row"),
        ([1, 2, 3], [0, 0, 1], None, "sequence 1 sampled 0, 1 due"),
        ([1, 2, 3], [0, 0, 1], 1, None),
        ([1, 2, 3], [1, 1, 1], None, "sequence 2 sampled 1, 0 due"),
        ([1, 2, 4], [1, 0, 1], None, "row of sequence 4 was not planned"),
        ([1, 2, 3, 4], [1, 0, 1, 0], None, "row of sequence 4 was not planned"),
        ([3, 1, 2], [1, 1, 0], None, "sequence 1 is running and has no row"),
        ([1, 2, 3], [1, 1], None, "differ in length"),
        ([1, 2], [1, 0, 1], None, "differ in length"),
    ],
)
def test_rows_are_those_of_the_plan_but_for_what_is_over_on_one_side(
    seq_ids: list[int], num_sampled: list[int], failed: int | None, fault: str | None
) -> None:
    """Sequence 2 computes a chunk, and 3 has another number by now."""
    rows = [running(f"r{seq_id}", prompt_len=8, max_tokens=4) for seq_id in (1, 2, 3)]
    for seq, seq_id in zip(rows, (1, 2, 9), strict=True):
        seq.seq_id = seq_id
    planned: dict[str, Any] = {"seq_ids": [1, 2, 3], "num_tokens": [1, 4, 1], "num_samples": [1, 0, 1]}
    plan = replace(plan_of(ExecutorSession(EPOCH, 2)), rows=rows, **planned)
    errors = [] if failed is None else [SequenceError(failed, "", StatusCode.INTERNAL)]
    result = StepResult(EPOCH, 1, seq_ids, num_sampled, [5] * sum(num_sampled), errors=errors)
    if fault is None:
        assert rows_that_ran(plan, result) == [rows[seq_id - 1] for seq_id in seq_ids]
    else:
        with pytest.raises(SessionBrokenError, match=fault):
            rows_that_ran(plan, result)


def test_an_end_without_a_token_breaks_the_session() -> None:
    seq = running(prompt_len=8, max_tokens=4)
    seq.seq_id = 1
    plan = replace(
        plan_of(ExecutorSession(EPOCH, 2)), seq_ids=[1], rows=[seq], num_tokens=[4], num_samples=[0]
    )
    for seq_id in (1, 2):  # one that samples nothing in this step, and one that has no row
        ended = [FinishedSequence(seq_id, FinishReason.STOP)]
        with pytest.raises(SessionBrokenError, match=f"sequence {seq_id} ended without a token"):
            rows_that_ran(plan, StepResult(EPOCH, 1, [1], [0], [], finished=ended))


def test_an_end_by_length_of_one_that_is_not_long_enough_breaks_the_session() -> None:
    seq = running(prompt_len=8, max_tokens=4)
    seq.seq_id = 1
    plan = replace(
        plan_of(ExecutorSession(EPOCH, 2)), seq_ids=[1], rows=[seq], num_tokens=[8], num_samples=[1]
    )
    result = StepResult(EPOCH, 1, [1], [1], [5], finished=[FinishedSequence(1, FinishReason.LENGTH)])
    with pytest.raises(SessionBrokenError, match="ended by its length with 9 tokens, it was to have 12"):
        rows_that_ran(plan, result)
    seq.token_ids.extend([5, 5, 5])
    assert rows_that_ran(plan, result) == [seq]


def test_ids_that_the_model_has_not_break_the_session() -> None:
    plan, eight_ids = plan_of(ExecutorSession(EPOCH, 2)), capacity(vocab_size=8)
    check_ids(StepResult(EPOCH, 1, [], [], []), plan, eight_ids)
    check_ids(StepResult(EPOCH, 1, [3], [2], [0, 7]), plan, eight_ids)
    with pytest.raises(SessionBrokenError, match="id 8 is not one of 8"):
        check_ids(StepResult(EPOCH, 1, [3], [2], [8, 7]), plan, eight_ids)


@pytest.mark.parametrize(
    ("fields", "last", "matched", "fault"),
    [
        ({}, 2, 2, None),  # the model's own end
        ({"stop_token_ids": frozenset({7})}, 7, 7, None),
        ({"stop_token_ids": frozenset({7}), "ignore_eos": True}, 7, 7, None),
        ({}, 7, 7, "stopped at 7, which does not end it"),
        ({"ignore_eos": True}, 2, 2, "stopped at 2, which does not end it"),
        ({}, 2, None, "stopped by None, its last id is 2"),
        ({}, 2, 7, "stopped by 7, its last id is 2"),
        ({"min_tokens": 1}, 2, 2, "with its 1. token, 1 were to come before"),
        ({"min_tokens": 1, "needs": frozenset({"constraints"})}, 2, 2, None),  # nothing else may be left
    ],
)
def test_a_stop_that_is_none_breaks_the_session(
    fields: dict[str, Any], last: int, matched: int | None, fault: str | None
) -> None:
    one, other = running(prompt_len=8, max_tokens=4, **fields), running("other", prompt_len=8, max_tokens=4)
    one.seq_id, other.seq_id = 1, 2
    rows: dict[str, Any] = {"seq_ids": [2, 1], "rows": [other, one], "num_tokens": [8, 8]}
    plan = replace(plan_of(ExecutorSession(EPOCH, 2)), num_samples=[1, 1], **rows)
    ended = [FinishedSequence(1, FinishReason.STOP, matched)]
    result = StepResult(EPOCH, 1, [2, 1], [1, 1], [5, last], finished=ended)
    ends = replace(capacity(), eos_token_ids=frozenset({2}))
    if fault is None:
        check_ids(result, plan, ends)
    else:
        with pytest.raises(SessionBrokenError, match=fault):
            check_ids(result, plan, ends)
    one.seq_id = 3  # it was given up, and admitted anew
    check_ids(result, plan, ends)
    check_ids(result, None, ends)  # nothing is due: so the session says


@pytest.mark.parametrize(
    ("token_ids", "fault"),
    [
        ([5], None),
        ([9], None),
        ([5, 9], None),
        ([5, 6, 9], None),
        ([9, 5], "sequence 1 has tokens after [9], its draft tokens were [5, 6]"),
        ([5, 9, 9], "sequence 1 has tokens after [5, 9], its draft tokens were [5, 6]"),
    ],
)
def test_a_token_behind_a_wrong_guess_breaks_the_session(token_ids: list[int], fault: str | None) -> None:
    rows = {"seq_ids": [2, 1], "num_tokens": [1, 3], "num_samples": [1, 1]}
    plan = replace(
        plan_of(ExecutorSession(EPOCH, 2)),
        **rows,
        draft_tokens={1: array("I", [5, 6])},  # type: ignore[arg-type]
    )
    result = StepResult(EPOCH, 1, [2, 1], [1, len(token_ids)], [4, *token_ids])
    if fault is None:
        check_ids(result, plan, capacity())
    else:
        with pytest.raises(SessionBrokenError, match=re.escape(fault)):
            check_ids(result, plan, capacity())


def test_a_full_window_takes_no_plan() -> None:
    session = ExecutorSession(EPOCH, 1)
    session.sent(plan_of(session))
    assert not session.can_send
    with pytest.raises(AssertionError):
        session.sent(plan_of(session))


def test_a_gap_in_the_step_ids_is_a_fault_of_ours() -> None:
    session, ahead = ExecutorSession(EPOCH, 2), ExecutorSession(EPOCH, 2)
    ahead.sent(plan_of(ahead))
    with pytest.raises(AssertionError):
        session.sent(plan_of(ahead))
