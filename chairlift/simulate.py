"""`chairlift simulate`: runs a load under several schedulers, on the server's own core, in logical time."""

import json
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from chairlift.about import about
from chairlift.flag_files import to_write
from chairlift.flag_numbers import positives
from chairlift.lab import pictures
from chairlift.lab.loads import Load, LoadError
from chairlift.lab.loop import Arrival
from chairlift.lab.run import Setup, Summary, configure_collector, longest, simulate
from chairlift.lab.schemes import SCHEMES
from chairlift.lab.setups import Choice, SetupError, add_flags, at_rate, choice_of
from chairlift.lab.step_times import StepTimesError
from chairlift.parser import Parser
from chairlift.tables import compared, figure, seconds, show

_ADVANCE_EVERY = 64  # requests: a bar that moves more often costs more than it tells


def main(argv: list[str]) -> int:
    """Simulates each scheme asked for; returns the exit code: 1 when one of them took no request."""
    parser = Parser(
        prog="chairlift simulate",
        description=about(__doc__),
        epilog="docs/lab.md shows a few runs; docs/papers.md what papers claim, and what comes out here.",
    )
    add_flags(parser, default_requests=1000)
    parser.add_argument(
        "--scheme",
        action="append",
        choices=list(SCHEMES),
        help="who schedules; may be given several times; default chairlift",
    )
    parser.add_argument(
        "--rates", type=positives, metavar="R,R,...", help="each scheme at each of these requests a second"
    )
    parser.add_argument("--json", type=to_write, metavar="FILE", help="writes all figures")
    parser.add_argument(
        "--png",
        type=to_write,
        metavar="FILE",
        help="draws batch and memory over time, and service with --tenants; latency against load with "
        "--rates; .pdf and .svg are drawn as such",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress, no table")
    options = parser.parse_args(argv)
    if options.rates:
        if options.rate is not None:
            parser.error("--rate beside --rates: name all of them by --rates")
        options.rate = options.rates[0]
    try:
        choice = choice_of(options)
        if options.png is not None:
            pictures.check(options.png)
        schemes = list(dict.fromkeys(options.scheme or ["chairlift"]))
        choices = [at_rate(choice, rate) for rate in options.rates or ()] or [choice]
        watches = options.png is not None and not options.rates
        configure_collector()
        runs = [_run(each, schemes, quiet=options.quiet, watches=watches) for each in choices]
        if options.json is not None:
            options.json.write_text(json.dumps(_figures(options.rates, runs), indent=2) + "\n")
        if options.png is not None and options.rates:
            pictures.draw_curves(_curves(options.rates, runs), options.png)
        elif options.png is not None:
            pictures.draw(runs[0][1], options.png)
    except (LoadError, SetupError, StepTimesError, pictures.NoPicturesError, OSError) as error:
        print(f"chairlift simulate: {error}", file=sys.stderr)
        return 2
    if not options.quiet:
        for rate, (summaries, _) in zip(options.rates or [None], runs, strict=True):
            show(table(summaries, rate))
    return _refusals_told(runs, choice.setup)


Run = tuple[list[Summary], dict[str, pictures.Watcher]]


def _refusals_told(runs: list[Run], setup: Setup) -> int:
    """Says which schemes took no request, and returns the exit code: 1 when there is one."""
    every = [item for summaries, _ in runs for item in summaries]
    refusing = list(dict.fromkeys(item.scheme for item in every if item.refused == item.requests))
    for scheme in refusing:
        print(
            f"chairlift simulate: {scheme} refused every request: one has room for "
            f"{longest(setup, scheme):,} tokens, prompt and output (--max-seq-len, --num-blocks)",
            file=sys.stderr,
        )
    return 1 if refusing else 0


def _figures(rates: list[float] | None, runs: list[Run]) -> list[dict[str, object]]:
    told = [{} if rates is None else {"rate": rate} for rate in rates or [0.0]]
    return [
        told_of | summary.as_json()
        for told_of, (summaries, _) in zip(told, runs, strict=True)
        for summary in summaries
    ]


def _curves(rates: list[float], runs: list[Run]) -> dict[str, list[tuple[float, Summary]]]:
    curves: dict[str, list[tuple[float, Summary]]] = {}
    for rate, (summaries, _) in zip(rates, runs, strict=True):
        for summary in summaries:
            curves.setdefault(summary.scheme, []).append((rate, summary))
    return curves


def _run(choice: Choice, schemes: list[str], *, quiet: bool, watches: bool) -> "Run":
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    summaries: list[Summary] = []
    watched: dict[str, pictures.Watcher] = {}
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as progress:
        for name in schemes:
            task = progress.add_task(name, total=choice.load.num_requests)
            watcher = watched[name] = pictures.Watcher()
            arrivals = _counted(choice.load, progress, task)
            on_step = watcher.note if watches else None
            summaries.append(simulate(choice.setup, arrivals, name, on_step=on_step))
    return summaries, watched


def _counted(load: Load, progress: Progress, task: TaskID) -> Iterator[Arrival]:
    for number, arrival in enumerate(load):
        if number % _ADVANCE_EVERY == 0:
            progress.update(task, completed=number)
        yield arrival
    progress.update(task, completed=load.num_requests)


def table(summaries: list[Summary], rate: float | None = None) -> Table:
    """A column for each run, all at this rate; a dash where nobody came to that."""
    at = "" if rate is None else f", {rate:g} a second"
    return compared(_title(summaries[0]) + at, {item.scheme: item for item in summaries}, _CELLS)


def _share(value: float) -> str:
    return figure(100 * value, "{:.1f} %")


_CELLS: dict[str, Callable[[Summary], str]] = {
    "output tokens/s": lambda item: figure(item.output_tokens_per_second, "{:,.0f}"),
    "first token p50": lambda item: seconds(item.first_token_p50),
    "first token p99": lambda item: seconds(item.first_token_p99),
    "between tokens p50": lambda item: seconds(item.between_tokens_p50),
    "between tokens p99": lambda item: seconds(item.between_tokens_p99),
    "whole time by tokens p50": lambda item: seconds(item.per_output_token_p50),
    "rows of a step": lambda item: figure(item.mean_rows, "{:.1f}"),
    "running, by time": lambda item: figure(item.mean_running, "{:.1f}"),
    "KV held": lambda item: _share(item.kv_held_share),
    "of it with tokens": lambda item: _share(item.kv_filled_share),
    "preemptions": lambda item: f"{item.preemptions:,}",
    "computed in vain": lambda item: _share(item.recomputed_share),
    "prompt tokens found": lambda item: _share(item.prefix_hit_share),
    "requests refused": lambda item: f"{item.refused:,}",
}


def _title(summary: Summary) -> str:
    return f"{summary.requests:,} requests, {summary.output_tokens:,} output tokens"
