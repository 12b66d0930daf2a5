"""What GGUF's quantised types hold, as codes with a scale and an offset for each block of 32.

Only types of such blocks are here: what a type with blocks of 16 holds (Q6_K and most others) cannot be said
so. The layouts are those of ggml (`ggml/src/ggml-common.h`, `block_q4_0` and the following). Knows no file.

    Q4_0   scale, 16 bytes                        scale x (code - 8)
    Q4_1   scale, offset, 16 bytes                scale x code + offset
    Q5_0   scale, fifth bits, 16 bytes            scale x (code - 16)
    Q5_1   scale, offset, fifth bits, 16 bytes    scale x code + offset
    Q8_0   scale, 32 signed bytes                 scale x code
    Q4_K   eight blocks: scale, scale of offsets, 8 x 2 numbers of six bits, 4 x 32 bytes
    Q5_K   eight blocks: the same, with 32 bytes of fifth bits before the 4 x 32 bytes

Of 16 bytes the lower halves are a block's first 16 numbers, the upper halves the others; of 32 bytes of Q4_K
and Q5_K the lower halves are one block and the upper ones the next.
"""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import torch

from executor.model.quantized import BLOCK_SIZE, QuantizedMatrix

_Blocks = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Codes `[blocks, 32]`, scales `[blocks]` and offsets `[blocks]`, both float32."""
_HALF: Final = BLOCK_SIZE // 2


def _q4_0(data: np.ndarray) -> _Blocks:
    scales = _halves(data, 0)
    return _halves_of_bytes(data[:, 2:]), scales, -8 * scales


def _q4_1(data: np.ndarray) -> _Blocks:
    return _halves_of_bytes(data[:, 4:]), _halves(data, 0), _halves(data, 2)


def _q5_0(data: np.ndarray) -> _Blocks:
    scales = _halves(data, 0)
    return _halves_of_bytes(data[:, 6:]) | _fifth_bits(data[:, 2:6]), scales, -16 * scales


def _q5_1(data: np.ndarray) -> _Blocks:
    codes = _halves_of_bytes(data[:, 8:]) | _fifth_bits(data[:, 4:8])
    return codes, _halves(data, 0), _halves(data, 2)


def _q8_0(data: np.ndarray) -> _Blocks:
    scales = _halves(data, 0)
    return data[:, 2:] ^ 0x80, scales, -128 * scales  # signed bytes plus 128


def _q4_k(data: np.ndarray) -> _Blocks:
    return _eighths(data[:, 16:]), *_k_scales(data)


def _q5_k(data: np.ndarray) -> _Blocks:
    # Byte n has the fifth bit of number n of each of the eight blocks.
    fifth = np.unpackbits(data[:, 16:48, None], axis=2, bitorder="little").swapaxes(1, 2)
    return _eighths(data[:, 48:]) | fifth.reshape(-1, BLOCK_SIZE) << 4, *_k_scales(data)


def _k_scales(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and offsets of eight blocks each."""
    scale, offset_scale = _halves(data, 0)[:, None], _halves(data, 2)[:, None]
    # Twelve bytes: six bits of the first four scales, of the first four offsets, then four bits each of the
    # last four scales and offsets, whose two upper bits are those that the first eight bytes had left.
    first, second, rest = data[:, 4:8], data[:, 8:12], data[:, 12:16]
    scales = np.concatenate([first & 63, rest & 15 | first >> 6 << 4], axis=1)
    offsets = np.concatenate([second & 63, rest >> 4 | second >> 6 << 4], axis=1)
    return (scale * scales).reshape(-1), -(offset_scale * offsets).reshape(-1)


def _eighths(data: np.ndarray) -> np.ndarray:
    """Four bits of eight blocks: 32 bytes are two of them."""
    pairs = data.reshape(-1, 4, 1, BLOCK_SIZE)
    return np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(-1, BLOCK_SIZE)


def _halves(data: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of each block."""
    return np.ascontiguousarray(data[:, at : at + 2]).view(np.float16).astype(np.float32)[:, 0]


def _halves_of_bytes(data: np.ndarray) -> np.ndarray:
    return np.concatenate([data & 15, data >> 4], axis=1)


def _fifth_bits(data: np.ndarray) -> np.ndarray:
    return np.unpackbits(data, axis=1, bitorder="little") << 4


_READ: Final[Mapping[str, tuple[int, Callable[[np.ndarray], _Blocks]]]] = {
    "Q4_0": (4, _q4_0),
    "Q4_1": (4, _q4_1),
    "Q4_K": (4, _q4_k),
    "Q5_0": (8, _q5_0),
    "Q5_1": (8, _q5_1),
    "Q5_K": (8, _q5_k),
    "Q8_0": (8, _q8_0),
}


def is_in_blocks(type_name: str) -> bool:
    """Whether what the GGUF type `type_name` holds can be said in blocks of 32."""
    return type_name in _READ


def blocks_of(data: np.ndarray, type_name: str, block_bytes: int, num_columns: int) -> QuantizedMatrix | None:
    """`data`, uint8 `[num_rows, bytes]`, whose rows are of `num_columns` numbers.

    None where float16 cannot hold a scale. Those of Q4_K and Q5_K are products, which float16 rounds, by half
    a thousandth at most where they are not tiny.
    """
    bits, read = _READ[type_name]
    codes, scales, offsets = read(np.ascontiguousarray(data).reshape(-1, block_bytes))
    num_rows = data.shape[0]
    scales, offsets = scales.reshape(num_rows, -1), offsets.reshape(num_rows, -1)
    with np.errstate(over="ignore"):
        in_half = scales.astype(np.float16), offsets.astype(np.float16)
    if not all(np.isfinite(each).all() for each in in_half):
        return None
    return QuantizedMatrix(
        torch.from_numpy(codes.reshape(num_rows, -1)),
        torch.from_numpy(in_half[0]),
        torch.from_numpy(in_half[1]),
        num_columns,
        bits,
    )
