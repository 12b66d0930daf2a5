"""Checks the invariants between sequences, blocks and plans. Pure.

`check` looks at everything, after every operation in tests. The server calls `check_idle` whenever an
executor has been given all the work there is, and `check_counts` once every so many steps. A violation is our
bug; the cure is to open the executor again and recompute.
"""

from scheduler.blocks import BlockError
from scheduler.core import SchedulerCore
from scheduler.executor_state import ExecutorState
from scheduler.sequence import Sequence, State
from scheduler.waiting import Hold


class AuditError(AssertionError):
    """An invariant does not hold."""


def check(core: SchedulerCore) -> None:
    """Raises AuditError or BlockError for the first invariant that does not hold."""
    for state in core.executors.values():
        _check_executor(state)
    waiting = set(core.waiting)
    _check_waiting(core, waiting)
    # In a long test most have ended, and there is no more to ask of these: who waits was seen above.
    finished, sequences = State.FINISHED, core.sequences.values()
    for seq in [seq for seq in sequences if (seq.finish is None) is (seq.state is finished)]:
        raise _fault("has an end and no state for it", seq)
    for seq in [seq for seq in sequences if seq.finish is None]:
        if (seq in waiting) != (seq.state is State.WAITING):
            raise _fault("is lost between queue and batch", seq)
        if seq.state is State.RUNNING and seq.seq_id not in core.executors[seq.executor_id].running:
            raise _fault("runs nowhere", seq)


def check_counts(state: ExecutorState) -> None:
    """Raises BlockError unless blocks and references add up. Takes a fraction of a millisecond."""
    members = [*state.running.values(), *state.entering_padding]
    state.blocks.check_counts(sum(len(seq.block_table) for seq in members))


def check_idle(state: ExecutorState) -> None:
    """Raises BlockError when nothing runs on the executor and yet blocks are held. Costs next to nothing."""
    blocks = state.blocks
    if not state.running and not state.entering_padding and blocks.num_free != blocks.num_blocks:
        raise BlockError(f"nothing runs, and {blocks.num_blocks - blocks.num_free} blocks are held")


def describe(state: ExecutorState) -> dict[str, object]:
    """The executor's books, for the log when they are found to be wrong."""
    return {
        "num_blocks": state.blocks.num_blocks,
        "num_free": len(state.blocks.free_block_ids),
        "num_idle": state.blocks.num_idle,
        "running": {seq_id: list(seq.block_table) for seq_id, seq in state.running.items()},
        "unanswered": [plan.step_id for plan in state.session.unanswered],
    }


def _check_waiting(core: SchedulerCore, waiting: set[Sequence]) -> None:
    state = State.WAITING
    for seq in waiting:
        if seq.state is not state or seq.block_table or seq.seq_id:
            raise _fault("waits and holds something", seq)
    causes = ((Hold.SEARCH, core.inquiry.held_of), (Hold.STRANDED, core.stranded.held_of))
    for hold, held_of in causes:
        marked = {seq for seq, holds in core.waiting.parked.items() if hold in holds}
        for seq in marked ^ held_of(waiting):
            raise _fault(f"is marked {hold.name} in the queue and is not so, or the reverse", seq)


def _check_executor(state: ExecutorState) -> None:
    members = [*state.running.values(), *state.entering_padding]
    state.blocks.check([seq.block_table for seq in members])
    if len(state.running) > state.max_num_seqs:
        raise AuditError(f"{len(state.running)} sequences run, {state.max_num_seqs} may")
    if state.session.num_unanswered > state.session.window:
        raise AuditError(f"{state.session.num_unanswered} plans unanswered, {state.session.window} may be")
    if state.made_way_for is not None:
        raise AuditError(f"somebody made way for {state.made_way_for}, who was not asked in that plan")
    for seq_id, seq in state.running.items():
        if seq.seq_id != seq_id or seq.state is not State.RUNNING:
            raise _fault("runs under a wrong name", seq)
        if seq.num_slots != len(seq.block_table) * state.blocks.block_size:
            raise _fault("miscounts its slots", seq)
        if seq.num_computed_tokens > seq.num_slots:
            raise _fault("computes without a slot", seq)
        if not seq.num_computed_tokens <= seq.num_computable_tokens < seq.max_len:
            raise _fault("is ahead of itself", seq)
        in_flight = sum(seq in plan.rows for plan in state.session.unanswered)
        ahead = seq.num_computable_tokens - min(len(seq.token_ids), seq.max_len - 1)
        if not 0 <= ahead <= in_flight:
            raise _fault(f"knows {ahead} tokens that {in_flight} steps are to bring", seq)


def _fault(what: str, seq: Sequence) -> AuditError:
    return AuditError(f"sequence {seq.seq_id} of {seq.request.request_id!r} {what}: {seq}")
