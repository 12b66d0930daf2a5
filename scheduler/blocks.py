"""Hands out the KV blocks of one executor, and knows which full blocks can be reused.

A block is `block_size` slots of KV memory on the executor; here it is only an id. Policy decides with counts,
this module hands out identities.

    blocks      [0] [1] [2] [3] [4] [5]          block_size 4
    sequence a   ●       ●                       block_table [2, 0], 7 tokens
    token 0..3 of a lie in block 2, token 4..6 in block 0: slot = block_table[i // 4] * 4 + i % 4

A block is in exactly one of three states:

    free     no sequence holds it, and its content means nothing
    held     ref_count >= 1 sequences have it in their tables
    idle     no sequence holds it, but its content is known: it has a key in the index, and may be held again

A key names content: the tokens of the block and all tokens before it (`prefix_cache`). A block gets one when
the step that filled it has been answered. Idle blocks are evicted least recently held first; a table is
released from its end, so leaves go before their parents. Pure: integers and bytes in, integers out.
"""

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import compress


class BlockError(RuntimeError):
    """Blocks and their holders disagree: our bug. The cure is to open the executor again and recompute."""


class BlockManager:
    """All blocks of one executor.

    Freed blocks are handed out again last-in first-out, which keeps the working set of KV memory small.
    """

    __slots__ = ("_block_of", "_idle", "_key_of", "_ref_counts", "block_size", "free_block_ids", "num_blocks")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.free_block_ids = list(range(num_blocks - 1, -1, -1))
        self._ref_counts = [0] * num_blocks
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently held first

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: free and idle ones."""
        return len(self.free_block_ids) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Blocks that no sequence holds but whose content can be reused."""
        return len(self._idle)

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    # --- holding -----------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks of no known content, now held. Raises BlockError when there are fewer."""
        if count > self.num_free:
            raise BlockError(f"{count} blocks wanted, {self.num_free} can be had")
        if not count:
            return []
        taken = self.free_block_ids[: -count - 1 : -1]
        del self.free_block_ids[-count:]
        while len(taken) < count:
            taken.append(self._evict())
        for block_id in taken:
            self._ref_counts[block_id] = 1
        return taken

    def _evict(self) -> int:
        block_id, _ = self._idle.popitem(last=False)
        key = self._key_of[block_id]
        assert key is not None
        del self._block_of[key]
        self._key_of[block_id] = None
        return block_id

    def share(self, block_ids: Iterable[int]) -> None:
        """One more sequence holds these, which are held or idle."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._idle[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_table: Seq[int]) -> None:
        """One sequence fewer holds these. Raises BlockError for a block that no sequence holds."""
        for block_id in reversed(block_table):
            count = self._ref_counts[block_id]
            if count <= 0:
                raise BlockError(f"block {block_id} is released and nobody holds it")
            self._ref_counts[block_id] = count - 1
            if count == 1:
                if self._key_of[block_id] is None:
                    self.free_block_ids.append(block_id)
                else:
                    self._idle[block_id] = None

    def num_private(self, block_table: Iterable[int]) -> int:
        """How many of these would come free if their only holder released them."""
        ref_counts = self._ref_counts
        return sum(ref_counts[block_id] == 1 for block_id in block_table)

    # --- known content -----------------------------------------------------------------------------------

    def register(self, block_id: int, key: bytes) -> None:
        """Records the content of a held block. If another block has the same, the index keeps that one."""
        if self._ref_counts[block_id] <= 0:
            raise BlockError(f"block {block_id} is registered and nobody holds it")
        if key not in self._block_of and self._key_of[block_id] is None:
            self._block_of[key] = block_id
            self._key_of[block_id] = key

    def find(self, key: bytes) -> int | None:
        """The block with this content, held or idle; None when there is none."""
        return self._block_of.get(key)

    def num_idle_among(self, block_ids: Iterable[int]) -> int:
        """How many of these are idle: holding them leaves fewer blocks to allocate."""
        ref_counts = self._ref_counts
        return sum(ref_counts[block_id] == 0 for block_id in block_ids)

    # --- audit -------------------------------------------------------------------------------------------

    def check_counts(self, num_table_entries: int) -> None:
        """The quick half of `check`: raises BlockError unless the numbers add up."""
        num_held = self.num_blocks - self._ref_counts.count(0)
        if num_held + self.num_free != self.num_blocks or sum(self._ref_counts) != num_table_entries:
            raise BlockError(
                f"{num_held} held + {self.num_free} to be had of {self.num_blocks} blocks, "
                f"{sum(self._ref_counts)} references for {num_table_entries} table entries"
            )

    def check(self, block_tables: Iterable[Seq[int]]) -> None:
        """Raises BlockError unless free + idle + held = all, and each ref_count is the number of tables."""
        counts = [0] * self.num_blocks
        for table in block_tables:
            if len(set(table)) != len(table):
                raise BlockError(f"a block is twice in one table: {table}")
            for block_id in table:
                counts[block_id] += 1
        if counts != self._ref_counts:
            both = zip(self._ref_counts, counts, strict=True)
            found = ((each, *pair) for each, pair in enumerate(both) if pair[0] != pair[1])
            block_id, count, expected = next(found)
            raise BlockError(f"block {block_id} has ref_count {count} and is in {expected} tables")
        # In tests this runs after every operation: loops that C makes.
        held = list(compress(range(self.num_blocks), counts))
        if sorted([*held, *self.free_block_ids, *self._idle]) != list(range(self.num_blocks)):
            places = f"{len(held)} held + {len(self.free_block_ids)} free + {len(self._idle)} idle"
            raise BlockError(f"{places} are not all {self.num_blocks} blocks")
        key_of = self._key_of.__getitem__
        if any(map(key_of, self.free_block_ids)):
            raise BlockError("a free block has a key")
        if not all(map(key_of, self._idle)):
            raise BlockError("an idle block has no key")
        if list(map(key_of, self._block_of.values())) != list(self._block_of):
            raise BlockError("the index names a block of other content")
