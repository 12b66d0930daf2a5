"""What routers are told about the executors, and check requests against.

Lengths and features are the minimum over all attached executors; the model is the same for all. What no
request can ask for is left out: routers need not hear of it, nor when it changes. Pure.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Self

from scheduler.drafting import DRAFT_TOKENS
from scheduler.plan import Capacity


@dataclass(frozen=True, slots=True)
class Promise:
    """Equal if routers would decide alike; the numerics, which may differ, are only shown to people."""

    max_total_tokens: int
    features: frozenset[str]
    vocab_size: int
    eos_token_ids: frozenset[int]
    model_fingerprint: str
    tokenizer_fingerprint: str
    numerics_fingerprint: str = field(compare=False)
    dtype: str = field(compare=False)

    @classmethod
    def of(cls, capacity: Capacity, max_total_tokens: int, features: Iterable[str]) -> Self:
        """The promise of executors with the model of this one."""
        return cls(
            max_total_tokens,
            frozenset(features) - {DRAFT_TOKENS},
            capacity.vocab_size,
            capacity.eos_token_ids,
            capacity.model_fingerprint,
            capacity.tokenizer_fingerprint,
            capacity.numerics_fingerprint,
            capacity.dtype,
        )

    def knowing(self, earlier: "Promise | None") -> "Promise":
        """The same, but keeps fingerprints when an executor that does not tell its own joins others."""
        if earlier is None:
            return self
        return replace(
            self,
            model_fingerprint=self.model_fingerprint or earlier.model_fingerprint,
            tokenizer_fingerprint=self.tokenizer_fingerprint or earlier.tokenizer_fingerprint,
        )
