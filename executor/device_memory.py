"""How many KV blocks fit on a GPU: found by trying out the largest step, not by estimating it.

    total x memory_utilization  =  what is taken already  +  the largest  +  captured   +  the KV cache
                                   (weights, the driver,     step's own      steps'        (what is left)
                                   others on the same GPU)   (measured)      (measured)

The largest step has as many tokens as a plan may have, spread over as many sequences, each of which samples
with every option there is. It runs over a small cache of its own, which is freed afterwards. It runs twice:
the first run loads what stays in memory (code of kernels, workspaces of libraries), so the second one counts
it as taken already.
"""

from collections.abc import Callable, Sequence

import numpy as np
import structlog

from executor.accelerator import Accelerator, DeviceMemory
from executor.adjustments import adjustment_of
from executor.inputs import StepBatch, build_inputs
from executor.model.errors import ModelError
from executor.plan import SamplingParams
from executor.rows import Row, SampleRow

GIB = 2**30

log = structlog.get_logger()


def largest_step(*, max_num_seqs: int, num_tokens: int, max_seq_len: int, block_size: int) -> StepBatch:
    """A step that takes the most memory; its sequences share the blocks `0` to `num_profile_blocks - 1`."""
    num_rows = min(max_num_seqs, num_tokens)
    params = SamplingParams(
        max_tokens=1, temperature=1.0, top_p=0.9, seed=1, logprobs=20, repetition_penalty=1.1
    )
    blocks = np.arange(num_profile_blocks(num_tokens, max_seq_len, block_size), dtype=np.int32)
    lengths = [num_tokens // num_rows + (row < num_tokens % num_rows) for row in range(num_rows)]
    rows = [
        Row(
            seq_id,
            [0] * min(length, max_seq_len),
            0,
            blocks,
            (SampleRow(params, 0, (), adjustment_of(params, (0,), ())),),
        )
        for seq_id, length in enumerate(lengths, start=1)
    ]
    return build_inputs(rows, block_size)


def num_profile_blocks(num_tokens: int, max_seq_len: int, block_size: int) -> int:
    """Blocks of the cache that the largest step runs over."""
    return -(-min(num_tokens, max_seq_len) // block_size)


def num_blocks_that_fit(
    accelerator: Accelerator,
    run_largest_step: Callable[[], None],
    captured_bytes: Callable[[], int],
    *,
    profile_bytes: int,
    block_bytes: int,
    block_size: int,
    num_tokens: int,
    memory_utilization: float,
    useful: int,
) -> int:
    """Blocks for plans, one more being kept for the trash block; `useful` is the most that can be filled.

    `captured_bytes` measures what captured steps keep. The largest step's own cache, of `profile_bytes`, is
    there meanwhile and given back after it. Raises `ModelError` when nothing is left.
    """
    run_largest_step()
    kept_bytes = captured_bytes()
    before = accelerator.memory()
    step_bytes = accelerator.peak_bytes(run_largest_step)
    taken = before.total - before.free - profile_bytes
    allowed = int(before.total * memory_utilization)
    left = allowed - taken - step_bytes - kept_bytes
    affordable = left // block_bytes - 1
    log.info(
        "memory_profiled",
        total_bytes=before.total,
        allowed_bytes=allowed,
        taken_bytes=taken,
        step_bytes=step_bytes,
        captured_bytes=kept_bytes,
        kv_cache_bytes=max(0, left),
    )
    if affordable < 1:
        raise ModelError(
            f"the GPU has {_gib(before.total)}, of which gpu_memory_utilization {memory_utilization} allows "
            f"{_gib(allowed)}; {_gib(taken)} are taken by the weights and by others, a step of {num_tokens} "
            f"tokens takes {_gib(step_bytes)} more, and captured steps keep {_gib(kept_bytes)}: the KV cache "
            f"needs at least two blocks of {block_size} tokens, {_gib(2 * block_bytes)}, and "
            f"{_gib(max(0, left))} are left. Lower max_num_batched_tokens or max_num_seqs, raise "
            "gpu_memory_utilization, or free memory on the GPU."
        )
    return min(affordable, useful)


def bytes_of_captures(
    accelerator: Accelerator, capture: Callable[[Sequence[int]], object], sizes: Sequence[int]
) -> int:
    """What the captured steps of all `sizes` keep, from the captures of one and of two of them.

    The largest one's memory is the others' too: what these add is the graph itself, as large for each. What
    `capture` returns keeps the captures of the sizes that it is asked for.
    """

    def kept(some: Sequence[int]) -> int:
        before = accelerator.memory().free
        captured = capture(some)
        after = accelerator.memory().free
        del captured
        return max(0, before - after)

    smallest, largest = min(sizes), max(sizes)
    kept((largest,))  # what it loads stays, and is no graph's
    of_largest = kept((largest,))
    of_both = of_largest if smallest == largest else kept((smallest, largest))
    return of_largest + (len(sizes) - 1) * max(0, of_both - of_largest)


def out_of_memory(memory: DeviceMemory, model: str) -> str:
    """What to say when the GPU has no memory left while `model` is loaded."""
    return (
        f"the GPU has no memory left to load {model}: {_gib(memory.free)} of its {_gib(memory.total)} are "
        "free beside what was loaded so far. Lower num_blocks, gpu_memory_utilization, "
        "max_num_batched_tokens or max_num_seqs, use a smaller model or another dtype, or free memory on "
        "the GPU."
    )


def check_weights_fit(accelerator: Accelerator, num_bytes: int) -> None:
    """Raises `ModelError` when the device has no room for the weights."""
    memory = accelerator.memory()
    if num_bytes > memory.free:
        raise ModelError(
            f"the weights need {_gib(num_bytes)}, and {_gib(memory.free)} of the GPU's {_gib(memory.total)} "
            "are free; use a smaller model or another dtype, or free memory on the GPU."
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
