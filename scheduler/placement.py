"""Decides which executor would start a waiting sequence first.

There is one queue for all executors. Each takes from it in its own turn, so nothing is placed ahead of time:
an executor only leaves to another one what that one would start sooner.

    start = what is in progress + steps needed until its prompt is computed
    steps = (tokens queued there + tokens of its prompt that are not cached there) / room in a step

A step's duration follows the measured line of `step_time`; an executor without one is assumed to be like the
others. What is left to another executor counts there for the rest of the turn, so that a burst is shared out.

Pure: reads executors, changes nothing.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from scheduler.executor_state import ExecutorState
from scheduler.inquiry import Inquiry
from scheduler.sequence import Sequence

MAX_GIVEN_AWAY = 32  # most sequences that one turn leaves to others: a turn must stay short
_NOMINAL_LINE = (10_000.0, 100.0)  # microseconds per step and per token, before any measurement


class Placement:
    """Compares executors with each other."""

    __slots__ = ("_executors", "_inquiry")

    def __init__(self, executors: Mapping[str, ExecutorState], inquiry: Inquiry) -> None:
        self._executors = executors
        self._inquiry = inquiry

    def others(self, state: ExecutorState) -> list[ExecutorState]:
        """All executors but this one."""
        return [other for other in self._executors.values() if other is not state]

    def only_at(self, seq: Sequence) -> frozenset[str] | None:
        """The executors that can ever compute `seq`; None when all attached ones can."""
        suited = [name for name, state in self._executors.items() if state.suits(seq)]
        return None if len(suited) == len(self._executors) else frozenset(suited)

    def takes_newcomers(self, state: ExecutorState) -> bool:
        """Whether the next sequence may enter here once there is room, whichever it is."""
        return not (state.is_draining or state.is_away or self._inquiry.is_host(state))

    def could_take(self, state: ExecutorState, seq: Sequence) -> bool:
        """Whether this executor could let `seq` in at its next turn, as far as can be told without trying."""
        return (
            self.takes_newcomers(state)
            and state.too_full_for is not seq
            and state.suits(seq)
            and len(state.running) + len(state.entering_padding) < state.max_num_seqs
            and state.blocks.blocks_for(len(seq.token_ids)) <= state.blocks.num_free
        )

    def seconds_to_start(self, state: ExecutorState, num_tokens: int, now: float) -> float:
        """How long until this executor has computed `num_tokens` more prompt tokens, after all it has."""
        base, per_token = self._line(state)
        num_tokens += state.num_queued_tokens
        num_running = len(state.running)
        room = max(1, state.max_num_batched_tokens - num_running)
        num_steps = -(-num_tokens // room)
        under_way = state.clock.seconds_left(now)
        if state.step_time.line is None:
            under_way = max(under_way, state.session.num_unanswered * base / 1e6)
        computing_us = num_steps * (base + num_running * per_token) + num_tokens * per_token
        return under_way + computing_us / 1e6

    def _line(self, state: ExecutorState) -> tuple[float, float]:
        line = state.step_time.line
        if line is not None:
            return line
        lines = [other.step_time.line for other in self._executors.values()]
        return next((line for line in lines if line is not None), _NOMINAL_LINE)


@dataclass(slots=True)
class _Other:
    """Another executor, and what was left to it in this turn."""

    state: ExecutorState
    num_seqs: int = 0
    num_tokens: int = 0


class Turn:
    """One executor's turn to take from the queue, among several executors."""

    __slots__ = ("_others", "_placement", "_state", "given_away", "look_again_at")

    def __init__(self, placement: Placement, state: ExecutorState) -> None:
        self._placement = placement
        self._state = state
        self._others = [_Other(other) for other in placement.others(state)]
        self.given_away: list[Sequence] = []  # to others, for the rest of this turn
        self.look_again_at: float | None = None  # when the first of these should have been taken

    @property
    def is_over(self) -> bool:
        """Whether the turn has left as much to others as it may."""
        return len(self.given_away) >= MAX_GIVEN_AWAY

    def give_away(self, seq: Sequence, num_cached_tokens: int, now: float) -> bool:
        """Leaves `seq` to the executor that would start it soonest; returns False if that is this one.

        It then counts there for the rest of the turn. `num_cached_tokens`: cached tokens of `seq` here.
        """
        num_tokens = len(seq.token_ids)
        here = self._placement.seconds_to_start(self._state, num_tokens - num_cached_tokens, now)
        best: tuple[float, _Other, int] | None = None
        for other in self._others:
            state = other.state
            if len(state.running) + other.num_seqs >= state.max_num_seqs:
                continue
            if not self._placement.could_take(state, seq):
                continue
            soonest = here if best is None else best[0]
            if self._placement.seconds_to_start(state, other.num_tokens + 1, now) >= soonest:
                continue  # not even if its whole prompt were cached there
            num_new = num_tokens - len(state.cache.matched(seq) or ()) * state.blocks.block_size
            there = self._placement.seconds_to_start(state, other.num_tokens + num_new, now)
            if there < soonest:
                best = there, other, num_new
        if best is None:
            return False
        there, other, num_new = best
        other.num_seqs += 1
        other.num_tokens += num_new
        self.given_away.append(seq)
        self.look_again_at = min(now + there, self.look_again_at or math.inf)
        return True
