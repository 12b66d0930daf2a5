"""Who owns which KV block of one executor.

A block is `block_size` slots of KV memory on the executor; here it is only an id. Policy decides with
counts, this module hands out identities.

    blocks      [0] [1] [2] [3] [4] [5]          block_size 4
    sequence a   ●       ●                       block_table [2, 0], 7 tokens
    token 0..3 of a lie in block 2, token 4..6 in block 0: slot = block_table[i // 4] * 4 + i % 4

Pure: integers in, integers out.
"""

from collections.abc import Iterable


class BlockError(RuntimeError):
    """Blocks and owners disagree: a fault of ours. The cure is to open the executor again and recompute."""


class BlockManager:
    """The free list of one executor's blocks.

    Freed blocks are handed out again last-in first-out, which keeps the working set of KV memory small.
    """

    __slots__ = ("_owned", "block_size", "free_block_ids", "num_blocks")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.free_block_ids = list(range(num_blocks - 1, -1, -1))
        self._owned = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks nobody owns."""
        return len(self.free_block_ids)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """`count` block ids, now owned. Raises BlockError when there are fewer: callers look first."""
        if count > len(self.free_block_ids):
            raise BlockError(f"{count} blocks wanted, {len(self.free_block_ids)} free")
        taken = [self.free_block_ids.pop() for _ in range(count)]
        for block_id in taken:
            self._owned[block_id] = 1
        return taken

    def free(self, block_ids: Iterable[int]) -> None:
        """Takes blocks back. Raises BlockError for one that is not owned."""
        for block_id in block_ids:
            if not self._owned[block_id]:
                raise BlockError(f"block {block_id} freed twice")
            self._owned[block_id] = 0
            self.free_block_ids.append(block_id)

    def check(self, block_tables: Iterable[list[int]]) -> None:
        """Raises BlockError unless free + owned = all and every owned block is in exactly one table."""
        owned = [block_id for table in block_tables for block_id in table]
        if len(set(owned)) != len(owned):
            raise BlockError(f"a block is in two tables: {sorted(owned)}")
        if sorted(owned + self.free_block_ids) != list(range(self.num_blocks)):
            raise BlockError(f"{len(owned)} owned + {len(self.free_block_ids)} free != {self.num_blocks}")
        if any(self._owned[block_id] for block_id in self.free_block_ids):
            raise BlockError("a free block is marked as owned")
