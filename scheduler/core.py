"""The scheduler's core: at every iteration the finished leave, the waiting enter, and the next plan is made.

    submit / cancel / expire          from clients, at any time
    attach / detach                   an executor comes, or is lost
    schedule(executor, now) ─► plan   who computes how many tokens in the next iteration
    update(executor, result, now)     what that iteration brought

There are no phases: each sequence has known and computed tokens, and a step gives out tokens until computed
catches up with known. Preempt-and-recompute is the one way back, whether blocks ran out or the executor died.

Must not know: gRPC, protobuf, asyncio, the clock (time is an argument), text, tensors, routers. It owns every
sequence, the waiting queue, and for each executor the running set, the blocks and the session.
"""

from dataclasses import dataclass, field

from scheduler import padding, policy
from scheduler.batching import Batching
from scheduler.executor_session import SessionBrokenError
from scheduler.executor_state import ExecutorState
from scheduler.plan import BatchPlan, Capacity, Leaver, NewSequence, StepResult
from scheduler.policy import Limits
from scheduler.rows import Rows
from scheduler.sequence import (
    Event,
    Finish,
    FinishReason,
    Request,
    Sequence,
    State,
    StatusCode,
    end_of_output,
)
from scheduler.timers import Timers
from scheduler.token_ids import NO_IDS, TokenIds
from scheduler.waiting import WaitingQueue


class RefusedError(Exception):
    """A request that is not taken in: a sentence for the client, and the status it gets."""

    def __init__(
        self, status_code: StatusCode, message: str, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.status_code = status_code
        self.message = message
        self.retry_after_seconds = retry_after_seconds


@dataclass(slots=True)
class Outcome:
    """What a result changed: sequences with new tokens, and sequences that ended (some are in both)."""

    progressed: list[Sequence] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)


@dataclass(slots=True)
class Counters:
    """What happened since start."""

    steps: int = 0
    preemptions: int = 0
    scheduled_tokens: int = 0
    wasted_tokens: int = 0  # sampled, never delivered


class SchedulerCore:
    """Queue, policy and blocks of all executors of one scheduler."""

    def __init__(
        self,
        limits: Limits | None = None,
        batching: Batching = Batching.ITERATION,
        padding_sampling: bytes = b"",
        cache_secret: bytes = b"",
    ) -> None:
        """A scheduler without executors.

        `padding_sampling`: encoded sampling parameters under which a padding row never ends.
        `cache_secret`: up to 64 random bytes that key the names of cached blocks.
        """
        self.limits = limits or Limits()
        self.batching = batching
        self.counters = Counters()
        self.waiting = WaitingQueue()
        self.executors: dict[str, ExecutorState] = {}
        self.sequences: dict[bytes, Sequence] = {}
        self._padding_sampling = padding_sampling
        self._cache_secret = cache_secret
        self._timers = Timers()
        self._num_submitted = 0

    # --- from clients ------------------------------------------------------------------------------------

    def submit(self, request: Request, output_token_ids: TokenIds = NO_IDS, *, now: float) -> Sequence:
        """Takes a request in, or finds the one that lives under its key. Idempotent.

        A live sequence goes on for its new reader when the ids the reader has (`output_token_ids`) are a
        prefix of its own; else it is computed anew from those ids. Ids that already end the request end it.
        Raises RefusedError.
        """
        live = self.sequences.get(request.key)
        if live is not None:
            if live.request.body_digest != request.body_digest:
                raise RefusedError(
                    StatusCode.ALREADY_EXISTS,
                    f"request_id {request.request_id!r} is in use by a different request; choose another",
                )
            if _continues(live, output_token_ids):
                live.orphaned_until = None
                return live
            if live.state is not State.FINISHED:
                self._end(live, Finish(FinishReason.ABORT), Event.ABORT, now)
            self.forget(live)
        self._check_fits(request)
        self._num_submitted += 1
        seq = Sequence.of(request, output_token_ids, self._num_submitted)
        self.sequences[request.key] = seq
        self.waiting.push(seq)
        finish = end_of_output(request, output_token_ids, self._eos_token_ids)
        if finish is not None:
            self._end(seq, finish, Event.FINISH, now)
        elif request.deadline is not None and request.deadline <= now:
            self._end(seq, _deadline_finish(), Event.EXPIRE, now)
        self._timers.watch(seq, len(self.sequences))
        return seq

    def cancel(self, key: bytes, reason: FinishReason, now: float) -> Sequence | None:
        """Gives a sequence up and frees what it holds; returns it, or None when nothing lives under `key`."""
        seq = self.sequences.get(key)
        if seq is None or seq.state is State.FINISHED:
            return None
        event = Event.EXPIRE if reason is FinishReason.DEADLINE else Event.ABORT
        self._end(seq, Finish(reason), event, now)
        self.forget(seq)  # its key is free at once: who gave it up will not come back for it
        return seq

    def orphan(self, seq: Sequence, now: float) -> None:
        """Nobody reads `seq` any more: it runs on for the grace, in case its reader comes back."""
        if seq.state is not State.FINISHED:
            seq.orphaned_until = now + self.limits.orphan_grace_seconds
            self._timers.watch(seq, len(self.sequences))

    def forget(self, seq: Sequence) -> None:
        """Drops the record of an ended sequence: its reader has everything."""
        assert seq.state is State.FINISHED
        if self.sequences.get(seq.request.key) is seq:
            del self.sequences[seq.request.key]
        seq.forget_at = None

    @property
    def next_timer(self) -> float | None:
        """When `expire` must be called next, or None."""
        return self._timers.next_time

    def expire(self, now: float) -> list[Sequence]:
        """Ends what is past its deadline or orphaned too long, forgets old results; returns who ended."""
        ended = []
        for seq in self._timers.due(now):
            if seq.state is State.FINISHED:
                self.forget(seq)
                continue
            if seq.request.deadline is not None and seq.request.deadline <= now:
                self._end(seq, _deadline_finish(), Event.EXPIRE, now)
            else:
                self._end(seq, Finish(FinishReason.ABORT), Event.ABORT, now)
            ended.append(seq)
        return ended

    # --- executors come and go ---------------------------------------------------------------------------

    def attach(self, executor_id: str, epoch: int, capacity: Capacity, now: float) -> list[Sequence]:
        """An executor with a fresh epoch. Returns waiting sequences that ended: they are not for it."""
        if executor_id in self.executors:
            raise ValueError(f"executor {executor_id!r} is attached already: detach it first")
        self.executors[executor_id] = ExecutorState(
            executor_id, epoch, capacity, self.limits, self.batching, self._cache_secret
        )
        return self._end_misfits(now)

    def detach(self, executor_id: str, now: float) -> list[Sequence]:
        """The executor is lost: what ran there waits again, before those that never ran, with its ids.

        Returns waiting sequences that ended: none of the executors left can ever hold them.
        """
        state = self.executors.pop(executor_id)
        for seq in list(state.running.values()):
            self._look_again(state.cache.end(seq))
            if not seq.is_padding:
                self._back_to_waiting(seq)
        return self._end_misfits(now)

    def _end_misfits(self, now: float) -> list[Sequence]:
        """Ends what waits and is not for any attached executor, so that it holds nobody back for ever.

        Two kinds: too long for each of them, or resubmitted with ids that end the request already, when
        nobody knew the model's end tokens. Without any executor everything waits for one to come back.
        """
        limit = max((state.max_total_tokens for state in self.executors.values()), default=None)
        if limit is None:
            return []
        ended: list[Sequence] = []
        for seq in list(self.waiting):
            over = end_of_output(seq.request, seq.output_token_ids(), self._eos_token_ids)
            if over is not None:
                self._end(seq, over, Event.FINISH, now)
            elif seq.max_len > limit:
                message = (
                    f"prompt and max_tokens together are {seq.max_len} tokens, "
                    f"the executor that took over holds at most {limit}"
                )
                self._end(seq, _error(StatusCode.UNAVAILABLE, message), Event.FAIL, now)
            else:
                continue
            ended.append(seq)
        return ended

    @property
    def max_total_tokens(self) -> int:
        """Longest prompt plus output that every attached executor can hold, tokens; 0 without any."""
        return min((state.max_total_tokens for state in self.executors.values()), default=0)

    # --- one iteration -----------------------------------------------------------------------------------

    def schedule(self, executor_id: str, now: float) -> BatchPlan | None:  # noqa: ARG002  (time-based policy)
        """The next plan for this executor, or None: the window is full, or there is nothing to say."""
        state = self.executors[executor_id]
        if not state.session.can_send:
            return None
        # Each running sequence takes at most one block a step: with more free ones nobody can be short.
        if state.blocks.num_free < len(state.running) and not self._make_room(state):
            return None
        state.is_hashing = False
        may_enter = self.batching.may_enter(num_running=len(state.running))
        rows = Rows(state.max_num_batched_tokens)
        self._admit_padding(state, rows)
        unfinished = self._decode_rows(state, rows)
        if self.limits.max_step_us is not None and rows.rows:
            self._cut_to_step_time(state, rows)
        for seq in unfinished:
            if rows.budget <= 0:
                break
            rows.chunk(seq, rows.budget)
        if may_enter and not state.is_draining:
            self._admit(state, rows)
        return self._plan(state, rows)

    def update(self, executor_id: str, result: StepResult, now: float) -> Outcome:
        """Applies a result: appends ids, ends what the executor says has ended, frees its blocks.

        A row of a sequence that was aborted, preempted or moved since is dropped: it delivers nothing. Raises
        SessionBrokenError when the result does not fit its plan.
        """
        state = self.executors[executor_id]
        plan = state.session.received(result)
        outcome = Outcome()
        if plan is None:
            return outcome
        self.counters.steps += 1
        if result.total_us and plan.rows:
            state.step_time.observe(sum(plan.num_tokens), result.total_us)
        state.is_draining = result.draining
        state.previous_step_us, state.previous_idle_us = result.total_us, result.idle_us
        rows = plan.rows
        if result.seq_ids != plan.seq_ids or result.num_sampled != plan.num_samples:
            rows = _rows_that_ran(plan, result)
        if len(result.token_ids) != sum(result.num_sampled):
            raise SessionBrokenError(f"step {result.step_id}: token ids and num_sampled differ")
        self._append_tokens(state.running, rows, result, outcome.progressed)
        self._register_blocks(state, plan, result)
        for finished in result.finished:
            seq = state.running.get(finished.seq_id)
            if seq is not None:
                self._end(seq, Finish(finished.reason, finished.matched_token_id), Event.FINISH, now)
                outcome.ended.append(seq)
            state.has_ghosts = True
        for error in result.errors:
            seq = state.running.get(error.seq_id)
            if seq is not None:
                self._end(seq, _error(error.status_code, error.message), Event.FAIL, now)
                outcome.ended.append(seq)
            state.has_ghosts = True
        return outcome

    def _append_tokens(
        self,
        running: dict[int, Sequence],
        rows: list[Sequence],
        result: StepResult,
        progressed: list[Sequence],
    ) -> None:
        at = 0
        token_ids = result.token_ids
        for seq, seq_id, count in zip(rows, result.seq_ids, result.num_sampled, strict=True):
            if count == 0:
                continue
            if seq.seq_id != seq_id:  # that admission is over
                self.counters.wasted_tokens += count
            elif count == 1:
                seq.token_ids.append(token_ids[at])
                progressed.append(seq)
            else:
                seq.token_ids.extend(token_ids[at : at + count])
                progressed.append(seq)
            at += count
        for seq_id, entries in result.logprobs.items():
            live = running.get(seq_id)
            if live is not None and live.logprobs is not None:
                live.logprobs.extend(entries)

    def _register_blocks(self, state: ExecutorState, plan: BatchPlan, result: StepResult) -> None:
        """What this step has filled can be used by others, unless its row failed or its sequence has gone."""
        failed = {error.seq_id for error in result.errors}
        for seq, seq_id, num_computed_tokens in plan.filled:
            if seq.seq_id == seq_id and seq_id not in failed and not seq.is_padding:
                self._look_again(state.cache.register(seq, num_computed_tokens))

    def _look_again(self, followers: list[Sequence]) -> None:
        for seq in followers:
            self.waiting.unpark(seq)

    # --- the parts of a plan -----------------------------------------------------------------------------

    def _decode_rows(self, state: ExecutorState, rows: Rows) -> list[Sequence]:
        """One row for each running sequence with one token to compute; returns those with more."""
        unfinished: list[Sequence] = []
        blocks = state.blocks
        members, seq_ids = rows.rows, rows.seq_ids
        budget, positions_sum = rows.budget, rows.positions_sum
        for seq_id, seq in state.running.items():
            position = seq.num_computed_tokens
            known = seq.num_known_tokens
            if known - position != 1:
                if known > position:
                    unfinished.append(seq)
                continue  # else its last token is in flight: a finish by length is foreseen
            if budget == 0:
                continue
            if position == seq.num_slots:
                if not blocks.num_free:
                    continue  # put off: nobody may be preempted yet
                self._grow(state, seq, rows)
            members.append(seq)
            seq_ids.append(seq_id)
            positions_sum += position
            budget -= 1
            seq.num_computed_tokens = known
            if known < seq.max_len - 1:
                seq.num_known_tokens = known + 1
        rows.num_tokens = [1] * len(members)
        rows.num_samples = [1] * len(members)
        rows.budget, rows.positions_sum = budget, positions_sum
        return unfinished

    def _grow(self, state: ExecutorState, seq: Sequence, rows: Rows) -> None:
        block_ids = state.blocks.allocate(1)
        seq.block_table += block_ids
        seq.num_slots += state.blocks.block_size
        rows.grown_seq_ids.append(seq.seq_id)
        rows.num_new_blocks.append(1)
        rows.new_block_ids += block_ids
        # The block before is full when this plan has answered: the row that filled it came before.
        rows.filled.append((seq, seq.seq_id, seq.num_computed_tokens))

    def _cut_to_step_time(self, state: ExecutorState, rows: Rows) -> None:
        """While anything decodes, chunks may only fill the wanted step duration.

        They never fall below one block of tokens: newcomers get on even where decoding alone takes longer.
        """
        assert self.limits.max_step_us is not None
        within = state.step_time.tokens_within(self.limits.max_step_us)
        if within is not None:
            room = max(within - len(rows.rows), state.blocks.block_size)
            rows.budget = min(rows.budget, room)

    def _admit(self, state: ExecutorState, rows: Rows) -> None:
        """Lets the waiting enter, in their order, while seats, blocks and tokens last.

        The order is strict: one that does not fit yet holds back those behind it, so that nobody is overtaken
        for ever. A request-level batch is filled at once, whatever the token budget: it will not open again.
        """
        fills_at_once = self.batching is not Batching.ITERATION
        while (rows.budget > 0 or fills_at_once) and len(state.running) < state.max_num_seqs:
            seq = self.waiting.peek()
            if seq is None:
                return
            matched = state.cache.matched(seq)
            if matched is None:
                state.is_hashing = True
                return
            leader = state.cache.leader_of(seq, len(matched))
            if leader is not None and not fills_at_once:
                self.waiting.park(seq)
                state.cache.follow(seq, leader)
                continue
            if not self._fits_now(state, seq, matched):
                return
            self.waiting.remove(seq)
            self._place(state, seq, matched, rows)
            if rows.budget > 0:
                rows.chunk(seq, rows.budget)

    def _fits_now(self, state: ExecutorState, seq: Sequence, matched: list[int]) -> bool:
        """Whether the blocks that can be had suffice. Shared blocks cost nothing, unless nobody held them."""
        blocks = state.blocks
        num_free = blocks.num_free - blocks.num_idle_among(matched) + len(matched)
        if num_free < blocks.blocks_for(len(seq.token_ids)):
            return False
        if not state.running:
            return True  # alone it fits: `submit` and `attach` saw to that
        running = state.running.values()
        return num_free >= policy.blocks_to_enter(seq, running, blocks.block_size, state.watermark_blocks)

    def _place(self, state: ExecutorState, seq: Sequence, matched: list[int], rows: Rows) -> None:
        """Admits `seq`: blocks for its whole context, the beginning of which was found in the cache."""
        blocks = state.blocks
        num_cached_tokens = len(matched) * blocks.block_size
        if not seq.has_started:
            seq.num_cached_tokens = min(num_cached_tokens, seq.num_prompt_tokens)
            state.cache.num_query_tokens += seq.num_prompt_tokens
            state.cache.num_hit_tokens += seq.num_cached_tokens
        blocks.share(matched)
        block_table = matched + blocks.allocate(blocks.blocks_for(len(seq.token_ids)) - len(matched))
        seq.move(Event.ADMIT)
        seq.has_started = True
        seq.num_tokens_at_admission = len(seq.token_ids)
        seq.num_computed_tokens = num_cached_tokens
        self._enter(state, seq, block_table, rows)
        state.cache.begin(seq, len(matched))

    def _enter(self, state: ExecutorState, seq: Sequence, block_ids: list[int], rows: Rows) -> None:
        """Gives `seq` a seat under a new seq_id. Plans are kept for resending, so they get copies."""
        seq.seq_id = state.next_seq_id
        state.next_seq_id += 1
        seq.executor_id = state.executor_id
        seq.block_table = block_ids
        seq.num_slots = len(block_ids) * state.blocks.block_size
        state.running[seq.seq_id] = seq
        sampling = self._padding_sampling if seq.is_padding else seq.request.sampling
        rows.admitted.append(
            NewSequence(
                seq.seq_id,
                seq.token_ids[:],
                seq.num_prompt_tokens,
                seq.num_computed_tokens,
                block_ids[:],
                sampling,
            )
        )

    def _plan(self, state: ExecutorState, rows: Rows) -> BatchPlan | None:
        session = state.session
        has_news = rows.rows or rows.admitted or state.released_seq_ids or state.has_ghosts
        if not has_news:
            return None
        plan = BatchPlan(
            epoch=session.epoch,
            step_id=session.last_step_id + 1,
            acked_step_id=session.acked_step_id,
            released_seq_ids=state.released_seq_ids,
            admitted=rows.admitted,
            seq_ids=rows.seq_ids,
            num_tokens=rows.num_tokens,
            grown_seq_ids=rows.grown_seq_ids,
            num_new_blocks=rows.num_new_blocks,
            new_block_ids=rows.new_block_ids,
            positions_sum=rows.positions_sum,
            num_samples=rows.num_samples,
            rows=rows.rows,
            filled=rows.filled,
            left=state.left,
        )
        state.released_seq_ids = []
        state.left = []
        state.has_ghosts = False
        session.sent(plan)
        self.counters.scheduled_tokens += sum(rows.num_tokens)
        return plan

    # --- running out of blocks ---------------------------------------------------------------------------

    def _make_room(self, state: ExecutorState) -> bool:
        """Preempts until every decoding sequence can grow; False when results must come in first.

        Token logs must be complete before anyone is preempted, so it happens only with nothing in flight: one
        bubble is cheaper than a needless victim. When nobody may be preempted, those left without a block are
        put off while the newcomers win their first token.
        """
        while True:
            short = sum(_needs_block(seq) for seq in state.running.values()) - state.blocks.num_free
            if short <= 0:
                return True
            if state.session.num_unanswered:
                return False
            seq = policy.victim(state.running.values())
            if seq is None:
                return True
            self._preempt(state, seq)

    def _preempt(self, state: ExecutorState, seq: Sequence) -> None:
        if not seq.is_padding:  # nothing is in flight: all it has computed is known, and may be found again
            self._look_again(state.cache.register(seq, seq.num_computed_tokens))
        self._leave(state, seq, reason=None, tell_executor=True)
        if not seq.is_padding:
            self.counters.preemptions += 1
            seq.num_preemptions += 1
            self._back_to_waiting(seq)

    def _back_to_waiting(self, seq: Sequence) -> None:
        seq.move(Event.PREEMPT)
        seq.seq_id = 0
        seq.executor_id = ""
        seq.block_table = []
        seq.num_slots = 0
        seq.forget_computed()
        self.waiting.push(seq)

    # --- ends --------------------------------------------------------------------------------------------

    def _end(self, seq: Sequence, finish: Finish, event: Event, now: float) -> None:
        """The one place where a sequence ends; whatever it holds goes back here."""
        if seq.state is State.WAITING:
            self.waiting.remove(seq)
        else:
            state = self.executors[seq.executor_id]
            executor_knows = event in {Event.FINISH, Event.FAIL}
            if not executor_knows:
                seq.num_wasted_tokens = max(0, seq.num_known_tokens - len(seq.token_ids))
            if event is Event.FINISH:  # all but its last token was fed, and has answered
                self._look_again(state.cache.register(seq, len(seq.token_ids) - 1))
            block_table = seq.block_table
            keeps_seat = padding.keeps_seat(state, seq, finish)
            self._leave(state, seq, finish.reason, tell_executor=not executor_knows, keep_blocks=keeps_seat)
            if keeps_seat:
                state.entering.append(padding.padding_of(state, seq, block_table))
            elif padding.is_all_padding(state):
                self._drop_padding(state)
        seq.move(event)
        seq.finish = finish
        seq.seq_id = 0
        seq.executor_id = ""
        seq.block_table = []
        seq.orphaned_until = None
        seq.forget_at = now + self.limits.result_keep_seconds
        self._timers.watch(seq, len(self.sequences))

    def _leave(
        self,
        state: ExecutorState,
        seq: Sequence,
        reason: FinishReason | None,
        *,
        tell_executor: bool,
        keep_blocks: bool = False,
    ) -> None:
        self._look_again(state.cache.end(seq))
        if not keep_blocks:
            state.blocks.release(seq.block_table)
        del state.running[seq.seq_id]
        if tell_executor:
            state.released_seq_ids.append(seq.seq_id)
        state.left.append(Leaver(seq, seq.seq_id, reason))

    def _admit_padding(self, state: ExecutorState, rows: Rows) -> None:
        for pad in state.entering:
            self._enter(state, pad, pad.block_table, rows)
        state.entering = []

    def _drop_padding(self, state: ExecutorState) -> None:
        for pad in list(state.running.values()):
            self._leave(state, pad, reason=None, tell_executor=True)
        for pad in state.entering:
            state.blocks.release(pad.block_table)
        state.entering = []

    # --- small things ------------------------------------------------------------------------------------

    def _check_fits(self, request: Request) -> None:
        lengths = f"prompt has {len(request.prompt_token_ids)} tokens and max_tokens is {request.max_tokens}"
        if not request.prompt_token_ids or request.max_tokens < 1:
            raise RefusedError(StatusCode.INVALID_ARGUMENT, f"{lengths}: each must be at least 1")
        if not self.executors:
            if request.accepted_before:
                return
            raise RefusedError(StatusCode.UNAVAILABLE, "no executor is attached; try again when one is")
        num_tokens = len(request.prompt_token_ids) + request.max_tokens
        if num_tokens > self.max_total_tokens:
            raise RefusedError(
                StatusCode.INVALID_ARGUMENT,
                f"{lengths}: their sum {num_tokens} must be at most {self.max_total_tokens}",
            )

    @property
    def _eos_token_ids(self) -> frozenset[int]:
        return next((state.capacity.eos_token_ids for state in self.executors.values()), frozenset())

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self.waiting and not any(state.running for state in self.executors.values())

    @property
    def num_running(self) -> int:
        """Sequences in a batch, padding left out."""
        return sum(not seq.is_padding for state in self.executors.values() for seq in state.running.values())


def _needs_block(seq: Sequence) -> bool:
    position = seq.num_computed_tokens
    return position == seq.num_slots and seq.num_known_tokens - position == 1


def _continues(seq: Sequence, output_token_ids: TokenIds) -> bool:
    """Whether a reader who has these ids can go on with `seq`: they are a beginning of what it has put out.

    One that was given up (its router was away too long) has nothing to go on with.
    """
    if seq.finish is not None and seq.finish.reason is FinishReason.ABORT:
        return False
    return seq.num_resumed_tokens <= len(output_token_ids) and (
        seq.output_token_ids()[: len(output_token_ids)] == output_token_ids
    )


def _deadline_finish() -> Finish:
    return Finish(
        FinishReason.DEADLINE,
        message="the deadline of the call has passed",
        status_code=StatusCode.DEADLINE_EXCEEDED,
    )


def _error(status_code: StatusCode, message: str) -> Finish:
    return Finish(FinishReason.ERROR, message=message, status_code=status_code)


def _rows_that_ran(plan: BatchPlan, result: StepResult) -> list[Sequence]:
    """The plan's rows that the result tells of, in its order.

    Missing may be only rows that are over on one side: ghosts, and rows in error. Raises SessionBrokenError
    for any other difference.
    """
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
        if num_sampled != num_samples and planned_id not in failed:
            raise SessionBrokenError(
                f"step {plan.step_id}: sequence {planned_id} sampled {num_sampled}, {num_samples} due"
            )
        ran.append(seq)
        seq_id, num_sampled = next(answers, (0, 0))
    if len(ran) != len(result.seq_ids):
        raise SessionBrokenError(f"step {plan.step_id}: row of sequence {seq_id} was not planned")
    return ran
