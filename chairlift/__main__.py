"""The command line: its first word selects a command; that command's module reads the rest.

Modules are imported when they are asked for, so that help and errors are quick. A service is not imported
at all: the process becomes it.
"""

import argparse
import errno
import importlib
import importlib.metadata
import io
import os
import signal
import sys
from pathlib import Path

import rpc.quiet  # noqa: F401 - before anything of ours imports grpc
from chairlift.origins import foreign_packages
from chairlift.parser import Parser

_COMMANDS = {
    "serve": "serve a model on this machine: router, scheduler and executor",
    "generate": "ask a running router and stream the answer",
    "pull": "fetch a model",
    "watch": "follow the batch of a running router, step by step",
    "status": "how a running server is: each tier, its version and its load",
    "top": "the batch of a running router as a moving picture in the terminal",
    "explain": "where the time of one request went",
    "demo": "twelve questions at once, and what the batch did",
    "bench": "measure a model on this machine",
    "simulate": "what schedulers do to a load, in logical time",
    "calibrate": "measure how long an executor's steps take, for simulate",
    "replay": "a recorded scheduler again, as it was or under other settings",
    "capacity": "the highest rate that keeps stated limits, or the executors a rate needs",
    "key": "make an API key",
    "certs": "make certificates to try TLS with",
    "conformance": "check that an executor keeps the step protocol",
}
_SERVICES = {
    "router": "one router: clients and text",
    "scheduler": "one scheduler: queue, policy, KV blocks, plans",
    "executor": "one executor: weights, KV cache, sampling",
}


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    command, *rest = argv or ["--help"]
    complaints = foreign_packages(["protos", "rpc", *_SERVICES])
    if complaints:
        print(*(f"chairlift: {complaint}" for complaint in complaints), sep="\n", file=sys.stderr)
        return 2
    if command in _SERVICES:
        flags = rest if command == "scheduler" else _with_folder(command, rest)
        # An exec, not a child: signals, exit code and process id are the service's own.
        os.execv(sys.executable, [sys.executable, "-m", command, *flags])  # noqa: S606 - our own module
    if command in _COMMANDS:
        return _run(command, rest)
    _parser().parse_args([command, *rest])  # prints help or version, or refuses the command
    return 0


def _with_folder(service: str, flags: list[str]) -> list[str]:
    """A service's flags, the name of a pulled model made its folder: services know nothing of pulling."""
    parser = Parser(prog=f"chairlift {service}", add_help=False, allow_abbrev=False)
    parser.add_argument("--model", default=os.environ.get("CHAIRLIFT_MODEL"))
    options, others = parser.parse_known_args(flags)
    if {"-h", "--help"} & set(others) or options.model is None or Path(options.model).exists():
        return flags
    models = importlib.import_module("chairlift.models_dir")
    errors = importlib.import_module("rpc.errors")
    try:
        return [*others, "--model", str(models.resolve(options.model, models.default_models_dir()))]
    except errors.StartError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def _run(command: str, argv: list[str]) -> int:
    """One command to its end. Ctrl-C, and a reader that has gone (`| head`), end it without a word.

    A terminal that cannot show a character gets a question mark in its place.

    Of Ctrl-C asyncio has made a cancellation before: a call under way is given up, and with it its request.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            exit_code: int = importlib.import_module(f"chairlift.{command}").main(argv)
            return exit_code
        finally:
            if sys.stdout is not None:  # it is closed from the start, by `>&-`
                sys.stdout.flush()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one would be a traceback of Python's own end
        return 128 + signal.SIGINT
    except BrokenPipeError:
        _drop_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _drop_output()
        print(f"chairlift {command}: {error.strerror}", file=sys.stderr)
        return 1


def _drop_output() -> None:
    """What is left of it would be flushed at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    lines = [f"  {name:<12} {text}" for name, text in (_COMMANDS | _SERVICES).items()]
    parser = Parser(
        prog="chairlift",
        usage="chairlift COMMAND [FLAGS]",
        description="An LLM server whose batch is re-formed at every model iteration.",
        epilog="\n".join(["commands:", *lines, "", "`chairlift COMMAND --help` says what a command takes."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_version())
    parser.add_argument("COMMAND", choices=[*_COMMANDS, *_SERVICES], nargs="?", help=argparse.SUPPRESS)
    return parser


def _version() -> str:
    try:
        return importlib.metadata.version("chairlift")
    except importlib.metadata.PackageNotFoundError:
        return "not installed: run from a source tree"


if __name__ == "__main__":
    sys.exit(main())
