from array import array
from collections import Counter, OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.blocks import BlockError, BlockManager


@given(num_tokens=st.integers(0, 10_000), block_size=st.integers(1, 300))
def test_blocks_for_is_the_least_number_that_holds_the_tokens(num_tokens: int, block_size: int) -> None:
    count = BlockManager(1, block_size).blocks_for(num_tokens)
    assert count * block_size >= num_tokens
    assert count == 0 or (count - 1) * block_size < num_tokens


class BlocksMachine(RuleBasedStateMachine):
    """Against a model that keeps every table, and the idle blocks in order of their last holder's leaving."""

    @initialize(num_blocks=st.integers(1, 20))
    def start(self, num_blocks: int) -> None:
        self.blocks = BlockManager(num_blocks, 4)
        self.tables: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # of registered blocks
        self.idle: OrderedDict[int, None] = OrderedDict()

    @property
    def held(self) -> Counter[int]:
        return Counter(block_id for table in self.tables for block_id in table)

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        num_free = self.blocks.num_free
        if count > num_free:
            with pytest.raises(BlockError, match=f"{count} blocks wanted, {num_free} can be had"):
                self.blocks.allocate(count)
            assert self.blocks.num_free == num_free
            return
        num_evicted = max(0, count - len(self.blocks.free_block_ids))
        evicted = list(self.idle)[:num_evicted]
        taken = self.blocks.allocate(count)
        assert len(set(taken)) == count
        assert not set(taken) & self.held.keys()
        assert set(taken) & self.idle.keys() == set(evicted), "free ones first, then the least recently held"
        for block_id in evicted:
            del self.idle[block_id]
            assert self.blocks.find(self.content.pop(block_id)) is None
        self.tables.append(taken)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """A prefix of a table that is held, as a cache hit takes it."""
        table = data.draw(st.sampled_from(self.tables))
        prefix = table[: data.draw(st.integers(0, len(table)))]
        self.blocks.share(prefix)
        self.tables.append(list(prefix))

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def share_idle(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(list(self.idle)))
        num_free = self.blocks.num_free
        assert self.blocks.num_idle_among([block_id]) == 1
        self.blocks.share([block_id])
        assert self.blocks.num_free == num_free - 1
        del self.idle[block_id]
        self.tables.append([block_id])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        last = [block_id for block_id in table if block_id not in self.held]
        num_free = self.blocks.num_free
        num_private = self.blocks.num_private(table)
        self.blocks.release(table)
        assert num_private == len(last)
        assert self.blocks.num_free == num_free + len(last)
        for block_id in reversed(last):
            if block_id in self.content:
                self.idle[block_id] = None

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), name=st.integers(0, 12))
    def register(self, data: st.DataObject, name: int) -> None:
        key = bytes([name])
        block_id = data.draw(st.sampled_from(sorted(self.held)))
        before = self.blocks.find(key)
        self.blocks.register(block_id, key)
        if before is None and block_id not in self.content:
            self.content[block_id] = key
        else:
            assert self.blocks.find(key) is before, "the first one with this content stays"

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "blocks"):
            return
        self.blocks.check(self.tables)
        assert self.blocks.num_free == self.blocks.num_blocks - len(self.held)
        assert self.blocks.num_idle == len(self.idle)
        assert len(self.blocks.free_block_ids) == self.blocks.num_blocks - len(self.held) - len(self.idle)
        for block_id, key in self.content.items():
            assert self.blocks.find(key) == block_id

    def teardown(self) -> None:
        if not hasattr(self, "blocks"):
            return
        for table in self.tables:
            self.blocks.release(table)
        self.blocks.check([])
        assert self.blocks.num_free == self.blocks.num_blocks


TestBlocks = BlocksMachine.TestCase


def test_what_was_freed_last_is_handed_out_first() -> None:
    blocks = BlockManager(8, 4)
    table = blocks.allocate(3)
    blocks.allocate(2)
    blocks.release(table)
    assert set(blocks.allocate(3)) == set(table)


def test_leaves_are_given_up_before_their_parents() -> None:
    blocks = BlockManager(3, 4)
    table = blocks.allocate(3)
    for block_id, key in zip(table, (b"root", b"middle", b"leaf"), strict=True):
        blocks.register(block_id, key)
    blocks.release(table)
    gone = []
    for _ in range(3):
        blocks.allocate(1)
        gone.append([key for key in (b"root", b"middle", b"leaf") if blocks.find(key) is None])
    assert gone == [[b"leaf"], [b"middle", b"leaf"], [b"root", b"middle", b"leaf"]]


def test_what_is_held_again_is_the_last_to_be_given_up() -> None:
    blocks = BlockManager(2, 4)
    old, new = blocks.allocate(1), blocks.allocate(1)
    blocks.register(old[0], b"old")
    blocks.register(new[0], b"new")
    blocks.release(old)
    blocks.release(new)
    blocks.share(old)
    blocks.release(old)
    assert blocks.allocate(1) == new


def test_more_than_there_is_is_refused_and_takes_nothing() -> None:
    blocks = BlockManager(3, 4)
    with pytest.raises(BlockError, match="4 blocks wanted, 3 can be had"):
        blocks.allocate(4)
    assert blocks.num_free == 3


def test_a_block_is_not_released_more_often_than_it_was_held() -> None:
    blocks = BlockManager(3, 4)
    (block_id,) = blocks.allocate(1)
    blocks.share([block_id])
    blocks.release([block_id])
    blocks.release([block_id])
    with pytest.raises(BlockError, match=f"block {block_id} is released and nobody holds it"):
        blocks.release([block_id])
    assert blocks.num_free == 3


def test_content_is_made_known_only_while_somebody_holds_it() -> None:
    blocks = BlockManager(3, 4)
    (block_id,) = blocks.allocate(1)
    blocks.release([block_id])
    with pytest.raises(BlockError, match=f"block {block_id} is registered and nobody holds it"):
        blocks.register(block_id, b"key")


def test_the_check_sees_what_is_lost_shared_or_marked_wrongly() -> None:
    blocks = BlockManager(4, 4)
    table = blocks.allocate(2)
    with pytest.raises(BlockError, match="has ref_count 1 and is in 0 tables"):
        blocks.check([])
    with pytest.raises(BlockError, match="has ref_count 1 and is in 2 tables"):
        blocks.check([table, table[:1]])
    with pytest.raises(BlockError, match="twice in one table"):
        blocks.check([[*table, table[0]]])
    with pytest.raises(BlockError, match="has ref_count 0 and is in 1 tables"):
        blocks.check([table, [3]])
    blocks.check([table])
    blocks.free_block_ids += table
    with pytest.raises(BlockError, match="are not all 4 blocks"):
        blocks.check([table])


def test_the_quick_check_sees_a_block_or_a_reference_that_is_lost() -> None:
    blocks = BlockManager(4, 4)
    table = blocks.allocate(2)
    blocks.share(table[:1])
    blocks.check_counts(3)
    for num_table_entries in (2, 4):
        with pytest.raises(BlockError, match=f"3 references for {num_table_entries} table entries"):
            blocks.check_counts(num_table_entries)
    blocks.free_block_ids.pop()
    with pytest.raises(BlockError, match="2 held \\+ 1 to be had of 4 blocks"):
        blocks.check_counts(3)


def test_the_check_sees_an_index_that_disagrees_with_the_blocks() -> None:
    def known() -> tuple[BlockManager, int]:
        blocks = BlockManager(2, 4)
        table = blocks.allocate(1)
        blocks.register(table[0], b"key")
        blocks.release(table)
        blocks.check([])
        return blocks, table[0]

    blocks, block_id = known()
    blocks._key_of[block_id] = None
    with pytest.raises(BlockError, match="an idle block has no key"):
        blocks.check([])
    blocks, block_id = known()
    blocks._key_of[1 - block_id] = b"other"
    with pytest.raises(BlockError, match="a free block has a key"):
        blocks.check([])
    blocks, block_id = known()
    blocks._block_of[b"another"] = block_id
    with pytest.raises(BlockError, match="a block of other content"):
        blocks.check([])
    blocks, block_id = known()
    del blocks._idle[block_id]
    with pytest.raises(BlockError, match="0 held \\+ 1 free \\+ 0 idle are not all 2 blocks"):
        blocks.check([])


def test_tables_may_be_any_sequence_of_ids() -> None:
    blocks = BlockManager(3, 4)
    blocks.release(array("I", blocks.allocate(2)))
    blocks.check([])
