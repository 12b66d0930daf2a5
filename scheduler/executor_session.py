"""Exactly once towards one executor: epoch, step numbers, the window, and what to send again.

A state machine without I/O, in the manner of h11. The core asks it whether a plan may leave and gives it
every result first; the client in `executor_client` only moves messages.

    open(epoch) ─► next step … sent(plan) ─► received(result) ─► …
                        broken stream, same epoch: resend() says what to send again, byte for byte
                        epoch lost: the object is discarded along with its executor's state

Rules kept here (docs/protocol.md): at most `window` plans unanswered; results in order; a repeated result is
dropped; `acked_step_id` is the newest result applied; a result that does not fit breaks the session, and its
plan stays unanswered: one of its rows may be what the executor cannot compute (`suspects`).
"""

from collections import deque
from itertools import accumulate

from scheduler.plan import BatchPlan, Capacity, FinishedSequence, StepResult
from scheduler.sequence import FinishReason, Sequence
from scheduler.token_ids import NO_IDS


class SessionBrokenError(RuntimeError):
    """The executor's answer does not fit the plans: its epoch is abandoned and the executor opened again."""


def check_ids(result: StepResult, plan: BatchPlan | None, capacity: Capacity) -> None:
    """Raises SessionBrokenError for an id outside the vocabulary, and for a stop at an id that stops nothing.

    No other executor would accept such an id later. `plan` is the one that the result should answer. Called
    before a result reaches the core, not by the core: a replay has no ids.
    """
    highest = max(result.token_ids, default=0)
    if highest >= capacity.vocab_size:
        raise SessionBrokenError(f"step {result.step_id}: id {highest} is not one of {capacity.vocab_size}")
    if plan is not None and plan.draft_tokens and plan.step_id == result.step_id:
        _check_drafts(plan, result)
    stopped = [finished for finished in result.finished if finished.reason is FinishReason.STOP]
    if stopped and plan is not None and plan.step_id == result.step_id:
        _check_stops(plan, result, stopped, capacity.eos_token_ids)


def _check_drafts(plan: BatchPlan, result: StepResult) -> None:
    """A token may follow another one of the same step only if that one was guessed."""
    end = 0
    for seq_id, count in zip(result.seq_ids, result.num_sampled, strict=False):
        start, end = end, end + count
        draft = plan.draft_tokens.get(seq_id, NO_IDS).tolist()
        followed = result.token_ids[start : max(start, end - 1)]
        if followed != draft[: len(followed)]:
            raise SessionBrokenError(
                f"step {plan.step_id}: sequence {seq_id} has tokens after {followed}, its draft tokens were "
                f"{draft}: only a right one has another token after it"
            )


def _check_stops(
    plan: BatchPlan, result: StepResult, stopped: list[FinishedSequence], eos_token_ids: frozenset[int]
) -> None:
    """A sequence may stop only at an id that ends it; `rows_that_ran` checks all else."""
    members = dict(zip(plan.seq_ids, plan.rows, strict=True))
    counts = dict(zip(result.seq_ids, result.num_sampled, strict=False))  # their lengths are checked later
    behind = dict(zip(result.seq_ids, accumulate(result.num_sampled), strict=False))
    for finished in stopped:
        seq_id, seq = finished.seq_id, members.get(finished.seq_id)
        last = result.token_ids[: behind.get(seq_id, 0)][-1:]
        if seq is None or seq.seq_id != seq_id or seq.is_padding or not last:
            continue
        request, where = seq.request, f"step {plan.step_id}: sequence {seq_id} stopped"
        if finished.matched_token_id != last[0]:
            raise SessionBrokenError(f"{where} by {finished.matched_token_id}, its last id is {last[0]}")
        if last[0] not in request.end_token_ids(eos_token_ids):
            raise SessionBrokenError(f"{where} at {last[0]}, which does not end it")
        num_output = seq.num_output_tokens + counts[seq_id]
        # A constraint may allow nothing but an end.
        if num_output <= request.min_tokens and "constraints" not in request.needs:
            raise SessionBrokenError(
                f"{where} with its {num_output}. token, {request.min_tokens} were to come before"
            )


def rows_that_ran(plan: BatchPlan, result: StepResult) -> list[Sequence]:
    """The plan's rows that the result reports on, in its order.

    Only rows that have ended on one side may be missing: ghosts, and rows in error. Raises SessionBrokenError
    for any other difference.
    """
    if len(result.token_ids) != sum(result.num_sampled):
        raise SessionBrokenError(f"step {result.step_id}: token ids and num_sampled differ")
    ran = _rows_told_of(plan, result)
    if result.finished:
        _check_finished(plan, result)
    return ran


def _check_finished(plan: BatchPlan, result: StepResult) -> None:
    """A sequence must end with a token, and by length only when it has all its tokens."""
    num_sampled = dict(zip(result.seq_ids, result.num_sampled, strict=True))
    members = dict(zip(plan.seq_ids, plan.rows, strict=True))
    for finished in result.finished:
        seq_id, seq = finished.seq_id, members.get(finished.seq_id)
        count = num_sampled.get(seq_id, 0)
        if seq is None or not count:
            raise SessionBrokenError(f"step {plan.step_id}: sequence {seq_id} ended without a token")
        if finished.reason is FinishReason.LENGTH and seq.seq_id == seq_id and not seq.is_padding:
            length = len(seq.token_ids) + count
            if length < seq.max_len:
                raise SessionBrokenError(
                    f"step {plan.step_id}: sequence {seq_id} ended by its length with {length} tokens, "
                    f"it was to have {seq.max_len}"
                )


def _rows_told_of(plan: BatchPlan, result: StepResult) -> list[Sequence]:
    if result.seq_ids == plan.seq_ids and result.num_sampled == plan.num_samples:
        return plan.rows
    if len(result.seq_ids) != len(result.num_sampled):
        raise SessionBrokenError(f"step {plan.step_id}: seq_ids and num_sampled differ in length")
    failed = {error.seq_id for error in result.errors}
    ran: list[Sequence] = []
    answers = iter(zip(result.seq_ids, result.num_sampled, strict=True))
    seq_id, num_sampled = next(answers, (0, 0))
    for planned_id, num_samples, seq in zip(plan.seq_ids, plan.num_samples, plan.rows, strict=True):
        if planned_id != seq_id:
            if seq.seq_id == planned_id and planned_id not in failed:
                raise SessionBrokenError(
                    f"step {plan.step_id}: sequence {planned_id} is running and has no row"
                )
            continue
        most = num_samples + len(plan.draft_tokens.get(planned_id, ()))
        if not num_samples <= num_sampled <= most and planned_id not in failed:
            due = num_samples if most == num_samples else f"{num_samples} to {most}"
            raise SessionBrokenError(
                f"step {plan.step_id}: sequence {planned_id} sampled {num_sampled}, {due} due"
            )
        ran.append(seq)
        seq_id, num_sampled = next(answers, (0, 0))
    if len(ran) != len(result.seq_ids):
        raise SessionBrokenError(f"step {plan.step_id}: row of sequence {seq_id} was not planned")
    return ran


class ExecutorSession:
    """One epoch of one executor."""

    __slots__ = ("acked_step_id", "epoch", "last_step_id", "unanswered", "window")

    def __init__(self, epoch: int, window: int) -> None:
        self.epoch = epoch
        self.window = window
        self.last_step_id = 0  # newest plan built
        self.acked_step_id = 0  # newest result applied
        self.unanswered: deque[BatchPlan] = deque()

    @property
    def num_unanswered(self) -> int:
        """Plans without a result."""
        return len(self.unanswered)

    @property
    def next_unanswered(self) -> BatchPlan | None:
        """The plan whose result is due next."""
        return self.unanswered[0] if self.unanswered else None

    @property
    def can_send(self) -> bool:
        """Whether the window has room for one more plan."""
        return len(self.unanswered) < self.window

    def sent(self, plan: BatchPlan) -> None:
        """Keeps a plan until its result arrives."""
        assert self.can_send
        assert plan.step_id == self.last_step_id + 1
        self.last_step_id = plan.step_id
        self.unanswered.append(plan)

    def received(self, result: StepResult) -> tuple[BatchPlan, list[Sequence]] | None:
        """The plan that this result answers, and its rows that ran; None if it was applied before.

        Raises SessionBrokenError when it belongs to another epoch, is out of order, or does not fit.
        """
        if result.epoch != self.epoch:
            raise SessionBrokenError(f"result of epoch {result.epoch:#x}, this one is {self.epoch:#x}")
        if result.step_id <= self.acked_step_id:
            return None
        if not self.unanswered or result.step_id != self.unanswered[0].step_id:
            expected = self.unanswered[0].step_id if self.unanswered else "none"
            raise SessionBrokenError(f"result of step {result.step_id}, expected {expected}")
        plan = self.unanswered[0]
        rows = rows_that_ran(plan, result)
        self.unanswered.popleft()
        self.acked_step_id = result.step_id
        return plan, rows

    def resend(self) -> list[BatchPlan]:
        """What a new stream of the same epoch must send first."""
        return list(self.unanswered)
