"""A record of operations in the order in which they were computed, to be replayed by one call.

A step of as many tokens as an earlier one asks for the same operations, on the same weights, in the same
buffers: only the step's arrays differ, and those are read through one structure. So the second such step, and
every one after it, is a single call: no time between operations is spent in Python, and no other thread of
this process can come in between.
"""

import ctypes
from collections.abc import Hashable

from torch import Tensor

from executor.kernels.library import Kernels, Operation

MOST_TAPES = 64


class Tape:
    """The operations of one forward pass up to the output head, and the tensor that they leave for it."""

    def __init__(self) -> None:
        self._recorded: list[Operation] = []
        self._calls: list[ctypes.Structure] = []
        self._operations: ctypes.Array[Operation] = (Operation * 0)()
        self._result: Tensor | None = None

    def add(self, operation: Operation, call: ctypes.Structure) -> None:
        """One more operation, which points at `call`."""
        self._recorded.append(operation)
        self._calls.append(call)

    def end(self, result: Tensor) -> None:
        """That was all of them."""
        self._operations = (Operation * len(self._recorded))(*self._recorded)
        self._recorded = []
        self._result = result

    def compute(self, kernels: Kernels, *, is_bfloat16: bool) -> Tensor:
        """All of them again."""
        assert self._result is not None, "a tape that has not ended cannot be played"
        kernels.compute(self._operations, len(self._operations), is_bfloat16)
        return self._result


class Tapes:
    """The tapes of the shapes that were met last, and the one being recorded."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Tape] = {}
        self._recording: tuple[Hashable, Tape] | None = None

    def find(self, shape: Hashable) -> Tape | None:
        """The tape of `shape`; where there is none, one is recorded from now on."""
        tape = self._kept.pop(shape, None)
        # A recording that was broken off is given up either way: the next `end` would be another step's.
        self._recording = (shape, Tape()) if tape is None else None
        if tape is not None:
            self._kept[shape] = tape  # now the last one used
        return tape

    def add(self, operation: Operation, call: ctypes.Structure) -> None:
        """An operation was computed."""
        if self._recording is not None:
            self._recording[1].add(operation, call)

    def end(self, result: Tensor) -> None:
        """The recording, if there is one, is complete."""
        if self._recording is None:
            return
        shape, tape = self._recording
        self._recording = None
        tape.end(result)
        self._kept[shape] = tape
        if len(self._kept) > MOST_TAPES:
            del self._kept[next(iter(self._kept))]

    def forget(self) -> None:
        """Buffers have moved: what was recorded points to where they were."""
        self._kept.clear()
