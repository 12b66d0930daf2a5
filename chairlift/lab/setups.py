"""Flags that say what a load is and what serves it, the same for each command of the laboratory.

Must not know: what is done with them.
"""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from chairlift.lab.loads import Load, read_trace, tenants
from chairlift.lab.replay import Report
from chairlift.lab.run import Setup
from chairlift.lab.step_times import PRESETS, Linear, Roofline, from_json, preset
from scheduler.policy import Admission, Limits
from scheduler.record_events import limits_of
from scheduler.waiting import Policy

MAX_EXECUTORS = 64
MAX_NUM_BLOCKS = 1 << 24  # each takes some 60 bytes of this machine
SIZES = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_seq_len")
"""Flags that describe an executor, by their names in its capacity."""


class SetupError(ValueError):
    """Flags that do not go together: a sentence."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What the flags choose."""

    load: Load
    setup: Setup


def add_flags(parser: argparse.ArgumentParser, *, default_requests: int) -> None:
    """Adds those of the load and those of what serves it."""
    load = parser.add_argument_group("the load")
    load.add_argument("--trace", type=Path, metavar="FILE", help="lengths (and times) from a trace")
    load.add_argument("--prompt", metavar="LENGTH", help="128, uniform:32,512 or exponential:161")
    load.add_argument("--output", metavar="LENGTH", help="likewise")
    load.add_argument(
        "--requests", type=int, default=default_requests, metavar="N", help="how many (default: %(default)s)"
    )
    load.add_argument(
        "--arrivals",
        metavar="HOW",
        help="trace, at-once, even, poisson or gamma:CV; default trace or poisson",
    )
    load.add_argument("--rate", type=float, metavar="R", help="requests a second; stretches a trace's rhythm")
    load.add_argument(
        "--max-tokens", type=int, metavar="N", help="what clients allow; default: what they will get"
    )
    load.add_argument("--tenants", metavar="A:1,B:2", help="who asks, and how often beside the others")
    load.add_argument("--seed", type=int, default=0, help="the same seed makes the same load")
    serving = parser.add_argument_group("what serves it")
    times = serving.add_mutually_exclusive_group(required=True)
    times.add_argument("--preset", metavar="NAME", help=f"a model on devices: {', '.join(PRESETS)}")
    times.add_argument("--step-times", type=Path, metavar="FILE", help="prices in JSON (docs/lab.md)")
    serving.add_argument(
        "--executors", type=int, default=1, metavar="N", help="each with the model (default: %(default)s)"
    )
    serving.add_argument("--num-blocks", type=int, metavar="N", help="default: what the preset has room for")
    serving.add_argument(
        "--block-size", type=int, default=16, metavar="N", help="tokens in a KV block (default: %(default)s)"
    )
    serving.add_argument(
        "--max-num-seqs",
        type=int,
        default=256,
        metavar="N",
        help="most sequences in a batch, and no more than tokens in a step (default: %(default)s)",
    )
    serving.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=2048,
        metavar="N",
        help="token budget of a step (default: %(default)s)",
    )
    serving.add_argument(
        "--max-seq-len",
        type=int,
        default=1 << 20,
        metavar="N",
        help="longest sequence, prompt and output (default: %(default)s)",
    )
    serving.add_argument(
        "--window", type=int, default=1, metavar="N", help="plans under way at once (default: %(default)s)"
    )
    serving.add_argument(
        "--no-late-plans",
        action="store_true",
        help="with --window 2: the second plan leaves as soon as it can",
    )
    serving.add_argument(
        "--policy",
        type=Policy,
        choices=list(Policy),
        default=Policy.FCFS,
        help="who is served next (default: fcfs)",
    )
    serving.add_argument(
        "--admission",
        type=Admission,
        choices=list(Admission),
        default=Admission.FORECAST,
        help="room a newcomer must find (default: forecast)",
    )
    serving.add_argument(
        "--no-prefix-caching", action="store_true", help="equal beginnings of prompts are computed each time"
    )
    for action in parser._actions:  # noqa: SLF001 - argparse shows members of an Enum by their Python names
        if action.dest in {"policy", "admission"}:
            action.metavar = "{" + ",".join(item.value for item in action.choices or ()) + "}"


def choice_of(options: argparse.Namespace) -> Choice:
    """What they choose. Raises SetupError, LoadError or StepTimesError."""
    step_times = preset(options.preset) if options.preset else from_json(options.step_times)
    load = _load_of(options)
    return Choice(load, _setup_of(options, step_times, shares_prefixes=load.shares_prefixes))


def _load_of(options: argparse.Namespace) -> Load:
    if (options.trace is None) == (options.prompt is None) or (options.prompt is None) != (
        options.output is None
    ):
        raise SetupError("a load has either --trace or both --prompt and --output")
    rows = () if options.trace is None else tuple(read_trace(options.trace))
    arrivals = options.arrivals or ("trace" if rows and rows[-1].time is not None else "poisson")
    if arrivals == "at-once" and options.rate is not None:
        raise SetupError("requests that come all at once have no rate: leave it out, or --arrivals at-once")
    return Load(
        num_requests=options.requests,
        rows=rows,
        prompt=options.prompt or "",
        output=options.output or "",
        arrivals=arrivals,
        rate=options.rate,
        max_tokens=options.max_tokens,
        tenants=(("", 1.0),) if options.tenants is None else tenants(options.tenants),
        seed=options.seed,
    )


def _setup_of(options: argparse.Namespace, step_times: Roofline | Linear, *, shares_prefixes: bool) -> Setup:
    for name in (
        "block_size",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_seq_len",
        "window",
        "executors",
    ):
        _check_at_least_one(name, getattr(options, name))
    if options.executors > MAX_EXECUTORS:
        raise SetupError(f"--executors is {options.executors}: at most {MAX_EXECUTORS} are simulated")
    num_blocks = options.num_blocks
    if num_blocks is None:
        if not isinstance(step_times, Roofline):
            raise SetupError("--step-times says nothing of memory: --num-blocks is wanted")
        num_blocks = step_times.num_kv_tokens() // options.block_size
    _check_at_least_one("num_blocks", num_blocks)
    if num_blocks > MAX_NUM_BLOCKS:
        raise SetupError(f"--num-blocks is {num_blocks}: at most {MAX_NUM_BLOCKS} are simulated")
    limits = Limits(
        window=options.window,
        late_plans=not options.no_late_plans,
        policy=options.policy,
        admission=options.admission,
        # Where no two prompts begin alike nothing is ever found: naming blocks would be time thrown away.
        prefix_caching=shares_prefixes and not options.no_prefix_caching,
    )
    return Setup(
        step_times,
        num_blocks,
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_seq_len=options.max_seq_len,
        num_executors=options.executors,
        limits=limits,
    )


def _check_at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise SetupError(f"--{name.replace('_', '-')} is {value}: it must be at least 1")


def flags_of(report: Report) -> list[str]:
    """What the first executor of a record was, as its scheduler used it: flags to simulate it."""
    limits, capacity = limits_of(report.header), report.fleet[0]
    most = {name: getattr(capacity, name) for name in SIZES} | {"window": capacity.max_window}
    used = {name: min(getattr(limits, name, None) or number, number) for name, number in most.items()}
    late = [] if limits.late_plans else ["--no-late-plans"]
    return [f"--{name.replace('_', '-')} {number}" for name, number in used.items()] + late


def with_executors(choice: Choice, count: int) -> Choice:
    """The same with so many executors."""
    return replace(choice, setup=replace(choice.setup, num_executors=count))


def at_rate(choice: Choice, rate: float) -> Choice:
    """The same at so many requests a second."""
    return replace(choice, load=replace(choice.load, rate=rate))
