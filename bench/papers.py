"""What five papers claim, and what comes out here: docs/papers.md tells the claims and the differences.

    python -m bench.papers [--out bench/results/papers.json] [PART …]

Parts: orca, paged, kv, sarathi, vtc, mooncake. In the laboratory, on step times from a roofline that no part
changes; the same on every machine.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from chairlift.lab.capacity import Targets, TargetsError, highest_rate
from chairlift.lab.loads import Load, fresh_prompt, hashed_prompt, read_trace
from chairlift.lab.loop import Arrival, Step
from chairlift.lab.run import Setup, Summary, served, simulate
from chairlift.lab.step_times import Linear, preset
from scheduler.policy import Admission, Limits
from scheduler.tenants import INPUT_WEIGHT, OUTPUT_WEIGHT
from scheduler.waiting import Policy

DATA = Path(__file__).parent / "data"
NO_CACHE = Limits(window=1, prefix_caching=False)
ORCA = ("orca-max", "orca-pow2", "orca-oracle")
BATCH_SIZES = (8, 16, 32, 64)
TOLERANCE = 0.05  # of a rate that is searched


def _rate(setup: Setup, load: Load, scheme: str, targets: Targets) -> float:
    """Requests a second within the targets; 0 when there is no such rate."""

    def at(rate: float) -> Summary:
        return simulate(setup, replace(load, rate=rate), scheme)

    try:
        return round(highest_rate(at, targets, tolerance=TOLERANCE).rate, 3)
    except TargetsError:
        return 0.0


# --- Orca ------------------------------------------------------------------------------------------------


def orca() -> dict[str, Any]:
    """GPT-3 175B on 16 A100: rates at a median of 190 ms a token, iteration-level against request-level."""
    step_times = preset("gpt3-175b-16xa100-40")
    setup = Setup(
        step_times, step_times.num_kv_tokens() // 16, max_seq_len=640, max_num_seqs=128, limits=NO_CACHE
    )
    mixed = Load(600, prompt="uniform:32,512", output="uniform:1,128", rate=1.0, max_tokens=128)
    targets = Targets(per_output_token_p50=0.19)
    rates: dict[str, Any] = {
        scheme: _rate(setup, mixed, scheme, targets) for scheme in ("orca-max", "chairlift")
    }
    for scheme in ("request", "request-padded"):
        by_size = {
            size: _rate(replace(setup, max_num_seqs=size), mixed, scheme, targets) for size in BATCH_SIZES
        }
        best = max(by_size, key=lambda size: by_size[size])
        rates[scheme] = by_size[best]
        rates[f"{scheme}_best_batch_size"] = best
    gains = {
        f"gain_over_{scheme}": round(rates["orca-max"] / rates[scheme], 2)
        for scheme in ("request", "request-padded")
    }
    return {
        "requests_per_second": rates,
        **gains,
        "all_at_once": {
            "lengths_drawn": _all_at_once(setup, mixed),
            "all_alike": _all_at_once(setup, replace(mixed, prompt="272", output="64")),
        },
    }


def _all_at_once(setup: Setup, load: Load) -> dict[str, float]:
    """Output tokens a second of 32 seats when all come at once: nobody waits for arrivals."""
    setup, load = replace(setup, max_num_seqs=32), replace(load, arrivals="at-once")
    schemes = ("orca-max", "request", "request-padded")
    return {name: round(simulate(setup, load, name).output_tokens_per_second) for name in schemes}


# --- PagedAttention --------------------------------------------------------------------------------------


def paged() -> dict[str, Any]:
    """OPT-13B on an A100-40GB with the paper's 15,700 slots, 2 requests a second: how many are in a batch."""
    setup = Setup(
        preset("opt-13b-a100-40"),
        15_700 // 16,
        max_seq_len=2048,
        max_num_batched_tokens=2560,
        limits=NO_CACHE,
    )
    load = Load(1000, prompt="exponential:161", output="exponential:338", rate=2.0, max_tokens=1024)
    result = {}
    for scheme in (*ORCA, *(f"{name}-buddy" for name in ORCA), "prefill-first", "chairlift"):
        at_two = simulate(setup, load, scheme)
        flooded = simulate(setup, replace(load, arrivals="at-once"), scheme)
        result[scheme] = {
            "running_at_2_a_second": round(at_two.mean_running, 2),
            "running_when_flooded": round(flooded.mean_running, 2),
            "tokens_per_second_when_flooded": round(flooded.output_tokens_per_second),
            "kv_filled_when_flooded": round(flooded.kv_filled_share, 3),
        }
    return result


# --- KV policies -----------------------------------------------------------------------------------------


def kv() -> dict[str, Any]:
    """Ways to hold KV memory under one scheduler: OPT-13B on an A100-40GB, lengths of ShareGPT conversations.

    All at once; clients allow 1,024 tokens. And what finding prefixes again is worth: the first 600 requests
    of Mooncake's conversation trace on Mistral-7B and an A100-80GB, one every 2 s.
    """
    setup = Setup(preset("opt-13b-a100-40"), 15_700 // 16, max_seq_len=2048, limits=Limits(window=1))
    load = Load(800, rows=tuple(read_trace(DATA / "sharegpt_turns.csv")), arrivals="at-once", max_tokens=1024)
    optimistic = replace(setup, limits=replace(setup.limits, admission=Admission.OPTIMISTIC))
    runs = {name: (setup, name) for name in ("contiguous-buddy", "contiguous", "paged")} | {
        "paged, admitting freely, victims by cost": (optimistic, "paged"),
        "paged, admitting freely, victims by order": (optimistic, "victims-by-order"),
    }
    result: dict[str, Any] = {
        name: _kv_figures(simulate(of, load, name_of)) for name, (of, name_of) in runs.items()
    }
    rows = islice(read_trace(DATA / "mooncake_conversation.jsonl"), 600)
    turns = [
        Arrival(2.0 * index, hashed_prompt(row), row.num_output_tokens, row.num_output_tokens)
        for index, row in enumerate(rows)
    ]
    step_times = preset("mistral-7b-a100-80")
    large = Setup(step_times, step_times.num_kv_tokens() // 16, limits=Limits(window=1))
    for name in ("contiguous", "paged", "chairlift"):
        summary = simulate(large, turns, name)
        result[f"{name}, turns of conversations"] = _kv_figures(summary) | {
            "first_token_p50": round(summary.first_token_p50, 2),
            "prefix_hit_share": round(summary.prefix_hit_share, 3),
        }
    return result


def _kv_figures(summary: Summary) -> dict[str, Any]:
    return {
        "running": round(summary.mean_running, 1),
        "kv_filled": round(summary.kv_filled_share, 3),
        "tokens_per_second": round(summary.output_tokens_per_second),
        "preemptions": summary.preemptions,
        "recomputed": round(summary.recomputed_share, 3),
    }


# --- Sarathi-Serve ---------------------------------------------------------------------------------------


def sarathi() -> dict[str, Any]:
    """Mistral-7B on an A100: rates under a P99 between tokens, prompts first against decoding first."""
    step_times = preset("mistral-7b-a100-80")
    setup = Setup(step_times, step_times.num_kv_tokens() // 16, max_num_seqs=128, limits=NO_CACHE)
    load = Load(500, rows=tuple(read_trace(DATA / "sharegpt_turns.csv")), rate=1.0, max_tokens=1024)
    targets = Targets(first_token_p50=2.0, between_tokens_p99=0.1)
    rates = {
        f"{scheme}, {budget}": _rate(replace(setup, max_num_batched_tokens=budget), load, scheme, targets)
        for scheme, budget in (("prefill-first", 8192), ("decode-first", 512), ("decode-first", 2048))
    }
    theirs, *ours = rates.values()
    return {"requests_per_second": rates, "gain": round(max(ours) / theirs, 2) if theirs else None}


# --- VTC -------------------------------------------------------------------------------------------------


def vtc() -> dict[str, Any]:
    """Llama-2-7B on an A10G, 10,000 slots: two clients ask 90 and 180 times a minute, more than it can do."""
    setup = Setup(preset("llama2-7b-a10g"), 10_000 // 16, limits=NO_CACHE)
    return {policy.value: _service(setup, policy) for policy in (Policy.FCFS, Policy.FAIR)}


def _service(setup: Setup, policy: Policy) -> dict[str, Any]:
    """The gap of service while both are backlogged: from 60 s on, when queues have formed."""
    seconds = 600
    times = [(60 / per_minute * i, name) for name, per_minute in (("one", 90), ("two", 180)) for i in
             range(per_minute * seconds // 60)]  # fmt: skip
    load = [Arrival(at, fresh_prompt(i, 256), 256, 256, name) for i, (at, name) in enumerate(sorted(times))]
    gaps: list[tuple[float, float]] = []

    def note(step: Step) -> None:
        one, two = (services[name](step) for name in ("one", "two"))
        gaps.append((step.end, two - one))

    services = {name: _Service(name) for name in ("one", "two")}
    loop = served(replace(setup, limits=replace(setup.limits, policy=policy)), load, on_step=note)
    early, late = ([gap for time, gap in gaps if start <= time < start + 270] for start in (60, 330))
    firsts = {name: loop.records.first_token_seconds(name) for name in services}
    return {
        "largest_gap_early": round(max(map(abs, early))),
        "largest_gap_late": round(max(map(abs, late))),
        "first_token_p50": {name: round(values[len(values) // 2], 1) for name, values in firsts.items()},
    }


class _Service:
    """Weighted tokens that one tenant got so far."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._total = 0.0

    def __call__(self, step: Step) -> float:
        """With this step."""
        plan = step.plan
        columns = zip(plan.rows, plan.num_tokens, plan.num_samples, strict=True)
        for seq, num_tokens, num_samples in columns:
            if seq.tenant.name == self._name:
                prompt = num_tokens if num_tokens > 1 else 0
                self._total += INPUT_WEIGHT * prompt + OUTPUT_WEIGHT * num_samples
        return self._total


# --- Mooncake --------------------------------------------------------------------------------------------


def mooncake() -> dict[str, Any]:
    """Share of prompt tokens found, one request after the other, by cache size in blocks of 512 tokens.

    Each block id stands for 16 tokens here, so every length falls 32-fold while the same prefixes match.
    """
    prompts = [hashed_prompt(row, 16) for row in read_trace(DATA / "mooncake_conversation.jsonl")]
    result = {}
    for num_blocks in (1_000, 10_000, 50_000, 100_000):
        setup = Setup(
            Linear(1, 1), num_blocks, max_num_seqs=1, max_num_batched_tokens=1 << 16, limits=Limits(window=1)
        )
        load = (Arrival(float(index), prompt, 1, 1) for index, prompt in enumerate(prompts))
        summary = simulate(setup, load)
        result[str(num_blocks)] = round(summary.prefix_hit_share, 4)
    return result


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "orca": orca,
    "paged": paged,
    "kv": kv,
    "sarathi": sarathi,
    "vtc": vtc,
    "mooncake": mooncake,
}


def main() -> None:
    """Runs the parts asked for and writes the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "papers.json")
    options = parser.parse_args()
    for name in options.parts:
        if name not in PARTS:
            sys.exit(f"no part is named {name!r}; there are {', '.join(PARTS)}")
    result = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in options.parts or PARTS:
        result[name] = PARTS[name]()
        print(name, json.dumps(result[name], indent=2), flush=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
