"""The scheduler's own core under logical time, with a step-time model in place of executors.

    arrival ─► submit ─► schedule ─► plan ─► its seconds pass ─► update ─► a token for each row due one

Time jumps from one event to the next. Nothing here decides anything: the core decides which sequences enter
and leave and what a step computes, so a policy does here what it does in the server. Arrivals are drawn one
by one and sequences are dropped when they end: memory holds those in the system, and a few bytes for each
that was.

Must not know: clocks, processes, files, where a load comes from.
"""

import heapq
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from chairlift.lab.kv_policies import num_held_slots
from chairlift.lab.records import Records
from chairlift.lab.step_times import StepTimes
from scheduler.core import SchedulerCore
from scheduler.door import RefusedError
from scheduler.executor_state import ExecutorState
from scheduler.plan import BatchPlan, Capacity, FinishedSequence, StepResult
from scheduler.sequence import FinishReason, Request, Sequence, State
from scheduler.token_ids import TokenIds

_SAMPLED = 7  # every token: what is said is nobody's business here
_EPOCH = 1


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a load. Times in seconds; it ends by itself after `num_output_tokens`."""

    time: float
    prompt_token_ids: TokenIds
    num_output_tokens: int
    max_tokens: int  # what its client allows, which may be less
    tenant: str = ""
    priority: int = 0
    deadline: float | None = None
    gives_up: float | None = None  # when its client has had enough, whatever it has by then


class _Track:
    """How far one request is; the core carries it as the sequence's attachment."""

    __slots__ = ("deadline", "index", "last_token", "num_left")

    def __init__(self, index: int, num_left: int, deadline: float | None) -> None:
        self.index = index
        self.num_left = num_left
        self.last_token: float | None = None
        self.deadline = deadline


@dataclass(slots=True)
class Totals:
    """What the executors did, all together."""

    num_steps: int = 0
    num_rows: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0  # delivered
    busy_seconds: float = 0.0
    running_seconds: float = 0.0  # sequences in the batch, by how long
    held_slot_seconds: float = 0.0  # KV slots that somebody held, by how long
    filled_slot_seconds: float = 0.0  # tokens that the rows of a step had in theirs, by how long


class _Executor:
    __slots__ = ("busy_until", "previous_end", "state")

    def __init__(self, state: ExecutorState) -> None:
        self.state = state
        self.busy_until = 0.0
        self.previous_end: float | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One step that has ended, for those who watch. Times in seconds."""

    state: ExecutorState
    plan: BatchPlan
    start: float
    end: float
    num_waiting: int
    num_held_slots: int  # of KV, by somebody


class LogicalLoop:
    """One load through one core."""

    def __init__(
        self,
        core: SchedulerCore,
        capacities: Seq[Capacity],
        step_times: StepTimes,
        *,
        on_step: Callable[[Step], None] | None = None,
    ) -> None:
        """Executors of these capacities; `on_step` is called after every step, once its result is in."""
        self.core = core
        self.now = 0.0
        self.records = Records()
        self.totals = Totals()
        self._step_times = step_times
        self._on_step = on_step
        self._executors = []
        for index, capacity in enumerate(capacities):
            executor_id = f"executor-{index}"
            core.attach(executor_id, _EPOCH, capacity, 0.0)
            self._executors.append(_Executor(core.executors[executor_id]))
        self._giving_up: list[tuple[float, int]] = []  # a heap of times, and of the records' indices
        self._under_way: list[tuple[float, int, _Executor, BatchPlan, float]] = []  # a heap, by end
        self._num_plans = 0

    def run(self, arrivals: Iterable[Arrival]) -> Records:
        """Serves all of them, which come in the order of their times, to their ends.

        May be called again with a later load. Raises ValueError when a time is before the one before it.
        """
        coming = iter(arrivals)
        arrival = next(coming, None)
        while True:
            while arrival is not None and arrival.time <= self.now:
                self._submit(arrival)
                previous, arrival = arrival, next(coming, None)
                if arrival is not None and arrival.time < previous.time:
                    raise ValueError(f"an arrival at {arrival.time} s comes after one at {previous.time} s")
            timer = self.core.next_timer
            if timer is not None and timer <= self.now:
                for seq in self.core.expire(self.now):
                    self._end(seq, by_itself=False)
            while self._giving_up and self._giving_up[0][0] <= self.now:
                self._give_up(heapq.heappop(self._giving_up)[1])
            self._plan()
            upcoming = self._next_event(arrival)
            if upcoming is None:
                assert self.core.is_idle, "nothing is under way, and somebody waits"
                return self.records
            self.now = max(self.now, upcoming)
            while self._under_way and self._under_way[0][0] <= self.now:
                self._answer(*heapq.heappop(self._under_way)[2:])

    def _next_event(self, arrival: Arrival | None) -> float | None:
        times = [arrival.time] if arrival is not None else []
        if self._under_way:
            times.append(self._under_way[0][0])
            times += [
                executor.state.held_until
                for executor in self._executors
                if executor.state.held_until is not None  # it plans as late as it can
            ]
        if not self.core.is_idle:
            if self._giving_up:
                times.append(self._giving_up[0][0])
            timer = self.core.next_timer
            if timer is not None:
                times.append(timer)
            for executor in self._executors:
                look_again_at = executor.state.look_again_at
                if look_again_at is not None and look_again_at > self.now:
                    times.append(look_again_at)
        return min(times, default=None)

    def _submit(self, arrival: Arrival) -> None:
        records = self.records
        index = records.add(arrival.time, len(arrival.prompt_token_ids), arrival.tenant)
        request = Request(
            key=index.to_bytes(16),
            request_id=str(index),
            prompt_token_ids=arrival.prompt_token_ids,
            sampling=b"",
            max_tokens=arrival.max_tokens,
            tenant=arrival.tenant,
            priority=arrival.priority,
            deadline=arrival.deadline,
            arrival=arrival.time,
        )
        try:
            seq = self.core.submit(request, now=self.now)
        except RefusedError:
            records.num_refused += 1
            return
        num_left = min(arrival.num_output_tokens, arrival.max_tokens)
        seq.attachment = _Track(index, num_left, arrival.deadline)
        if seq.state is State.FINISHED:  # its deadline had passed when the step before was done
            self._end(seq, by_itself=False)
        elif arrival.gives_up is not None:
            heapq.heappush(self._giving_up, (arrival.gives_up, index))

    def _give_up(self, index: int) -> None:
        seq = self.core.cancel(index.to_bytes(16), FinishReason.ABORT, self.now)
        if seq is not None:
            self._end(seq, by_itself=False)

    # --- steps -------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        for executor in self._executors:
            state = executor.state
            while state.session.can_send:
                plan = self.core.schedule(state.executor_id, self.now)
                if plan is not None:
                    self._begin(executor, plan)
                elif state.session.num_unanswered or not state.is_still_looking:
                    break  # else nothing will happen before it has been asked again

    def _begin(self, executor: _Executor, plan: BatchPlan) -> None:
        """Its steps come one after the other. A plan without rows only tells who has gone."""
        seconds = self._step_times.seconds(plan) if plan.rows else 0.0
        end = executor.busy_until = max(self.now, executor.busy_until) + seconds
        self._num_plans += 1
        heapq.heappush(self._under_way, (end, self._num_plans, executor, plan, seconds))

    def _answer(self, executor: _Executor, plan: BatchPlan, seconds: float) -> None:
        now, state = self.now, executor.state
        totals = self.totals
        num_rows = len(plan.rows)
        num_tokens = sum(plan.num_tokens)
        if num_rows:
            totals.num_steps += 1
            totals.num_rows += num_rows
            totals.num_computed_tokens += num_tokens
            totals.busy_seconds += seconds
            totals.running_seconds += len(state.running) * seconds
            totals.held_slot_seconds += num_held_slots(self.core, state) * seconds
            totals.filled_slot_seconds += (plan.positions_sum + num_tokens) * seconds
        result = StepResult(
            plan.epoch,
            plan.step_id,
            plan.seq_ids,
            plan.num_samples,
            [_SAMPLED] * sum(plan.num_samples),
            total_us=round(seconds * 1e6),
        )
        self._deliver(executor, plan, result)
        for seq in self.core.update(state.executor_id, result, now).ended:
            self._end(seq, by_itself=True)
        if self._on_step is not None and num_rows:
            num_held = num_held_slots(self.core, state)
            self._on_step(Step(state, plan, now - seconds, now, len(self.core.waiting), num_held))

    def _deliver(self, executor: _Executor, plan: BatchPlan, result: StepResult) -> None:
        """A token to each row due one; who has its last ends. Rows of those who have gone get nothing."""
        now, previous = self.now, executor.previous_end
        num_steady = num_delivered = 0
        for seq, seq_id, count in zip(plan.rows, plan.seq_ids, plan.num_samples, strict=True):
            track = seq.attachment
            if not count or type(track) is not _Track:  # padding, or ended while this was under way
                continue
            num_delivered += 1
            if track.last_token is None:
                self.records.first_token[track.index] = now
            elif track.last_token == previous:
                num_steady += 1
            else:
                self.records.gaps.add(now - track.last_token)
            track.last_token = now
            track.num_left -= 1
            if not track.num_left:
                result.finished.append(FinishedSequence(seq_id, FinishReason.STOP))
        if num_steady and previous is not None:
            self.records.gaps.add(now - previous, num_steady)
        self.totals.num_output_tokens += num_delivered
        executor.previous_end = now

    def _end(self, seq: Sequence, *, by_itself: bool) -> None:
        track = seq.attachment
        seq.attachment = None
        if type(track) is _Track:
            records = self.records
            records.ended[track.index] = self.now
            records.num_output_tokens[track.index] = seq.num_output_tokens
            records.in_time[track.index] = by_itself and (
                track.deadline is None or self.now <= track.deadline
            )
        self.core.forget(seq)
