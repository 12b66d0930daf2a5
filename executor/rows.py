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
    """How one token is chosen from its row of the logits.

    Attributes:
        params: the request's sampling.
        output_index: which output token this is, 0 being the first; the counter of the random numbers.
        masked_ids: ids that may not be chosen now (end tokens before `min_tokens`).
        adjustment: bias, penalties and lists, as of the tokens before it; None when the request has none.
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

        token_ids      [ known ......... | draft ... ]     of 5 known tokens and 2 draft tokens, say,
        sample_rows                [ 0   | 1     2   ]     each stands for the token after the one above it

    Attributes:
        seq_id: whose.
        token_ids: the tokens to compute, the draft tokens last; of those before, the last may be IN_FLIGHT.
        first_position: position of the first of them.
        block_ids: int32, the sequence's whole block table.
        sample_rows: how the token after its last known one is chosen, and the one after each draft token, as
            if the guesses before it were right; empty when known tokens remain after this row.
        scored: the stretch of its prompt whose log-probabilities are wanted; None for none.
    """

    seq_id: int
    token_ids: list[int]
    first_position: int
    block_ids: NDArray[np.int32]
    sample_rows: tuple[SampleRow, ...] = ()
    scored: PromptStretch | None = None

    @property
    def draft_token_ids(self) -> list[int]:
        """Its draft tokens."""
        return self.token_ids[len(self.token_ids) - len(self.sample_rows) + 1 :] if self.sample_rows else []


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the sampler chose for S rows. Where `errors` holds a sentence, the token id means nothing."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    errors: list[str | None]
