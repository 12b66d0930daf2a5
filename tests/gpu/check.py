"""Everything about the executor that only a GPU can settle, in at most six minutes on one.

    python -m tests.gpu.check --json gpu_check.json

Parts stand for themselves: what goes wrong in one is written down and stops no other. Without a GPU the same
parts run on the CPU, small, with the Triton kernels in their interpreter: that shows that the script runs,
and its figures mean nothing.
"""

import argparse
import json
import math
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the kernels are imported

from tests.gpu import attention_parts, model_parts
from tests.gpu.attention_parts import WrongError
from tests.gpu.machine import Machine

SECONDS = 360.0


def environment(machine: Machine) -> dict[str, Any]:
    try:
        from triton import __version__ as triton
    except ImportError as error:
        triton = f"not there: {error}"
    spec = machine.spec(128, 8, 4, 16)
    return {
        "torch": torch.__version__,
        "triton": triton,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name()
        if machine.is_gpu
        else f"CPU, {torch.get_num_threads()} threads",
        "capability": torch.cuda.get_device_capability() if machine.is_gpu else None,
        "refused": {name: why for name, why in machine.refusals(spec).items() if why is not None},
        "refused_block_256": {
            name: why
            for name, why in machine.refusals(machine.spec(128, 8, 4, 256)).items()
            if why is not None
        },
    }


def rates(machine: Machine) -> dict[str, Any]:
    """The ceilings: bytes read and written by a copy, and a large product's operations."""
    return {"copy_bytes_per_second": copy_rate(machine), "flops_per_second": flop_rate(machine)}


def copy_rate(machine: Machine) -> float:
    source = torch.zeros((4 << 30) if machine.is_gpu else (8 << 20), dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)

    def work() -> None:
        target.copy_(source)

    return 2 * source.nbytes / machine.seconds(work)


def flop_rate(machine: Machine) -> float:
    size = 8192 if machine.is_gpu else 128
    a, b, product = (torch.ones(size, size, device=machine.device, dtype=machine.dtype) for _ in range(3))

    def work() -> None:
        torch.matmul(a, b, out=product)

    return 2 * size**3 / machine.seconds(work)


class Check:
    """The parts in turn, each with what it found."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.parts: dict[str, dict[str, Any]] = {}

    def part(self, name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Run one part; what it found, or nothing."""
        started = time.monotonic()
        if self.machine.is_late:
            self.parts[name] = {"verdict": "not run", "why": "no time was left"}
        else:
            try:
                self.parts[name] = {"verdict": "good", "found": work()}
            except WrongError as wrong:
                self.parts[name] = {"verdict": "WRONG", "why": str(wrong), "found": wrong.result}
            except Exception as error:  # noqa: BLE001 - see the module
                why = f"{type(error).__name__}: {error}"[:500]
                self.parts[name] = {"verdict": "BROKEN", "why": why, "trace": traceback.format_exc()[-3000:]}
        part = self.parts[name]
        part["seconds"] = round(time.monotonic() - started, 1)
        print(
            f"{name:12} {part['verdict']:8} {part['seconds']:7.1f} s  {part.get('why', '')}"[:200], flush=True
        )
        found: dict[str, Any] = part.get("found", {})
        return found

    def run(self) -> bool:
        """All of them; whether none is wrong or broken."""
        machine = self.machine
        self.part("environment", lambda: environment(machine))
        measured = self.part("rates", lambda: rates(machine))
        copy = measured.get("copy_bytes_per_second", math.nan)
        flops = measured.get("flops_per_second", math.nan)
        self.part("attention", lambda: attention_parts.correctness(machine))
        self.part("graphs", lambda: model_parts.graphs(machine))
        self.part("sampling", lambda: model_parts.sampling(machine))
        self.part("whole step", lambda: model_parts.whole_step(machine, copy, flops))
        self.part("bandwidth", lambda: attention_parts.bandwidth(machine, copy))
        return not any(part["verdict"] in {"WRONG", "BROKEN"} for part in self.parts.values())


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.check", description="What only a GPU can settle."
    )
    parser.add_argument("--json", type=Path, help="where to write all that was found")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after which no part is begun")
    options = parser.parse_args(arguments)
    check = Check(Machine.here(options.seconds))
    is_good = check.run()
    report = {"is_gpu": check.machine.is_gpu, "parts": check.parts}
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print_table(check.parts)
    if not check.machine.is_gpu:
        print("There is no GPU here: the script runs, and its figures mean nothing.")
    return 0 if is_good else 1


def print_table(parts: dict[str, dict[str, Any]]) -> None:
    """The figures in a few lines."""
    found = {name: part.get("found", {}) for name, part in parts.items()}
    if found["rates"]:
        rate = found["rates"]
        copy, product = rate["copy_bytes_per_second"] / 1e12, rate["flops_per_second"] / 1e12
        print(f"copy {copy:.2f} TB/s, product {product:.0f} Tflop/s")
    for name, error in found["attention"].get("worst_error", {}).items():
        print(f"  {name:10} worst relative error {error:.1e}")
    for name, times in found["whole step"].items():
        print(f"  {name:10} step {times}")
    for each in found["bandwidth"].get("measured", []):
        print(f"  {each}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
