from array import array
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from scheduler.batch_changes import BatchChanges
from scheduler.plan import BatchPlan, Leaver
from scheduler.sequence import FinishReason, Sequence
from tests.scheduler.sequences import running

Rows = dict[int, tuple[int, int]]  # seq_id → tokens and samples

_SEQS = {seq_id: running(f"r{seq_id}") for seq_id in range(1, 10)}


def plan(step_id: int, rows: Rows, left: tuple[int, ...] = ()) -> BatchPlan:
    return BatchPlan(
        epoch=1,
        step_id=step_id,
        acked_step_id=0,
        released_seq_ids=[],
        admitted=[],
        seq_ids=list(rows),
        num_tokens=[count for count, _ in rows.values()],
        grown_seq_ids=[],
        num_new_blocks=[],
        new_block_ids=[],
        positions_sum=0,
        num_samples=[num_samples for _, num_samples in rows.values()],
        rows=[_SEQS[seq_id] for seq_id in rows],
        filled=[],
        outgrown=[],
        left=[Leaver(_SEQS[seq_id], seq_id, FinishReason.STOP) for seq_id in left],
    )


def decoding(*seq_ids: int) -> Rows:
    return dict.fromkeys(seq_ids, (1, 1))


def ids(entered: list[tuple[int, Sequence]]) -> list[int]:
    return [seq_id for seq_id, _ in entered]


def test_steps_in_which_the_same_rows_decode_are_counted() -> None:
    changes = BatchChanges()
    for step_id in range(1, 6):
        changes.take(plan(step_id, decoding(1, 2)))
    (only,) = changes.steps
    assert (only.step_id, ids(only.entered), only.num_alike) == (1, [1, 2], 4)
    assert changes.step_id == 5


def test_a_chunk_is_told_with_its_tokens_and_what_comes_after_is_not_like_it() -> None:
    changes = BatchChanges()
    for step_id, rows in enumerate([{1: (64, 0)}, {1: (30, 1)}, decoding(1), decoding(1)], start=1):
        changes.take(plan(step_id, rows))
    assert [step.chunks for step in changes.steps] == [[(1, 64, True)], [(1, 30, False)], []]
    assert [step.num_alike for step in changes.steps] == [0, 0, 1]


def test_a_row_with_draft_tokens_decodes() -> None:
    changes = BatchChanges()
    changes.take(plan(1, decoding(1, 2)))
    for step_id in (2, 3):
        drafted = replace(plan(step_id, {1: (6, 1), 2: (1, 1)}), draft_tokens={1: array("I", [5] * 5)})
        changes.take(drafted)
    changes.take(plan(4, decoding(1, 2)))
    (only,) = changes.steps
    assert (only.chunks, only.num_alike) == ([], 3)


def test_whoever_has_no_row_sits_still() -> None:
    changes = BatchChanges()
    changes.take(plan(1, decoding(1, 2)))
    changes.take(plan(2, decoding(2)))
    changes.take(plan(3, decoding(2)))
    assert [(step.still, step.num_alike) for step in changes.steps] == [([], 0), ([1], 1)]


def test_who_left_is_told_and_who_never_had_a_row_is_not() -> None:
    changes = BatchChanges()
    changes.take(plan(1, decoding(1, 2)))
    changes.take(plan(2, decoding(2), left=(1, 7)))
    assert [leaver.seq_id for leaver in changes.steps[1].left] == [1]
    assert list(changes.seated) == [2]


def test_what_was_told_is_not_told_again() -> None:
    changes = BatchChanges()
    changes.take(plan(1, decoding(1)))
    assert changes.is_fresh
    changes.told()
    changes.take(plan(2, decoding(1)))
    assert not changes.is_fresh
    assert [(step.step_id, step.entered) for step in changes.steps] == [(2, [])]


_ROWS = st.dictionaries(st.integers(1, 9), st.sampled_from([(1, 1), (1, 1), (1, 1), (8, 0), (8, 1), (1, 0)]))


@given(st.lists(st.tuples(_ROWS, st.sets(st.integers(1, 9)), st.booleans(), st.integers(1, 4))))
def test_whoever_follows_the_changes_knows_every_row_of_every_step(
    given_steps: list[tuple[Rows, set[int], bool, int]],
) -> None:
    changes, wanted, told = BatchChanges(), {}, []
    step_id = 0
    for rows, leavers, is_told, times in given_steps:
        for time in range(times):
            step_id += 1
            wanted[step_id] = rows
            changes.take(plan(step_id, rows, tuple(leavers - set(rows)) if not time else ()))
        if is_told:
            told += changes.steps
            changes.told()
    told += changes.steps
    seen: dict[int, Rows] = {}
    seated: set[int] = set()
    for step in told:
        seated -= {leaver.seq_id for leaver in step.left}
        assert not seated & set(ids(step.entered))
        seated |= set(ids(step.entered))
        chunks = {seq_id: (count, 0 if prefill else 1) for seq_id, count, prefill in step.chunks}
        moving = seated - set(step.still)
        seen[step.step_id] = {seq_id: chunks.get(seq_id, (1, 1)) for seq_id in moving}
        for alike in range(1, step.num_alike + 1):
            seen[step.step_id + alike] = decoding(*moving)
    assert seen == wanted
