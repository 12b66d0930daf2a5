"""What a GPU does besides arithmetic: events, pinned memory, captured work, and how much memory it has.

A narrow seam with two implementations: `Cuda` here, and in the tests a device that does the same on the CPU
and records in which order. Work is put on one stream, in the order of the calls, and done later; the host
never waits for anything but an event. Knows no model and no step.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A mark in the stream."""

    def record(self) -> None:
        """Put the mark behind all that was asked for so far."""

    def wait(self) -> None:
        """Return when the device has come to the mark."""

    def us_since(self, earlier: "Event") -> int:
        """Microseconds of the device from the mark `earlier`; both have been waited for."""


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Ask for all of it again: on the same memory, with what lies there now."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device."""

    free: int
    total: int


class Accelerator(Protocol):
    """A device with a stream of work of its own."""

    device: torch.device

    def event(self) -> Event:
        """A new mark."""

    def pinned(self, num_bytes: int) -> Tensor:
        """Host memory, uint8 `[num_bytes]`, from which the device copies while the host goes on."""

    def bring(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor` on the host; its numbers are there when a mark behind it was waited for."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record what `work` asks for, without doing it; nothing it makes may be on the host."""

    def memory(self) -> DeviceMemory:
        """What the device has now; memory that torch keeps for later counts as free."""

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """The most bytes that were taken beyond those before, while `work` was done."""


class CudaEvent:
    """`Event` of CUDA."""

    def __init__(self) -> None:
        # A thread that waits sleeps: if it spun, it would take a core from those that prepare the next step.
        self.mark: Any = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]

    def record(self) -> None:
        """Behind all on the current stream."""
        self.mark.record()

    def wait(self) -> None:
        """Lets go of the interpreter meanwhile."""
        self.mark.synchronize()

    def us_since(self, earlier: Event) -> int:
        """By the device's own clock."""
        assert isinstance(earlier, CudaEvent)
        return int(1000 * earlier.mark.elapsed_time(self.mark))


class Cuda:
    """`Accelerator` of CUDA. A graph shares the memory of the one captured before it, while that lives.

    They can share it because only one runs at a time. The memory pool is asked of a living graph, not kept by
    its id: once its last graph is gone, the allocator counts the pool as nobody's (though it keeps it while
    anything lies in it), and to name its id is an error.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._last_graph: weakref.ref[torch.cuda.CUDAGraph] | None = None

    def event(self) -> Event:
        """A mark with a time."""
        return CudaEvent()

    def pinned(self, num_bytes: int) -> Tensor:
        """Page-locked."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def bring(self, tensor: Tensor) -> Tensor:
        """Into page-locked memory."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def capture(self, work: Callable[[], None]) -> Graph:
        """Once in earnest, so that kernels are built and workspaces taken; then recorded.

        What other threads ask of CUDA meanwhile is no fault: NCCL has one that looks after its work.
        """
        work()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        alive = None if self._last_graph is None else self._last_graph()
        pool = None if alive is None else alive.pool()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            work()
        self._last_graph = weakref.ref(graph)
        return graph

    def memory(self) -> DeviceMemory:
        """As the driver has it, and torch's own cache given back."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return DeviceMemory(*torch.cuda.mem_get_info(self.device))

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """By torch's count of what it reserves, so that gaps between tensors are in it."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        torch.cuda.synchronize(self.device)
        return int(torch.cuda.max_memory_reserved(self.device) - before)
