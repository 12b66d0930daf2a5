"""A step's small results, laid end to end on the device, so that one copy brings them to the host."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor.accelerator import Accelerator


@dataclass(frozen=True, slots=True)
class Parcel:
    """Tensors on their way."""

    _host: Tensor
    _layout: dict[str, tuple[int, torch.dtype, torch.Size]]
    """for each, where it begins, its type and its shape"""

    @classmethod
    def send(cls, tensors: Mapping[str, Tensor], accelerator: Accelerator) -> "Parcel":
        """Ask for the copy. At least one tensor."""
        layout, start = {}, 0
        for name, tensor in tensors.items():
            layout[name] = (start, tensor.dtype, tensor.shape)
            start += tensor.nbytes
        numbers = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors.values()]
        return cls(accelerator.bring(torch.cat(numbers)), layout)

    def unpack(self) -> dict[str, NDArray[np.generic]]:
        """The numbers, by their names. To be called when they are there."""
        return {
            name: self._host[start : start + shape.numel() * dtype.itemsize]
            .clone()
            .view(dtype)
            .view(shape)
            .numpy()
            for name, (start, dtype, shape) in self._layout.items()
        }
