"""Chooses each row's next token on the device, without making the host wait.

The rules are those of `executor.sampler`, in the same order and with the same arithmetic. What differs is
when things are known: the host puts into arrays what each row asks for (`wishes`), and these go to the device
with the step's other arrays; the device chooses (`chosen`), and nothing is read back until the step is over
(`sampled`).

If a row's last token is still in flight, its penalties depend on a token that the host's counts lack: the
device adds it, from the ids that the step before has left there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor import late_logprobs, logprobs, sampler
from executor.philox import uniforms
from executor.plan import TokenLogprobs
from executor.rows import Sampled, SampleRow

PREFIX: Final = "sample "
"""Of the names of our arrays among a step's."""

Arrays = dict[str, NDArray[np.generic]]

FilterRows = Callable[[Tensor, Tensor, Tensor], None]
"""Writes zeros into weights, float32 `[num_drawn, vocab_size]`, for the tokens that filters remove.

Beside the weights, which are at most 1, it takes the rows that have filters, int64 `[R]`, and theirs, float64
`[R, 3]`: top-k (the vocabulary's size where it is off), top-p, min-p."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What S rows ask for: arrays for the device, and what the host keeps for the time after."""

    arrays: Arrays
    faults: dict[int, str]
    """rows that a constraint leaves nothing, and why"""
    asked: list[int]
    """rows that want log-probabilities"""
    num_tops: list[int]
    """alternatives for each of `asked`"""


def wishes(rows: Sequence[SampleRow], in_flight: Sequence[bool], vocab_size: int) -> Wishes:
    """What `rows` ask for; `in_flight` tells whose last token the host does not know.

    A constrained row's last token must be known.
    """
    arrays: Arrays = {}
    rows, faults = _held(rows, arrays, vocab_size)
    _adjusted(rows, in_flight, arrays)
    _drawn(rows, arrays, vocab_size)
    asked = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    if asked:
        arrays["asked"] = np.array(asked)
    return Wishes(
        {PREFIX + name: array for name, array in arrays.items()},
        faults,
        asked,
        [rows[index].params.logprobs or 0 for index in asked],
    )


def _held(
    rows: Sequence[SampleRow], arrays: Arrays, vocab_size: int
) -> tuple[Sequence[SampleRow], dict[int, str]]:
    """Constraints: which ids are excluded, what is wrong by row, and the rows as they are to be taken."""
    constrained = [index for index, row in enumerate(rows) if row.matcher is not None]
    if not constrained:
        return rows, {}
    held, excluded, faults = sampler.exclusions(rows, constrained, vocab_size)
    arrays |= {"held": np.array(constrained), "excluded": excluded}
    return held, faults


def _adjusted(rows: Sequence[SampleRow], in_flight: Sequence[bool], arrays: Arrays) -> None:
    """Bias, penalties and lists."""
    adjusted = [(index, row.adjustment) for index, row in enumerate(rows) if row.adjustment is not None]
    _put_places(arrays, "bias", [(index, each.bias_ids) for index, each in adjusted])
    if "bias ids" in arrays:
        arrays["bias"] = np.concatenate([each.bias for _, each in adjusted])
    penalized = [(index, each, each.seen) for index, each in adjusted if each.seen is not None]
    if penalized:
        arrays["penalized"] = np.array([index for index, _, _ in penalized])
        arrays["penalties"] = np.array(
            [
                (each.repetition_penalty, each.presence_penalty, each.frequency_penalty)
                for _, each, _ in penalized
            ],
            dtype=np.float32,
        )
        _put_places(arrays, "seen", [(place, seen.ids) for place, (_, _, seen) in enumerate(penalized)])
        if "seen ids" in arrays:
            arrays["seen"] = np.concatenate([seen.counts for _, _, seen in penalized])
        late = [place for place, (index, _, _) in enumerate(penalized) if in_flight[index]]
        if late:
            arrays["late"] = np.array(late)
    _put_places(arrays, "allowed", [(index, each.allowed_ids) for index, each in adjusted])
    if "allowed ids" in arrays:
        arrays["limited"] = np.array([index for index, each in adjusted if each.allowed_ids.size])
    banned = [(index, each.banned_ids) for index, each in adjusted]
    masked = [(index, np.array(row.masked_ids, dtype=np.int64)) for index, row in enumerate(rows)]
    _put_places(arrays, "banned", [*banned, *masked])


def _put_places(arrays: Arrays, name: str, rows: Sequence[tuple[int, NDArray[np.int64]]]) -> None:
    """Where ids of single rows lie: rows and columns, if there are any."""
    ids = [each for _, each in rows if each.size]
    if ids:
        arrays[f"{name} rows"] = np.repeat(
            [row for row, each in rows if each.size], [each.size for each in ids]
        )
        arrays[f"{name} ids"] = np.concatenate(ids)


def _drawn(rows: Sequence[SampleRow], arrays: Arrays, vocab_size: int) -> None:
    """Temperatures, filters, and the random numbers."""
    drawn = [index for index, row in enumerate(rows) if row.params.temperature > 0]
    if not drawn:
        return
    params = [rows[index].params for index in drawn]
    arrays["drawn"] = np.array(drawn)
    arrays["temperatures"] = np.array([each.temperature for each in params], dtype=np.float32)
    arrays["uniforms"] = uniforms([each.seed for each in params], [rows[i].output_index for i in drawn])
    top_ks = [each.top_k if 0 < each.top_k < vocab_size else vocab_size for each in params]
    filtered = [
        place
        for place, each in enumerate(params)
        if top_ks[place] < vocab_size or each.top_p < 1 or each.min_p > 0
    ]
    if filtered:
        arrays["filtered"] = np.array(filtered)
        arrays["filters"] = np.array(
            [(top_ks[place], params[place].top_p, params[place].min_p) for place in filtered]
        )


def chosen(
    logits: Tensor,
    last_tokens: Tensor,
    arrays: Mapping[str, Tensor],
    most_tops: int,
    filter_rows: FilterRows,
) -> dict[str, Tensor]:
    """Choose on the device from float32 `logits` `[S, vocab_size]`, which are written to.

    `last_tokens` are the rows' last tokens, int64 `[S]`; `arrays` those of `wishes`, on the device. Returns
    the chosen ids, int64 `[S]`, each row's highest logit, and what was asked for beside.
    """
    given = {name.removeprefix(PREFIX): each for name, each in arrays.items() if name.startswith(PREFIX)}
    table = logprobs.table_of(logits[given["asked"]]) if "asked" in given else None
    _adjust(logits, last_tokens, given)
    highest = logits.amax(dim=-1)  # carries a NaN and a +inf with it; -inf when nothing is left
    finite = highest.isfinite()
    logits.masked_fill_(~finite[:, None], 0.0)
    token_ids = logits.argmax(dim=-1)  # the first of equals
    if "drawn" in given:
        drawn = given["drawn"]
        token_ids[drawn] = _draw(logits[drawn], highest.where(finite, 0.0)[drawn], given, filter_rows)
    parts = {"token_ids": token_ids, "highest": highest}
    if table is not None:
        parts |= late_logprobs.report_parts(table, token_ids[given["asked"]], most_tops)
    return parts


def _adjust(logits: Tensor, last_tokens: Tensor, given: Mapping[str, Tensor]) -> None:
    impossible = logits.new_full((), -torch.inf)
    if "held" in given:
        logits[given["held"]] = logits[given["held"]].masked_fill(given["excluded"], -torch.inf)
    if "bias" in given:
        places = (given["bias rows"], given["bias ids"])
        logits[places] = logits[places] + given["bias"]
    if "penalized" in given:
        _penalize(logits, last_tokens, given)
    if "limited" in given:
        places = (given["allowed rows"], given["allowed ids"])
        kept = logits[places]
        logits[given["limited"]] = impossible
        logits[places] = kept
    if "banned ids" in given:
        logits[given["banned rows"], given["banned ids"]] = impossible


def _penalize(logits: Tensor, last_tokens: Tensor, given: Mapping[str, Tensor]) -> None:
    """Over the whole vocabulary of the rows that ask: the device cannot tell whether a token is new."""
    rows = given["penalized"]
    values = logits[rows]
    counts = torch.full_like(values, -1.0)  # -1: not seen; 0: in the prompt alone
    if "seen" in given:
        counts[given["seen rows"], given["seen ids"]] = given["seen"]
    if "late" in given:
        late = given["late"]
        token_ids = last_tokens[rows[late]]
        counts[late, token_ids] = counts[late, token_ids].clamp(min=0.0) + 1.0
    repetition, presence, frequency = given["penalties"][:, :, None].unbind(1)
    taken = frequency * counts + presence * (counts > 0)
    penalized = torch.where(values < 0, values * repetition, values / repetition) - taken
    logits[rows] = torch.where(counts >= 0, penalized, values)


def _draw(logits: Tensor, highest: Tensor, given: Mapping[str, Tensor], filter_rows: FilterRows) -> Tensor:
    weights = sampler.likelihoods(logits, highest, given["temperatures"])
    if "filtered" in given:
        filter_rows(weights, given["filtered"], given["filters"])
    return sampler.drawn_from(running_sums(weights), given["uniforms"])


def filter_by_sorting(weights: Tensor, rows: Tensor, filters: Tensor) -> None:
    """`FilterRows` in torch, on any device: what others are measured by."""
    picked = weights[rows]
    ordered, order = picked.sort(dim=-1, descending=True, stable=True)
    staying = sampler.stays(
        ordered,
        sampler.Filters(filters[:, 0:1], filters[:, 1:2], filters[:, 2:3]),
        running_sums(picked)[:, -1:],
        weights.shape[-1],
    )
    weights[rows] = torch.zeros_like(picked).scatter_(1, order, ordered * staying)


def running_sums(weights: Tensor) -> Tensor:
    """Sums in float64 along each row.

    A lone row is summed beside a copy of itself: CUDA has another way for one row, whose rounding depends on
    how its threads come to run.
    """
    rows = torch.cat([weights, weights]) if len(weights) == 1 else weights
    return rows.cumsum(dim=-1, dtype=torch.float64)[: len(weights)]


def sampled(parts: Mapping[str, NDArray[Any]], asked_for: Wishes) -> Sampled:
    """What was chosen, when the numbers of `chosen` are on the host."""
    token_ids: list[int] = parts["token_ids"].tolist()
    errors = [
        asked_for.faults.get(index) or sampler.error_of(value)
        for index, value in enumerate(parts["highest"].tolist())
    ]
    chances: list[TokenLogprobs | None] = [None] * len(token_ids)
    if asked_for.asked:
        own = [token_ids[index] for index in asked_for.asked]
        reports = late_logprobs.reports(parts, own, asked_for.num_tops)
        for index, report in zip(asked_for.asked, reports, strict=True):
            chances[index] = report if errors[index] is None else None
    return Sampled(token_ids, chances, errors)
