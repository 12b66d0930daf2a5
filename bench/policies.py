"""What policies do to a load, in the laboratory: admission, deadlines, fairness, prefix hits.

    python -m bench.policies [--out bench/results/policies.json] [PART …]

Parts: admission, deadline, fairness, prefix, prefix_under_load. The figures are the same on every machine.
"""

import argparse
import json
import statistics
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chairlift.lab.loads import fresh_prompt, hashed_prompt, read_trace
from chairlift.lab.loop import Arrival, LogicalLoop, Step
from chairlift.lab.records import Records, quantile
from chairlift.lab.run import Setup
from chairlift.lab.step_times import Linear
from scheduler.core import SchedulerCore
from scheduler.policy import Admission, Limits
from scheduler.tenants import INPUT_WEIGHT, OUTPUT_WEIGHT
from scheduler.token_ids import TokenIds
from scheduler.waiting import Policy

DATA = Path(__file__).parent / "data"
STEP = Linear(base_us=12_000, per_token_us=60)  # roughly an 8B model on one large GPU
MAX_TOKENS = 1024  # what clients ask for at most; the trace's longest output is 1,000
LOADS = (0.8, 0.9, 1.0, 1.1, 1.2, 1.3)
NUM_REQUESTS = 1500
NUM_SEATS = 64
BLOCK = 16


def _loop(
    limits: Limits, num_blocks: int, on_step: Callable[[Step], None] | None = None, **capacity: int
) -> LogicalLoop:
    """One executor of so many blocks."""
    setup = Setup(STEP, num_blocks, block_size=BLOCK, limits=limits, **capacity)
    core = SchedulerCore(limits, cache_secret=b"bench")
    return LogicalLoop(core, [setup.capacity()], STEP, on_step=on_step)


def _step_seconds(num_tokens: int) -> float:
    return (STEP.base_us + STEP.per_token_us * num_tokens) / 1e6


def _mean_rate(trace: list[tuple[float, int, int]]) -> float:
    """Requests a second that the executor can do of this kind, with all seats taken."""
    work_us = sum(
        prompt * STEP.per_token_us + output * (STEP.base_us / NUM_SEATS + STEP.per_token_us)
        for _, prompt, output in trace
    )
    return 1e6 * len(trace) / work_us


def _arrivals(load: float, *, slack: float | None = None) -> list[Arrival]:
    """The trace's lengths and rhythm at `load` times what the executor can do."""
    rows = read_trace(DATA / "azure2023_conv.csv")[:NUM_REQUESTS]
    trace = [(row.time or 0.0, row.num_prompt_tokens, row.num_output_tokens) for row in rows]
    stretch = (NUM_REQUESTS / trace[-1][0]) / (load * _mean_rate(trace))
    arrivals = []
    for number, (time, prompt, output) in enumerate(trace):
        at = time * stretch
        alone = _step_seconds(prompt) + output * _step_seconds(NUM_SEATS)
        deadline = None if slack is None else at + 2.0 + slack * alone
        arrivals.append(Arrival(at, fresh_prompt(number, prompt), output, MAX_TOKENS, deadline=deadline))
    return arrivals


def admission() -> dict[str, Any]:
    """A cache that holds about a third of what 64 seats want, at 1.2 times the load it can do."""
    result = {}
    for mode in Admission:
        limits = Limits(window=1, admission=mode, prefix_caching=False)
        run = _loop(limits, 2048, max_num_seqs=NUM_SEATS)
        records = run.run(_arrivals(1.2))
        computed = run.core.counters.scheduled_tokens
        needed = sum(records.num_prompt_tokens) + sum(records.num_output_tokens)
        result[mode.value] = {
            "output_tokens_per_second": round(sum(records.num_output_tokens) / run.now, 1),
            "preemptions": run.core.counters.preemptions,
            "recomputed_share": round(max(0.0, computed / needed - 1), 4),
        } | _latencies(records)
    return result


def _latencies(records: Records) -> dict[str, float]:
    firsts = records.first_token_seconds()
    return {
        "first_token_p50": round(quantile(firsts, 0.5), 2),
        "first_token_p99": round(quantile(firsts, 0.99), 2),
        "total_mean": round(statistics.fmean(records.total_seconds()), 2),
    }


def deadline() -> dict[str, Any]:
    """Requests done in time, fcfs against deadline, over the load."""
    result: dict[str, Any] = {}
    for load in LOADS:
        row = {}
        for policy in (Policy.FCFS, Policy.DEADLINE):
            limits = Limits(window=1, policy=policy, prefix_caching=False)
            records = _loop(limits, 8192, max_num_seqs=NUM_SEATS).run(_arrivals(load, slack=3.0))
            row[policy.value] = round(sum(records.in_time) / len(records), 4)
        row["gain"] = round(row["deadline"] / row["fcfs"], 3)
        result[str(load)] = row
    return result


def fairness() -> dict[str, Any]:
    """Tenant x floods, tenant y asks steadily: service over time under fcfs and fair, drawn."""
    result = {policy.value: _two_tenants(policy) for policy in (Policy.FCFS, Policy.FAIR)}
    _draw(result, Path(__file__).parent / "results" / "fairness.svg")
    return {policy: {"y_first_token_p50": item["y_first_token_p50"]} for policy, item in result.items()}


def _two_tenants(policy: Policy) -> dict[str, Any]:
    arrivals = [Arrival(0.0, fresh_prompt(i, 400), 100, 200, tenant="x") for i in range(600)]
    arrivals += [Arrival(0.2 * i, fresh_prompt(5000 + i, 400), 100, 200, tenant="y") for i in range(300)]
    points: list[tuple[float, float, float]] = []

    def note(step: Step) -> None:
        x, y = (run.core.tenants.get(name, 0.0) for name in "xy")
        of_x, of_y = (
            INPUT_WEIGHT * item.num_input_tokens + OUTPUT_WEIGHT * item.num_output_tokens for item in (x, y)
        )
        points.append((step.end, of_x, of_y))

    limits = Limits(window=1, policy=policy, prefix_caching=False)
    run = _loop(limits, 2048, note, max_num_seqs=32)
    waits = run.run(sorted(arrivals, key=lambda arrival: arrival.time)).first_token_seconds("y")
    return {"y_first_token_p50": round(statistics.median(waits), 2), "points": points[::20]}


def _draw(result: dict[str, Any], path: Path) -> None:
    """Cumulative service of both tenants, a panel for each policy, as SVG."""
    width, height, margin = 380, 260, 40
    parts = []
    top = max(max(x, y) for item in result.values() for _, x, y in item["points"])
    end = max(item["points"][-1][0] for item in result.values())
    for panel, (policy, item) in enumerate(result.items()):
        left = margin + panel * (width + margin)
        for column, colour, name in ((1, "#c2410c", "x: 600 at once"), (2, "#1d4ed8", "y: 5 a second")):
            line = " ".join(
                f"{left + width * p[0] / end:.1f},{margin + height * (1 - p[column] / top):.1f}"
                for p in item["points"]
            )
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
            parts.append(f'<text x="{left + 8}" y="{margin + 16 * column}" fill="{colour}">{name}</text>')
        parts.append(
            f'<rect x="{left}" y="{margin}" width="{width}" height="{height}" fill="none" stroke="#888"/>'
        )
        parts.append(f'<text x="{left}" y="{margin - 10}">{policy}: virtual tokens over {end:.0f} s</text>')
    body = "\n".join(parts)
    size = f'width="{2 * width + 3 * margin}" height="{height + 2 * margin}"'
    font = 'font-family="sans-serif" font-size="13"'
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>\n{body}\n</svg>\n')


def prefix() -> dict[str, Any]:
    """Hits on the Mooncake conversation trace, served one after the other, against an exact oracle.

    Each block id of 512 tokens stands for 16, so every length falls 32-fold while the same prefixes match.
    """
    prompts = mooncake_prompts()
    result: dict[str, Any] = {}
    for num_blocks in (4_000, 16_000, 64_000):
        run = _loop(Limits(window=1), num_blocks, max_num_seqs=1, max_num_batched_tokens=1 << 16)
        (state,) = run.core.executors.values()
        oracle = LruOracle(num_blocks)
        differing = hits = expected_hits = total = 0
        for prompt in prompts:
            before = state.cache.num_hit_tokens
            run.run([Arrival(run.now, prompt, 1, 1)])
            got, expected = state.cache.num_hit_tokens - before, oracle.serve(prompt)
            differing += got != expected
            hits, expected_hits, total = hits + got, expected_hits + expected, total + len(prompt)
        result[str(num_blocks)] = {
            "hit_share": round(hits / total, 4),
            "oracle_hit_share": round(expected_hits / total, 4),
            "requests_that_differ": differing,
        }
    return result


def prefix_under_load() -> dict[str, Any]:
    """Hits with 64 seats taken, against whoever knows all prompts and never computes a block twice.

    Nothing is evicted, so the two differ only in blocks that several computed at the same time.
    """
    prompts = mooncake_prompts()
    limits = Limits(window=1, admission=Admission.OPTIMISTIC)
    run = _loop(limits, 1_000_000, max_num_seqs=NUM_SEATS)
    run.run(Arrival(0.0, prompt, 8, 8) for prompt in prompts)
    seen: set[bytes] = set()
    possible = 0
    for prompt in prompts:
        raw = prompt.tobytes()
        keys = [raw[: 4 * BLOCK * count] for count in range(1, (len(prompt) - 1) // BLOCK + 1)]
        possible += BLOCK * sum(key in seen for key in keys)
        seen.update(keys)
    hits = sum(state.cache.num_hit_tokens for state in run.core.executors.values())
    return {"hit_tokens": hits, "possible": possible, "share": round(hits / possible, 4)}


def mooncake_prompts() -> list[TokenIds]:
    """Prompts with the trace's prefix structure."""
    return [hashed_prompt(row, BLOCK) for row in read_trace(DATA / "mooncake_conversation.jsonl")]


class LruOracle:
    """A dictionary of block chains of the same capacity: least recently used first, leaves before parents."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._chains: OrderedDict[bytes, None] = OrderedDict()

    def serve(self, prompt: TokenIds) -> int:
        """Tokens of the prompt that are there; afterwards all its full blocks are."""
        raw = prompt.tobytes()
        keys = [raw[: 4 * BLOCK * count] for count in range(1, len(prompt) // BLOCK + 1)]
        usable = (len(prompt) - 1) // BLOCK
        num_hits = 0
        while num_hits < usable and keys[num_hits] in self._chains:
            num_hits += 1
        kept = keys[:num_hits]
        for key in kept:
            del self._chains[key]
        num_new = -(-len(prompt) // BLOCK) - num_hits
        while len(self._chains) + num_hits + num_new > self._num_blocks:
            self._chains.popitem(last=False)
        for key in reversed(keys):
            if key in self._chains:  # computed again though it was there: the older block stays, with its age
                continue
            self._chains[key] = None
        return num_hits * BLOCK


PARTS = {
    "admission": admission,
    "deadline": deadline,
    "fairness": fairness,
    "prefix": prefix,
    "prefix_under_load": prefix_under_load,
}


def main() -> None:
    """Runs the parts asked for and writes the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "policies.json")
    options = parser.parse_args()
    result = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in options.parts or PARTS:
        result[name] = PARTS[name]()
        print(name, json.dumps(result[name], indent=2), flush=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
