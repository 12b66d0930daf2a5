"""When a sequence ends. The executor alone decides this, because it is the first to know a token.

Knows token ids and counts. Must not know text (stop strings are the router's), plans, tensors or protos.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class FinishReason(Enum):
    """Why a sequence ended by itself."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class StopRule:
    """What ends one sequence. Made once, at admission, so that a step only looks up.

    Attributes:
        end_token_ids: ids that end it: the model's end tokens unless ignored, and the request's stop ids.
        min_tokens: output tokens before which no end token may be chosen.
        max_tokens: most output tokens.
        max_seq_len: most tokens, prompt plus output.
    """

    end_token_ids: frozenset[int]
    min_tokens: int
    max_tokens: int
    max_seq_len: int

    def masked_ids(self, output_index: int) -> tuple[int, ...]:
        """Ids that may not be chosen as output token number `output_index` (0 is the first), ascending."""
        return tuple(sorted(self.end_token_ids)) if output_index < self.min_tokens else ()

    def finish_reason(self, token_id: int, *, num_output_tokens: int, seq_len: int) -> FinishReason | None:
        """Why the sequence ends with `token_id`, or None when it goes on.

        `num_output_tokens` and `seq_len` count `token_id`. An end token beats a length reached by the same
        token: the model was done.
        """
        if token_id in self.end_token_ids:
            return FinishReason.STOP
        is_long = self.is_long_enough(num_output_tokens=num_output_tokens, seq_len=seq_len)
        return FinishReason.LENGTH if is_long else None

    def is_long_enough(self, *, num_output_tokens: int, seq_len: int) -> bool:
        """Whether its length alone ends the sequence, whatever its last token is."""
        return num_output_tokens >= self.max_tokens or seq_len >= self.max_seq_len


def end_token_ids(
    eos_token_ids: Iterable[int], stop_token_ids: Iterable[int], *, ignore_eos: bool
) -> frozenset[int]:
    """Ids that end a sequence: the model's own (unless `ignore_eos`) and the request's."""
    return frozenset(stop_token_ids) | (frozenset() if ignore_eos else frozenset(eos_token_ids))
