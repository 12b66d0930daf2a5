"""How likely tokens were, without waiting for them: one part asks the device, another makes the reports.

The reports are those of `executor.logprobs`, for tokens that the host may not know yet. Only the few
alternatives themselves are sorted.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor.logprobs import IMPOSSIBLE
from executor.plan import TokenLogprobs


def report_parts(table: Tensor, token_ids: Tensor, most: int) -> dict[str, Tensor]:
    """What `reports` are made of, on the device; `token_ids` (int64) has one entry for each row of `table`.

    `most` is the most alternatives that any of them wants.
    """
    own = table.gather(1, token_ids[:, None])
    ids = torch.arange(table.shape[-1], device=table.device)
    # Ties are placed by their ids, the lower first.
    ahead = (table > own) | ((table == own) & (ids < token_ids[:, None]))
    parts = {"logprobs": own.squeeze(1), "ranks": 1 + ahead.sum(dim=-1)}
    if most:
        parts["top_logprobs"], parts["top_ids"] = _tops(table, min(most, table.shape[-1]))
    return parts


def _tops(table: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` most likely tokens of each row, ties by the lower id: their log-probabilities, and ids.

    Which of those that tie for the last place topk takes is not said, and looking whether there are any would
    be waiting for them. So what is above the last place is taken as topk finds it, and of all that tie for it
    the lowest ids, which topk finds too: among numbers of which no two are equal.
    """
    vocab_size = table.shape[-1]
    values, ids = table.topk(count, dim=-1)
    least = values[:, -1:]
    to_the_end = torch.arange(vocab_size, 0, -1, dtype=torch.int32, device=table.device)
    ties = vocab_size - torch.where(table == least, to_the_end, 0).topk(count, dim=-1).values
    # In id order before the stable sort, so that ties fall to the lower id; the vocabulary's size is no id.
    ids = torch.cat([ids.where(values > least, vocab_size), ties], dim=-1).sort(dim=-1).values
    values = table.gather(1, ids.clamp(max=vocab_size - 1)).where(ids < vocab_size, -torch.inf)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return values[:, :count], ids.gather(1, order)[:, :count]


def reports(
    parts: Mapping[str, NDArray[Any]], token_ids: Sequence[int], num_tops: Sequence[int]
) -> list[TokenLogprobs]:
    """The reports, once their `parts` are on the host: on one token each, with so many alternatives."""
    nothing = np.empty((len(token_ids), 0))
    top_ids = parts.get("top_ids", nothing.astype(np.int64))
    top_logprobs = parts.get("top_logprobs", nothing)
    return [
        TokenLogprobs(
            token_id,
            max(float(logprob), IMPOSSIBLE),
            int(rank),
            tuple(ids[: min(num_top, possible)].tolist()),
            tuple(values[: min(num_top, possible)].tolist()),
        )
        for token_id, logprob, rank, ids, values, possible, num_top in zip(
            token_ids,
            parts["logprobs"],
            parts["ranks"],
            top_ids,
            top_logprobs,
            np.count_nonzero(top_logprobs > -np.inf, axis=-1).tolist(),
            num_tops,
            strict=True,
        )
    ]
