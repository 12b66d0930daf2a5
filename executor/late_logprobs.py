"""How likely tokens were, without waiting for them: asked of the device in one part, worded in another.

The same reports as `executor.logprobs` makes, of tokens that the host may not know yet. The vocabulary is
sorted whole for rows that want alternatives: looking at the most likely ones first would have to wait for
them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor.logprobs import IMPOSSIBLE
from executor.plan import TokenLogprobs


def asked(table: Tensor, token_ids: Tensor, most: int) -> dict[str, Tensor]:
    """What reports are worded from, `token_ids` (int64) having one entry for each row of `table`.

    `most` is the most alternatives that any of them wants.
    """
    own = table.gather(1, token_ids[:, None])
    ids = torch.arange(table.shape[-1], device=table.device)
    # Ties are placed by their ids, the lower first.
    ahead = (table > own) | ((table == own) & (ids < token_ids[:, None]))
    parts = {"logprobs": own.squeeze(1), "ranks": 1 + ahead.sum(dim=-1)}
    if most:
        values, order = table.sort(dim=-1, descending=True, stable=True)
        parts |= {"top_logprobs": values[:, :most], "top_ids": order[:, :most]}
    return parts


def worded(
    parts: Mapping[str, NDArray[Any]], token_ids: Sequence[int], num_tops: Sequence[int]
) -> list[TokenLogprobs]:
    """The reports, when the numbers are there."""
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
