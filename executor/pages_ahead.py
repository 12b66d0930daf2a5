"""Memory for KV blocks, taken from the system before a step needs it.

The system provides a page, as zeros, when it is first written to; a huge page can take milliseconds if none
is at hand (a virtual machine asks its host). In the middle of a step this is a pause for every sequence in
it, and it comes again whenever the sequences have grown by a block. So while the device's thread has nothing
else to do, it takes pages ahead of the highest block in use, up to `MOST_BYTES_AHEAD`; the memory taken still
follows what is used. Schedulers hand out blocks from the lowest to the highest; with one that does not, pages
come as they would have without this module.

Must not know: what a block holds.
"""

from typing import Final

import torch
from torch import Tensor

from executor import memory

MOST_BYTES_AHEAD: Final = 256 << 20
_SHARE_AHEAD: Final = 8
"""An eighth of the cache at most; then to the end of a huge page, in each layer."""


class PagesAhead:
    """The pages of `blocks`, `[arrays, blocks, ...]`: block b has a part in each array."""

    def __init__(self, blocks: Tensor) -> None:
        self._arrays = blocks.flatten(2).unbind()
        self._num_blocks = blocks.shape[1]
        bytes_of_part = self._arrays[0][0].nbytes
        bytes_ahead = min(MOST_BYTES_AHEAD, blocks.nbytes // _SHARE_AHEAD)
        self._num_ahead = max(1, bytes_ahead // (bytes_of_part * len(self._arrays)))
        self._blocks_at_once = max(1, memory.HUGE_PAGE_BYTES // bytes_of_part)
        self._num_used = 0
        self._num_taken = 0
        """Blocks whose pages are there in every array."""
        self._next_array = 0
        """Array in which the blocks after those come next."""

    def used(self, block_id: int) -> None:
        """A step wrote to this block."""
        self._num_used = max(self._num_used, block_id + 1)

    def take(self) -> bool:
        """Take about one huge page, if more are wanted. Returns whether any was."""
        wanted = min(self._num_blocks, self._num_used + self._num_ahead)
        if self._num_taken >= wanted:
            return False
        end = min(self._num_blocks, self._num_taken + self._blocks_at_once)
        memory.take_pages(self._arrays[self._next_array][self._num_taken : end])
        self._next_array += 1
        if self._next_array == len(self._arrays):
            self._next_array, self._num_taken = 0, end
        return True


def of(blocks: Tensor) -> PagesAhead | None:
    """Those of a cache on the CPU; a GPU's memory is taken when it is allocated."""
    return PagesAhead(blocks) if blocks.device == torch.device("cpu") else None
