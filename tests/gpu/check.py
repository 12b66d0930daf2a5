"""Everything about the executor that only a GPU can settle, in at most six minutes on one.

    python -m tests.gpu.check --json gpu_check.json
    python -m tests.gpu.check --part attention --backend triton     one part of it

Each part, and of some parts each back end, is a process of its own that is ended when its time is up: a
kernel that hangs, or that leaves the GPU unusable to its process, stops no other. What was found is printed,
and the file written anew, after each of them. Without a GPU the same parts run on the CPU, small, with the
Triton kernels in their interpreter: that shows that the script runs, and its figures mean nothing.

Exit codes: 0 all is good, 1 something is wrong or broken, 2 something is missing here, 3 a part was not run,
or not all of it.

Must not know: torch, nor anything else that may be missing where this runs. `tests.gpu.parts` is the part.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

SECONDS: Final = 360.0
PARTS: Final = (
    *("environment", "rates", "operations", "filters", "graphs", "sampling", "executor"),
    *("whole step", "attention", "bandwidth"),
)
OF_EACH_BACKEND: Final = frozenset({"graphs", "whole step", "attention", "bandwidth"})
MOST_SECONDS: Final = {
    "environment": 100.0, "rates": 60.0, "operations": 60.0, "filters": 60.0, "graphs": 120.0,
    "sampling": 60.0, "executor": 90.0, "whole step": 150.0, "attention": 120.0,
}  # fmt: skip
"""Of all processes of a part; the last one has what is left."""
LEAST_SECONDS: Final = 5.0
"""With less left nothing is begun."""
SOFT_SHARE: Final = 0.85
"""Of a process's time: what is not begun by then is left out, so that the process ends by itself."""
NUM_BUILDERS: Final = max(1, (os.cpu_count() or 1) // 2)
NEEDED: Final = ("llguidance", "numpy", "structlog", "torch")
NOT_ASKED: Final = ("triton", "reference")
"""The back ends that are tried when the environment does not say which there are."""
WORSE: Final = ("good", "unfinished", "not run", "WRONG", "BROKEN")
"""Verdicts, from the best to the worst."""

Unit = dict[str, Any]
"""What one process found: `part`, `backend`, `verdict`, `seconds`, `found`, `why`, `trace`."""


def units_of(parts: Iterable[str], backends: dict[str, Sequence[str]]) -> list[Unit]:
    """What there is to be found in `parts`; `backends` are those of each part."""
    return [
        {"part": part, "backend": backend}
        for part in parts
        for backend in (backends.get(part, NOT_ASKED) if part in OF_EACH_BACKEND else (None,))
    ]


class Check:
    """The parts in turn, each with what it found."""

    def __init__(
        self, seconds: float, path: Path | None, command: Sequence[str], builder: Sequence[str] = ()
    ) -> None:
        """`command` is what runs a part, but for its arguments, and `builder` what compiles a share of the
        kernels; `path` is where all is written."""
        self.deadline = time.monotonic() + seconds
        self.path = path
        self.command = list(command)
        self.builder = list(builder)
        self.is_gpu: bool | None = None
        self.parts: dict[str, dict[str, Any]] = {}

    def run(self) -> bool:
        """All of them; whether none is wrong or broken."""
        backends: dict[str, Sequence[str]] = {}
        with ExitStack() as beside:
            for part in PARTS:
                if self.is_gpu is False:
                    # Nothing can be spoilt for those that follow: they are spared a start each.
                    self.process(units_of(PARTS[1:], backends), math.inf)
                    break
                self.of_each_backend(part, backends)
                if part == "environment":
                    found = self.parts[part].get("found", {})
                    self.is_gpu = found.get("is_gpu")
                    backends = found.get("backends", {})
                    if self.is_gpu and self.builder:
                        beside.enter_context(building(self.builder, NUM_BUILDERS))
        for part in PARTS:
            if part not in self.parts:
                self.take(
                    {"part": part, "backend": None, "verdict": "not run", "seconds": 0.0}
                    | {"why": "no back end here is made for it"}
                )
        return not any(part["verdict"] in {"WRONG", "BROKEN"} for part in self.parts.values())

    @property
    def is_whole(self) -> bool:
        """Whether nothing was left out."""
        return not any(part["verdict"] in {"not run", "unfinished"} for part in self.parts.values())

    def of_each_backend(self, part: str, backends: dict[str, Sequence[str]]) -> None:
        """A part, in as many processes as there are back ends; what one does not need is the next ones'."""
        units = units_of([part], backends)
        until = time.monotonic() + MOST_SECONDS.get(part, math.inf)
        for place, unit in enumerate(units):
            left = min(until, self.deadline) - time.monotonic()
            self.process([unit], left / (len(units) - place))

    def process(self, units: list[Unit], seconds: float) -> None:
        """Find `units` in one process that has so many seconds."""
        started = time.monotonic()
        seconds = min(seconds, self.deadline - started)
        if seconds < LEAST_SECONDS:
            for unit in units:
                self.take(unit | {"verdict": "not run", "why": "no time was left", "seconds": 0.0})
            return
        with TemporaryDirectory() as folder:
            path, output = Path(folder) / "found.json", Path(folder) / "output"
            arguments = ["--json", str(path), "--seconds", f"{SOFT_SHARE * seconds:.1f}", *self._rates()]
            arguments += ["--part", *dict.fromkeys(unit["part"] for unit in units)]
            if any(names := [unit["backend"] for unit in units if unit["backend"] is not None]):
                arguments += ["--backend", *dict.fromkeys(names)]
            ending = ending_of([*self.command, *arguments], seconds, output)
            found: list[Unit] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
            said = output.read_text(encoding="utf-8", errors="replace")[-3000:]
        took = round(time.monotonic() - started, 1)
        for unit in units:
            mine = [each for each in found if all(each[name] == unit[name] for name in unit)]
            done = mine[0] if mine else unit
            if done.get("verdict") is None and ending is None:
                done |= {"verdict": "not run", "why": "the process before it has ended", "seconds": 0.0}
            elif done.get("verdict") is None:
                done |= {"verdict": "BROKEN", "why": ending, "trace": said, "seconds": took}
                ending = None
            self.take(done)

    def take(self, unit: Unit) -> None:
        """What was found goes to its place, to the file, and to whoever watches."""
        told = {name: value for name, value in unit.items() if name not in {"part", "backend"}}
        if unit["backend"] is None:
            self.parts[unit["part"]] = told
        else:
            part = self.parts.setdefault(unit["part"], {"verdict": "good", "backends": {}})
            part["backends"][unit["backend"]] = told
            part["verdict"] = max(part["verdict"], told["verdict"], key=WORSE.index)
        self.write()
        name = unit["part"] if unit["backend"] is None else f"{unit['part']}, {unit['backend']}"
        line = f"{name:24} {told['verdict']:10} {told['seconds']:6.1f} s  {told.get('why', '')}"
        print("\n  ".join([line[:300].rstrip(), *lines_of(unit["part"], told.get("found", {}))]), flush=True)

    def write(self) -> None:
        if self.path is not None:
            write_whole(self.path, {"is_gpu": self.is_gpu, "parts": self.parts})

    def _rates(self) -> list[str]:
        found = self.parts.get("rates", {}).get("found")
        if not found:
            return []
        return [
            "--copy-rate", str(found["copy_bytes_per_second"]),
            "--flop-rate", str(found["flops_per_second"]),
        ]  # fmt: skip


def ending_of(command: Sequence[str], seconds: float, output: Path) -> str:
    """Run a process, and end it with all that it started when its time is up; how it ended, in words."""
    with (
        output.open("wb") as said,
        subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True) as process,
    ):
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"it was not done after {seconds:.0f} s, and was ended"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if code < 0:
        return f"it was ended by signal {-code}, {signal.Signals(-code).name}"
    return f"it ended with exit code {code} and had not said what it found"


@contextmanager
def building(builder: Sequence[str], number: int) -> Iterator[None]:
    """Have the attention kernels compiled in so many processes, beside the first parts, which need few.

    One after the other they would take most of the time that their part has. What is not compiled when a part
    asks for it is compiled then, so nobody looks at how the processes end.
    """
    nowhere, shares = subprocess.DEVNULL, [[str(share), str(number)] for share in range(number)]
    processes = [
        subprocess.Popen([*builder, "all", *share], stdout=nowhere, stderr=nowhere, start_new_session=True)
        for share in shares
    ]
    try:
        yield
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def write_whole(path: Path, content: object) -> None:
    """Who reads the file finds what was there, or all of `content`."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def lines_of(part: str, found: dict[str, Any]) -> list[str]:
    """The figures in a few lines."""
    lines = []
    if not found or part == "environment":
        return lines
    if part == "rates":
        copy, product = found["copy_bytes_per_second"] / 1e12, found["flops_per_second"] / 1e12
        lines = [f"copy {copy:.2f} TB/s, product {product:.0f} Tflop/s"]
    elif part == "attention":
        lines = [f"{found.get('cases')} cases, worst relative error {found.get('worst_error')}"]
        lines += [f"wrong: {each}" for each in found.get("failed", [])[:5]]
        if "nan_in_tails" in found:
            lines += [f"NaN behind the end of a context: {found['nan_in_tails']}"]
    elif part == "bandwidth":
        lines = [
            ", ".join(f"{name} {value}" for name, value in each.items()) for each in found.get("measured", [])
        ]
    else:
        lines = [f"{name} {value}" for name, value in found.items() if name != "not_run"]
    if found.get("not_run"):
        lines.append(f"not run, for want of time: {len(found['not_run'])}, {found['not_run'][0]} first")
    return lines


def missing() -> str | None:
    """What is not installed here, as a sentence for people; None when nothing is."""
    lacking = [name for name in NEEDED if find_spec(name) is None]
    if not lacking:
        return None
    return (
        f"The check needs {', '.join(NEEDED)}; not installed here: {', '.join(lacking)}. Install what is "
        f"missing (pip install {' '.join(lacking)}), or put a folder that has it on PYTHONPATH."
    )


def main(arguments: list[str]) -> int:
    started = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.check", description="What only a GPU can settle."
    )
    parser.add_argument("--json", type=Path, help="where to write all that was found")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all of it (default %(default)s)")
    parser.add_argument("--part", nargs="+", choices=PARTS, help="these alone, in this process")
    parser.add_argument("--backend", nargs="+", help="attention back ends of --part; all when not given")
    parser.add_argument("--copy-rate", type=float, default=math.nan, help="bytes per second, for --part")
    parser.add_argument("--flop-rate", type=float, default=math.nan, help="per second, for --part")
    options = parser.parse_args(arguments)
    if (sentence := missing()) is not None:
        print(sentence, file=sys.stderr)
        return 2
    if options.part is not None:
        from tests.gpu import parts

        return parts.run(options, started)
    # A process group is nobody's when the one that waits for it is gone.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    python = [sys.executable, "-m"]
    check = Check(
        options.seconds, options.json, [*python, "tests.gpu.check"], builder=[*python, "tests.gpu.variants"]
    )
    is_good = check.run()
    if check.is_gpu is False:
        print("There is no GPU here: the script runs, and its figures mean nothing.")
        return 0 if is_good else 1
    return 3 if is_good and not check.is_whole else 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
