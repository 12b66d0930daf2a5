"""The executor's step alone, without scheduler and gRPC: seconds by batch width, and of prefill.

    python -m bench.cpu_steps [--model models/smollm2] [--dtype bfloat16] [--context 96]
                              [--plain | --operations]

Medians of several steps, the widths alternating. The limits are measured in the same run. `--operations`
tells where a decode step of 64 goes, each operation being a call of its own.
"""

import argparse
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import machine_limit
from executor.inputs import StepInputs, build_inputs
from executor.kernels.library import Kind
from executor.plan import SamplingParams
from executor.rows import Row, SampleRow
from executor.runner import ModelRunner

GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)


def rows(
    runner: ModelRunner, width: int, num_tokens: int, context: int
) -> tuple[StepInputs, list[SampleRow]]:
    """`width` sequences whose last `num_tokens` of `context` tokens are computed."""
    blocks = -(-context // runner.block_size)
    rng = np.random.default_rng(width)
    tables = rng.permutation(runner.num_blocks)[: width * blocks].astype(np.int32).reshape(width, blocks)
    batch = build_inputs(
        [
            Row(
                i,
                rng.integers(0, runner.vocab_size, num_tokens).tolist(),
                context - num_tokens,
                table,
                (SampleRow(GREEDY, 0, ()),),
            )
            for i, table in enumerate(tables)
        ],
        runner.block_size,
    )
    return batch.inputs, batch.sample_rows


def tell_operations(runner: ModelRunner, context: int, rounds: int) -> None:
    """Milliseconds of a step in each operation, medians; in the clock's time of whoever calls them."""
    inputs, sample_rows = rows(runner, 64, 1, context)
    operations: Any = runner._model._operations  # noqa: SLF001 - measured from inside
    compute = operations._compute  # noqa: SLF001
    spent: Counter[str] = Counter()

    def timed(kind: Kind, call: Any, *args: Any, **flags: Any) -> None:
        started = time.perf_counter_ns()
        compute(kind, call, *args, **flags)
        columns = f" of {call.num_columns} columns" if kind is Kind.LINEAR else ""
        spent[f"{kind.name.lower()}{columns}"] += time.perf_counter_ns() - started

    operations._compute = timed  # noqa: SLF001
    taken: dict[str, list[float]] = {}
    for _ in range(rounds):
        operations._tapes.forget()  # noqa: SLF001 - else it is one call
        spent.clear()
        output = runner.step(inputs, sample_rows)
        for name, each in (*spent.items(), ("sampling", output.sample_us * 1000)):
            taken.setdefault(name, []).append(each / 1e6)
    for name, times in sorted(taken.items(), key=lambda item: -statistics.median(item[1])):
        print(f"{name:24} {statistics.median(times):6.2f} ms")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--context", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--plain", action="store_true", help="plain torch in place of the kernels")
    parser.add_argument("--operations", action="store_true", help="a decode of 64, operation by operation")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    runner = ModelRunner.load(
        options.model,
        dtype=options.dtype,
        quantization=options.quantization,
        device="cpu",
        num_blocks=3000,
        block_size=16,
        max_num_seqs=256,
        attention="reference" if options.plain else None,
    )
    runner.warm_up()
    if options.operations:
        tell_operations(runner, options.context, options.rounds)
        return
    machine = machine_limit.measured(options.threads)
    print(
        f"limits: {machine.operations_per_second / 1e9:.0f} GF/s, {machine.bytes_per_second / 1e9:.1f} GB/s"
    )
    widths = (1, 8, 16, 32, 64)
    steps = {f"decode of {width}": (width, rows(runner, width, 1, options.context)) for width in widths}
    for tokens in (64, 256, 512, 1024):
        steps[f"prefill of {tokens}"] = (tokens, rows(runner, 1, tokens, tokens))
    seconds: dict[str, list[tuple[int, int]]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, (_, (inputs, sample_rows)) in steps.items():
            output = runner.step(inputs, sample_rows)
            seconds[name].append((output.forward_us, output.sample_us))
    for name, (tokens, _) in steps.items():
        forward, sample = (statistics.median(column) / 1000 for column in zip(*seconds[name], strict=True))
        rate = 1000 * tokens / (forward + sample)
        print(f"{name:16} {forward:8.2f} ms + {sample:5.2f} ms sampling {rate:7.0f} tokens/s")


if __name__ == "__main__":
    main()
