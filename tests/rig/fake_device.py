"""A device for tests: an `Accelerator` on the CPU that does its work at once, and writes down what was asked.

What a GPU would do later has happened when a call returns, with one exception: the numbers that are brought
to the host lie there only when an event behind them was waited for. Who reads too early reads nonsense.

A captured graph holds the operations that torch was asked for and asks for them again, into the same
memory: whatever was worked out by the host at capture stays as it was, as on a GPU.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from executor.accelerator import DeviceMemory, Event


@dataclass
class FakeEvent:
    name: str
    device: "FakeDevice"
    tick: int = -1
    arrivals: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def record(self) -> None:
        self.device.log.append(f"record {self.name}")
        self.tick = len(self.device.log)
        with self.device.lock:
            self.arrivals = list(self.device.on_their_way)

    def wait(self) -> None:
        assert self.tick >= 0, "waited for a mark that was never put"
        self.device.log.append(f"wait {self.name}")
        for host, numbers in self.arrivals:
            host.numpy()[...] = numbers.numpy()
            with self.device.lock:
                left = [each for each in self.device.on_their_way if each[0] is not host]
                self.device.on_their_way = left
        self.arrivals = []

    def us_since(self, earlier: Event) -> int:
        assert isinstance(earlier, FakeEvent)
        return self.tick - earlier.tick


class _Current(threading.local):
    """The recording of this thread: ranks that are threads capture side by side."""

    recording: "Recording | None" = None


_current = _Current()


class Recording(TorchDispatchMode):
    """Does what is asked for, and keeps it to be asked for again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], object]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        outputs = [each for each in _pytree.tree_leaves(result) if isinstance(each, Tensor)]
        if func is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("the host reads a number of the device inside of captured work")

        def again() -> None:
            made = [each for each in _pytree.tree_leaves(func(*args, **kwargs)) if isinstance(each, Tensor)]
            for old, new in zip(outputs, made, strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self.calls.append(again)
        return result


@contextmanager
def opaque() -> Iterator["Recording | None"]:
    """Operations inside are one call to a recording, which whoever is inside adds: `yield`s the recording."""
    recording, _current.recording = _current.recording, None
    try:
        with torch.utils._python_dispatch._disable_current_modes():
            yield recording
    finally:
        _current.recording = recording


def as_one_kernel(kernel: Callable[[], Tensor]) -> Tensor:
    """What `kernel` computes, as one call that a graph repeats: how fakes of foreign kernels compute."""
    with opaque() as recording:
        result = kernel()
        if recording is not None:
            recording.calls.append(lambda: result.copy_(kernel()))
        return result


def in_place(kernel: Callable[[], object]) -> None:
    """The same of a kernel that writes into what it is given."""
    with opaque() as recording:
        kernel()
        if recording is not None:
            recording.calls.append(kernel)


@dataclass
class FakeGraph:
    calls: list[Callable[[], object]]
    num_replays: int = 0

    def replay(self) -> None:
        self.num_replays += 1
        for call in self.calls:
            call()


@dataclass
class FakeDevice:
    """`Accelerator`."""

    free_bytes: int = 1 << 30
    total_bytes: int = 1 << 30
    peak: int = 0
    """What `peak_bytes` says."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    log: list[str] = field(default_factory=list)
    graphs: list[FakeGraph] = field(default_factory=list)
    on_their_way: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    """A mark may be waited for in another thread."""
    _num_events: int = 0

    def event(self) -> FakeEvent:
        self._num_events += 1
        return FakeEvent(f"event {self._num_events}", self)

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 0xA5, dtype=torch.uint8)

    def bring(self, tensor: Tensor) -> Tensor:
        host = torch.full_like(tensor, 0xA5)
        with self.lock:
            self.on_their_way.append((host, tensor.clone()))
        self.log.append("bring")
        return host

    def capture(self, work: Callable[[], None]) -> FakeGraph:
        work()
        recording = _current.recording = Recording()
        try:
            with recording:
                work()
        finally:
            _current.recording = None
        self.graphs.append(FakeGraph(recording.calls))
        return self.graphs[-1]

    def memory(self) -> DeviceMemory:
        return DeviceMemory(self.free_bytes, self.total_bytes)

    def peak_bytes(self, work: Callable[[], None]) -> int:
        work()
        return self.peak
