"""`chairlift bench serve`: puts an open-loop load on a running server and measures what clients see.

    chairlift bench serve --rate 1 --duration 40 --trace azure2023_conv.csv --result result.json

Requests come on their own: at `--rate` a second as a Poisson process, or, without it, when the trace says.
Their lengths are the trace's, clipped, or the same for all. Prompts are random ids that share nothing, others
in each run, so that no server has them in its cache; greedy, end tokens ignored. It speaks gRPC (`--address`)
or OpenAI's HTTP (`--url`), so other servers can be measured too.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from chairlift.bench_doors import Send, grpc_door, openai_door
from chairlift.flag_files import to_write
from chairlift.flag_numbers import positive, whole
from chairlift.lab import pictures
from chairlift.lab.loads import LoadError, Row, read_trace
from chairlift.open_loop import LATE_SECONDS, Due, Limits, Seen, poisson, prompts, report, until
from chairlift.parser import Parser
from chairlift.results import ChairliftError
from chairlift.router_flags import add_flags, from_flags, given_flags, waited_for
from rpc.address import AddressError
from rpc.errors import StartError


def main(argv: list[str]) -> int:
    """Runs the load; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    _fix_seeds(options)
    if options.url is not None and (unused := given_flags(parser, options)):
        parser.error(f"{', '.join(unused)} with --url: only one of the doors is asked; leave it out")
    try:
        if options.plot is not None:
            pictures.check(options.plot)
        dues = _dues(options)
        result, seen = asyncio.run(_measure(options, dues))
    except (StartError, LoadError, pictures.NoPicturesError, ChairliftError) as error:
        print(f"chairlift bench serve: {error}", file=sys.stderr)
        return 2
    result = {"load": _load_of(options)} | result
    if options.result is not None:
        options.result.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if options.plot is not None:
        _plot(options.plot, seen, result)
    print(*lines(result), sep="\n")
    return 0 if result["num_answered"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="chairlift bench serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser)
    parser.add_argument("--url", help="an OpenAI server instead: http://HOST:PORT/v1 or unix:PATH")
    parser.add_argument("--model", default="", help="the model's name (default: the server's first)")
    parser.add_argument("--rate", type=positive, help="requests a second (default: the trace's own times)")
    parser.add_argument("--trace", type=Path, help="arrival_s, prompt_tokens, output_tokens (docs/lab.md)")
    parser.add_argument("--max-in", type=whole, default=512, help="longest prompt, tokens (default: 512)")
    parser.add_argument("--max-out", type=whole, default=128, help="longest output, tokens (default: 128)")
    parser.add_argument("--duration", type=positive, help="seconds in which requests come")
    parser.add_argument("--num-requests", type=whole, help="most requests")
    parser.add_argument("--timeout", type=positive, default=600.0, help="for each, seconds (default: 600)")
    parser.add_argument("--ttft-limit", type=positive, help="goodput: most seconds to the first token")
    parser.add_argument("--itl-limit", type=positive, help="goodput: most seconds a token after the first")
    parser.add_argument("--vocab-size", type=whole, help="ids are below it (default: the model's, or 32,000)")
    parser.add_argument(
        "--seed", type=int, help="the same load again (default: other prompts at the same times)"
    )
    parser.add_argument("--prompt-seed", type=int, help="the same prompts alone (default: --seed, or drawn)")
    parser.add_argument("--warm-up", type=int, default=2, help="requests before the load (default: 2)")
    parser.add_argument("--result", type=to_write, help="a JSON file to write")
    parser.add_argument("--plot", type=to_write, help="a picture to draw: .png, .pdf or .svg")
    return parser


def _fix_seeds(options: argparse.Namespace) -> None:
    """Whoever names none gets the same times, and prompts that no run before has left in a server's cache."""
    if options.prompt_seed is None:
        options.prompt_seed = secrets.randbits(32) if options.seed is None else options.seed
    options.seed = options.seed or 0


def _dues(options: argparse.Namespace) -> list[Due]:
    """The load. Raises StartError or LoadError."""
    if options.duration is None and options.num_requests is None:
        raise StartError("say when it ends: --duration SECONDS, --num-requests N, or both")
    if options.rate is None and options.trace is None:
        raise StartError("say when requests come: --rate N a second, or --trace FILE with their times")
    rows = (
        [Row(None, options.max_in, options.max_out)] if options.trace is None else read_trace(options.trace)
    )
    lengths = [
        (min(row.num_prompt_tokens, options.max_in), min(row.num_output_tokens, options.max_out))
        for row in rows
    ]
    dues: Iterable[Due]
    if options.rate is not None:
        dues = poisson(options.rate, itertools.cycle(lengths), options.seed)
    else:
        times = [row.time for row in rows if row.time is not None]
        if len(times) < len(rows):
            raise StartError(f"{options.trace} tells no arrival times: --rate says when requests come")
        dues = [Due(time, *each) for time, each in zip(times, lengths, strict=True)]
    chosen = until(dues, seconds=options.duration, count=options.num_requests)
    if not chosen:
        raise StartError(f"no request comes in --duration {options.duration:g} s: make it longer")
    return chosen


async def _measure(options: argparse.Namespace, dues: list[Due]) -> tuple[dict[str, Any], list[Seen]]:
    async with await _door(options) as (send, vocab_size):
        warm_up = [Due(0.0, 16, 8)] * options.warm_up
        texts = prompts([*dues, *warm_up], options.vocab_size or vocab_size, options.prompt_seed)
        await asyncio.gather(*(send(prompt, 8, lambda: None) for prompt in texts[len(dues) :]))
        limits = Limits(options.ttft_limit, options.itl_limit)
        cpu_before, began = time.process_time(), time.monotonic()
        with _progress(len(dues)) as advance:
            seen = await run_load(
                send, dues, texts[: len(dues)], timeout_seconds=options.timeout, advance=advance
            )
        seconds, cpu_seconds = time.monotonic() - began, time.process_time() - cpu_before
        return report(seen, limits, seconds=seconds, cpu_seconds=cpu_seconds), seen


async def _door(options: argparse.Namespace) -> contextlib.AbstractAsyncContextManager[tuple[Send, int]]:
    """The one that is asked for, once the server is there as far as `--wait` says. Raises StartError."""
    if options.url is not None:
        return openai_door(options.url, options.model)
    try:
        router = from_flags(options)
    except AddressError as error:
        raise StartError(str(error)) from error
    await waited_for(router, options, "chairlift bench serve")
    return grpc_door(router, options.model)


async def run_load(
    send: Send,
    dues: list[Due],
    texts: list[list[int]],
    *,
    timeout_seconds: float,
    advance: Callable[[], None],
) -> list[Seen]:
    """Sends each request when it is due, whatever became of those before; returns when all have ended."""
    began = time.monotonic()

    async def one(due: Due, prompt: list[int]) -> Seen:
        seen = Seen(due)
        await asyncio.sleep(began + due.seconds - time.monotonic())
        seen.sent = time.monotonic() - began

        def came() -> None:
            seen.arrivals.append(time.monotonic() - began)

        try:
            async with asyncio.timeout(timeout_seconds):
                seen.num_tokens, seen.num_cached = await send(prompt, due.num_out, came)
            if not seen.arrivals:
                seen.failure = "the answer had no token"
        except TimeoutError:
            seen.failure = f"no end within {timeout_seconds:g} s"
        except ChairliftError as error:
            seen.failure = error.code
        advance()
        return seen

    return list(await asyncio.gather(*map(one, dues, texts)))


@contextlib.contextmanager
def _progress(total: int) -> Any:
    columns = (TextColumn("answered"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)


# --- what is shown ------------------------------------------------------------------------------------


def lines(result: Mapping[str, Any]) -> list[str]:
    """The result for people."""
    goodput, generator = result["goodput"], result["generator"]
    shown = [
        f"{result['num_answered']} of {result['num_requests']} answered in {result['seconds']:.1f} s",
        f"{result['answered_requests_per_second']:.2f} requests/s",
        f"{result['output_tokens_per_second']:.1f} tokens/s",
        _milliseconds("time to first token", result["time_to_first_token_seconds"]),
        _milliseconds("between tokens", result["inter_token_seconds"]),
        f"goodput {goodput['requests_per_second']:.2f} requests/s ({goodput['share']:.1%} of all: answered"
        + _limit(", first token within", goodput["first_token_limit_seconds"])
        + _limit(", a token every", goodput["mean_inter_token_limit_seconds"])
        + ")",
        f"the generator itself used {generator['cpu_seconds']:.2f} s of CPU",
        "the same load: --seed {seed} --prompt-seed {prompt_seed}".format(**result["load"]),
    ]
    if (num_cached := result["num_cached_tokens"]) is not None:
        share = num_cached / result["num_prompt_tokens"]
        shown.append(
            f"prompt tokens found in the server's cache: {num_cached:,} of {result['num_prompt_tokens']:,} "
            f"({share:.1%})"
        )
    shown += [f"failed: {count} x {why}" for why, count in result["failures"].items()]
    if not generator["kept_the_rate"]:
        shown.append(
            f"The generator did not keep the rate: {generator['num_late']} requests left more than "
            f"{1000 * LATE_SECONDS:.0f} ms after they were due. Times count from when they were due; "
            "give the generator a free core, or ask for less."
        )
    return shown


def _milliseconds(what: str, spread: Mapping[str, float] | None) -> str:
    if spread is None:
        return f"{what}: none came"
    return f"{what}, ms: " + ", ".join(f"{name} {1000 * value:.1f}" for name, value in spread.items())


def _limit(words: str, seconds: float | None) -> str:
    return "" if seconds is None else f"{words} {1000 * seconds:g} ms"


def _load_of(options: argparse.Namespace) -> dict[str, Any]:
    """What was asked, for the result file."""
    return {
        "door": options.url or options.address,
        "rate": options.rate,
        "trace": None if options.trace is None else options.trace.name,
        "max_in": options.max_in,
        "max_out": options.max_out,
        "seed": options.seed,
        "prompt_seed": options.prompt_seed,
    }


def _plot(path: Path, seen: list[Seen], result: Mapping[str, Any]) -> None:
    """Two curves: the share of requests by time to first token, the share of gaps by length."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    answered = [each for each in seen if each.arrivals and not each.failure]
    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    limits = result["goodput"]
    for axes, name, values, limit in zip(
        figure.subplots(1, 2, sharey=True),
        ("time to first token, ms", "between tokens, ms"),
        ([each.first_token_seconds for each in answered], [gap for each in answered for gap in each.gaps]),
        (limits["first_token_limit_seconds"], limits["mean_inter_token_limit_seconds"]),
        strict=True,
    ):
        ordered = sorted(1000 * value for value in values)
        axes.step(ordered, [(place + 1) / len(ordered) for place in range(len(ordered))], where="post")
        if limit is not None:
            axes.axvline(1000 * limit, linestyle="--", color="0.5")
        axes.set_xlabel(name)
        axes.set_ylim(0, 1.02)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("share of all")
    rate = result["offered_requests_per_second"]
    figure.suptitle("" if rate is None else f"{rate:.2f} requests/s offered")
    figure.savefig(path, dpi=120)
