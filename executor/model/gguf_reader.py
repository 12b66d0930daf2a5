"""The `gguf` package's reader, with an array's elements read in one go.

The package makes several calls for each element, and a vocabulary of today has a million of them in its
arrays: that was most of the time that opening a file took. Router and executor never import each other, so
each has this file. It knows nothing of what a GGUF file means.
"""

import sys
from struct import Struct, error

import gguf
import numpy as np


class Reader(gguf.GGUFReader):
    """As the package's, with the same fields and parts."""

    @property  # type: ignore[override]  # slicing a plain array costs a fraction of slicing a `memmap`
    def data(self) -> np.ndarray:
        """The bytes of the file."""
        return self._data

    @data.setter
    def data(self, mapped: np.memmap) -> None:
        self._data = np.asarray(mapped)

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[np.ndarray], list[int], list[gguf.GGUFValueType]]:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = self._get(orig_offs, np.uint32)
        if kind[0] == gguf.GGUFValueType.ARRAY:
            raise ValueError("arrays of arrays are not read")
        length = self._get(orig_offs + kind.nbytes, np.uint64)
        header = [kind, length]
        start = orig_offs + kind.nbytes + length.nbytes
        count = int(length[0])
        if kind[0] == gguf.GGUFValueType.STRING:
            elements, end = self._strings(start, count)
            places = list(range(len(header) + 1, len(header) + 2 * count, 2))
        else:
            values = self._get(start, self.gguf_scalar_to_np[gguf.GGUFValueType(kind[0])], count)
            if len(values) < count:
                raise ValueError("an array goes beyond the end of the file")
            elements, end = list(values.reshape(-1, 1)), start + values.nbytes
            places = list(range(len(header), len(header) + count))
        types = [gguf.GGUFValueType.ARRAY, *([gguf.GGUFValueType(kind[0])] if count else [])]
        return end - orig_offs, header + elements, places, types

    def _strings(self, start: int, count: int) -> tuple[list[np.ndarray], int]:
        """So many strings, each as its length and its bytes, and where they end."""
        data, stored = self._data, self._data.data
        length = Struct("=Q" if self.byte_order == "I" else ">Q" if sys.byteorder == "little" else "<Q")
        parts: list[np.ndarray] = []
        for _ in range(count):
            try:
                (size,) = length.unpack_from(stored, start)
            except error as short:
                raise ValueError("an array goes beyond the end of the file") from short
            begin = start + length.size
            start = begin + size
            if start > len(data):
                raise ValueError("an array goes beyond the end of the file")
            parts += (data[begin - length.size : begin], data[begin:start])
        return parts, start
