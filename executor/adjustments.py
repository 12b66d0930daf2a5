"""How a request changes its logits before a token is chosen: bias, penalties, allowed and banned tokens.

`executor/sampler.py`, which applies the options, says what each of them means. Here they are prepared once,
at admission, so that a step only gathers arrays. A sequence without such options needs none of this.

Which tokens count as seen depends only on the ids of the sequence and on where its output began: it is the
same whether the sequence ran in one piece or was preempted, moved and resumed. Pure numpy.
"""

from collections.abc import Sequence
from copy import copy
from typing import Final

import numpy as np
from numpy.typing import NDArray

from executor.plan import SamplingParams

_NO_IDS: Final = np.empty(0, dtype=np.int64)


class SeenTokens:
    """The distinct tokens of one sequence, and how often each is in its output.

    _ids      [ prompt's, in id order | output's, as they came first | room to grow ]
    _counts   [ 0  0  2 ...           | 1  3  ...                    |              ]
    """

    __slots__ = ("_counts", "_ids", "_place_of")

    def __init__(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        self._ids = np.unique(np.array(prompt_ids, dtype=np.int64))
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._place_of = {token_id: place for place, token_id in enumerate(self._ids.tolist())}
        for token_id in output_ids:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        """One more token of output."""
        place = self._place_of.setdefault(token_id, len(self._place_of))
        if place == len(self._ids):
            room = np.zeros(max(16, len(self._ids)), dtype=np.int64)
            self._ids = np.concatenate([self._ids, room])
            self._counts = np.concatenate([self._counts, room.astype(np.float32)])
        self._ids[place] = token_id
        self._counts[place] += 1

    def copy(self) -> "SeenTokens":
        """As they are now."""
        other = SeenTokens((), ())
        other._ids, other._counts = self._ids.copy(), self._counts.copy()
        other._place_of = dict(self._place_of)
        return other

    @property
    def ids(self) -> NDArray[np.int64]:
        """Each of them once."""
        return self._ids[: len(self._place_of)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """How often each of `ids` is in the output; 0 for one that only the prompt has."""
        return self._counts[: len(self._place_of)]


class Adjustment:
    """One sequence's own changes. Empty arrays and `seen` None are *off*.

    Attributes:
        bias_ids, bias: added to the logits of these ids; int64 and float32 `[B]`.
        seen: the tokens that penalties look at.
        repetition_penalty, presence_penalty, frequency_penalty: as in `SamplingParams`.
        allowed_ids: int64, none but these may be chosen; empty is no rule.
        banned_ids: int64, these may not.
    """

    __slots__ = (
        "allowed_ids",
        "banned_ids",
        "bias",
        "bias_ids",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "seen",
    )

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        self.bias_ids = np.array([token_id for token_id, _ in params.logit_bias], dtype=np.int64)
        self.bias = np.array([bias for _, bias in params.logit_bias], dtype=np.float32)
        self.repetition_penalty = params.repetition_penalty
        self.presence_penalty = params.presence_penalty
        self.frequency_penalty = params.frequency_penalty
        # Repetition looks at prompt and output, the other two at the output alone.
        repeats = self.repetition_penalty != 1
        penalizes = repeats or self.presence_penalty != 0 or self.frequency_penalty != 0
        self.seen = SeenTokens(prompt_ids if repeats else (), output_ids) if penalizes else None
        self.allowed_ids = _ids(params.allowed_token_ids)
        self.banned_ids = _ids(params.banned_token_ids)

    def took(self, token_id: int) -> None:
        """The sequence has put out one more token."""
        if self.seen is not None:
            self.seen.add(token_id)

    def after(self, token_id: int) -> "Adjustment":
        """What it will be if that is the next token; this one stays as it is."""
        if self.seen is None:
            return self
        later = copy(self)
        later.seen = self.seen.copy()
        later.took(token_id)
        return later


def adjustment_of(
    params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> Adjustment | None:
    """What `params` changes of the logits after these tokens; None when it changes nothing."""
    changes = (
        params.logit_bias
        or params.allowed_token_ids
        or params.banned_token_ids
        or params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
    )
    return Adjustment(params, prompt_ids, output_ids) if changes else None


def _ids(token_ids: frozenset[int]) -> NDArray[np.int64]:
    return np.array(sorted(token_ids), dtype=np.int64) if token_ids else _NO_IDS
