"""The part of the GPU check for what sorts no vocabulary: filters by our kernel, and the most likely tokens.

Each beside a sort, and how long both take.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from executor import late_logprobs
from executor.attention.reference import ReferenceAttention
from executor.late_sampler import FilterRows, filter_by_sorting
from executor.operations.fused import FusedOperations
from tests.gpu import machine as machines
from tests.gpu.machine import Machine, Report, WrongError

SLACK: Final = 1e-12
"""Of the whole: where the mass before a token is as near to top_p of it, either answer is right."""
FILTERS: Final = (
    *((0, 0.9, 0.0), (50, 1.0, 0.0), (0, 1.0, 0.05), (40, 0.8, 0.0)),
    *((0, 1e-3, 0.0), (0, 0.999, 0.0), (20_000, 0.95, 1e-4), (1, 1.0, 0.0)),
)
"""top-k (0: off), top-p and min-p of rows in turn."""
SHAPES: Final = ((64, 128_256), (64, 50_257), (8, 1000), (16, 262_144))
"""Rows and vocabulary."""
SMALL: Final = ((5, 300),)
TIMED: Final = ((1, 128_256), (32, 128_256), (256, 128_256))
SMALL_TIMED: Final = ((1, 300),)
MOST_ALTERNATIVES: Final = 20

Shapes = tuple[tuple[int, int], ...]


def kernel_or_why(machine: Machine) -> FilterRows | str:
    """The kernel, or why there is none here."""
    spec = machine.spec(64, 1, 1, 16)
    refusal = FusedOperations.refusal(spec, 64) if machine.is_gpu else machines.interpreter_refusal()
    return FusedOperations(ReferenceAttention(spec)).filter_rows if refusal is None else refusal


def logits_of(machine: Machine, num_rows: int, vocab_size: int) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator(machine.device).manual_seed(1)
    normal = torch.randn(num_rows, vocab_size, generator=generator, device=machine.device)
    yield "likely ones", normal * 3
    yield "ties", (normal * 2).round()
    yield "peaks", normal * 30
    yield "all alike", torch.zeros_like(normal)
    yield "few possible", torch.where(normal > 2, normal, -torch.inf)


def likelihoods(logits: Tensor) -> Tensor:
    return (logits - logits.amax(dim=-1, keepdim=True)).exp()


def filters_on(machine: Machine, num_rows: int, vocab_size: int) -> tuple[list[int], Tensor]:
    """All rows but the last, where there are several; and what they ask for."""
    rows = list(range(max(1, num_rows - 1)))
    wanted = [FILTERS[row % len(FILTERS)] for row in rows]
    own = [(top_k if 0 < top_k < vocab_size else vocab_size, top_p, min_p) for top_k, top_p, min_p in wanted]
    return rows, torch.tensor(own, dtype=torch.float64, device=machine.device)


def is_at_the_boundary(weights: Tensor, found: Tensor, expected: Tensor, top_k: int, top_p: float) -> bool:
    """Whether one row's two answers differ where either is right: by exact sums, on the host."""
    weights, found, expected = weights.cpu(), found.cpu(), expected.cpu()
    ordered, order = weights.double().sort(descending=True, stable=True)
    whole = math.fsum(ordered[:top_k].tolist())
    places = (found != expected)[order].nonzero().squeeze(-1).tolist()
    shares = [math.fsum(ordered[:place].tolist()) / whole for place in (places[0], places[-1])]
    return (
        bool(((found == 0) | (found == weights)).all())
        and places[-1] < top_k
        and all(abs(share - top_p) <= SLACK for share in shares)
    )


def differences(machine: Machine, kernel: FilterRows, num_rows: int, vocab_size: int) -> Iterator[str]:
    """Where the kernel is wrong; `at the boundary` where it only differs."""
    rows, filters = filters_on(machine, num_rows, vocab_size)
    there = torch.tensor(rows, device=machine.device)
    for name, logits in logits_of(machine, num_rows, vocab_size):
        weights = likelihoods(logits)
        found, expected = weights.clone(), weights.clone()
        kernel(found, there, filters)
        filter_by_sorting(expected, there, filters)
        for row in (found != expected).any(dim=-1).nonzero().squeeze(-1).tolist():
            top_k, top_p, _ = filters[min(row, len(rows) - 1)].tolist()
            where = f"{num_rows} rows of {vocab_size}, {name}, row {row}"
            three = weights[row], found[row], expected[row]
            if row in rows and is_at_the_boundary(*three, int(top_k), top_p):
                yield f"at the boundary: {where}"
            else:
                yield f"other tokens: {where}"


def other_alternatives(machine: Machine, num_rows: int, vocab_size: int) -> Iterator[str]:
    """Where the most likely tokens, or ranks, are not those of a stable sort."""
    token_ids = torch.arange(num_rows, device=machine.device) * 7 % vocab_size
    for name, logits in logits_of(machine, num_rows, vocab_size):
        table = logits.double().log_softmax(dim=-1)
        parts = late_logprobs.report_parts(table, token_ids, MOST_ALTERNATIVES)
        values, order = table.sort(dim=-1, descending=True, stable=True)
        ranks = 1 + (order == token_ids[:, None]).int().argmax(dim=-1)
        tops = order[:, :MOST_ALTERNATIVES], values[:, :MOST_ALTERNATIVES]
        if not (
            parts["ranks"].equal(ranks)
            and parts["top_ids"].equal(tops[0])
            and parts["top_logprobs"].equal(tops[1])
        ):
            yield f"other alternatives: {num_rows} rows of {vocab_size}, {name}"


def timed(
    machine: Machine, kernel: FilterRows, num_rows: int, vocab_size: int
) -> Iterator[tuple[str, Callable[[], None]]]:
    """What is timed, by its name."""
    _, logits = next(logits_of(machine, num_rows, vocab_size))
    weights = likelihoods(logits)
    rows = torch.arange(num_rows, device=machine.device)
    for name, own in (("top-p", (vocab_size, 0.9, 0.0)), ("top-k and top-p", (50, 0.9, 0.0))):
        filters = torch.tensor([own] * num_rows, dtype=torch.float64, device=machine.device)
        yield f"{name}, selected", partial(kernel, weights.clone(), rows, filters)
        yield f"{name}, sorted", partial(filter_by_sorting, weights.clone(), rows, filters)
    table = logits.double().log_softmax(dim=-1)

    def selected() -> None:
        late_logprobs.report_parts(table, rows, 5)

    def in_order() -> None:
        table.sort(dim=-1, descending=True, stable=True)

    yield "rank and 5 alternatives, selected", selected
    yield "all in order, sorted", in_order


@torch.inference_mode()
def filters(machine: Machine, report: Report) -> dict[str, Any]:
    """Filters and alternatives beside a sort's, then milliseconds of both."""
    kernel = kernel_or_why(machine)
    if isinstance(kernel, str):
        return {"refused": kernel}
    found: dict[str, Any] = {"wrong": [], "at_the_boundary": 0, "ms": {}, "not_run": []}
    for num_rows, vocab_size in SHAPES if machine.is_gpu else SMALL:
        if machine.is_late:
            found["not_run"].append(f"{num_rows} rows of {vocab_size}")
            continue
        told = list(differences(machine, kernel, num_rows, vocab_size))
        found["at_the_boundary"] += sum(each.startswith("at the boundary") for each in told)
        found["wrong"] += [each for each in told if not each.startswith("at the boundary")]
        found["wrong"] += other_alternatives(machine, num_rows, vocab_size)
        report(found)
    for num_rows, vocab_size in TIMED if machine.is_gpu else SMALL_TIMED:
        name = f"{num_rows} rows of {vocab_size}"
        if machine.is_late:
            found["not_run"].append(f"the time of {name}")
            continue
        times = found["ms"].setdefault(name, {})
        for what, work in timed(machine, kernel, num_rows, vocab_size):
            times[what] = round(1e3 * machine.seconds(work), 3)
            report(found)
    if found["wrong"]:
        raise WrongError(f"{len(found['wrong'])} differ from a sort, the first: {found['wrong'][0]}", found)
    return found
