"""Parts of the GPU check, in the process that `tests.gpu.check` has made for them.

What is found goes to a file as soon as it is found: whatever ends the process, what was known is told. Parts
1 and 2 are here, the environment and the rates.
"""

import argparse
import os
import platform
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the kernels are imported

from executor.attention.base import AttentionBackend
from executor.selection import BACKENDS
from tests.gpu import attention_parts, check, executor_part, filters_part, model_parts, operations_part
from tests.gpu.attention_parts import CPU_KERNELS
from tests.gpu.machine import Machine, Report, WrongError

BLOCK_SIZES: Final = (16, 256)
Backends = dict[str, list[str]]


def backends_here(machine: Machine) -> Backends:
    """Names of those that each part is about; in the interpreter a whole step takes too long."""
    specs = [machine.spec(64, 4, 4, size) for size in BLOCK_SIZES]
    served = [each for each in BACKENDS if any(each in machine.backends(spec) for spec in specs)]
    names = [each.name for each in served]
    if not machine.is_gpu:
        return {
            "graphs": [],
            "whole step": names[-1:],
            "attention": [*names, CPU_KERNELS],
            "bandwidth": names,
        }
    captured = [each.name for each in served if each.can_be_captured]
    return {"graphs": captured, "whole step": captured, "attention": names, "bandwidth": captured}


def environment(machine: Machine) -> dict[str, Any]:
    try:
        from triton import __version__ as triton
    except ImportError as error:
        triton = f"not there: {error}"
    return {
        "is_gpu": machine.is_gpu,
        "torch": torch.__version__,
        "triton": triton,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name()
        if machine.is_gpu
        else f"CPU, {torch.get_num_threads()} threads",
        "capability": torch.cuda.get_device_capability() if machine.is_gpu else None,
        "backends": backends_here(machine),
        "refused": {
            f"block {size}": {
                name: why
                for name, why in machine.refusals(machine.spec(128, 8, 4, size)).items()
                if why is not None
            }
            for size in BLOCK_SIZES
        },
    }


def rates(machine: Machine) -> dict[str, Any]:
    """The ceilings: bytes read and written by a copy, and a large product's operations."""
    return {"copy_bytes_per_second": copy_rate(machine), "flops_per_second": flop_rate(machine)}


def copy_rate(machine: Machine) -> float:
    num_bytes = (4 << 30) if machine.is_gpu else (8 << 20)
    source = torch.empty(num_bytes, dtype=torch.uint8, device=machine.device).random_()
    target = torch.empty_like(source)

    def work() -> None:
        target.copy_(source)

    return 2 * source.nbytes / machine.seconds(work)


def flop_rate(machine: Machine) -> float:
    """Of random numbers: a chip that multiplies ones draws less power, and so is faster than it ever is."""
    size = 8192 if machine.is_gpu else 128
    a, b = (torch.randn(size, size, device=machine.device, dtype=machine.dtype) for _ in range(2))
    product = torch.empty_like(a)

    def work() -> None:
        torch.matmul(a, b, out=product)

    return 2 * size**3 / machine.seconds(work)


class Findings:
    """What was found, in a file whose last entry may be under way."""

    def __init__(self, machine: Machine, path: Path | None) -> None:
        self.machine = machine
        self.path = path
        self.units: list[check.Unit] = []

    def unit(self, unit: check.Unit, work: Callable[[Report], dict[str, Any]]) -> check.Unit:
        """Run one; what goes wrong in it is written down."""
        started = time.monotonic()
        self.units.append(unit)
        self._write()

        def report(found: dict[str, Any]) -> None:
            unit["found"] = found
            self._write()

        if self.machine.is_late:
            unit |= {"verdict": "not run", "why": "no time was left"}
        else:
            try:
                found = work(report)
                unit |= {"verdict": "unfinished" if found.get("not_run") else "good", "found": found}
            except WrongError as wrong:
                unit |= {"verdict": "WRONG", "why": str(wrong), "found": wrong.result}
            except Exception as error:  # noqa: BLE001 - see the module
                why = f"{type(error).__name__}: {error}"[:500]
                unit |= {"verdict": "BROKEN", "why": why, "trace": traceback.format_exc()[-3000:]}
        unit["seconds"] = round(time.monotonic() - started, 1)
        self._write()
        return unit

    def _write(self) -> None:
        if self.path is not None:
            check.write_whole(self.path, self.units)


def work_of(
    unit: check.Unit, machine: Machine, measured: dict[str, float]
) -> Callable[[Report], dict[str, Any]]:
    """What finds it; `measured` are the rates, by their names in what was found of them."""

    def backend() -> type[AttentionBackend]:
        return next(each for each in BACKENDS if each.name == unit["backend"])

    def attention(report: Report) -> dict[str, Any]:
        if unit["backend"] == CPU_KERNELS:
            return attention_parts.kernels(machine)
        return attention_parts.correctness(machine, backend(), report)

    copy, flops = measured["copy_bytes_per_second"], measured["flops_per_second"]
    return {
        "environment": lambda _: environment(machine),
        "rates": lambda _: rates(machine),
        "operations": lambda _: operations_part.operations(machine),
        "filters": lambda report: filters_part.filters(machine, report),
        "graphs": lambda report: model_parts.graphs(machine, backend(), report),
        "sampling": lambda report: model_parts.sampling(machine, report),
        "executor": lambda report: executor_part.executor(machine, report),
        "whole step": lambda report: model_parts.whole_step(machine, backend(), copy, flops, report),
        "attention": attention,
        "bandwidth": lambda report: attention_parts.bandwidth(machine, backend(), copy, report),
    }[unit["part"]]


def run(options: argparse.Namespace, started: float) -> int:
    """The parts that `options` name, of the back ends that they name; what was found is in the file."""
    machine = Machine.here(options.seconds - (time.monotonic() - started))
    measured = {"copy_bytes_per_second": options.copy_rate, "flops_per_second": options.flop_rate}
    findings = Findings(machine, options.json)
    for unit in wanted(options.part, options.backend, backends_here(machine)):
        done = findings.unit(unit, work_of(unit, machine, measured))
        if done["part"] == "rates":
            measured |= done.get("found", {})
        said = f"{done['part']} {done['backend'] or ''}: {done['verdict']}. {done.get('why', '')}"
        print("\n  ".join([said, *check.lines_of(done["part"], done.get("found", {}))]), flush=True)
    return 0


def wanted(parts: Sequence[str], names: Sequence[str] | None, here: Backends) -> list[check.Unit]:
    """The units of `parts` whose back ends are among `names`, or any where there are none."""
    units = check.units_of(parts, here)
    return [each for each in units if names is None or each["backend"] is None or each["backend"] in names]
