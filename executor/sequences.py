"""The sequences an executor knows, and what one plan does to them.

A plan is applied in this order: acknowledged ghosts, releases, admissions, new blocks, rows
(docs/protocol.md, "What a plan does"). A sequence that ends in step k becomes a *ghost* until a plan
acknowledges k: its rows are skipped and report nothing, for the scheduler may have planned them before it
knew of the end.

Two kinds of fault are told apart. A plan that disagrees with this table (unknown ids, wrong positions, too
few blocks) is the scheduler's fault and raises `PlanError`: the epoch is over. A request that cannot be
computed (a token id past the vocabulary) is one sequence's fault: it ends with a `SequenceError`, the others
go on.

Must not know: protos, torch, streams, clocks, other schedulers. It never chooses or frees a block.
"""

from collections import abc
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from executor.adjustments import Adjustment, adjustment_of
from executor.constraints import Matcher, MatcherOf
from executor.plan import (
    INTERNAL,
    INVALID_ARGUMENT,
    BatchPlan,
    FinishedSequence,
    NewSequence,
    PromptLogprobs,
    SamplingParams,
    SequenceError,
    StepResult,
    TokenLogprobs,
)
from executor.request_faults import request_fault
from executor.rows import IN_FLIGHT, NOT_FINITE, PromptStretch, Row, Sampled, SampleRow
from executor.stopping import FinishReason, StopRule, end_token_ids


class PlanError(ValueError):
    """The plan and this executor disagree. The epoch is over; the text is a sentence for operators."""


@dataclass(slots=True)
class _Sequence:
    """What is known of one running sequence."""

    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: NDArray[np.int32]
    params: SamplingParams
    stop_rule: StopRule
    adjustment: Adjustment | None
    prompt_logprobs_from: int | None
    matcher: Matcher | None
    drafted_in: int = 0
    """The newest step that had draft tokens of it."""
    has_ended: bool = False

    @property
    def is_at_its_end(self) -> bool:
        """Whether its length alone ends it, whatever the newest token is."""
        num_output_tokens = len(self.token_ids) - self.num_prompt_tokens
        return self.stop_rule.is_long_enough(num_output_tokens=num_output_tokens, seq_len=len(self.token_ids))

    def go_on(self) -> None:
        """Its newest token, a right guess, is computed already; the one after it is sampled too."""
        self.num_computed_tokens += 1
        self.token_ids.append(IN_FLIGHT)

    def take(self, token_id: int, output_index: int) -> FinishReason | None:
        """Fill in output token `output_index`, IN_FLIGHT until now. Why it ends the sequence, or None."""
        seq_len = self.num_prompt_tokens + output_index + 1
        self.token_ids[seq_len - 1] = token_id
        if self.adjustment is not None:
            self.adjustment.took(token_id)
        reason = self.stop_rule.finish_reason(token_id, num_output_tokens=output_index + 1, seq_len=seq_len)
        if reason is None and self.matcher is not None:
            self.matcher.take(token_id)
        return reason


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that the device has and whose results are not in: its rows, and the errors so far.

    `settle` adds the step's own errors to `errors`.
    """

    step_id: int
    epoch: int
    rows: list[tuple[Row, _Sequence]]
    errors: list[SequenceError]


@dataclass(slots=True)
class _Ghost:
    """What is left of an ended sequence: enough to check positions_sum over rows planned too late."""

    ended_step: int
    next_position: int


@dataclass(slots=True)
class _IdSet:
    """Ids seen so far. One bit each, in pages, so that an epoch of millions of admissions stays small."""

    pages: dict[int, int] = field(default_factory=dict)

    def add(self, number: int) -> bool:
        """Put `number` in; False when it was in already."""
        page, bit = divmod(number, 4096)
        bits = self.pages.get(page, 0)
        self.pages[page] = bits | 1 << bit
        return not bits >> bit & 1


class SequenceTable:
    """All sequences of one epoch: `apply` a plan, compute its rows, `commit` what was sampled.

    Each `apply` must be followed by the `commit` or `advance` of the same plan before the next one.

    Where a device works while the host goes on, `commit` comes in two parts: `advance` once the step is on
    its way, `settle` when its results are in. Between them the next plan may be applied, whose rows then
    begin with tokens that are IN_FLIGHT. A sequence whose end is found by `settle` is a ghost from its own
    step on, as if it had been known: what a later flight has of it is passed over.
    """

    __slots__ = (
        "_block_size",
        "_eos_token_ids",
        "_errors",
        "_ghosts",
        "_matcher_of",
        "_max_num_batched_tokens",
        "_max_num_seqs",
        "_max_seq_len",
        "_num_blocks",
        "_rows",
        "_sequences",
        "_takes_draft_tokens",
        "_used_seq_ids",
        "_vocab_size",
    )

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_seq_len: int,
        vocab_size: int,
        eos_token_ids: abc.Iterable[int],
        matcher_of: MatcherOf | None = None,
        takes_draft_tokens: bool = False,
    ) -> None:
        """`matcher_of` is None where outputs cannot be constrained.

        `takes_draft_tokens` only where each `apply` comes after the `settle` of the plan before.
        """
        self._takes_draft_tokens = takes_draft_tokens
        self._matcher_of = matcher_of
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_seq_len = max_seq_len
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._sequences: dict[int, _Sequence] = {}
        self._ghosts: dict[int, _Ghost] = {}
        self._used_seq_ids = _IdSet()
        # Of the plan that was applied and not yet advanced:
        self._rows: list[tuple[Row, _Sequence]] = []
        self._errors: list[SequenceError] = []

    @property
    def num_sequences(self) -> int:
        """Sequences that have not ended."""
        return len(self._sequences)

    @property
    def num_ghosts(self) -> int:
        """Ended sequences whose end no plan has acknowledged."""
        return len(self._ghosts)

    def apply(self, plan: BatchPlan) -> list[Row]:
        """Bring the table to where the plan's rows can run; return those rows, in the plan's order.

        Raises PlanError when plan and table disagree. The table is then of no further use.
        """
        _check_columns(plan)
        self._errors = []
        self._forget_ghosts(plan.acked_step_id)
        for seq_id in plan.released_seq_ids:
            self._sequences.pop(seq_id, None)
            self._ghosts.pop(seq_id, None)
        for new in plan.admitted:
            self._admit(new, plan.step_id)
        self._grow(plan)
        self._check_ceilings(plan)
        self._rows = self._plan_rows(plan)
        return [row for row, _ in self._rows]

    def commit(
        self,
        plan: BatchPlan,
        sampled_seq_ids: abc.Sequence[int],
        sampled: Sampled,
        prompt_logprobs: abc.Sequence[PromptLogprobs] = (),
    ) -> StepResult:
        """Take in what the step sampled, end what has ended, and say so.

        `sampled_seq_ids` tells whose each entry of `sampled` is: every row that samples, in any order; a
        row with draft tokens as often as it has sample rows, in their order.
        `prompt_logprobs` has those of the rows' scored stretches, without the ones that are no numbers.
        """
        return self.settle(self.advance(plan), sampled_seq_ids, sampled, prompt_logprobs)

    def advance(self, plan: BatchPlan) -> Flight:
        """The plan's rows are on their way: what they compute is computed, and what they sample as known."""
        for row, sequence in self._rows:
            sequence.num_computed_tokens += len(row.token_ids) - len(row.draft_token_ids)
            if row.sample_rows:
                sequence.token_ids.append(IN_FLIGHT)
        flight = Flight(plan.step_id, plan.epoch, self._rows, self._errors)
        self._rows, self._errors = [], []
        return flight

    def settle(
        self,
        flight: Flight,
        sampled_seq_ids: abc.Sequence[int],
        sampled: Sampled,
        prompt_logprobs: abc.Sequence[PromptLogprobs] = (),
    ) -> StepResult:
        """Take in what a step sampled, end what has ended, and say so. Flights settle in their order."""
        index_of: dict[int, int] = {}  # where each row's entries begin
        for i, seq_id in enumerate(sampled_seq_ids):
            index_of.setdefault(seq_id, i)
        seq_ids: list[int] = []
        num_sampled: list[int] = []
        token_ids: list[int] = []
        logprobs: list[tuple[int, TokenLogprobs]] = []
        finished: list[FinishedSequence] = []
        errors = flight.errors
        scored_seq_ids = {stretch.seq_id for stretch in prompt_logprobs}
        for row, sequence in flight.rows:
            if sequence.has_ended:  # in an earlier flight: this row was a ghost's
                continue
            error = None
            if row.scored is not None and row.seq_id not in scored_seq_ids:
                error = NOT_FINITE  # the logits of its prompt
            elif row.sample_rows:
                error = sampled.errors[index_of[row.seq_id]]
            if error is not None:
                # All else is what the request asks for: a constraint, or lists that leave no token to choose.
                code = INTERNAL if error == NOT_FINITE else INVALID_ARGUMENT
                errors.append(SequenceError(row.seq_id, error, code))
                self._end(row.seq_id, sequence, flight.step_id)
                continue
            seq_ids.append(row.seq_id)
            if not row.sample_rows:  # a chunk: known tokens remain, nothing was sampled
                num_sampled.append(0)
                continue
            index = index_of[row.seq_id]
            count, reason = _take(sequence, row, sampled, index)
            num_sampled.append(count)
            token_ids += sampled.token_ids[index : index + count]
            chances = sampled.logprobs[index : index + count]
            logprobs += [(row.seq_id, each) for each in chances if each is not None]
            if reason is not None:
                matched = token_ids[-1] if reason is FinishReason.STOP else None
                finished.append(FinishedSequence(row.seq_id, reason, matched))
                self._end(row.seq_id, sequence, flight.step_id)
        return StepResult(
            epoch=flight.epoch,
            step_id=flight.step_id,
            seq_ids=tuple(seq_ids),
            num_sampled=tuple(num_sampled),
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs),
            finished=tuple(finished),
            errors=tuple(errors),
            prompt_logprobs=tuple(stretch for stretch in prompt_logprobs if stretch.seq_id in seq_ids),
        )

    def _end(self, seq_id: int, sequence: _Sequence, step_id: int) -> None:
        sequence.has_ended = True
        # A plan that was applied since may have released it.
        if self._sequences.pop(seq_id, None) is not None:
            self._ghosts[seq_id] = _Ghost(step_id, sequence.num_computed_tokens)

    def _forget_ghosts(self, acked_step_id: int) -> None:
        for seq_id in [each for each, ghost in self._ghosts.items() if ghost.ended_step <= acked_step_id]:
            del self._ghosts[seq_id]

    def _admit(self, new: NewSequence, step_id: int) -> None:
        if new.seq_id < 1 or not self._used_seq_ids.add(new.seq_id):
            raise PlanError(
                f"seq_id {new.seq_id} is 0 or was used before in this epoch; each admission needs its own"
            )
        self._check_blocks(new.seq_id, new.block_ids)
        fault = request_fault(new, vocab_size=self._vocab_size, max_seq_len=self._max_seq_len)
        if new.params.constraint is not None and self._matcher_of is None:
            fault = "a constrained output is not supported by this executor"
        if fault is not None:
            self._errors.append(SequenceError(new.seq_id, fault, INVALID_ARGUMENT))
            self._ghosts[new.seq_id] = _Ghost(step_id, new.num_computed_tokens)
            return
        num_known = len(new.token_ids)
        if not 1 <= new.num_prompt_tokens <= num_known:
            raise PlanError(
                f"num_prompt_tokens of sequence {new.seq_id} is {new.num_prompt_tokens}; "
                f"it must be 1 to its {num_known} known tokens"
            )
        if not new.num_computed_tokens < num_known:
            raise PlanError(
                f"num_computed_tokens of sequence {new.seq_id} is {new.num_computed_tokens}; "
                f"it must leave at least one of its {num_known} known tokens to compute"
            )
        first_wanted = new.prompt_logprobs_from
        if first_wanted is not None and not new.num_computed_tokens < first_wanted:
            raise PlanError(
                f"prompt_logprobs_from of sequence {new.seq_id} is {first_wanted}; it must be more than its "
                f"{new.num_computed_tokens} computed tokens, whose distributions are not at hand"
            )
        params = new.params
        self._sequences[new.seq_id] = _Sequence(
            token_ids=list(new.token_ids),
            num_prompt_tokens=new.num_prompt_tokens,
            num_computed_tokens=new.num_computed_tokens,
            block_ids=np.array(new.block_ids, dtype=np.int32),
            params=params,
            stop_rule=StopRule(
                end_token_ids=end_token_ids(
                    self._eos_token_ids, params.stop_token_ids, ignore_eos=params.ignore_eos
                ),
                min_tokens=params.min_tokens,
                max_tokens=params.max_tokens,
                max_seq_len=self._max_seq_len,
            ),
            adjustment=adjustment_of(
                params, new.token_ids[: new.num_prompt_tokens], new.token_ids[new.num_prompt_tokens :]
            ),
            prompt_logprobs_from=new.prompt_logprobs_from,
            matcher=self._matcher(new),
        )

    def _matcher(self, new: NewSequence) -> Matcher | None:
        if new.params.constraint is None:
            return None
        assert self._matcher_of is not None, "a fault of the request otherwise"
        return self._matcher_of(new.params.constraint, new.token_ids[new.num_prompt_tokens :])

    def _check_blocks(self, seq_id: int, block_ids: abc.Sequence[int]) -> None:
        for block_id in block_ids:
            if not 0 <= block_id < self._num_blocks:
                raise PlanError(
                    f"sequence {seq_id} has block {block_id}; block ids are 0 to {self._num_blocks - 1}"
                )

    def _grow(self, plan: BatchPlan) -> None:
        start = 0
        for seq_id, count in zip(plan.grown_seq_ids, plan.num_new_blocks, strict=True):
            block_ids = plan.new_block_ids[start : start + count]
            start += count
            self._check_blocks(seq_id, block_ids)
            if seq_id in self._ghosts:
                continue  # planned before its end was known; the scheduler takes the blocks back itself
            if (sequence := self._sequences.get(seq_id)) is None:
                raise PlanError(f"sequence {seq_id} gets new blocks and is not known here")
            sequence.block_ids = np.concatenate((sequence.block_ids, np.array(block_ids, dtype=np.int32)))

    def _check_ceilings(self, plan: BatchPlan) -> None:
        if len(plan.seq_ids) > self._max_num_seqs:
            raise PlanError(f"the plan has {len(plan.seq_ids)} rows; max_num_seqs is {self._max_num_seqs}")
        if (num_tokens := sum(plan.num_tokens)) > self._max_num_batched_tokens:
            raise PlanError(
                f"the plan has {num_tokens} tokens; max_num_batched_tokens is {self._max_num_batched_tokens}"
            )
        if len(set(plan.seq_ids)) != len(plan.seq_ids):
            raise PlanError("a sequence has two rows in one plan; each may have one")

    def _plan_rows(self, plan: BatchPlan) -> list[tuple[Row, _Sequence]]:
        rows: list[tuple[Row, _Sequence]] = []
        drafts = self._drafts(plan) if plan.draft_tokens else {}
        positions_sum = 0
        for seq_id, num_tokens in zip(plan.seq_ids, plan.num_tokens, strict=True):
            if num_tokens < 1:
                raise PlanError(f"the row of sequence {seq_id} has {num_tokens} tokens; a row has at least 1")
            if (ghost := self._ghosts.get(seq_id)) is not None:
                positions_sum += ghost.next_position
                ghost.next_position += num_tokens
                continue
            if (sequence := self._sequences.get(seq_id)) is None:
                raise PlanError(f"sequence {seq_id} has a row and is not known here")
            positions_sum += sequence.num_computed_tokens
            if sequence.token_ids[-1] == IN_FLIGHT and sequence.is_at_its_end:
                sequence.num_computed_tokens += num_tokens  # a ghost's as soon as its step settles
                continue
            if sequence.drafted_in > plan.acked_step_id:
                raise PlanError(
                    f"sequence {seq_id} has a row, and step {sequence.drafted_in} with its draft tokens is "
                    f"not acknowledged (acked_step_id is {plan.acked_step_id}): where it begins was not known"
                )
            row = self._row(seq_id, sequence, num_tokens, drafts.get(seq_id, ()))
            if row.draft_token_ids:
                sequence.drafted_in = plan.step_id
            rows.append((row, sequence))
        if positions_sum != plan.positions_sum:
            raise PlanError(
                f"positions_sum is {plan.positions_sum} in the plan and {positions_sum} here: "
                "scheduler and executor disagree about what has been computed"
            )
        return rows

    def _drafts(self, plan: BatchPlan) -> dict[int, tuple[int, ...]]:
        """The plan's draft tokens, by seq_id."""
        if not self._takes_draft_tokens:
            raise PlanError("the plan has draft tokens; this executor does not have the feature draft_tokens")
        drafts = dict(plan.draft_tokens)
        if len(drafts) != len(plan.draft_tokens):
            raise PlanError("a sequence has two entries of draft tokens in one plan; each may have one")
        if without := drafts.keys() - set(plan.seq_ids):
            raise PlanError(f"sequence {min(without)} has draft tokens and no row")
        for seq_id, token_ids in drafts.items():
            if not token_ids:
                raise PlanError(f"sequence {seq_id} has an entry of no draft tokens; it must have at least 1")
            if (highest := max(token_ids)) >= self._vocab_size:
                raise PlanError(
                    f"sequence {seq_id} has the draft token {highest}; the vocabulary has {self._vocab_size}"
                )
        return drafts

    def _row(self, seq_id: int, sequence: _Sequence, num_tokens: int, draft: tuple[int, ...]) -> Row:
        first = sequence.num_computed_tokens
        end, num_known = first + num_tokens, len(sequence.token_ids)
        if draft:
            self._check_draft(seq_id, sequence, end, draft)
            num_known += len(draft)
        if end > num_known:
            raise PlanError(
                f"the row of sequence {seq_id} computes positions {first} to {end - 1}; "
                f"only {num_known} tokens are known"
            )
        if end > (num_slots := len(sequence.block_ids) * self._block_size):
            raise PlanError(
                f"the row of sequence {seq_id} computes positions {first} to {end - 1}; "
                f"its {len(sequence.block_ids)} blocks hold {num_slots}"
            )
        return Row(
            seq_id=seq_id,
            token_ids=[*sequence.token_ids[first:end], *draft],
            first_position=first,
            block_ids=sequence.block_ids,
            sample_rows=_sample_rows(sequence, draft) if end == num_known else (),
            scored=None if sequence.prompt_logprobs_from is None else _scored(seq_id, sequence, first, end),
        )

    def _check_draft(self, seq_id: int, sequence: _Sequence, end: int, draft: tuple[int, ...]) -> None:
        num_known = len(sequence.token_ids)
        if end != num_known + len(draft):
            raise PlanError(
                f"the row of sequence {seq_id} ends before position {end}; with {num_known} known and "
                f"{len(draft)} draft tokens it must end before {num_known + len(draft)}"
            )
        rule = sequence.stop_rule
        most = min(sequence.num_prompt_tokens + rule.max_tokens, rule.max_seq_len) - num_known - 1
        if len(draft) > most:
            raise PlanError(
                f"sequence {seq_id} has {len(draft)} draft tokens and may sample {most + 1} more tokens; "
                f"it may have {most}"
            )


def _sample_rows(sequence: _Sequence, draft: tuple[int, ...]) -> tuple[SampleRow, ...]:
    """How a token is chosen after the last known one, and after each draft token as if that was right."""
    params, masked_ids = sequence.params, sequence.stop_rule.masked_ids
    adjustment, matcher = sequence.adjustment, sequence.matcher
    first = len(sequence.token_ids) - sequence.num_prompt_tokens
    sample_rows = [SampleRow(params, first, masked_ids(first), adjustment, matcher)]
    for output_index, token_id in enumerate(draft, start=first + 1):
        adjustment = None if adjustment is None else adjustment.after(token_id)
        matcher = None if matcher is None else matcher.after(token_id)
        sample_rows.append(SampleRow(params, output_index, masked_ids(output_index), adjustment, matcher))
    return tuple(sample_rows)


def _take(sequence: _Sequence, row: Row, sampled: Sampled, index: int) -> tuple[int, FinishReason | None]:
    """Takes the row's tokens, from `index` of `sampled` on: one, and one after each right draft token.

    Returns how many there are, and why the last one ends the sequence. A place that cannot be sampled is left
    to the next step, which meets it again: the tokens before it are good.
    """
    count, reason = 0, None
    for sample_row, draft_id in zip(row.sample_rows, (*row.draft_token_ids, None), strict=True):
        if count:
            if sampled.errors[index + count] is not None:
                break
            sequence.go_on()
        token_id = sampled.token_ids[index + count]
        reason = sequence.take(token_id, sample_row.output_index)
        count += 1
        if reason is not None or token_id != draft_id:
            break
    return count, reason


def _scored(seq_id: int, sequence: _Sequence, first: int, end: int) -> PromptStretch | None:
    """What positions `first` to `end - 1` tell of the prompt: each speaks of the token behind it."""
    assert sequence.prompt_logprobs_from is not None
    wanted_from = max(first + 1, sequence.prompt_logprobs_from)
    wanted_to = min(end + 1, sequence.num_prompt_tokens)
    if wanted_from >= wanted_to:
        return None
    token_ids = sequence.token_ids[wanted_from:wanted_to]
    return PromptStretch(seq_id, wanted_from, token_ids, sequence.params.prompt_logprobs or 0)


def _check_columns(plan: BatchPlan) -> None:
    if plan.reserved:
        raise PlanError(f"the plan sets {', '.join(plan.reserved)}, reserved at protocol revision 1")
    if len(plan.seq_ids) != len(plan.num_tokens):
        raise PlanError(f"seq_ids has {len(plan.seq_ids)} entries and num_tokens {len(plan.num_tokens)}")
    if len(plan.grown_seq_ids) != len(plan.num_new_blocks):
        raise PlanError(
            f"grown_seq_ids has {len(plan.grown_seq_ids)} entries, num_new_blocks {len(plan.num_new_blocks)}"
        )
    if sum(plan.num_new_blocks) != len(plan.new_block_ids):
        raise PlanError(
            f"num_new_blocks add up to {sum(plan.num_new_blocks)}; "
            f"new_block_ids has {len(plan.new_block_ids)} entries"
        )
