"""The main job in figures: start, throughput by width, iteration-level against request-level, plan bytes.

    python -m bench.main_job [--model smollm2] [--out bench/results/main_job.json] [PART …]

Parts: start, throughput, batching; all of them when none is named. Everything goes through all three
processes over gRPC, with the generator on the same cores. Figures are medians; rounds alternate.
"""

import argparse
import asyncio
import json
import platform
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from bench.stack import Run, Work, load, service
from protos.v1.router_pb2 import StepSummary

VOCAB_SIZE = 49_152
WIDTHS = (1, 8, 32, 64)
NUM_SEATS = 64


def random_ids(rng: random.Random, count: int) -> list[int]:
    """A prompt that no cache knows."""
    return [rng.randrange(1000, VOCAB_SIZE) for _ in range(count)]


async def start(flags: list[str], rounds: int) -> dict[str, Any]:
    """Seconds from start to ready, beside `import torch` in the same run, alternating."""
    torch_seconds, ready_seconds = [], []
    for _ in range(rounds):
        began = time.monotonic()
        importing = await asyncio.create_subprocess_exec(sys.executable, "-c", "import torch")
        assert await importing.wait() == 0
        torch_seconds.append(time.monotonic() - began)
        async with service(*flags) as (_, seconds):
            ready_seconds.append(seconds)
    return {
        "import_torch_seconds": round(statistics.median(torch_seconds), 2),
        "start_to_ready_seconds": round(statistics.median(ready_seconds), 2),
        "rounds": rounds,
    }


def steady_decode(run: Run, width: int) -> list[StepSummary]:
    """Steps in which everybody decodes, but for the first three: they tell of the pause before the load."""
    steps = [step for step in run.steps if len(step.members) == width]
    return [step for step in steps if all(member.num_tokens == 1 for member in step.members)][3:]


async def throughput(flags: list[str], rounds: int) -> dict[str, Any]:
    """Tokens a second at 1, 8, 32 and 64 requests of 64 tokens in and 64 out; plan bytes and idle share."""
    result: dict[str, Any] = {}
    async with service(*flags, "--max-num-seqs", str(NUM_SEATS)) as (address, _):
        runs: dict[int, list[Run]] = {width: [] for width in WIDTHS}
        for round_number in range(rounds):
            for width in WIDTHS:
                rng = random.Random(1000 * round_number + width)
                works = [Work(random_ids(rng, 64), 64) for _ in range(width)]
                runs[width].append(await load(address, works, watch=True))
    for width, of_width in runs.items():
        steady = [step for run in of_width for step in steady_decode(run, width)]
        measured = [step for step in steady if step.previous_step_us]
        busy = sum(step.previous_step_us for step in measured)
        idle = sum(step.previous_idle_us for step in measured)
        result[str(width)] = {
            "tokens_per_second": round(statistics.median(run.tokens_per_second for run in of_width), 1),
            "all_rounds": [round(run.tokens_per_second, 1) for run in of_width],
            "plan_bytes_steady_decode": round(statistics.mean(step.num_plan_bytes for step in steady), 1),
            "executor_idle_share": round(idle / max(1, idle + busy), 4),
        }
    return result


async def batching(flags: list[str], num_requests: int, mean_tokens: float) -> dict[str, Any]:
    """Exponential output lengths on 64 seats: iteration-level, and both request-level baselines."""
    rng = random.Random(7)
    works = [
        Work(random_ids(rng, 16), max(1, min(512, round(rng.expovariate(1 / mean_tokens)))))
        for _ in range(num_requests)
    ]
    result: dict[str, Any] = {
        "num_requests": num_requests,
        "num_tokens": sum(work.max_tokens for work in works),
        "mean_tokens": mean_tokens,
        "seats": NUM_SEATS,
    }
    for mode in ("iteration", "request", "request-padded"):
        async with service(*flags, "--max-num-seqs", str(NUM_SEATS), "--batching", mode) as (address, _):
            run = await load(address, works, watch=True)
        useful = [sum(not member.padding for member in step.members) for step in run.steps]
        useful = [width for width in useful if width]
        result[mode] = {
            "useful_tokens_per_second": round(run.tokens_per_second, 1),
            "mean_width": round(statistics.mean(useful), 2),
            "steps": len(useful),
            "empty_seat_steps": sum(NUM_SEATS - width for width in useful),
            "mean_latency_seconds": round(statistics.mean(item.total_seconds for item in run.done), 2),
            "seconds": round(run.seconds, 1),
        }
        print(mode, result[mode], flush=True)
    return result


def main() -> None:
    """Runs the parts asked for and writes the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-requests", type=int, default=1024)
    parser.add_argument("--mean-tokens", type=float, default=32.0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "main_job.json")
    options = parser.parse_args()
    flags = ["--model", options.model, "--dtype", options.dtype]
    parts = {
        "start": lambda: start(flags, options.rounds),
        "throughput": lambda: throughput(flags, options.rounds),
        "batching": lambda: batching(flags, options.num_requests, options.mean_tokens),
    }
    result = json.loads(options.out.read_text()) if options.out.exists() else {}
    result["machine"] = {"processor": platform.machine(), "python": platform.python_version()}
    for name in options.parts or parts:
        result[name] = asyncio.run(parts[name]())
        print(name, json.dumps(result[name], indent=2), flush=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
