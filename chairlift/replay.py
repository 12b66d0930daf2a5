"""`chairlift replay`: feeds a record to the scheduler's core again, as it was or under other settings."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from chairlift.about import about
from chairlift.lab.changes import ChangeError, add_flags, change_of, check_fleet
from chairlift.lab.fit import FitError
from chairlift.lab.replay import DifferentError, Report, UnreadableError, replay_file
from chairlift.lab.what_if import Change, Latencies, fitted, modelled, recorded
from chairlift.parser import Parser
from chairlift.tables import compared, seconds, show


def main(argv: list[str]) -> int:
    """Replays; returns the exit code: 1 when plans differ or the settings take nobody, 2 for a refusal."""
    options = _parser().parse_args(argv)
    console = Console(stderr=True)
    try:
        with console.status("replaying"):
            report = replay_file(options.record, may_be_cut=options.cut)
    except (UnreadableError, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        return _refused(options, str(why))
    except DifferentError as error:
        print(f"chairlift replay: {options.record}: the plans differ. {error}", file=sys.stderr)
        return 1
    print(_told(report))
    change = change_of(options)
    if change is None:
        return 0
    try:
        check_fleet(options, report.fleet)
        columns, title = _compared(report, change)
    except (ChangeError, FitError) as error:
        return _refused(options, str(error))
    show(compared(title, columns, _CELLS))
    changed = columns["what if"]
    if 0 < changed.requests == changed.refused:
        print("chairlift replay: under these settings every request is refused", file=sys.stderr)
        return 1
    return 0


def _refused(options: argparse.Namespace, why: str) -> int:
    print(f"chairlift replay: {options.record}: {why}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="chairlift replay",
        description=about(__doc__),
        epilog="With any of the settings, the recorded load is run under them besides (docs/lab.md).",
    )
    parser.add_argument("record", type=Path, metavar="FILE", help="what a scheduler wrote with --record")
    parser.add_argument(
        "--cut", action="store_true", help="take a record whose scheduler was killed as far as it is whole"
    )
    add_flags(parser)
    return parser


def _told(report: Report) -> str:
    head = report.header
    early = f"\nthe recording ended here, before its scheduler did: {report.ended_early}"
    return (
        f"recorded {head.get('began', '')} by {head.get('scheduler_id') or 'a scheduler'}, "
        f"version {head.get('version')}\n"
        f"{report.num_events:,} events in {report.seconds:,.1f} s: {len(report.seen):,} requests, "
        f"{report.num_refused:,} refused; {report.num_tokens:,} tokens computed; "
        f"{report.preemptions} preemptions, {report.displacements} displacements, "
        f"{report.num_lost} executors gone\n"
        f"{report.num_plans:,} plans, all equal to those recorded{early if report.ended_early else ''}"
    )


def _compared(report: Report, change: Change) -> tuple[dict[str, Latencies], str]:
    """The record, its model, and the model under the changed settings; and what they rest on."""
    fit = fitted(report)
    columns = {
        "recorded": recorded(report),
        "modelled": modelled(report, fit.prices, lambda limits: limits),
        "what if": modelled(report, fit.prices, change),
    }
    return columns, f"step times fitted to {fit.sentence}"


_CELLS: dict[str, Callable[[Latencies], str]] = {
    "requests": lambda item: f"{item.requests:,}",
    "output tokens": lambda item: f"{item.output_tokens:,}",
    "first token p50": lambda item: seconds(item.first_token_p50),
    "first token p99": lambda item: seconds(item.first_token_p99),
    "between tokens p50": lambda item: seconds(item.between_tokens_p50),
    "between tokens p99": lambda item: seconds(item.between_tokens_p99),
    "whole time, mean": lambda item: seconds(item.total_mean),
    "ended by themselves, in time": lambda item: f"{item.in_time:,}",
    "preemptions": lambda item: f"{item.preemptions:,}",
    "refused": lambda item: f"{item.refused:,}",
}
