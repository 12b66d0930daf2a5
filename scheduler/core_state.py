"""The state of the core, and every move of a sequence: taken in, waiting, seated, unseated, ended, forgotten.

    taken in ─► waiting ─► seat ─► ended ─► forgotten
                   ▲         │
                   └─────────┘  preempted, displaced, or its executor was lost

Each move is made here and nowhere else, so that queue, seats, blocks, tenants and time lines agree. When to
make one is decided elsewhere: by the calls of `core` and the rules that they apply (`door`, `preemption`,
`admitting`). Pure.
"""

from typing import Protocol

from scheduler import followers, padding
from scheduler.batching import Batching
from scheduler.counters import Counters
from scheduler.doubt import Doubt
from scheduler.drain_rate import DrainRate
from scheduler.entrance import Entrance, Found
from scheduler.executor_state import ExecutorState
from scheduler.explain import Reason, ReasonClocks, TimeLine, TimeLines
from scheduler.forecast import LengthModel
from scheduler.inquiry import Inquiry
from scheduler.meters import Meters
from scheduler.placement import Placement
from scheduler.plan import Leaver, NewSequence
from scheduler.plan_builder import PlanBuilder
from scheduler.policy import Limits
from scheduler.recovery import RecoveryPace
from scheduler.sequence import Event, Finish, FinishReason, Request, Sequence, State, end_of_output
from scheduler.slack import Slack
from scheduler.stranded import Stranded
from scheduler.tenants import Tenant, Tenants
from scheduler.timers import Timers
from scheduler.waiting import WaitingQueue


class Witness(Protocol):
    """Is told when a sequence arrives and when it ends; the time line holds what happened in between."""

    def arrived(self, seq: Sequence) -> None:
        """`seq` was taken in. May set `traceparent`, which is what executors are told."""

    def ended(self, seq: Sequence, now: float) -> None:
        """`seq` has ended and holds nothing any more."""


class CoreState:
    """All sequences of one scheduler, its queue, and its executors."""

    def __init__(
        self,
        limits: Limits | None = None,
        batching: Batching = Batching.ITERATION,
        padding_sampling: bytes = b"",
    ) -> None:
        """Starts without sequences or executors.

        `padding_sampling`: encoded sampling parameters under which a padding row never ends.
        """
        self.limits = limits or Limits()
        self.batching = batching
        self.counters = Counters()
        self.meters = Meters()
        self.clocks = ReasonClocks()
        self.executors: dict[str, ExecutorState] = {}
        self.sequences: dict[bytes, Sequence] = {}
        self.tenants = Tenants(self.limits.tenants, self.limits.default_tenant)
        self.waiting = WaitingQueue(
            self.limits.policy, self.limits.aging_seconds, on_aside=self._turn_aside, on_hold=self.hand_on
        )
        # What the rules know, one subject each.
        self.lengths = LengthModel()
        self.drain_rate = DrainRate()
        self.doubt = Doubt()
        self.recovery_pace = RecoveryPace()
        self.inquiry = Inquiry(self.waiting, self.executors)
        self.stranded = Stranded(
            self.waiting, self.executors, self.inquiry, self.clocks, self.limits.recovery_timeout_seconds
        )
        self.placement = Placement(self.executors, self.inquiry)
        self.slack = Slack(self.limits.policy, self.executors, self.lengths)
        self.entrance = Entrance(self.limits, self.executors, self.waiting, self.lengths)
        self.witness: Witness | None = None
        """Told when sequences arrive and end, if set."""
        self._time_lines = TimeLines()
        self._timers = Timers()
        self._by_request: dict[tuple[str, str], dict[bytes, Sequence]] = {}  # by tenant and request id
        self._padding_sampling = padding_sampling
        # Time of the call in progress: every public method of the core that takes `now` sets it first, for
        # what it calls.
        self._now = 0.0

    # --- taken in, forgotten -----------------------------------------------------------------------------

    def _take_in(self, seq: Sequence) -> Sequence:
        """Takes in a new sequence. It may end at once: by the ids it came with, or by its deadline."""
        request, now = seq.request, self._now
        self.sequences[request.key] = seq
        self._by_request.setdefault((request.tenant, request.request_id), {})[request.key] = seq
        seq.time_line = TimeLine(request.arrival, now, self.clocks, seq.tenant.aside)
        if self.witness is not None:
            self.witness.arrived(seq)
        seq.tenant.draw_on_rates(seq.max_len, now)
        self._wait(seq)
        finish = end_of_output(request, seq.output_token_ids(), self._eos_token_ids)
        if finish is not None:
            self._end(seq, finish, Event.FINISH)
        elif request.deadline is not None and request.deadline <= now:
            self._end(seq, Finish.past_deadline(), Event.EXPIRE)
        self._timers.watch(seq, len(self.sequences))
        return seq

    def forget(self, seq: Sequence) -> None:
        """Drops the record of an ended sequence: its reader has everything."""
        assert seq.state is State.FINISHED
        request = seq.request
        if self.sequences.get(request.key) is seq:
            del self.sequences[request.key]
            choices = self._by_request[request.tenant, request.request_id]
            del choices[request.key]
            if not choices:
                del self._by_request[request.tenant, request.request_id]
        seq.forget_at = None

    # --- waiting -----------------------------------------------------------------------------------------

    def _wait(self, seq: Sequence) -> None:
        seq.latest_start = self.slack.latest_start(seq)
        seq.only_at = self.placement.only_at(seq)
        self.waiting.push(seq)
        self.stranded.began_to_wait(seq, self._now)
        if self.inquiry:
            self.inquiry.began_to_wait(seq)

    def _turn_aside(self, tenant: Tenant) -> None:
        """`tenant` is passed over from now on, or takes part again."""
        tenant.aside.turn(self._now, self.clocks)

    def hand_on(self, leader: Sequence) -> None:
        """`leader` has ended or is not served next, so its followers must not go on waiting for it."""
        if leader.followers or leader.inherited:
            self.unpark_followers(followers.hand_on(self.waiting, leader))

    def unpark_followers(self, served: list[Sequence]) -> None:
        """Puts sequences back into the queue: their shared prefix is there, or no longer computed."""
        for seq in served:
            if self.waiting.unpark(seq) and seq.time_line is not None:
                seq.time_line.wait(self._now, self.clocks, step_id=0, detail="its beginning is there")

    # --- on a seat, and off it ---------------------------------------------------------------------------

    def find_place(self, state: ExecutorState, seq: Sequence, *, follows: bool) -> Found:
        """Whether `seq`, the next one, may enter; with `follows`, it may wait for a prefix in progress."""
        return self.entrance.find(state, seq, follows=follows)

    def enter(
        self, state: ExecutorState, seq: Sequence, block_table: list[int], builder: PlanBuilder
    ) -> None:
        """Gives `seq` a seat under a new seq_id. Plans are kept for resending, so they get copies."""
        seq.seq_id = state.next_seq_id
        state.next_seq_id += 1
        seq.executor_id = state.executor_id
        seq.block_table = block_table
        seq.num_slots = len(block_table) * state.blocks.block_size
        state.take_seat(seq)
        seq.tenant.num_running += 1
        seq.tenant.meter(len(block_table), self._now)
        sampling = self._padding_sampling if seq.is_padding else seq.request.sampling
        builder.admitted.append(
            NewSequence(
                seq.seq_id,
                seq.token_ids[:],
                seq.num_prompt_tokens,
                seq.num_computed_tokens,
                block_table[:],
                sampling,
                None if seq.is_padding else seq.prompt_logprobs_from,
                "" if seq.is_padding else seq.traceparent,
            )
        )

    def preempt(self, state: ExecutorState, seq: Sequence, why: str) -> None:
        """Takes `seq` off its executor, which has answered every plan; it waits again, to be recomputed."""
        if not seq.is_padding:  # nothing is in flight: all it has computed is known, and can be cached
            self.unpark_followers(state.cache.register(seq, seq.num_computed_tokens))
        self._leave(state, seq, reason=None, tell_executor=True)
        if not seq.is_padding:
            self._back_to_waiting(seq, why)
            if padding.is_all_padding(state):
                self._drop_padding(state)

    def _back_to_waiting(self, seq: Sequence, why: str, *, recovers: bool = False) -> None:
        seq.move(Event.PREEMPT)
        seq.is_recovering |= recovers
        self.counters.recoveries += recovers
        seq.give_up_seat()
        seq.forget_computed()
        seq.waiting_since = self._now
        if seq.time_line is not None:
            seq.time_line.wait(self._now, self.clocks, step_id=0, detail=why)
        self._wait(seq)

    def _leave(
        self,
        state: ExecutorState,
        seq: Sequence,
        reason: FinishReason | None,
        *,
        tell_executor: bool,
        keep_blocks: bool = False,
    ) -> None:
        """The one place where a seat is given back, and its blocks with it."""
        state.cache.end(seq)
        self.hand_on(seq)
        if not keep_blocks:
            state.release(seq)
        state.give_seat_back(seq)
        seq.tenant.num_running -= 1
        seq.tenant.meter(-len(seq.block_table), self._now)
        self.waiting.recall(seq.tenant)
        if tell_executor:
            state.released_seq_ids.append(seq.seq_id)
        state.left.append(Leaver(seq, seq.seq_id, reason))

    def _drop_padding(self, state: ExecutorState) -> None:
        """Ends the batch's padding: the last real sequence has left."""
        for pad in list(state.running.values()):
            self._leave(state, pad, reason=None, tell_executor=True)
        for pad in state.entering_padding:
            state.blocks.release(pad.block_table)
        state.entering_padding = []

    def note(self, seq: Sequence, reason: Reason, state: ExecutorState, detail: str) -> None:
        """Records what `seq` does in its batch from now on."""
        seq.is_prefilling = reason is Reason.PREFILL
        seq.is_recovering &= seq.is_prefilling
        if seq.time_line is not None:
            step_id = state.session.last_step_id + (reason is Reason.PREFILL)
            seq.time_line.run(reason, self._now, self.clocks, step_id=step_id, detail=detail)

    # --- ends --------------------------------------------------------------------------------------------

    def _end(self, seq: Sequence, finish: Finish, event: Event) -> None:
        """The one place where a sequence ends; whatever it holds is given back here."""
        if seq.state is State.WAITING:
            self.waiting.remove(seq)
            if not self.waiting:
                self.drain_rate.queue_is(self._now, empty=True)
            self.stranded.waits_no_more(seq)
            self.hand_on(seq)
        else:
            self._end_running(self.executors[seq.executor_id], seq, finish, event)
        seq.move(event)
        seq.finish = finish
        self.counters.ended[finish.reason] += not seq.is_padding
        seq.give_up_seat()
        seq.orphaned_until = None
        seq.forget_at = self._now + self.limits.result_keep_seconds
        self._timers.watch(seq, len(self.sequences))
        if self.inquiry and not seq.is_padding:
            self.inquiry.ended(seq, is_last=not self.has_sibling(seq.request))
        if seq.time_line is not None:
            seq.time_line.close(self._now, self.clocks)
            request = seq.request
            entries = seq.time_line.entries
            self._time_lines.keep(request.tenant, request.request_id, request.sample_index, entries)
        if self.witness is not None and not seq.is_padding:
            self.witness.ended(seq, self._now)

    def _end_running(self, state: ExecutorState, seq: Sequence, finish: Finish, event: Event) -> None:
        executor_knows = event in {Event.FINISH, Event.FAIL}
        if not executor_knows:
            seq.num_wasted_tokens = max(0, seq.num_computable_tokens - len(seq.token_ids))
            self.meters.steps_to_free.observe(state.session.num_unanswered)
        if event is Event.FINISH:  # all but its last token was fed, and has been answered
            num_tokens = min(len(seq.token_ids) - 1, seq.num_computed_tokens)
            self.unpark_followers(state.cache.register(seq, num_tokens))
            if not seq.is_padding:
                self.lengths.observe(seq.num_output_tokens)
        block_table = seq.block_table
        keeps_seat = padding.keeps_seat(state, seq, finish)
        self._leave(state, seq, finish.reason, tell_executor=not executor_knows, keep_blocks=keeps_seat)
        if keeps_seat:
            state.entering_padding.append(padding.padding_of(state, seq, block_table))
        elif padding.is_all_padding(state):
            self._drop_padding(state)

    # --- derived -----------------------------------------------------------------------------------------

    @property
    def _eos_token_ids(self) -> frozenset[int]:
        return next((state.capacity.eos_token_ids for state in self.executors.values()), frozenset())

    def has_sibling(self, request: Request) -> bool:
        """Whether another choice of the same request is live."""
        choices = self._by_request.get((request.tenant, request.request_id), {})
        return any(seq.state is not State.FINISHED for seq in choices.values())

    @property
    def num_free_seats(self) -> int:
        """Free seats at executors that take newcomers."""
        return sum(
            max(0, state.max_num_seqs - len(state.running))
            for state in self.executors.values()
            if self.placement.takes_newcomers(state)
        )

    def see_who_takes_newcomers(self) -> None:
        """If no executor takes newcomers, records that as what the queue waits for."""
        if not any(self.placement.takes_newcomers(state) for state in self.executors.values()):
            self.clocks.set(Reason.QUEUED_FOR_EXECUTOR, self._now)

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self.waiting and not any(state.running for state in self.executors.values())

    @property
    def num_running(self) -> int:
        """Sequences in a batch, without padding."""
        return sum(not seq.is_padding for state in self.executors.values() for seq in state.running.values())

    @property
    def max_total_tokens(self) -> int:
        """Longest prompt plus output, in tokens, that all attached executors can hold; 0 without any."""
        return min((state.max_total_tokens for state in self.executors.values()), default=0)

    @property
    def features(self) -> frozenset[str]:
        """Optional abilities that every attached executor has."""
        each = [state.capacity.features for state in self.executors.values()]
        return frozenset.intersection(*each) if each else frozenset()
