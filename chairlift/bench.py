"""`chairlift bench KIND`: the benchmarks that anyone can run on their own model or server."""

import argparse
import importlib

from chairlift.parser import Parser

_KINDS = {
    "offline": "a workload file, all at once: seconds and tokens",
    "serve": "an open load on a running server: times to first token and between tokens, goodput",
}


def main(argv: list[str]) -> int:
    """Runs one kind; returns its exit code."""
    kind, *rest = argv or ["--help"]
    if kind in _KINDS:
        exit_code: int = importlib.import_module(f"chairlift.bench_{kind}").main(rest)
        return exit_code
    lines = [f"  {name:<12} {text}" for name, text in _KINDS.items()]
    parser = Parser(
        prog="chairlift bench",
        usage="chairlift bench KIND ...",
        description="Measures a model or a running server; anyone can, on their own.",
        epilog="\n".join(["kinds:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("KIND", choices=list(_KINDS), help=argparse.SUPPRESS)
    parser.parse_args(argv)
    return 0
