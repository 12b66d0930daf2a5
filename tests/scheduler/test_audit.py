"""The audit sees each fault that it is there for."""

from collections.abc import Callable

import pytest

from scheduler import audit
from scheduler.audit import AuditError
from scheduler.blocks import BlockError
from scheduler.policy import Limits
from scheduler.sequence import Finish, FinishReason, Sequence, State
from tests.scheduler.harness import EXECUTOR, Harness


@pytest.fixture
def h() -> Harness:
    """One runs, one waits, one has ended; a plan is on its way."""
    harness = Harness(Limits(watermark=0.0, window=2), max_num_seqs=1)
    harness.submit("ended", [1, 2], 1)
    harness.run_to_end()
    harness.submit("runs", [1, 2, 3, 4, 5], 20, ignore_eos=True)
    harness.step()
    harness.submit("waits", [1, 2], 20)
    audit.check(harness.core)
    return harness


def _runs(h: Harness) -> Sequence:
    return h.sequences["runs"]


def _says_that_it_runs(h: Harness) -> None:
    seq = h.sequences["ended"]
    seq.state, seq.finish, seq.executor_id = State.RUNNING, None, EXECUTOR


FAULTS: dict[str, Callable[[Harness], object]] = {
    "waits and holds something": lambda h: h.sequences["waits"].block_table.append(9),
    "is lost between queue and batch": lambda h: h.core.waiting.remove(h.sequences["waits"]),
    "has an end and no state for it": lambda h: setattr(_runs(h), "finish", Finish(FinishReason.ABORT)),
    "runs nowhere": _says_that_it_runs,
    "runs under a wrong name": lambda h: setattr(_runs(h), "seq_id", 77),
    "miscounts its slots": lambda h: setattr(_runs(h), "num_slots", 99),
    "computes without a slot": lambda h: setattr(_runs(h), "num_computed_tokens", 99),
    "is ahead of itself": lambda h: setattr(_runs(h), "num_computable_tokens", 1),
    "knows 4 tokens that 2 steps are to bring": lambda h: setattr(
        _runs(h), "num_computable_tokens", _runs(h).num_computable_tokens + 2
    ),
    "2 sequences run, 1 may": lambda h: h.core.executors[EXECUTOR].running.update({99: _runs(h)}),
    "plans unanswered, 0 may be": lambda h: setattr(h.core.executors[EXECUTOR].session, "window", 0),
    "freed blocks": lambda h: h.core.executors[EXECUTOR].blocks.release(_runs(h).block_table),
}


@pytest.mark.parametrize("sentence", FAULTS)
def test_a_fault_is_seen(h: Harness, sentence: str) -> None:
    h.plan()
    FAULTS[sentence](h)
    with pytest.raises((AuditError, BlockError)) as error:
        audit.check(h.core)
    assert isinstance(error.value, BlockError) or sentence in str(error.value)


def test_an_idle_executor_whose_blocks_are_not_all_free_is_seen() -> None:
    h = Harness()
    state = h.core.executors[EXECUTOR]
    audit.check_idle(state)
    seq = h.submit("a", [1], 20, ignore_eos=True)
    h.step()
    audit.check_idle(state)  # it is not idle: its blocks are somebody's
    h.core.cancel(seq.request.key, FinishReason.ABORT, h.now)
    audit.check_idle(state)
    state.blocks.allocate(2)
    with pytest.raises(BlockError, match="nothing runs, and 2 blocks are held"):
        audit.check_idle(state)


def test_the_quick_look_sees_references_that_do_not_add_up() -> None:
    h = Harness(max_num_seqs=2)
    h.submit("a", [1, 2, 3, 4, 5], 20, ignore_eos=True)
    h.submit("b", [1, 2, 3, 4, 5], 20, ignore_eos=True)
    h.step()
    state = h.core.executors[EXECUTOR]
    audit.check_counts(state)
    h.sequences["a"].block_table.append(9)
    with pytest.raises(BlockError):
        audit.check_counts(state)


def test_what_the_books_say_is_described_for_the_log() -> None:
    h = Harness()
    seq = h.submit("a", [1, 2, 3, 4, 5], 20, ignore_eos=True)
    h.plan()
    said = audit.describe(h.core.executors[EXECUTOR])
    assert said["running"] == {seq.seq_id: seq.block_table}
    assert said["unanswered"] == [1]
    assert said["num_blocks"] == 64
