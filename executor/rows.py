"""A step as the model sees it: the rows it computes, and what the sampler chose for them.

`sequences` turns a plan into rows and records what was sampled; `inputs` turns rows into arrays. Pure data.
It must not know which sequences there are.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from executor.adjustments import Adjustment
from executor.constraints import Matcher
from executor.plan import SamplingParams, TokenLogprobs

NOT_FINITE: Final = (
    "the model's logits for this sequence are not numbers (NaN or infinite): it cannot be continued"
)
"""What `Sampled.errors` says of such a row."""
IN_FLIGHT: Final = -1
"""Stands for a token that is sampled and not known here yet: the device has it."""


@dataclass(frozen=True, slots=True)
class PromptStretch:
    """Tokens of a prompt whose log-probabilities a row brings: their distributions are computed in it.

    Attributes:
        seq_id: whose.
        first_position: position of the first of them in the prompt, >= 1.
        token_ids: the tokens.
        num_top: alternatives wanted beside each.
    """

    seq_id: int
    first_position: int
    token_ids: list[int]
    num_top: int


@dataclass(frozen=True, slots=True)
class SampleRow:
    """How one row's next token is chosen.

    Attributes:
        params: the request's sampling.
        output_index: which output token this is, 0 being the first; the counter of the random numbers.
        masked_ids: ids that may not be chosen now (end tokens before `min_tokens`).
        adjustment: bias, penalties and lists; None when the request has none.
        matcher: what may be chosen at all; None for anything.
    """

    params: SamplingParams
    output_index: int
    masked_ids: tuple[int, ...]
    adjustment: Adjustment | None = None
    matcher: Matcher | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part in a step, ready to compute.

    Attributes:
        seq_id: whose.
        token_ids: the tokens to compute; the last may be IN_FLIGHT. Its draft tokens are the last ones.
        first_position: position of the first of them.
        block_ids: int32, the sequence's whole block table.
        params: how its next token is chosen.
        output_index: which output token it samples (0 is the first); None when known tokens remain after it.
        masked_ids: ids that may not be chosen.
        adjustment: what else its request changes of the logits, as of the tokens known now; None for nothing.
        scored: the stretch of its prompt whose log-probabilities are wanted; None for none.
        matcher: what may be chosen at all; None for anything.
        behind_drafts: how a token is chosen behind each of its draft tokens, if that one is right.
    """

    seq_id: int
    token_ids: list[int]
    first_position: int
    block_ids: NDArray[np.int32]
    params: SamplingParams
    output_index: int | None
    masked_ids: tuple[int, ...]
    adjustment: Adjustment | None = None
    scored: PromptStretch | None = None
    matcher: Matcher | None = None
    behind_drafts: tuple[SampleRow, ...] = ()

    @property
    def draft(self) -> list[int]:
        """Its draft tokens."""
        return self.token_ids[len(self.token_ids) - len(self.behind_drafts) :]

    @property
    def choices(self) -> tuple[SampleRow, ...]:
        """How its tokens are chosen, one for each of the last `token_ids`; empty if it samples none."""
        if self.output_index is None:
            return ()
        first = SampleRow(self.params, self.output_index, self.masked_ids, self.adjustment, self.matcher)
        return (first, *self.behind_drafts)


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the sampler chose for S rows. Where `errors` holds a sentence, the token id means nothing."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    errors: list[str | None]
