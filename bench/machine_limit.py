"""What this machine could do at most with a workload, by its measured rate of products and of reading memory.

limit = prefill operations / rate + the sum over steps of max(weight bytes / bandwidth, operations / rate)
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from executor import memory


@dataclass(frozen=True, slots=True)
class Machine:
    """The best of five of each."""

    operations_per_second: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Model:
    """What a token costs: two operations a weight. `num_output` of the weights are the output layer's."""

    num_weights: int
    num_output: int
    bytes_per_weight: int = 2


def measured(num_threads: int = 2) -> Machine:
    """A 2048³ product and a read of a gigabyte in huge pages, each the best of five.

    The product is in bfloat16, or in float32 where the processor has no instructions for bfloat16: torch is a
    thousand times slower there, and kernels widen their numbers instead.
    """
    torch.set_num_threads(num_threads)
    many = memory.zeros((1 << 28,), torch.float32).fill_(1.0)  # zeros that nobody wrote are one page
    dtypes = [torch.float32, torch.bfloat16]
    dtype = max(dtypes, key=lambda dtype: _operations_per_second(dtype, size=256))
    reads = []
    for _ in range(5):
        began = time.perf_counter()
        many.sum()
        reads.append(time.perf_counter() - began)
    return Machine(_operations_per_second(dtype, size=2048), (1 << 30) / min(reads))


def _operations_per_second(dtype: torch.dtype, *, size: int) -> float:
    square = torch.randn(size, size).to(dtype)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        square @ square
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds)


def seconds_at_least(
    lengths: Iterable[tuple[int, int]], machine: Machine, model: Model, shared_tokens: int = 0
) -> float:
    """Seconds for requests of (tokens in, out), all at once; of each, `shared_tokens` are the same."""
    lengths = list(lengths)
    operations = 2 * model.num_weights
    num_in = sum(num_in for num_in, _ in lengths) - shared_tokens * (len(lengths) - 1)
    # The output layer is needed for the last token of each prompt alone.
    body = num_in * (operations - 2 * model.num_output) + len(lengths) * 2 * model.num_output
    seconds = body / machine.operations_per_second
    read = model.num_weights * model.bytes_per_weight / machine.bytes_per_second
    # The first token is the prefill's own; step n has everybody who wants more than n.
    for step in range(1, max(num_out for _, num_out in lengths)):
        width = sum(num_out > step for _, num_out in lengths)
        seconds += max(read, width * operations / machine.operations_per_second)
    return seconds
