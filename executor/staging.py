"""Brings a step's arrays to the device: laid end to end in pinned memory, in one copy.

    pinned   [ token_ids | positions | ... | uniforms ]     filled by the host, one of `NUM_SLOTS` in turn
                             |  one copy, asked for and not waited for
    device   [ token_ids | positions | ... | uniforms ]     views of it are the tensors

A pinned buffer is filled again only when its copy is done, which an event shows. In the stream, a copy comes
after the steps that read the old numbers. Its target is a new tensor each time, so that a view stays valid as
long as somebody holds it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor.accelerator import Accelerator, Event
from executor.inputs import StepInputs

NUM_SLOTS: Final = 3
"""One more than the steps that may be under way."""
_ALIGNMENT_BYTES: Final = 16
_FIRST_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class StepArrays:
    """The arrays of `StepInputs`, of the same names, types and shapes, on the device."""

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    logits_indices: Tensor


def arrays_of(inputs: StepInputs) -> dict[str, NDArray[np.generic]]:
    """What of `inputs` the device needs, by its names."""
    return {name: getattr(inputs, name) for name in StepArrays.__slots__}


def on_device(inputs: StepInputs, device: torch.device) -> StepArrays:
    """The arrays one by one, each when the one before has arrived."""
    return StepArrays(
        **{name: torch.from_numpy(array).to(device) for name, array in arrays_of(inputs).items()}
    )


class Staging:
    """The way of arrays from the host to one device."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._slots: list[tuple[Tensor, Event] | None] = [None] * NUM_SLOTS
        self._next = 0

    def put(self, arrays: Mapping[str, NDArray[np.generic]]) -> dict[str, Tensor]:
        """The arrays on the device, by their names."""
        starts, num_bytes = _layout(arrays)
        pinned, copied = self._slot(num_bytes)
        host = pinned.numpy()
        for name, array in arrays.items():
            end = starts[name] + array.nbytes
            host[starts[name] : end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        there = torch.empty(num_bytes, dtype=torch.uint8, device=self._accelerator.device)
        there.copy_(pinned[:num_bytes], non_blocking=True)
        copied.record()
        return {
            name: there[starts[name] : starts[name] + array.nbytes]
            .view(_torch_type(array.dtype))
            .view(array.shape)
            for name, array in arrays.items()
        }

    def _slot(self, num_bytes: int) -> tuple[Tensor, Event]:
        index, self._next = self._next, (self._next + 1) % NUM_SLOTS
        slot = self._slots[index]
        if slot is not None:
            slot[1].wait()
        if slot is None or len(slot[0]) < num_bytes:
            room = max(_FIRST_BYTES, 1 << (num_bytes - 1).bit_length())
            slot = (self._accelerator.pinned(room), self._accelerator.event())
            self._slots[index] = slot
        return slot


def _layout(arrays: Mapping[str, NDArray[np.generic]]) -> tuple[dict[str, int], int]:
    starts, end = {}, 0
    for name, array in arrays.items():
        starts[name] = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        end = starts[name] + array.nbytes
    return starts, max(end, 1)


def _torch_type(dtype: np.dtype[np.generic]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=dtype)).dtype
