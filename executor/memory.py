"""Memory on the CPU, in huge pages where the system provides them.

Weights are read from end to end at every step, and KV blocks are scattered over the cache: with pages of 4
KiB, the processor would spend a good part of that time looking up addresses. A page is taken when it is first
touched, and begins as zeros.
"""

import ctypes
import math
import mmap
from typing import Final

import torch
from torch import Tensor

HUGE_PAGE_BYTES: Final = 2 << 20  # on x86-64
_ALIGNMENT_BYTES: Final = 64
_SLAB_BYTES: Final = 64 << 20
_POPULATE_WRITE: Final = 23  # of Linux from 5.14 on; `mmap` has no name for it
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros. Raises OSError when there is no room for it."""
    return torch.frombuffer(_pages(math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


def take_pages(tensor: Tensor) -> None:
    """Take the pages that a contiguous tensor lies in as if it were written to; what is in them stays.

    Where the kernel does not know this call nothing happens: a first write asks again. Where memory has run
    out it ends as such a write does.
    """
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    _madvise(start, tensor.data_ptr() + tensor.nbytes - start, _POPULATE_WRITE)


class Arena:
    """Tensors that live as long as each other, laid end to end: small ones share a huge page."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used_bytes = 0

    def zeros(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """A tensor `[num_elements]` of zeros that begins at a cache line."""
        num_bytes = num_elements * dtype.itemsize
        start = -(-self._used_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if start + num_bytes > len(self._slab):
            # What is left of the old slab was never touched: it takes addresses, not memory.
            self._slab, start = zeros((max(_SLAB_BYTES, num_bytes),), torch.uint8), 0
        self._used_bytes = start + num_bytes
        return self._slab[start : self._used_bytes].view(dtype)


def _pages(num_bytes: int) -> mmap.mmap:
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        pages.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return pages  # a kernel without huge pages; small ones do
    return pages
