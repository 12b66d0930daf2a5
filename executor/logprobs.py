"""How likely tokens were in the model's raw distribution: sampled tokens, and those of a prompt.

Computed in float64 from float32 logits; a row's numbers are the same however many rows are computed together.
Alternatives come most likely first, among equals the lower id first; impossible ones are left out.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from executor.inputs import Scored
from executor.plan import PromptLogprobs, TokenLogprobs

IMPOSSIBLE: Final = -9999.0
"""Stands for minus infinity where a prompt has a token that the model holds impossible."""


SLICE_NUMBERS: Final = 1 << 22
"""Logits of a prompt that are looked at together: 32 MiB in float64, however long the prompt."""


def score(scored: Scored, logits_at: Callable[[Tensor], Tensor], vocab_size: int) -> PromptLogprobs | None:
    """Reports on a stretch of a prompt, slice by slice; None when the model's logits are no numbers.

    `logits_at` gives the float32 logits `[num, vocab_size]` of tokens of the step, by their indices (int64,
    on the CPU). It is asked for all `slices`, whatever it gives.
    """
    stretch = scored.stretch
    tokens: list[TokenLogprobs] = []
    is_finite = True
    for indices in slices(scored, vocab_size, torch.device("cpu")):
        logits = logits_at(indices)
        is_finite = is_finite and bool(logits.amax(dim=-1).isfinite().all())
        if is_finite:
            token_ids = stretch.token_ids[len(tokens) : len(tokens) + len(indices)]
            tokens += reports(table_of(logits), token_ids, [stretch.num_top] * len(token_ids))
    return PromptLogprobs(stretch.seq_id, stretch.first_position, tokens) if is_finite else None


def slices(scored: Scored, vocab_size: int, device: torch.device) -> Iterator[Tensor]:
    """Indices (int64) of the step's tokens that speak of a stretch, in slices that are computed together."""
    num_rows = max(1, SLICE_NUMBERS // vocab_size)
    end = scored.first_index + len(scored.stretch.token_ids)
    for start in range(scored.first_index, end, num_rows):
        yield torch.arange(start, min(end, start + num_rows), device=device)


def table_of(logits: Tensor) -> Tensor:
    """Log-probabilities, float64, of float32 `logits` `[num_rows, vocab_size]`."""
    return logits.double().log_softmax(dim=-1)


def reports(table: Tensor, token_ids: Sequence[int], num_tops: Sequence[int]) -> list[TokenLogprobs]:
    """The report on one token for each row of `table`, with so many alternatives beside it."""
    own = table.gather(1, torch.tensor(token_ids, device=table.device)[:, None])
    most = min(max(num_tops, default=0), table.shape[-1])
    tops = _tops(table, most) if most else [((), ())] * len(token_ids)
    ranks = _ranks(table, own, token_ids, [top_ids for top_ids, _ in tops])
    return [
        TokenLogprobs(token_id, max(logprob, IMPOSSIBLE), rank, top_ids[:num_top], top_logprobs[:num_top])
        for token_id, logprob, rank, (top_ids, top_logprobs), num_top in zip(
            token_ids, own.squeeze(-1).tolist(), ranks, tops, num_tops, strict=True
        )
    ]


def _ranks(
    table: Tensor, own: Tensor, token_ids: Sequence[int], tops: Sequence[tuple[int, ...]]
) -> list[int]:
    """The place of each row's token among all: told by the most likely ones, or counted."""
    ranks = [
        1 + top_ids.index(token_id) if token_id in top_ids else 0
        for token_id, top_ids in zip(token_ids, tops, strict=True)
    ]
    unplaced = [index for index, rank in enumerate(ranks) if not rank]
    if unplaced:
        rows, limits = (table, own) if len(unplaced) == len(table) else (table[unplaced], own[unplaced])
        counts = torch.count_nonzero(rows > limits, dim=-1).tolist()
        for index, row, limit, count in zip(unplaced, rows, limits, counts, strict=True):
            ties = torch.count_nonzero(row[: token_ids[index]] == limit)
            ranks[index] = 1 + count + int(ties)
    return ranks


def _tops(table: Tensor, count: int) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """The `count` most likely tokens of each row, with their log-probabilities."""
    values, ids = table.topk(min(count + 1, table.shape[-1]), dim=-1)
    # Which of those that tie for the last place topk takes is not said: such rows are sorted whole.
    tied = (values[:, count - 1] == values[:, -1]).nonzero().squeeze(-1) if values.shape[1] > count else ()
    # In id order before the stable sort, so that ties fall to the lower id.
    ids = ids[:, :count].sort(dim=-1).values
    values, places = table.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, places)
    if len(tied):
        ordered, order = table[tied].sort(dim=-1, descending=True, stable=True)
        values[tied], ids[tied] = ordered[:, :count], order[:, :count]
    possible = torch.count_nonzero(values > -torch.inf, dim=-1).tolist()
    return [
        (tuple(row_ids[:num]), tuple(row_values[:num]))
        for row_ids, row_values, num in zip(ids.tolist(), values.tolist(), possible, strict=True)
    ]
