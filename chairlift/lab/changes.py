"""Flags that change recorded settings, to ask "what if".

Must not know: what is done with them.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace

from chairlift.flag_numbers import not_negative, positive, whole
from scheduler.plan import Capacity
from scheduler.policy import Admission, Limits
from scheduler.waiting import Policy

_COUNTS = {
    "max_num_seqs": "most sequences in a batch",
    "max_num_batched_tokens": "token budget of a step",
    "num_blocks": "KV blocks to use of those there were",
    "window": "plans under way at once",
    "max_queued": "most waiting requests beyond the free seats",
}
_CEILINGS = {
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "num_blocks": "num_blocks",
    "window": "max_window",
}
"""What an executor says it takes at most of them."""
_OTHERS = ("policy", "admission", "prefix_caching")


class ChangeError(ValueError):
    """A setting that could change nothing: a sentence."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds them; none is the recorded setting."""
    settings = parser.add_argument_group("what if")
    for name, kind, text in (
        ("policy", Policy, "who is served next"),
        ("admission", Admission, "room a newcomer must find"),
    ):
        choices = "{" + ",".join(item.value for item in kind) + "}"
        settings.add_argument(f"--{name}", type=kind, choices=list(kind), metavar=choices, help=text)
    for name, text in _COUNTS.items():
        number = not_negative if name == "max_queued" else whole
        settings.add_argument(f"--{name.replace('_', '-')}", type=number, metavar="N", help=text)
    settings.add_argument("--max-step-ms", type=positive, metavar="MS", help="wanted duration of a step")
    settings.add_argument(
        "--prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="whether equal beginnings of prompts are computed once",
    )


def change_of(options: argparse.Namespace) -> Callable[[Limits], Limits] | None:
    """What they change; None when they leave all as it was."""
    changed = {
        name: getattr(options, name) for name in (*_COUNTS, *_OTHERS) if getattr(options, name) is not None
    }
    if options.max_step_ms is not None:
        changed["max_step_us"] = 1000 * options.max_step_ms
    return (lambda limits: replace(limits, **changed)) if changed else None


def check_fleet(options: argparse.Namespace, fleet: list[Capacity]) -> None:
    """Raises ChangeError for a setting beyond what any executor of the record takes: nobody would heed it."""
    for name, ceiling in _CEILINGS.items():
        wanted = getattr(options, name)
        most = max((getattr(capacity, ceiling) for capacity in fleet), default=wanted)
        if wanted is not None and wanted > most:
            raise ChangeError(
                f"--{name.replace('_', '-')} is {wanted}, and the recorded executors take {most} at most: "
                "what more would bring is not in the record"
            )
