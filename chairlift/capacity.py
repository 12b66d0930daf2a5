"""`chairlift capacity`: the highest rate that keeps stated limits, or how many executors a rate needs."""

import argparse
import json
import sys
from dataclasses import replace

from chairlift.about import about
from chairlift.flag_files import to_write
from chairlift.lab.capacity import Targets, TargetsError, fewest_executors, highest_rate
from chairlift.lab.loads import LoadError
from chairlift.lab.run import Summary, configure_collector, simulate
from chairlift.lab.schemes import SCHEMES
from chairlift.lab.setups import (
    MAX_EXECUTORS,
    Choice,
    SetupError,
    add_flags,
    at_rate,
    choice_of,
    with_executors,
)
from chairlift.lab.step_times import StepTimesError
from chairlift.parser import Parser

_TARGETS = {
    "first_token_p50": "median seconds to the first token",
    "first_token_p99": "the same for 99 in 100",
    "between_tokens_p50": "median seconds between tokens",
    "between_tokens_p99": "the same for 99 in 100",
    "per_output_token_p50": "median of whole time by output tokens, seconds",
}


def main(argv: list[str]) -> int:
    """Searches; returns the exit code."""
    parser = Parser(
        prog="chairlift capacity",
        description=about(__doc__),
        epilog="With --rate it tells how many executors that rate needs; without, the highest rate.",
    )
    add_flags(parser, default_requests=2000)
    targets_group = parser.add_argument_group("limits to keep, at least one")
    for name, text in _TARGETS.items():
        targets_group.add_argument(f"--{name.replace('_', '-')}", type=float, metavar="SECONDS", help=text)
    parser.add_argument("--scheme", choices=list(SCHEMES), default="chairlift", help="who schedules")
    parser.add_argument("--json", type=to_write, metavar="FILE", help="writes what was found")
    options = parser.parse_args(argv)
    wants_executors = options.rate is not None
    if wants_executors and options.executors != parser.get_default("executors"):
        parser.error("--executors beside --rate: it is what is looked for; leave one of them out")
    try:
        targets = _targets_of(options)
        if not wants_executors:
            options.rate = 1.0  # where the search begins
        choice = choice_of(options)
        configure_collector()
        search = _executors if wants_executors else _rate
        told, found = search(choice, targets, options.scheme)
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=2) + "\n")
    except (LoadError, SetupError, StepTimesError, OSError) as error:
        print(f"chairlift capacity: {error}", file=sys.stderr)
        return 2
    except TargetsError as error:
        print(f"chairlift capacity: {error}", file=sys.stderr)
        return 1
    print(told)
    return 0


def _targets_of(options: argparse.Namespace) -> Targets:
    if options.arrivals == "at-once":
        raise SetupError("--arrivals at-once has no rate: there is nothing to search")
    values = {name: getattr(options, name) for name in _TARGETS}
    for name, value in values.items():
        if value is not None and not value > 0:
            raise SetupError(f"--{name.replace('_', '-')} is {value:g}: seconds above 0 are wanted")
    if all(value is None for value in values.values()):
        raise SetupError(f"no limit to keep: give one of --{', --'.join(_TARGETS).replace('_', '-')}")
    return Targets(**values)


def _rate(choice: Choice, targets: Targets, scheme: str) -> tuple[str, dict[str, object]]:
    load = replace(choice.load, arrivals="at-once", rate=None)
    at_once = _told("all at once", simulate(choice.setup, load, scheme), targets)
    if targets.missed(at_once) is None:
        raise SetupError(f"all {load.num_requests} requests at once keep the limits: give more --requests")

    def at(rate: float) -> Summary:
        tried = at_rate(choice, rate)
        return _told(f"{rate:9.4g} requests/s", simulate(tried.setup, tried.load, scheme), targets)

    found = highest_rate(at, targets)
    beyond = "" if found.missed is None else f"; at {found.missed_at:.3f}: {found.missed}"
    return f"{scheme} takes {found.rate:.3f} requests/s within the limits{beyond}", {
        "rate": found.rate,
        "missed_at": found.missed_at,
        "missed": found.missed,
    } | found.summary.as_json()


def _executors(choice: Choice, targets: Targets, scheme: str) -> tuple[str, dict[str, object]]:
    def with_count(count: int) -> Summary:
        tried = with_executors(choice, count)
        return _told(f"{count:3} executors", simulate(tried.setup, tried.load, scheme), targets)

    count, summary = fewest_executors(with_count, targets, at_most=MAX_EXECUTORS)
    told = f"{choice.load.rate:g} requests/s need {count} executor{'s' if count > 1 else ''} under {scheme}"
    return told, {"executors": count} | summary.as_json()


def _told(what: str, summary: Summary, targets: Targets) -> Summary:
    print(f"{what}   {targets.missed(summary) or 'within the limits'}", file=sys.stderr)
    return summary
