"""Builds the kernels with the system's C++ compiler, once for each source and instruction set.

The shared object goes into a cache directory (`$CHAIRLIFT_CACHE_DIR`, or `chairlift` in `$XDG_CACHE_HOME`, or
`~/.cache/chairlift`) under a name that says what it was made from: a changed source is another file, and two
processes that build at once put the same file in place. Instruction sets are named, never "whatever this
machine has": the same file gives the same bits on every machine that has the set, and an image without a
compiler can bring what `python -m executor.kernels` has built elsewhere.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

SOURCES: Final = Path(__file__).parent
COMPILER: Final = "g++"
FLAGS: Final = (
    "-std=c++17",
    "-O2",
    "-pipe",
    "-fno-exceptions",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-Wno-psabi",
    "-pthread",
)
BUILD_SECONDS: Final = 120
"""A compiler that has not ended by then never will."""

log = structlog.get_logger()


class KernelsUnavailableError(Exception):
    """Why there are no kernels here, as a clause for people."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """What the compiler may use: its flags, and what the processor needs, in the words of /proc/cpuinfo."""

    name: str
    flags: tuple[str, ...]
    features: frozenset[str]


_V2: Final = frozenset({"ssse3", "sse4_1", "sse4_2", "popcnt", "cx16"})
_V3: Final = _V2 | {"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"}
_V4: Final = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_WIDE: Final = ("-march=x86-64-v4", "-mprefer-vector-width=512")

INSTRUCTION_SETS: Final = (
    InstructionSet(
        "amx",
        (*_WIDE, "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        _V4 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"},
    ),
    InstructionSet(
        "avx512_bf16", (*_WIDE, "-mavx512vnni", "-mavx512bf16"), _V4 | {"avx512_vnni", "avx512_bf16"}
    ),
    InstructionSet("avx512_vnni", (*_WIDE, "-mavx512vnni"), _V4 | {"avx512_vnni"}),
    InstructionSet("avx512", _WIDE, _V4),
    InstructionSet("avx2_vnni", ("-march=x86-64-v3", "-mavxvnni"), _V3 | {"avx_vnni"}),
    InstructionSet("avx2", ("-march=x86-64-v3",), _V3),
    InstructionSet("x86_64", ("-march=x86-64-v2",), _V2),
)
"""The fastest first."""


def available() -> tuple[InstructionSet, ...]:
    """The sets that this processor has, the fastest first."""
    if platform.machine() != "x86_64":
        return ()
    features = processor_features()
    return tuple(each for each in INSTRUCTION_SETS if each.features <= features)


def processor_features() -> frozenset[str]:
    """What the processor and the kernel offer, in the words of /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1] for line in lines if line.startswith("flags")), "").split())


def built(instruction_set: InstructionSet, tell: Callable[[str], None] | None = None) -> Path:
    """The shared object for `instruction_set`, built if there is none yet: `tell` gets a line before that.

    Raises KernelsUnavailableError.
    """
    sources = sorted([*SOURCES.glob("*.hpp"), *SOURCES.glob("*.cpp")])
    digest = hashlib.sha256("\0".join([*FLAGS, *instruction_set.flags]).encode())
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    path = cache_directory() / f"kernels-{instruction_set.name}-{digest.hexdigest()[:16]}.so"
    if not path.exists():
        started = time.monotonic()
        _build(instruction_set, path, tell)
        log.info("kernels_built", path=str(path), seconds=round(time.monotonic() - started, 2))
    return path


def cache_directory() -> Path:
    """Where built kernels lie; the first of these variables that is set says it.

    Raises KernelsUnavailableError.
    """
    if own := os.environ.get("CHAIRLIFT_CACHE_DIR"):
        return Path(own)
    if common := os.environ.get("XDG_CACHE_HOME"):
        return Path(common) / "chairlift"
    try:
        return Path.home() / ".cache" / "chairlift"
    except RuntimeError as error:  # a user of no name, as containers have them
        raise KernelsUnavailableError(
            f"there is no place for them ({error}): set CHAIRLIFT_CACHE_DIR"
        ) from error


def _build(instruction_set: InstructionSet, path: Path, tell: Callable[[str], None] | None) -> None:
    if shutil.which(COMPILER) is None:
        raise KernelsUnavailableError(
            f"there is no compiler {COMPILER} to build the kernels with: install it, or bring what "
            "`python -m executor.kernels` has built elsewhere"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            unfinished = Path(folder) / path.name
            if tell is not None:
                tell(f"building the {instruction_set.name} kernels with {COMPILER}, once; it takes seconds")
            _output(
                *(COMPILER, *FLAGS, *instruction_set.flags),
                *("-o", str(unfinished), str(SOURCES / "kernels.cpp")),
            )
            unfinished.replace(path)
    except OSError as error:
        raise KernelsUnavailableError(
            f"the kernels cannot be written to {path.parent} ({error.strerror or error}): name another "
            "folder by CHAIRLIFT_CACHE_DIR"
        ) from error


def _output(*command: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - the words are our own
            command, capture_output=True, text=True, check=False, timeout=BUILD_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise KernelsUnavailableError(f"{command[0]} did not end within {BUILD_SECONDS} s") from error
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["it says nothing"]
        raise KernelsUnavailableError(f"{command[0]} failed: {last[0]}")
    return done.stdout
