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
    for seq in waiting:
        _require(
            seq.state is State.WAITING and not seq.block_table and not seq.seq_id,
            "waits and holds something",
            seq,
        )
        holds = core.waiting.parked.get(seq, ())
        _require((Hold.SEARCH in holds) == core.inquiry.holds(seq), "is not held as it is searched", seq)
        _require((Hold.STRANDED in holds) == core.stranded.holds(seq), "is not held as it is stranded", seq)
    for seq in core.sequences.values():
        _require((seq in waiting) == (seq.state is State.WAITING), "is lost between queue and batch", seq)
        _require(
            (seq.finish is not None) == (seq.state is State.FINISHED), "has an end and no state for it", seq
        )
        running = seq.state is State.RUNNING
        _require(not running or seq.seq_id in core.executors[seq.executor_id].running, "runs nowhere", seq)


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
        _require(seq.seq_id == seq_id and seq.state is State.RUNNING, "runs under a wrong name", seq)
        _require(seq.num_slots == len(seq.block_table) * state.blocks.block_size, "miscounts its slots", seq)
        _require(seq.num_computed_tokens <= seq.num_slots, "computes without a slot", seq)
        _require(
            seq.num_computed_tokens <= seq.num_computable_tokens < seq.max_len, "is ahead of itself", seq
        )
        in_flight = sum(seq in plan.rows for plan in state.session.unanswered)
        ahead = seq.num_computable_tokens - min(len(seq.token_ids), seq.max_len - 1)
        _require(0 <= ahead <= in_flight, f"knows {ahead} tokens that {in_flight} steps are to bring", seq)


def _require(holds: bool, what: str, seq: Sequence) -> None:  # noqa: FBT001  (a condition is a condition)
    if not holds:
        raise AuditError(f"sequence {seq.seq_id} of {seq.request.request_id!r} {what}: {seq}")
