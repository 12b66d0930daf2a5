"""What `--record` costs: the loop's thread, the writer's and the file, beside a core that records nothing.

    python -m bench.record_cost [--steps 2000] [--out bench/results/record_cost.json]

Steady decode of 64 and 256 sequences, blocks of 16; processor time of each thread. The two cores take turns
step by step, so that whatever else the machine does meets both; medians. The file holds prompts and plans of
the beginning as well, which the bytes for a step do not count.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.scheduler_cost import core_with, steps
from scheduler.batching import Batching
from scheduler.core import SchedulerCore
from scheduler.policy import Admission, Limits
from scheduler.recorder import Recorder, RecordingCore
from scheduler.waiting import Policy

WIDTHS = (64, 256)
LIMITS = Limits(window=1, admission=Admission.FORECAST)


def measure(width: int, num_steps: int, folder: Path) -> dict[str, Any]:
    """One width; microseconds for a step, and bytes."""
    recorder = Recorder(folder / f"record-{width}", LIMITS, Batching.ITERATION)

    def recording(limits: Limits, **settings: Any) -> SchedulerCore:
        return RecordingCore(recorder, limits, **settings)

    plain, told = (
        steps(*core_with(width, 0, num_steps, Policy.FCFS, lockstep=False, make_core=make))
        for make in (SchedulerCore, recording)
    )
    for _ in range(20):
        next(plain)
        next(told)
    without: list[float] = []
    with_record: list[float] = []
    began, process_began = time.thread_time(), time.process_time()
    time.sleep(0.2)
    size = recorder.path.stat().st_size
    turns = [(plain, without), (told, with_record)]
    for _ in range(num_steps):
        for core, times in turns:
            times.append(1e6 * next(core)["total"])
        turns.reverse()  # the first after a pause finds its memory cold
        time.sleep(0.001)  # a step takes its time: the writer has some
    recorder.close()
    others = time.process_time() - process_began - (time.thread_time() - began)
    return {
        "running": width,
        "loop_us_without": round(statistics.median(without), 1),
        "loop_us_with": round(statistics.median(with_record), 1),
        "writer_us": round(1e6 * others / num_steps, 1),
        "bytes": round((recorder.path.stat().st_size - size) / num_steps, 1),
    }


def main() -> None:
    """Measures and writes the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "record_cost.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = [measure(width, options.steps, Path(folder)) for width in WIDTHS]
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
