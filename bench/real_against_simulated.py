"""The laboratory against the real thing: one load through a real server, and through the simulator.

    python -m bench.real_against_simulated [--model smollm2] [--requests 500] [--pairs 3] [--share 0.8]
                                           [--out bench/results/real_against_simulated.json] [VARIANT …]

In each pair a server is calibrated by the record of another load (other draws of the same lengths, at the
same rate), the load is simulated on its step times, and then served by router, scheduler and executor over
gRPC, the generator on the same cores. The simulator knows neither router nor client: what a first token takes
longer for the clients of the calibration than for its scheduler is added. Pairs alternate between the
variants: iteration, request (request-level batching), narrow (8 seats). Lengths are drawn, prompts are random
ids, end tokens ignored. Requests come as a Poisson process, at `--share` of the rate at which the simulator,
by an executor that was calibrated alone, gets through them when all come at once. Told are the medians of the
pairs, and beside them the noise: how far the real runs lie apart.
"""

import argparse
import asyncio
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from bench.stack import service
from chairlift.calibrate import calibrate
from chairlift.child_process import ChildProcess, Service
from chairlift.lab.fit import Fit
from chairlift.lab.loads import Load, Row
from chairlift.lab.loop import LogicalLoop
from chairlift.lab.replay import replay_file
from chairlift.lab.step_times import Linear
from chairlift.lab.what_if import fitted
from chairlift.models_dir import default_models_dir, resolve
from scheduler.batching import Batching
from scheduler.core import SchedulerCore
from scheduler.plan import Capacity
from scheduler.policy import Limits

PROMPT, OUTPUT, LONGEST = "exponential:64", "exponential:32", 512
TOLERANCES = {"output_tokens_per_second": 0.10, "first_token_p50": 0.15, "between_tokens_p50": 0.15}
# As a server is that has been used for a while: every block has been written to before the load comes, so
# that no step waits for memory that a virtual machine must first ask its host for.
NUM_BLOCKS, NUM_WARM_UP_REQUESTS = 1000, 1000  # each leaves one full block behind
SERVED = Limits(window=2, late_plans=True)  # what `chairlift serve` has when nothing is said


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to schedule: as flags of the server, and for the simulator."""

    flags: tuple[str, ...] = ()
    batching: Batching = Batching.ITERATION
    limits: Limits = SERVED


VARIANTS = {
    "iteration": Variant(),
    "request": Variant(("--batching", "request"), batching=Batching.REQUEST),
    "narrow": Variant(("--max-num-seqs", "8"), limits=replace(SERVED, max_num_seqs=8)),
}


def drawn(num_requests: int, seed: int) -> tuple[Row, ...]:
    """Lengths, none longer than the server is asked for."""
    load = Load(num_requests, prompt=PROMPT, output=OUTPUT, arrivals="at-once", seed=seed)
    return tuple(
        Row(0.0, min(LONGEST, len(item.prompt_token_ids)), min(LONGEST, item.num_output_tokens))
        for item in load
    )


def arriving(rows: tuple[Row, ...], rate: float, seed: int) -> tuple[Row, ...]:
    """The same as a Poisson process."""
    gaps = Load(len(rows), rows=rows, arrivals="poisson", rate=rate, seed=seed)
    return tuple(replace(row, time=item.time) for row, item in zip(rows, gaps, strict=True))


async def calibrated(flags: list[str]) -> tuple[Fit, Capacity]:
    """Step times of an executor alone."""
    with tempfile.TemporaryDirectory(prefix="cl-cal-") as folder:
        argv = ("--listen", f"unix:{folder}/executor.sock", *flags)
        child = ChildProcess(Service("executor", argv, module="executor"))
        await child.start()
        try:
            await child.serving()
            fit, told = await calibrate(str(child.address), tell=lambda _: None)
        finally:
            await child.stop(10.0)
    return fit, Capacity(
        told.num_blocks, told.block_size, told.max_num_seqs, told.max_num_batched_tokens, told.max_seq_len,
        told.max_window, told.vocab_size, row_invariant=told.row_invariant,
    )  # fmt: skip


def simulated(
    variant: Variant, capacity: Capacity, prices: Linear, rows: tuple[Row, ...]
) -> dict[str, float]:
    """Figures of the load in logical time."""
    core = SchedulerCore(variant.limits, variant.batching, cache_secret=b"bench")
    loop = LogicalLoop(core, [capacity], prices)
    arrivals = "trace" if rows[-1].time else "at-once"
    records = loop.run(Load(len(rows), rows=rows, arrivals=arrivals))
    firsts = records.first_token_seconds()
    return {
        "output_tokens_per_second": loop.totals.num_output_tokens / loop.now,
        "first_token_p50": statistics.median(firsts),
        "between_tokens_p50": records.gaps.quantile(0.5),
    }


async def calibrated_by_load(
    variant: Variant, flags: list[str], rows: tuple[Row, ...], folder: Path
) -> tuple[Fit, float]:
    """Step times of a server under this load, and what a first token takes beside the scheduler, seconds."""
    record = folder / "calibration.rec"
    record.unlink(missing_ok=True)
    told = await real(variant, [*flags, "--record", str(record)], rows, folder)
    report = replay_file(record)
    newest = report.seen[-len(rows) :]  # the others warmed it up
    firsts = [seen.first_token - seen.submitted for seen in newest if seen.first_token is not None]
    return fitted(report), told["first_token_p50"] - statistics.median(firsts)


async def real(variant: Variant, flags: list[str], rows: tuple[Row, ...], folder: Path) -> dict[str, float]:
    """The same figures of a server."""
    trace, result = folder / "trace.csv", folder / "result.json"
    with trace.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("arrival_s", "prompt_tokens", "output_tokens"))
        writer.writerows((row.time, row.num_prompt_tokens, row.num_output_tokens) for row in rows)
    async with service(*flags, *variant.flags) as (address, _):
        asked = ("--address", str(address), "--trace", str(trace), "--num-requests", str(len(rows)))
        limits = ("--max-in", str(LONGEST), "--max-out", str(LONGEST), "--result", str(result))
        warm_up = ("--warm-up", str(NUM_WARM_UP_REQUESTS))
        generator = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "chairlift", "bench", "serve", *asked, *limits, *warm_up),
            stdout=subprocess.DEVNULL,
        )
        assert await generator.wait() == 0
    told = json.loads(result.read_text())
    assert told["num_answered"] == len(rows), told["failures"]
    return {
        "output_tokens_per_second": told["output_tokens_per_second"],
        "first_token_p50": told["time_to_first_token_seconds"]["p50"],
        "between_tokens_p50": told["inter_token_seconds"]["p50"],
    }


def judged(runs: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians of the pairs of one variant: real, simulated, how far apart, and the noise of the real ones."""
    figures: dict[str, Any] = {}
    for name, tolerance in TOLERANCES.items():
        reals = [run["real"][name] for run in runs]
        real_median = statistics.median(reals)
        simulated_median = statistics.median(run["simulated"][name] for run in runs)
        figures[name] = {
            "real": round(real_median, 5),
            "simulated": round(simulated_median, 5),
            "difference": round(simulated_median / real_median - 1, 3),
            "allowed": tolerance,
            "noise": round((max(reals) - min(reals)) / real_median, 3),
        }
    return figures


def orders(by_variant: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """For each two variants and figure, whether both worlds put them in one order; None within the noise."""
    found = []
    for (one, first), (other, second) in combinations(by_variant.items(), 2):
        for name in TOLERANCES:
            a, b = first[name], second[name]
            apart = a["real"] / b["real"] - 1
            clear = abs(apart) > max(a["noise"], b["noise"])
            same = (a["real"] > b["real"]) == (a["simulated"] > b["simulated"])
            pair = {"pair": f"{one}, {other}", "figure": name, "apart": round(apart, 3)}
            found.append(pair | {"same_order": same if clear else None})
    return found


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All pairs."""
    flags = ["--model", str(resolve(options.model, default_models_dir())), "--log-level", "error"]
    flags += ["--num-blocks", str(NUM_BLOCKS)]
    if options.num_threads:
        flags += ["--num-threads", str(options.num_threads)]
    rows = drawn(options.requests, options.seed)
    runs: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in options.variants}
    alone, capacity = await calibrated(flags)
    at_once = simulated(VARIANTS["iteration"], capacity, alone.prices, rows)
    tokens = sum(row.num_output_tokens for row in rows)
    rate = options.share * len(rows) * at_once["output_tokens_per_second"] / tokens
    rows, fits = arriving(rows, rate, options.seed), []
    with tempfile.TemporaryDirectory(prefix="cl-ras-") as folder:
        for number in range(1, options.pairs + 1):
            other = options.seed + number
            another = arriving(drawn(options.requests // 2, other), rate, other)
            for name in options.variants:
                fit, way = await calibrated_by_load(VARIANTS[name], flags, another, Path(folder))
                fits.append(fit.sentence)
                expected = simulated(VARIANTS[name], capacity, fit.prices, rows)
                expected["first_token_p50"] += way
                run = {
                    "simulated": expected,
                    "real": await real(VARIANTS[name], flags, rows, Path(folder)),
                }
                runs[name].append(run)
                print(
                    name,
                    json.dumps(run),
                    f"{fit.sentence}; {1000 * way:.0f} ms beside the scheduler",
                    sep="\n  ",
                    flush=True,
                )
    figures = {name: judged(each) for name, each in runs.items()}
    return {
        "requests": options.requests,
        "pairs": options.pairs,
        "requests_per_second": round(rate, 3),
        "variants": figures,
        "orders": orders(figures),
        "fits": fits,
        "runs": runs,
    }


def main() -> None:
    """Measures and writes the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--num-threads", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    default = Path(__file__).parent / "results" / "real_against_simulated.json"
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args()
    options.variants = options.variants or list(VARIANTS)
    unknown = set(options.variants) - set(VARIANTS)
    if unknown:
        sys.exit(f"no variant is named {min(unknown)!r}; there are {', '.join(VARIANTS)}")
    result = asyncio.run(measure(options))
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({name: result[name] for name in ("variants", "orders")}, indent=2))


if __name__ == "__main__":
    main()
