"""The tensors that hold keys and values, in blocks. Which block belongs to whom is not known here.

One layer, as allocated:

    [ num_blocks + 1 | num_kv_heads | keys, values | block_size | head_dim ]
      block b          head h                        slot s       one vector, contiguous

Inside a block the layout is head-major: one head's keys of a block are one run of memory, and its values are
the next. A kernel that reads the keys makes the processor prefetch the values, and both need only one address
lookup. Kernels get the permuted view `[num_blocks + 1, block_size, num_kv_heads, head_dim]`, in which token
`slot` of a sequence is at `[slot // block_size, slot % block_size]`. Our own CPU kernels arrange a head's
numbers of a block differently (`executor/kernels/rows.hpp`), within the same run. The last block,
`trash_block_id`, never belongs to a sequence: rows that pad a batch, and the warm-up, write there.

The cache is allocated as zeros: some kernels multiply what lies past a sequence's end by a probability of
zero, and that must not be a NaN. For these kernels a block is zeroed again when its next owner begins it
(`clear`), because its last owner may have left NaNs there.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor import control_groups, memory, pages_ahead
from executor.model.config import ModelConfig
from executor.model.errors import ModelError

CPU_MEMORY_SHARE = 0.4
"""Of the memory that is available after the weights are loaded."""
CPU_MEMORY_LIMIT_BYTES = 4 << 30
"""So that a machine with other work to do keeps its memory unless told otherwise."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's keys and values, each a view `[num_blocks + 1, block_size, num_kv_heads, head_dim]`."""

    keys: Tensor
    values: Tensor


class KVCache:
    """Keys and values of all layers. Block ids of plans are 0 to `num_blocks - 1`."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._config, self._dtype, self._device = config, dtype, device
        shape = (config.num_layers, num_blocks + 1, config.num_kv_heads, 2, block_size, config.head_dim)
        try:
            storage = zeros(shape, dtype, device)
        except (RuntimeError, OSError) as error:
            num_bytes = (num_blocks + 1) * bytes_per_block(config, block_size, dtype)
            raise ModelError(
                f"num_blocks {num_blocks} of {block_size} tokens need {num_bytes / 2**30:.1f} GiB on "
                f"{device.type}, which could not be allocated; use fewer."
            ) from error
        self._pages_ahead = pages_ahead.of(storage)
        self._storage = storage
        self._layers = layers_of(storage)

    def another(self, num_blocks: int) -> "KVCache":
        """A cache of the same model with so many blocks."""
        return KVCache(
            self._config,
            num_blocks=num_blocks,
            block_size=self.block_size,
            dtype=self._dtype,
            device=self._device,
        )

    @property
    def trash_block_id(self) -> int:
        """The block that belongs to no sequence."""
        return self.num_blocks

    def used(self, block_id: int) -> None:
        """This block is the highest of those that a step writes to; the next higher ones come next."""
        if self._pages_ahead is not None and block_id != self.trash_block_id:
            self._pages_ahead.used(block_id)

    def take_pages_ahead(self) -> bool:
        """Take a few megabytes of memory for blocks not yet in use. Returns whether any was wanted."""
        return self._pages_ahead is not None and self._pages_ahead.take()

    def clear(self, block_ids: Tensor) -> None:
        """Make blocks (int64) of zeros, in all layers."""
        self._storage.index_fill_(1, block_ids, 0.0)

    def layer(self, index: int) -> LayerCache:
        """The cache of layer `index`."""
        return self._layers[index]


def begun_blocks(slot_mapping: NDArray[np.int64], block_size: int) -> NDArray[np.int64]:
    """Of a step's blocks those whose first slot it writes: nothing in them is anybody's yet."""
    blocks: NDArray[np.int64] = slot_mapping[slot_mapping % block_size == 0] // block_size
    return blocks


def layers_of(storage: Tensor) -> tuple[LayerCache, ...]:
    """The layers of `[layers, blocks, kv heads, keys and values, block_size, head_dim]`."""
    blocks_of_slots = storage.transpose(2, 4)
    return tuple(LayerCache(*layer.unbind(2)) for layer in blocks_of_slots)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros. On the CPU its pages are taken when they are first touched, not all at the start."""
    return (
        memory.zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
    )


def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    return 2 * config.num_layers * config.num_kv_heads * block_size * config.head_dim * dtype.itemsize


def default_num_blocks(
    config: ModelConfig, *, block_size: int, dtype: torch.dtype, max_num_seqs: int, num_sharers: int = 1
) -> int:
    """As many blocks as a share of the CPU's free memory holds; `num_sharers` processes take equal parts.

    No more than `max_num_seqs` whole sequences need. Raises `ModelError` when there is no memory for one.
    """
    budget = min(int(available_memory_bytes() * CPU_MEMORY_SHARE), CPU_MEMORY_LIMIT_BYTES) // num_sharers
    block_bytes = bytes_per_block(config, block_size, dtype)
    affordable = budget // block_bytes - 1  # the trash block
    if affordable < 1:
        raise ModelError(
            f"{budget} bytes of memory can be used for the KV cache, and two blocks of "
            f"{block_size} tokens need {2 * block_bytes}; free memory, or give num_blocks."
        )
    return min(affordable, useful_num_blocks(config, block_size=block_size, max_num_seqs=max_num_seqs))


def useful_num_blocks(config: ModelConfig, *, block_size: int, max_num_seqs: int) -> int:
    """What `max_num_seqs` sequences of the greatest length fill."""
    return max_num_seqs * -(-config.max_seq_len // block_size)


def available_memory_bytes() -> int:
    """Memory a process may take without swapping: the machine's, or what its control groups leave of it."""
    words = Path("/proc/meminfo").read_text(encoding="ascii").split()
    available = int(words[words.index("MemAvailable:") + 1]) * 1024
    return min([available, *control_groups.bytes_left(control_groups.own_groups())])
