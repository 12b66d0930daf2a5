import pytest

from scheduler.batching import Batching
from scheduler.blocks import BlockError
from scheduler.executor_state import ExecutorState
from scheduler.policy import Limits
from scheduler.sequence import FinishReason, State
from tests.rig.checking_executor import capacity
from tests.scheduler.harness import EXECUTOR, Harness


def state(limits: Limits, **capacities: int) -> ExecutorState:
    return ExecutorState("e", 1, capacity(**capacities), limits, Batching.ITERATION, b"")


def test_the_operator_may_ask_for_less_and_never_for_more() -> None:
    less = state(Limits(max_num_seqs=2, max_num_batched_tokens=10, num_blocks=5, window=1))
    assert (less.max_num_seqs, less.max_num_batched_tokens, less.blocks.num_blocks) == (2, 10, 5)
    assert less.session.window == 1
    more = state(
        Limits(max_num_seqs=999, max_num_batched_tokens=9999, num_blocks=9999, window=2), max_window=1
    )
    assert (more.max_num_seqs, more.max_num_batched_tokens, more.blocks.num_blocks) == (8, 64, 64)
    assert more.session.window == 1


def test_what_the_operator_leaves_open_is_the_executors_ceiling() -> None:
    silent = state(Limits())
    assert (silent.max_num_seqs, silent.max_num_batched_tokens, silent.blocks.num_blocks) == (8, 64, 64)


@pytest.mark.parametrize(
    ("executors", "operators", "expected"),
    [(4, None, 4), (64, 4, 4), (64, 7, 7), (8, None, 8), (64, None, 8)],
)
def test_there_are_no_more_seats_than_a_step_has_tokens(
    executors: int, operators: int | None, expected: int
) -> None:
    limits = Limits(max_num_batched_tokens=operators)
    assert state(limits, max_num_batched_tokens=executors).max_num_seqs == expected


@pytest.mark.parametrize(("num_blocks", "expected"), [(10, 40), (64, 256), (100, 256)])
def test_b01_the_longest_sequence_is_bound_by_the_model_or_by_the_blocks_in_use(
    num_blocks: int, expected: int
) -> None:
    assert state(Limits(num_blocks=num_blocks), num_blocks=100).max_total_tokens == expected


@pytest.mark.parametrize(("watermark", "expected"), [(0.0, 0), (0.1, 6), (0.01, 0)])
def test_the_watermark_is_a_share_of_the_blocks(watermark: float, expected: int) -> None:
    assert state(Limits(watermark=watermark)).watermark_blocks == expected


def test_a_disagreement_about_blocks_is_kept_for_the_next_plan_to_raise() -> None:
    """A cancel that finds it still ends: its caller can do nothing about it."""
    h = Harness()
    seq = h.submit("a", [1, 2, 3], 9, ignore_eos=True)
    h.step()
    h.core.executors[EXECUTOR].blocks.release(seq.block_table)
    assert h.core.cancel(seq.request.key, FinishReason.ABORT, h.now) is seq
    assert seq.state is State.FINISHED
    with pytest.raises(BlockError, match="is released and nobody holds it"):
        h.core.schedule(EXECUTOR, h.now)
