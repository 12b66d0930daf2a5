"""Results of requests that have ended, kept a little longer for clients that ask again.

A client whose connection broke with the last tokens on the way repeats its request by its id, or resumes it,
and gets what is here rather than what is computed anew. Bounded in time and in bytes: the oldest go first.

Pure: time comes in as an argument, in seconds. It must not know streams, gRPC, text.
"""

from array import array
from collections import OrderedDict, abc
from dataclasses import dataclass
from typing import Final

from router.request_log import ChoiceLog, End, FinishReason, RequestLog

KEEP_SECONDS: Final = 60.0
MAX_BYTES: Final = 64 * 1024 * 1024
_BYTES_PER_CHOICE: Final = 512  # records and pointers, about
_PROPER: Final = frozenset({FinishReason.STOP, FinishReason.LENGTH})

Name = tuple[str, str]
"""Tenant and request id."""


@dataclass(frozen=True, slots=True)
class KeptChoice:
    """How one choice came out."""

    token_ids: abc.Sequence[int]
    end: End
    num_cached_tokens: int

    def tell(self, choice: ChoiceLog, now: float) -> bool:
        """Brings a choice that has a beginning of these ids to its end; says whether it was one."""
        num_received = len(choice.output_token_ids)
        if list(self.token_ids[:num_received]) != choice.output_token_ids:
            return False
        choice.taken_in = True
        choice.start(self.num_cached_tokens)
        if choice.end is None:
            choice.append(self.token_ids[num_received:], (), now)
        if choice.end is None:  # else a stop string has ended it
            choice.finish(self.end, now)
        return True


@dataclass(frozen=True, slots=True)
class KeptResult:
    """How a request came out; None for a choice that cannot be told again."""

    body_digest: bytes
    choices: tuple[KeptChoice | None, ...]

    @classmethod
    def of(cls, request: RequestLog) -> "KeptResult":
        """What there is to tell of a request now. Log-probabilities are not kept, nor choices with them."""
        return cls(request.body_digest, tuple(map(_kept, request.choices)))

    @property
    def num_bytes(self) -> int:
        """What it takes in memory, about."""
        return sum(
            _BYTES_PER_CHOICE + 4 * len(choice.token_ids) for choice in self.choices if choice is not None
        )


class KeptResults:
    """The results of the last `keep_seconds`, at most `max_bytes` of them."""

    def __init__(self, *, keep_seconds: float = KEEP_SECONDS, max_bytes: int = MAX_BYTES) -> None:
        self._keep_seconds = keep_seconds
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._results: OrderedDict[Name, tuple[float, KeptResult]] = OrderedDict()

    def keep(self, request: RequestLog, now: float) -> None:
        """Keeps a request's result if all of it came to a proper end."""
        name = (request.tenant, request.request_id)
        result = KeptResult.of(request)
        self._drop(name)
        self._forget_old(now)
        if None in result.choices or result.num_bytes > self._max_bytes:
            return
        self._results[name] = (now, result)
        self._num_bytes += result.num_bytes
        while self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._results)))

    def find(self, name: Name, body_digest: bytes, now: float) -> KeptResult | None:
        """The result of this request, if it is here and was of the same body."""
        self._forget_old(now)
        _, result = self._results.get(name, (now, None))
        return result if result is not None and result.body_digest == body_digest else None

    def _forget_old(self, now: float) -> None:
        while self._results:
            name, (kept_at, _) = next(iter(self._results.items()))
            if now < kept_at + self._keep_seconds:
                return
            self._drop(name)

    def _drop(self, name: Name) -> None:
        _, result = self._results.pop(name, (0.0, None))
        if result is not None:
            self._num_bytes -= result.num_bytes


def _kept(choice: ChoiceLog) -> KeptChoice | None:
    if choice.end is None or choice.end.reason not in _PROPER:
        return None
    if choice.sampling.logprobs is not None or choice.sampling.prompt_logprobs is not None:
        return None
    return KeptChoice(array("I", choice.output_token_ids), choice.end, choice.num_cached_tokens or 0)
