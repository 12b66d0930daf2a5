#!/usr/bin/env python3
"""Makes the stubs beside `protos/v1/*.proto`; with `--check` says whether the committed ones are stale.

Stubs are compiled with the repository root as include path, so that generated imports read
`from protos.v1 import ...`.
"""

import filecmp
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = sorted((ROOT / "protos" / "v1").glob("*.proto"))
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def generate(target: Path) -> None:
    """Writes all stubs under `target`, keeping the `protos/v1` folders."""
    names = [str(path.relative_to(ROOT)) for path in PROTOS]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}"]
    command += [f"--{kind}_out={target}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    # protoc looks for its plugins on the path; they are installed beside this interpreter.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    subprocess.run([*command, *names], check=True, cwd=ROOT, env=os.environ | {"PATH": path})


def stale(fresh: Path) -> list[str]:
    """Names of stubs that differ from, or miss in, the committed ones."""
    names = [f"protos/v1/{path.stem}{suffix}" for path in PROTOS for suffix in SUFFIXES]
    return [
        name
        for name in names
        if (fresh / name).exists()
        and not ((ROOT / name).exists() and filecmp.cmp(fresh / name, ROOT / name, shallow=False))
    ]


def main() -> int:
    """Generates, or checks; returns the exit code."""
    if "--check" not in sys.argv[1:]:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        names = stale(Path(folder))
    if names:
        print("Stale stubs, run scripts/gen_protos.py:", *names, sep="\n  ")
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
