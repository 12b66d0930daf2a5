"""Random numbers as a pure function of a key and a counter (Philox4x32-10), for many rows at once.

There is no generator and no state: the uniform of a token is determined by the request's seed and the token's
place in the output, so neither the batch, nor a preemption, nor a recompute can change it. Knows no tensor
and no sampling rule.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), and the reference
implementation Random123.
"""

import numpy as np
from numpy.typing import NDArray

UInt64Array = NDArray[np.uint64]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW_32 = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_ROUNDS = 10

SAMPLING_STREAM = 1
"""Stream tag of the sampler's one uniform per token. A sampler that uses it otherwise takes another tag."""


def philox4x32(counter: UInt64Array, key: UInt64Array) -> UInt64Array:
    """Ten rounds of Philox4x32.

    `counter` is `[rows, 4]` and `key` is `[rows, 2]`; each element holds one 32-bit word in a uint64, so that
    a 32 x 32 bit product is one multiplication. Returns `[rows, 4]` words in the same form.
    """
    c0, c1, c2, c3 = counter.T
    k0, k1 = key.T
    for _ in range(_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _32) ^ c1 ^ k0,
            product1 & _LOW_32,
            (product0 >> _32) ^ c3 ^ k1,
            product0 & _LOW_32,
        )
        k0 = (k0 + _KEY_STEPS[0]) & _LOW_32
        k1 = (k1 + _KEY_STEPS[1]) & _LOW_32
    return np.stack([c0, c1, c2, c3], axis=1)


def uniforms(
    seeds: list[int], output_indices: list[int], stream: int = SAMPLING_STREAM
) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each row.

    `seeds` are signed 64-bit integers and become the key; `output_indices` (0 for the first generated token,
    below 2^32) and `stream` become the counter. Both lists have one entry a row.
    """
    num_rows = len(seeds)
    key64 = np.array(seeds, dtype=np.int64).astype(np.uint64)
    key = np.stack([key64 & _LOW_32, key64 >> _32], axis=1)
    counter = np.zeros((num_rows, 4), dtype=np.uint64)
    counter[:, 0] = output_indices
    counter[:, 1] = stream
    words = philox4x32(counter, key)
    # 27 bits of the first word above 26 bits of the second.
    bits = ((words[:, 0] >> np.uint64(5)) << np.uint64(26)) | (words[:, 1] >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53
