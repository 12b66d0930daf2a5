"""The scheduler's core: at each iteration, finished sequences leave, waiting ones enter, a plan is made.

    submit / cancel / expire          from clients, at any time
    attach / detach                   an executor arrives, or is lost
    schedule(executor, now) ─► plan   which sequences compute how many tokens in the next iteration
    update(executor, result, now)     apply the result of that iteration

There are no phases: each sequence has known and computed tokens, and a step gives out tokens until computed
catches up with known. The only way back is preempt-and-recompute, whether blocks ran out, a more important
sequence arrived, or the executor died.

Must not know: gRPC, protobuf, asyncio, the clock (time is an argument), text, tensors, routers. The core owns
every sequence, the waiting queue, and the running set, blocks and session of each executor. `door` refuses
requests, `preemption` takes seats and blocks back, `admitting` lets sequences into the batch, `speculation`
adds draft tokens, and `results` takes tokens out of a step's result.
"""

from dataclasses import replace

from scheduler import admitting, door, policy, preemption, results, speculation
from scheduler.batching import Batching
from scheduler.core_state import CoreState
from scheduler.counters import Outcome
from scheduler.executor_session import SessionBrokenError
from scheduler.executor_state import ExecutorState
from scheduler.explain import Entry, Reason
from scheduler.plan import BatchPlan, Capacity, StepResult
from scheduler.plan_builder import PlanBuilder
from scheduler.policy import Limits
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
from scheduler.token_ids import NO_IDS, TokenIds


class SchedulerCore(CoreState):
    """Queue, policy and blocks for all executors of one scheduler."""

    def __init__(
        self,
        limits: Limits | None = None,
        batching: Batching = Batching.ITERATION,
        padding_sampling: bytes = b"",
        cache_secret: bytes = b"",
    ) -> None:
        """Starts without executors.

        `padding_sampling`: encoded sampling parameters under which a padding row never ends.
        `cache_secret`: up to 64 random bytes that key the names of cached blocks.
        """
        super().__init__(limits, batching, padding_sampling)
        self._cache_secret = cache_secret
        self._num_submitted = 0

    # --- from clients ------------------------------------------------------------------------------------

    def submit(self, request: Request, output_token_ids: TokenIds = NO_IDS, *, now: float) -> Sequence:
        """Accepts a request, or finds the live sequence that has its key. Idempotent.

        A live sequence continues for its new reader if the ids that the reader has (`output_token_ids`) are a
        prefix of its output; otherwise the request is computed again from those ids. If the ids already
        complete the request, it ends at once. Raises RefusedError.
        """
        self._now = now
        live = self.sequences.get(request.key)
        if live is not None:
            door.check_same_body(live.request, request)
            if _continues(live, request, output_token_ids):
                live.orphaned_until = None
                if live.request.deadline != request.deadline:
                    self._renew(live, request.deadline)
                return live
        tenant = self.tenants.get(request.tenant, now)
        try:
            door.check(self, request, tenant, now)
        except door.RefusedError:
            self.counters.refused += 1
            raise
        if live is not None:
            if live.state is not State.FINISHED:
                self._end(live, Finish(FinishReason.ABORT), Event.ABORT)
            self.forget(live)
        self._num_submitted += 1
        return self._take_in(Sequence.of(request, tenant, output_token_ids, self._num_submitted))

    def _renew(self, seq: Sequence, deadline: float | None) -> None:
        """The client called again, with a new deadline."""
        seq.request = replace(seq.request, deadline=deadline)
        seq.latest_start = self.slack.latest_start(seq)
        if seq.state is State.WAITING:
            if not self.waiting.unpark(seq):  # else it finds out by itself which sequence to follow
                self.waiting.reorder(seq)
            self.hand_on(seq)
        self._timers.watch(seq, len(self.sequences))

    def cancel(self, key: bytes, reason: FinishReason, now: float) -> Sequence | None:
        """Aborts a sequence and frees what it holds; returns it, or None when no live sequence has `key`."""
        self._now = now
        seq = self.sequences.get(key)
        if seq is None or seq.state is State.FINISHED:
            return None
        event = Event.EXPIRE if reason is FinishReason.DEADLINE else Event.ABORT
        if reason is FinishReason.STOP:  # a stop string was matched: its length is a natural one
            self.lengths.observe(seq.num_output_tokens)
        self._end(seq, Finish(reason), event)
        self.forget(seq)  # frees its key at once: a client that gave up will not come back for the result
        return seq

    def orphan(self, seq: Sequence, now: float) -> None:
        """`seq` has lost its reader: it runs on for the grace period, in case the reader comes back."""
        if seq.state is not State.FINISHED:
            seq.orphaned_until = now + self.limits.orphan_grace_seconds
            self._timers.watch(seq, len(self.sequences))

    @property
    def next_timer(self) -> float | None:
        """When `expire` must be called next, or None."""
        times = (self._timers.next_time, self.stranded.next_time)
        return min((time for time in times if time is not None), default=None)

    def expire(self, now: float) -> list[Sequence]:
        """Ends what is past its deadline or orphaned too long, forgets old results; returns what ended."""
        self._now = now
        ended = []
        for seq in self._timers.due(now):
            if seq.state is State.FINISHED:
                self.forget(seq)
                continue
            if seq.request.deadline is not None and seq.request.deadline <= now:
                self._end(seq, Finish.past_deadline(), Event.EXPIRE)
            else:
                self._end(seq, Finish(FinishReason.ABORT), Event.ABORT)
            ended.append(seq)
        return ended + self._end_unrecovered()

    def _end_unrecovered(self) -> list[Sequence]:
        """Ends what has waited too long for an executor."""
        overdue = self.stranded.overdue(self._now)
        for seq, message in overdue:
            self._end(seq, Finish.failed(StatusCode.UNAVAILABLE, message), Event.FAIL)
        return [seq for seq, _ in overdue]

    def explain(self, request_id: str, now: float, tenant: str = "") -> dict[int, list[Entry]]:
        """Where the time of a tenant's request went, by choice; empty when nothing is known about it."""
        lines = self._time_lines.of(tenant, request_id)
        for seq in self._by_request.get((tenant, request_id), {}).values():
            if seq.time_line and seq.state is not State.FINISHED:
                lines[seq.request.sample_index] = seq.time_line.so_far(now, self.clocks)
        return lines

    # --- executors come and go ---------------------------------------------------------------------------

    def attach(self, executor_id: str, epoch: int, capacity: Capacity, now: float) -> list[Sequence]:
        """Adds an executor with a fresh epoch. Returns the waiting sequences that ended."""
        if executor_id in self.executors:
            raise ValueError(f"executor {executor_id!r} is attached already: detach it first")
        self._now = now
        self.executors[executor_id] = ExecutorState(
            executor_id, epoch, capacity, self.limits, self.batching, self._cache_secret
        )
        self.clocks.set(Reason.QUEUED_FOR_STEP, now)
        self._sort_by_executor()
        ended = self._end_complete()
        self.stranded.executor_came(now)
        return ended + self._end_unrecovered()

    def detach(self, executor_id: str, now: float, *, is_crash: bool = False) -> list[Sequence]:
        """Removes a lost executor: what ran there waits again with its ids, ahead of what has never run.

        `is_crash`: it may have died, or answered wrongly, because of what it was computing. Returns the
        sequences that ended: those found guilty of the crash, and those that have waited too long for an
        executor.
        """
        self._now = now
        state = self.executors[executor_id]
        guilty = self.inquiry.executor_died(state, now) if is_crash else None
        for seq in list(state.running.values()):
            self._leave(state, seq, reason=None, tell_executor=False, keep_blocks=True)
            if not seq.is_padding:
                self._back_to_waiting(seq, "its executor was lost", recovers=True)
        del self.executors[executor_id]
        self.counters.executors_crashed += is_crash
        self.counters.executors_left += not is_crash
        self.counters.prefix_query_tokens += state.cache.num_query_tokens
        self.counters.prefix_hit_tokens += state.cache.num_hit_tokens
        self.see_who_takes_newcomers()
        self._sort_by_executor()
        self.stranded.executor_went(now)
        ended = self._end_guilty(guilty) if guilty is not None else []
        return ended + self._end_unrecovered()

    def _end_guilty(self, name: tuple[str, str]) -> list[Sequence]:
        """Ends all choices of a request that kills executors, so that others need no more recomputing."""
        message = (
            f"request {name[1]!r} was stopped: executors died, or answered wrongly, each time they computed "
            "it, and the last time it was alone; it may meet a defect of the executor"
        )
        choices = self._by_request.get(name, {}).values()
        ended = [seq for seq in choices if seq.state is not State.FINISHED]
        for seq in ended:  # ABORT: another executor may be computing one of them and must be told
            self._end(seq, Finish.failed(StatusCode.INTERNAL, message), Event.ABORT)
        return ended

    def _end_complete(self) -> list[Sequence]:
        """Ends resubmitted sequences whose ids end them already: the end tokens were not known until now."""
        ended: list[Sequence] = []
        for seq in list(self.waiting):
            finish = end_of_output(seq.request, seq.output_token_ids(), self._eos_token_ids)
            if finish is not None:
                self._end(seq, finish, Event.FINISH)
                ended.append(seq)
        return ended

    def _sort_by_executor(self) -> None:
        """The set of executors changed: works out again which sequences only some of them can compute."""
        longest, features = self.max_total_tokens, self.features
        leaders = [seq for seq in self.waiting if seq.followers or seq.inherited]
        for seq in list(self.waiting):
            is_for_all = seq.max_len <= longest and seq.request.needs <= features
            only_at = None if is_for_all else self.placement.only_at(seq)
            if only_at != seq.only_at:
                seq.only_at = only_at
                self.waiting.reorder(seq)
        for seq in leaders:  # its followers may now be in another class than it is, or than they were
            seq.followers = seq.take_followers()
            self.hand_on(seq)

    # --- one iteration: the plan -------------------------------------------------------------------------

    def schedule(self, executor_id: str, now: float) -> BatchPlan | None:
        """This executor's next plan; None if a result must come first, it is too early, or it has no work.

        After None, the executor's state says when to ask again, if that is before the next event:
            held_until        it was too early: at this time
            look_again_at     it is idle and left a sequence to another executor: at this time
            is_still_looking  finding out what to admit takes longer than a step may last: at once, after
                              a turn of the event loop

        Raises SessionBrokenError when the executor has failed to end a sequence, BlockError when blocks and
        their holders were found to disagree.
        """
        self._now = now
        state = self.executors[executor_id]
        state.is_still_looking = False
        state.num_put_behind = 0
        if state.fault is not None:
            raise state.fault
        plan = self._next_plan(state, now)
        if plan is None and state.crowded and not state.session.num_unanswered:
            # All were postponed for their tenants' own limits. With nothing in flight, no result comes that
            # would have anybody ask again: those that make room are found at once.
            plan = self._next_plan(state, now)
        return plan

    def _next_plan(self, state: ExecutorState, now: float) -> BatchPlan | None:
        if not self._may_send(state, now) or not self._clear_the_way(state):
            return None
        may_enter = self.batching.may_enter(num_running=len(state.running)) and not state.is_draining
        builder = PlanBuilder(state.max_num_batched_tokens)
        for pad in state.entering_padding:
            self.enter(state, pad, pad.block_table, builder)
        state.entering_padding = []
        unfinished = self._decode_rows(state, builder)
        if self.limits.max_step_us is not None and builder.rows:
            builder.budget = state.tokens_beside(len(builder.rows), self.limits.max_step_us)
        admitting.give_out(self, state, unfinished, builder, now, may_enter=may_enter)
        speculation.add_draft_tokens(self, state, builder, now)
        self.drain_rate.queue_is(now, empty=not self.waiting)
        return self._plan(state, builder)

    def _may_send(self, state: ExecutorState, now: float) -> bool:
        """Whether a plan may leave: the window has room, and it is late enough (`pace`).

        Sets the state's `held_until` when only the time is not right.
        """
        state.held_until = None
        if not state.session.can_send:
            return False
        if state.session.num_unanswered and self.inquiry and self.inquiry.is_watching(state):
            return False
        if state.session.num_unanswered and state.drafting is not None and state.drafting.waits:
            return False
        if self.limits.late_plans and state.session.num_unanswered:
            state.held_until = state.pace.held_until(now)
        return state.held_until is None

    def _clear_the_way(self, state: ExecutorState) -> bool:
        """Preempts what must go before the plan is made; False when results must arrive first."""
        if state.is_draining and not preemption.move_off_draining(self, state, self._now):
            return False
        # A running sequence takes at most one block a step: with at least that many free, none can run short.
        if state.blocks.num_free < len(state.running) and not preemption.preempt_for_growth(self, state):
            return False
        if state.crowded and not preemption.preempt_within_tenants(self, state):
            return False
        return preemption.displace_for_next(self, state, self._now)

    def _decode_rows(self, state: ExecutorState, builder: PlanBuilder) -> list[Sequence]:
        """Adds a row for each running sequence with one token to compute; returns those with more."""
        unfinished: list[Sequence] = []
        growing: list[Sequence] = []
        num_early, early = policy.early_growth(
            len(state.running), state.blocks.num_free, state.blocks.block_size
        )
        members, seq_ids = builder.rows, builder.seq_ids
        budget, positions_sum = builder.budget, builder.positions_sum
        for seq_id, seq in state.running.items():
            position = seq.num_computed_tokens
            computable = seq.num_computable_tokens
            if computable - position != 1:
                if computable > position:
                    unfinished.append(seq)
                elif len(seq.token_ids) >= seq.max_len and not seq.is_padding:
                    raise SessionBrokenError(f"sequence {seq_id} has all its tokens and was not ended")
                continue  # else its last token is in flight: it will end by length
            if budget == 0:
                continue
            if position >= seq.num_slots - early and not self._has_slot(state, seq, growing, num_early):
                continue  # postponed: nothing may be preempted yet
            members.append(seq)
            seq_ids.append(seq_id)
            positions_sum += position
            budget -= 1
            seq.num_computed_tokens = computable
            if seq.is_prefilling:  # a last chunk of one token
                builder.filled.append((seq, seq_id, computable))
            if computable < seq.max_len - 1:
                seq.num_computable_tokens = computable + 1
        builder.num_tokens = [1] * len(members)
        builder.num_samples = [1] * len(members)
        builder.budget, builder.positions_sum = budget, positions_sum
        if growing:
            builder.grow(growing, state.blocks)
        return unfinished

    def _has_slot(self, state: ExecutorState, seq: Sequence, growing: list[Sequence], num_early: int) -> bool:
        """Whether `seq` has a slot for its next token. May add it to `growing`, for a block now or early."""
        if seq.num_computed_tokens < seq.num_slots:
            if len(growing) >= num_early or seq.num_slots >= seq.max_len - 1 or not seq.tenant.may_grow:
                return True
        elif len(growing) >= state.blocks.num_free:
            return False
        elif not seq.tenant.may_grow:
            state.crowded[seq.tenant] = None
            return False
        seq.tenant.meter(1, self._now)
        growing.append(seq)
        return True

    def _plan(self, state: ExecutorState, builder: PlanBuilder) -> BatchPlan | None:
        session = state.session
        if not (builder.rows or builder.admitted or state.released_seq_ids or state.has_ghosts):
            return None
        plan = BatchPlan(
            epoch=session.epoch,
            step_id=session.last_step_id + 1,
            acked_step_id=session.acked_step_id,
            released_seq_ids=state.released_seq_ids,
            admitted=builder.admitted,
            seq_ids=builder.seq_ids,
            num_tokens=builder.num_tokens,
            grown_seq_ids=builder.grown_seq_ids,
            num_new_blocks=builder.num_new_blocks,
            new_block_ids=builder.new_block_ids,
            positions_sum=builder.positions_sum,
            num_samples=builder.num_samples,
            rows=builder.rows,
            filled=builder.filled,
            outgrown=builder.outgrown,
            left=state.left,
            draft_tokens=builder.draft_tokens,
        )
        state.released_seq_ids = []
        state.left = []
        state.has_ghosts = False
        session.sent(plan)
        num_tokens = sum(builder.num_tokens)
        predicted_us = state.step_time.predict_us(num_tokens) if num_tokens else 0.0
        state.clock.sent(None if predicted_us is None else predicted_us / 1e6, self._now)
        self.counters.scheduled_tokens += num_tokens
        return plan

    # --- one iteration: the result -----------------------------------------------------------------------

    def update(self, executor_id: str, result: StepResult, now: float) -> Outcome:
        """Applies a result: appends ids, ends what the executor reports as ended, frees its blocks.

        Rows of sequences that have since been aborted, preempted or moved are dropped. Raises
        SessionBrokenError when the result does not fit its plan.
        """
        self._now = now
        state = self.executors[executor_id]
        answered = state.session.received(result)
        outcome = Outcome()
        if answered is None:
            return outcome
        plan, rows = answered
        self.counters.steps += 1
        wall_seconds = state.pace.answered(now, result.total_us / 1e6, result.idle_us / 1e6)
        if plan.rows:
            self.meters.step(len(plan.rows), result.total_us, result.idle_us, wall_seconds)
            state.previous_step_us, state.previous_idle_us = result.total_us, result.idle_us
        if result.total_us and plan.rows:
            state.step_time.observe(sum(plan.num_tokens), result.total_us)
        state.is_draining = result.draining
        state.leaves_at = now + result.seconds_to_leave
        if state.is_draining:
            self.see_who_takes_newcomers()
        self._end_unfit(results.take_prompt_logprobs(plan, result, outcome.progressed), "a prompt", outcome)
        unfit = results.append_tokens(rows, result, outcome.progressed, self.counters)
        speculation.settle(state, plan, self.counters)
        self._end_unfit(unfit, "a token", outcome)
        self._register_blocks(state, plan, result)
        if self.inquiry:
            self.inquiry.stepped(rows)
        self._apply_ends(state, result, outcome)
        if state.drafting is not None:
            # With a window of one, plans wait for all results anyway.
            way_seconds = state.pace.way if state.session.window > 1 else 0.0
            state.drafting.learn(state.running, outcome.progressed, state.step_time.line, way_seconds)
        return outcome

    def _apply_ends(self, state: ExecutorState, result: StepResult, outcome: Outcome) -> None:
        for finished in result.finished:
            seq = state.running.get(finished.seq_id)
            if seq is not None:
                self._end(seq, Finish(finished.reason, finished.matched_token_id), Event.FINISH)
                outcome.ended.append(seq)
            state.has_ghosts = True
        for error in result.errors:
            seq = state.running.get(error.seq_id)
            if seq is not None:
                self._end(seq, Finish.failed(error.status_code, error.message), Event.FAIL)
                outcome.ended.append(seq)
            state.has_ghosts = True

    def _end_unfit(self, unfit: list[Sequence], what: str, outcome: Outcome) -> None:
        message = f"the executor gave {what} without the log-probabilities that were asked for"
        for seq in unfit:
            self._end(seq, Finish.failed(StatusCode.INTERNAL, message), Event.ABORT)
            outcome.ended.append(seq)

    def _register_blocks(self, state: ExecutorState, plan: BatchPlan, result: StepResult) -> None:
        """Makes the blocks that this step filled reusable, unless the row failed or its sequence has left."""
        failed = {error.seq_id for error in result.errors}
        for seq, seq_id, num_computed_tokens in plan.filled:
            if state.running.get(seq_id) is not seq or seq_id in failed or seq.is_padding:
                continue
            self.unpark_followers(state.cache.register(seq, num_computed_tokens))
            if seq.is_prefilling and seq.has_progressed:
                self.note(seq, Reason.DECODE, state, "")
        # Naming the blocks of decoding sequences can wait: when many fill in the same step, it takes several.
        later = state.to_register
        later.extend(plan.outgrown)
        for _ in range(
            min(len(later), policy.num_named_at_once(len(state.running), state.blocks.block_size))
        ):
            seq, seq_id, num_computed_tokens = later.popleft()
            if state.running.get(seq_id) is seq and not seq.is_padding:  # else it has left this seat
                served = state.cache.register(seq, num_computed_tokens)
                if served:
                    self.unpark_followers(served)


def _continues(seq: Sequence, request: Request, output_token_ids: TokenIds) -> bool:
    """Whether `seq` can continue for a reader that has these ids: they must be a prefix of its output.

    A sequence that was aborted (its router was away too long), found no executor, or ran out of its call's
    time cannot continue: a client that asks again has time. Nor can one that was submitted without the
    prompt's log-probabilities (its router had them), if this reader lacks them.
    """
    finish = seq.finish
    if finish is not None and (
        finish.reason in {FinishReason.ABORT, FinishReason.DEADLINE}
        or finish.status_code is StatusCode.UNAVAILABLE
    ):
        return False
    if request.want_prompt_logprobs and seq.prompt_logprobs is None:
        return False
    return seq.num_resumed_tokens <= len(output_token_ids) and (
        seq.output_token_ids()[: len(output_token_ids)] == output_token_ids
    )
