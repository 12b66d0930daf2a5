"""How fast the laboratory is: simulated output tokens for each second of processor time.

    python -m bench.lab_speed [--requests 100000] [--seats 256] [--out bench/results/lab_speed.json]

Requests of the Azure conversation kind, Poisson at nine tenths of what the executor can do. One core, and its
processor time, since a shared machine's clock tells of its neighbours.
"""

import argparse
import json
import resource
import time
from pathlib import Path

from chairlift.lab.loads import Load, read_trace
from chairlift.lab.run import Setup, configure_collector, served
from chairlift.lab.step_times import Linear
from scheduler.policy import Limits

DATA = Path(__file__).parent / "data"
STEP = Linear(base_us=12_000, per_token_us=20)
BLOCKS_EACH = 200  # enough for all who run
LOAD = 0.9


def main() -> None:
    """Simulates once and writes the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seats", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "lab_speed.json")
    options = parser.parse_args()
    rows = tuple(read_trace(DATA / "azure2023_conv.csv"))
    per_output = STEP.base_us / options.seats + STEP.per_token_us
    work_us = sum(
        row.num_prompt_tokens * STEP.per_token_us + row.num_output_tokens * per_output for row in rows
    )
    rate = LOAD * len(rows) / work_us * 1e6
    load = Load(options.requests, rows=rows, arrivals="poisson", rate=rate, max_tokens=1024)
    setup = Setup(
        STEP,
        options.seats * BLOCKS_EACH,
        max_num_seqs=options.seats,
        limits=Limits(window=1, prefix_caching=False),
    )
    configure_collector()
    before = time.process_time()
    loop = served(setup, load)
    seconds = time.process_time() - before
    result = {
        "requests": options.requests,
        "seats": options.seats,
        "rows_of_a_step": round(loop.totals.num_rows / loop.totals.num_steps, 1),
        "output_tokens": loop.totals.num_output_tokens,
        "processor_seconds": round(seconds, 1),
        "output_tokens_per_processor_second": round(loop.totals.num_output_tokens / seconds),
        "seconds_for_a_million_requests": round(1e6 * seconds / options.requests),
        "peak_memory_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }
    print(json.dumps(result, indent=2))
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
