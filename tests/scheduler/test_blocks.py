import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.blocks import BlockError, BlockManager


@given(num_tokens=st.integers(0, 10_000), block_size=st.integers(1, 300))
def test_blocks_for_is_the_least_number_that_holds_the_tokens(num_tokens: int, block_size: int) -> None:
    count = BlockManager(1, block_size).blocks_for(num_tokens)
    assert count * block_size >= num_tokens
    assert count == 0 or (count - 1) * block_size < num_tokens


@given(
    num_blocks=st.integers(1, 40),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60),
)
def test_every_block_is_free_or_in_one_table_whatever_comes_and_goes(
    num_blocks: int, steps: list[tuple[bool, int]]
) -> None:
    blocks = BlockManager(num_blocks, 4)
    tables: list[list[int]] = []
    for takes, number in steps:
        if takes and number <= blocks.num_free:
            table = blocks.allocate(number)
            assert len(table) == number
            tables.append(table)
        elif tables:
            blocks.free(tables.pop(number % len(tables)))
        blocks.check(tables)
        assert blocks.num_free == num_blocks - sum(map(len, tables))
    for table in tables:
        blocks.free(table)
    blocks.check([])
    assert sorted(blocks.free_block_ids) == list(range(num_blocks))


def test_what_was_freed_last_is_handed_out_first() -> None:
    blocks = BlockManager(8, 4)
    table = blocks.allocate(3)
    blocks.allocate(2)
    blocks.free(table)
    assert set(blocks.allocate(3)) == set(table)


def test_more_than_there_is_is_refused_and_takes_nothing() -> None:
    blocks = BlockManager(3, 4)
    with pytest.raises(BlockError, match="4 blocks wanted, 3 free"):
        blocks.allocate(4)
    assert blocks.num_free == 3


def test_a_block_is_not_freed_twice() -> None:
    blocks = BlockManager(3, 4)
    (block_id,) = blocks.allocate(1)
    blocks.free([block_id])
    with pytest.raises(BlockError, match=f"block {block_id} freed twice"):
        blocks.free([block_id])
    assert blocks.num_free == 3


def test_the_check_sees_what_is_lost_shared_or_marked_wrongly() -> None:
    blocks = BlockManager(4, 4)
    table = blocks.allocate(2)
    with pytest.raises(BlockError, match="0 owned"):
        blocks.check([])
    with pytest.raises(BlockError, match="two tables"):
        blocks.check([table, table[:1]])
    with pytest.raises(BlockError, match="!= 4"):
        blocks.check([table, [3]])
    blocks.check([table])
    blocks.free_block_ids += table
    with pytest.raises(BlockError, match="marked as owned"):
        blocks.check([])
