"""Preempts sequences before a plan is made, for blocks, for more important ones, or off a draining executor.

Every function returns whether the plan may be made now: False when results must arrive first. Nothing is
preempted while a result is outstanding: it is recomputed from its token log, which must be complete. Waiting
for the result leaves the executor idle for a moment; a needless victim would cost a recompute. Pure.
"""

from scheduler import admitting, draining, policy
from scheduler.batching import Batching
from scheduler.core_state import CoreState
from scheduler.executor_state import ExecutorState
from scheduler.sequence import Sequence


def preempt_for_growth(core: CoreState, state: ExecutorState) -> bool:
    """Preempts until every decoding sequence can grow.

    When nothing may be preempted, sequences left without a block are postponed until the newcomers have their
    first token. That will come: they have the blocks for it, and a step has more tokens than decoding takes.
    """
    while True:
        short = sum(seq.needs_block for seq in state.running.values()) - state.blocks.num_free
        if short <= 0:
            return True
        if state.session.num_unanswered:
            return False
        seq = policy.victim(state.running.values(), state.recompute_tokens, state.num_freed)
        if seq is None:
            return True
        _preempt_for_blocks(core, state, seq, "blocks ran out")


def preempt_within_tenants(core: CoreState, state: ExecutorState) -> bool:
    """Preempts one sequence of each tenant whose own block limit keeps it from growing.

    One at a time is enough: it held at least one block, and each of the others needs one. The last sequence
    left to a tenant is not held to the limit, so one always progresses.
    """
    if state.session.num_unanswered:
        return False
    for tenant in state.crowded:
        members = [seq for seq in state.running.values() if seq.tenant is tenant]
        seq = policy.victim(members, state.recompute_tokens, lambda seq: len(seq.block_table))
        if seq is not None and not tenant.may_grow:
            _preempt_for_blocks(core, state, seq, f"tenant {tenant.name!r} is at its own block limit")
    state.crowded = {}
    return True


def _preempt_for_blocks(core: CoreState, state: ExecutorState, seq: Sequence, why: str) -> None:
    if not seq.is_padding:
        core.counters.preemptions += 1
        seq.num_preemptions += 1
    core.preempt(state, seq, why)


def displace_for_next(core: CoreState, state: ExecutorState, now: float) -> bool:
    """Displaces less important sequences for the next waiting one."""
    if core.batching is not Batching.ITERATION or state.is_draining:
        return True
    least = state.least_important
    head = admitting.next_one(core, state, now) if least is not None else None
    if head is None or least is None or head.request.priority >= least:
        return True
    if any(core.placement.could_take(other, head) for other in core.placement.others(state)):
        return True  # another executor has room for it
    if core.inquiry and core.inquiry.may_keep_out(state):
        return True  # it could not enter
    if admitting.tokens_left_to(core, state, head, now) <= 0:
        return True  # it would get a seat but no tokens: a later step has some
    chosen = core.entrance.who_makes_way(state, head)
    if chosen and admitting.is_too_late(core, head, now):
        admitting.put_behind(core, state, head)
        return True
    if chosen and state.session.num_unanswered:
        return False
    for seq in chosen:
        core.counters.displacements += 1
        seq.num_displacements += 1
        core.preempt(state, seq, f"made way for {head.request.request_id}")
        state.made_way_for = head  # even if what was freed would let another one come before it
    return True


def move_off_draining(core: CoreState, state: ExecutorState, now: float) -> bool:
    """Moves sequences that a draining executor will not finish to the others."""
    movers = draining.who_must_move(state, core.placement.others(state), core.lengths, now)
    if movers and state.session.num_unanswered:
        return False
    for seq in movers:
        seq.is_recovering = True
        core.counters.recoveries += 1
        core.preempt(state, seq, "its executor is going away")
    return True
