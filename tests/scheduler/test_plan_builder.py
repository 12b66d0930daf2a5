from array import array

from hypothesis import given
from hypothesis import strategies as st

from scheduler.blocks import BlockManager
from scheduler.plan_builder import PlanBuilder
from tests.scheduler.sequences import waiting


@given(
    prompt_len=st.integers(1, 50),
    max_tokens=st.integers(1, 5),
    limits=st.lists(st.integers(1, 20), min_size=1),
)
def test_chunks_cover_the_computable_tokens_once_and_the_last_one_samples(
    prompt_len: int, max_tokens: int, limits: list[int]
) -> None:
    seq = waiting(prompt_len=prompt_len, max_tokens=max_tokens)
    computable = seq.num_computable_tokens
    covered = 0
    for limit in limits * 50:
        if covered == computable:
            break
        builder = PlanBuilder(budget=1000)
        builder.chunk(seq, limit)
        (count,), (samples,) = builder.num_tokens, builder.num_samples
        assert 1 <= count <= limit
        assert builder.positions_sum == covered
        assert builder.budget == 1000 - count
        covered += count
        assert seq.num_computed_tokens == covered
        assert samples == (covered == computable)
    assert covered == computable
    # The sampled token can be computed at once, unless it is the last of all, which is never fed.
    assert seq.num_computable_tokens == min(computable + 1, seq.max_len - 1)


def test_columns_stand_beside_each_other() -> None:
    builder = PlanBuilder(budget=10)
    first, second = waiting("a", prompt_len=3), waiting("b", prompt_len=9)
    first.seq_id, second.seq_id = 4, 5
    second.num_computed_tokens = 2
    builder.chunk(first, builder.budget)
    builder.chunk(second, builder.budget)
    assert builder.rows == [first, second]
    assert (builder.seq_ids, builder.num_tokens, builder.num_samples) == ([4, 5], [3, 7], [1, 1])
    assert (builder.positions_sum, builder.budget) == (2, 0)


def test_a_grown_sequence_has_a_block_more_and_its_full_ones_are_noted() -> None:
    builder, blocks = PlanBuilder(budget=10), BlockManager(num_blocks=4, block_size=2)
    first, second = waiting("a", prompt_len=3), waiting("b", prompt_len=9)
    first.seq_id, second.seq_id = 4, 5
    second.num_computed_tokens = 2
    builder.grow([first], blocks)
    builder.grow([first, second], blocks)
    assert builder.grown_seq_ids == [4, 4, 5]
    assert builder.num_new_blocks == [1, 1, 1]
    assert builder.new_block_ids == [*first.block_table[:1], first.block_table[1], *second.block_table]
    assert len(set(builder.new_block_ids)) == 3
    assert (first.num_slots, second.num_slots, blocks.num_free) == (4, 2, 1)
    assert builder.outgrown == [(first, 4, 0), (first, 4, 0), (second, 5, 2)]


def test_draft_tokens_lengthen_their_row_and_nothing_of_it_is_computable_until_they_are_answered() -> None:
    builder = PlanBuilder(budget=10)
    before, seq = waiting("a", prompt_len=3), waiting("b", prompt_len=1)
    before.seq_id, seq.seq_id = 4, 5
    builder.chunk(before, builder.budget)
    builder.chunk(seq, builder.budget)
    builder.add_draft_tokens(1, array("I", [7, 8]))
    assert builder.draft_tokens == {5: array("I", [7, 8])}
    assert (builder.num_tokens, builder.num_samples, builder.budget) == ([3, 3], [1, 1], 4)
    assert (seq.num_computed_tokens, seq.num_computable_tokens) == (1, 1)
    assert before.num_computable_tokens == 4
