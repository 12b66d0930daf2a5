"""Chooses each row's next token from its logits. Knows no sequence, no end, and not the other rows.

A token is drawn by inverse CDF from one uniform number per token (`executor.philox`), keyed by the request's
seed and the token's place in the output. The CDF runs over the vocabulary in id order, so that the filters
take part only by what they remove.

The order, for each row (an option that a row does not use leaves its logits unchanged, bit for bit):

  1. raw logits: log-probabilities are taken of these, so nothing below changes them
  2. bias: added to single tokens
  3. penalties: repetition divides positive and multiplies negative logits of every token seen in prompt or
     output, once; then frequency x (times in the output) and presence (if in the output) are taken off
  4. exclusions: what does not match a constraint; all but the allowed tokens; the banned ones; end tokens
     before `min_tokens` (`masked_ids`)
  5. temperature, then top-k, then top-p of what top-k left, then min-p relative to the most likely token
  6. the draw

A filter is off at its neutral value, and each keeps at least the most likely token; where tokens tie, the
lower id counts as the more likely one. Temperature 0 takes the most likely token after step 4, whatever else
is set. A row with nothing left to choose gets an error.

Bias, repetition and the filters are those of transformers (`generation/logits_process.py`), in its order;
presence and frequency those of OpenAI's API.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor import logprobs
from executor.adjustments import Adjustment
from executor.constraints import ConstraintError
from executor.philox import uniforms
from executor.plan import TokenLogprobs
from executor.rows import NOT_FINITE, Sampled, SampleRow

ALL_MASKED = "every token is excluded for this sequence: none can be chosen"

NUM_CANDIDATES: Final = 1024
"""Tokens that are sorted before the whole vocabulary is."""


Choose = Callable[[Tensor, Sequence[SampleRow]], tuple[list[int], list[float]]]
"""Takes allowed logits, float32 `[num_rows, vocab_size]`, and what each row asks for.

Returns a token for each row, and its highest logit: NaN if one is, -inf when nothing is left. A row whose
highest logit is not finite gets any token."""


def choose(allowed: Tensor, rows: Sequence[SampleRow]) -> tuple[list[int], list[float]]:
    """`Choose` in torch, on any device."""
    highest = allowed.amax(dim=-1)  # carries a NaN and a +inf with it; -inf when nothing is left
    finite = highest.isfinite()
    if not bool(finite.all()):
        allowed = allowed.masked_fill(~finite[:, None], 0.0)
    chosen = allowed.argmax(dim=-1)  # the first of equals
    drawn = [index for index, row in enumerate(rows) if row.params.temperature > 0]
    if drawn:
        index = torch.tensor(drawn, device=allowed.device)
        finite_highest = highest.where(finite, 0.0)[index]
        chosen[index] = draw(allowed[index], finite_highest, [rows[i] for i in drawn])
    return chosen.tolist(), highest.tolist()


def sample(logits: Tensor, rows: Sequence[SampleRow], choose: Choose = choose) -> Sampled:
    """Choose one token for each row of `logits` (float32 `[num_rows, vocab_size]`), as `rows` asks.

    A row whose logits hold NaN or +inf, or leave no token to choose, gets an error in place of a token; the
    others are not touched by it. Rows that ask for changes have them written to `logits`.
    """
    asked = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    table = logprobs.table_of(logits[asked]) if asked else None
    rows, faults = constrain(logits, rows)
    adjust(logits, rows)
    token_ids, highest = choose(logits, rows)
    errors = [faults.get(index) or error_of(value) for index, value in enumerate(highest)]
    chances: list[TokenLogprobs | None] = [None] * len(rows)
    if table is not None:
        num_tops = [rows[index].params.logprobs or 0 for index in asked]
        reports = logprobs.reports(table, [token_ids[index] for index in asked], num_tops)
        for index, report in zip(asked, reports, strict=True):
            chances[index] = report if errors[index] is None else None
    return Sampled(token_ids, chances, errors)


def constrain(logits: Tensor, rows: Sequence[SampleRow]) -> tuple[Sequence[SampleRow], dict[int, str]]:
    """Exclude in place what constraints do. Returns the rows as they are to be taken, and faults by row.

    An output that must end now may do so before its `min_tokens`.
    """
    constrained = [index for index, row in enumerate(rows) if row.matcher is not None]
    if not constrained:
        return rows, {}
    held, excluded, faults = exclusions(rows, constrained, logits.shape[-1])
    places = torch.tensor(constrained, device=logits.device)
    mask = torch.from_numpy(excluded).to(logits.device)
    logits[places] = logits[places].masked_fill(mask, -torch.inf)
    return held, faults


def exclusions(
    rows: Sequence[SampleRow], constrained: Sequence[int], vocab_size: int
) -> tuple[Sequence[SampleRow], NDArray[np.bool_], dict[int, str]]:
    """What the constraints of the rows `constrained` exclude, bool `[num_constrained, vocab_size]`.

    Beside it the rows, and what is wrong by row.
    """
    held, faults = list(rows), {}
    excluded = np.zeros((len(constrained), vocab_size), dtype=np.bool_)
    for place, index in enumerate(constrained):
        row = rows[index]
        assert row.matcher is not None
        try:
            allowed = row.matcher.allowed()
        except ConstraintError as error:
            faults[index] = str(error)
            continue
        excluded[place] = ~allowed
        if row.masked_ids and allowed.sum() == allowed[list(row.masked_ids)].sum():
            held[index] = replace(row, masked_ids=())
    return held, excluded, faults


def adjust(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Bring `logits` from raw to what may be chosen from, in place: steps 2 to 4."""
    adjusted = [(index, row.adjustment) for index, row in enumerate(rows) if row.adjustment is not None]
    if adjusted:
        _add_bias(logits, adjusted)
        _penalize(logits, adjusted)
        _keep_allowed(logits, adjusted)
        _exclude(logits, [(index, each.banned_ids) for index, each in adjusted if each.banned_ids.size])
    masked = [(index, np.array(row.masked_ids)) for index, row in enumerate(rows) if row.masked_ids]
    _exclude(logits, masked)


_Adjusted = Sequence[tuple[int, Adjustment]]
"""Indices of rows, each with what is to be changed there."""


def _add_bias(logits: Tensor, rows: _Adjusted) -> None:
    biased = [(index, each) for index, each in rows if each.bias_ids.size]
    if biased:
        places = _places(logits, [(index, each.bias_ids) for index, each in biased])
        bias = torch.from_numpy(np.concatenate([each.bias for _, each in biased])).to(logits.device)
        logits[places] = logits[places] + bias


def _penalize(logits: Tensor, rows: _Adjusted) -> None:
    seen = [(index, each, each.seen) for index, each in rows if each.seen is not None and each.seen.ids.size]
    if not seen:
        return
    counts = np.concatenate([tokens.counts for _, _, tokens in seen])
    repetition, presence, frequency = np.repeat(
        np.array(
            [(each.repetition_penalty, each.presence_penalty, each.frequency_penalty) for _, each, _ in seen],
            dtype=np.float32,
        ),
        [tokens.ids.size for _, _, tokens in seen],
        axis=0,
    ).T
    factors = torch.from_numpy(np.ascontiguousarray(repetition)).to(logits.device)
    taken = torch.from_numpy(frequency * counts + presence * (counts > 0)).to(logits.device)
    places = _places(logits, [(index, tokens.ids) for index, _, tokens in seen])
    values = logits[places]
    logits[places] = torch.where(values < 0, values * factors, values / factors) - taken


def _keep_allowed(logits: Tensor, rows: _Adjusted) -> None:
    limited = [(index, each.allowed_ids) for index, each in rows if each.allowed_ids.size]
    if limited:
        places = _places(logits, limited)
        kept = logits[places]
        logits[torch.tensor([index for index, _ in limited], device=logits.device)] = -torch.inf
        logits[places] = kept


def _exclude(logits: Tensor, rows: Sequence[tuple[int, np.ndarray]]) -> None:
    if rows:
        logits[_places(logits, rows)] = -torch.inf


def _places(logits: Tensor, rows: Sequence[tuple[int, np.ndarray]]) -> tuple[Tensor, Tensor]:
    """Where ids of single rows lie in `logits`: indices of rows and of columns."""
    indices = np.repeat([index for index, _ in rows], [ids.size for _, ids in rows])
    columns = np.concatenate([ids for _, ids in rows])
    return torch.from_numpy(indices).to(logits.device), torch.from_numpy(columns).to(logits.device)


def error_of(highest: float) -> str | None:
    """What is wrong with a row whose highest logit this is, as a sentence; None when nothing is."""
    if highest == -np.inf:
        return ALL_MASKED
    return None if np.isfinite(highest) else NOT_FINITE


def draw(logits: Tensor, highest: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Draw a token id for each row (int64 `[num_rows]`) of `logits`, whose maxima are `highest`."""
    temperatures = torch.tensor([row.params.temperature for row in rows], device=logits.device)
    weights = filtered(likelihoods(logits, highest, temperatures), rows)
    numbers = uniforms([row.params.seed for row in rows], [row.output_index for row in rows])
    cdf = weights.cumsum(dim=-1, dtype=torch.float64)
    return drawn_from(cdf, torch.from_numpy(numbers).to(logits.device))


def drawn_from(cdf: Tensor, numbers: Tensor) -> Tensor:
    """The token ids (int64 `[num_rows]`) at which `numbers`, in [0, 1), stand in the float64 sums `cdf`."""
    total = cdf[:, -1:].contiguous()
    target = total * numbers[:, None]
    # The first token whose CDF exceeds the target. Rounding may lift a target to the total: the last token
    # with any weight is the limit, and it is the first whose CDF is the total.
    found = torch.searchsorted(cdf, target, right=True)
    last = torch.searchsorted(cdf, total, right=False)
    return torch.minimum(found, last).squeeze(-1)


def likelihoods(logits: Tensor, highest: Tensor, temperatures: Tensor) -> Tensor:
    """Likelihoods at the rows' temperatures, relative to the most likely token, which has 1."""
    # The maximum is taken off first: however small the temperature, the most likely token stays at exp(0).
    smallest = torch.finfo(torch.float32).tiny
    return ((logits - highest[:, None]) / temperatures.clamp(min=smallest)[:, None]).exp()


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters of R rows, one column `[R, 1]` each; float64, in which top-k is exact as well."""

    top_k: Tensor
    """the vocabulary's size where it is off"""
    top_p: Tensor
    min_p: Tensor

    def of(self, rows: Tensor) -> "Filters":
        """Those of `rows` (int64) alone."""
        return Filters(self.top_k[rows], self.top_p[rows], self.min_p[rows])


def filtered(weights: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """`weights` with zeros for the tokens that top-k, top-p and min-p remove."""
    vocab_size = weights.shape[-1]
    # Off in another spelling is off: nothing is computed for it, and nothing is rounded.
    top_ks = [row.params.top_k if 0 < row.params.top_k < vocab_size else vocab_size for row in rows]
    picked = [
        index
        for index, row in enumerate(rows)
        if top_ks[index] < vocab_size or row.params.top_p < 1 or row.params.min_p > 0
    ]
    if not picked:
        return weights

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=weights.device)[:, None]

    filters = Filters(
        top_k=column([top_ks[i] for i in picked]),
        top_p=column([rows[i].params.top_p for i in picked]),
        min_p=column([rows[i].params.min_p for i in picked]),
    )
    index = torch.tensor(picked, device=weights.device)
    return weights.index_copy(0, index, filtered_rows(weights[index], filters))


def filtered_rows(weights: Tensor, filters: Filters) -> Tensor:
    """`weights` with zeros for the tokens that `filters` remove.

    Sorting a vocabulary is the dearest part of sampling, and the tokens that stay are mostly few. So the most
    likely ones are sorted first, and the whole vocabulary only for rows whose last token to stay is not among
    them. Both ways keep the same tokens.
    """
    vocab_size = weights.shape[-1]
    total = weights.cumsum(dim=-1, dtype=torch.float64)[:, -1:]
    kept = torch.zeros_like(weights)
    unsettled = torch.arange(len(weights), device=weights.device)
    if vocab_size > NUM_CANDIDATES:
        # In id order before the stable sort, so that ties fall to the lower id here too.
        token_ids = weights.topk(NUM_CANDIDATES, dim=-1, sorted=False).indices.sort(dim=-1).values
        ordered, order = weights.gather(1, token_ids).sort(dim=-1, descending=True, stable=True)
        staying = stays(ordered, filters, total, vocab_size)
        kept.scatter_(1, token_ids.gather(1, order), ordered * staying)
        # Tokens left out may tie with the least of these, or follow it, or be of the mass that top-p shares.
        reaches_further = (staying & (ordered == ordered[:, -1:])).any(dim=-1)
        top_k = filters.top_k.squeeze(-1)
        reaches_further |= (top_k > NUM_CANDIDATES) & (top_k < vocab_size)
        unsettled = reaches_further.nonzero().squeeze(-1)
    if len(unsettled):
        ordered, token_ids = weights[unsettled].sort(dim=-1, descending=True, stable=True)
        staying = stays(ordered, filters.of(unsettled), total[unsettled], vocab_size)
        kept[unsettled] = torch.zeros_like(ordered).scatter_(1, token_ids, ordered * staying)
    return kept


def stays(ordered: Tensor, filters: Filters, total: Tensor, vocab_size: int) -> Tensor:
    """Which of the weights `ordered`, most likely tokens first, the filters leave: bool, of their shape.

    `total` `[R, 1]` is the sum over the whole vocabulary.
    """
    places = torch.arange(ordered.shape[-1], device=ordered.device)
    within_top_k = places < filters.top_k
    mass = torch.where(within_top_k, ordered, 0.0).cumsum(dim=-1, dtype=torch.float64)
    whole = torch.where(filters.top_k < vocab_size, mass[:, -1:], total)
    # A token is needed as long as those before it do not reach top_p. At 1 all are, whatever sums round to.
    within_top_p = (mass - ordered < filters.top_p * whole) | (filters.top_p >= 1)
    within_min_p = ordered >= filters.min_p * ordered[:, :1]
    return (within_top_k & within_top_p & within_min_p) | (places == 0)
