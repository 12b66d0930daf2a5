"""The log of one live request: what a scheduler can be rebuilt from, and what its client has yet to get.

Rules:
  1. Ids are appended in the order in which the scheduler sent them, each once, and never taken back.
  2. A choice ends once. Nothing is appended after its end.
  3. The text of a choice is a function of its ids and of the request alone, never of how deltas are cut. Text
     that was held back comes out with the id that ends the choice.
  4. What the client has not taken yet is one delta for each choice, however slow the client is.
  5. Log-probabilities of the prompt come once, for all choices, before the first token: choice 0 asks for
     them, and only as long as they are not all here.

It must not know: streams, handles, gRPC, the clock (time comes in as an argument, in seconds).
"""

import enum
import hashlib
from collections import abc
from dataclasses import dataclass, replace

from router.constraints import Constraint
from router.latencies import Latencies
from router.text_stream import TextStream

_MASK_64 = (1 << 64) - 1
_SIGN_64 = 1 << 63


class FinishReason(enum.IntEnum):
    """Why a choice ended; the numbers are those of the contract."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    DEADLINE = 4
    ERROR = 5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen, every value in force.

    Off are: `top_k` 0, `logprobs` and `prompt_logprobs` None, a repetition penalty of 1, the other two
    penalties of 0, and empty lists.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]
    logprobs: int | None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely one token was, and its most likely alternatives (natural logarithms)."""

    token_id: int
    logprob: float
    rank: int
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class End:
    """The end of one choice.

    `message` is a sentence for the client and `status_code` the number of a gRPC status; both are set when
    the call is to fail with them.
    """

    reason: FinishReason
    matched_token_id: int | None = None
    matched_stop: str | None = None
    message: str = ""
    status_code: int = 0
    retry_after_ms: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """More of one choice. `offset` counts the ids that came before; `logprobs` is empty unless asked for."""

    index: int
    offset: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]


class OverrunError(ValueError):
    """Ids that were said to be received go on behind the end of their choice, from `position` on."""

    def __init__(self, position: int) -> None:
        super().__init__(f"id {position} stands behind the end")
        self.position = position


def choice_key(tenant: str, request_id: str, index: int) -> bytes:
    """16 bytes that name one choice for good: the head of SHA-256 over tenant, request id and index."""
    return hashlib.sha256(f"{tenant}\0{request_id}\0{index}".encode()).digest()[:16]


def drawn_seed(tenant: str, request_id: str, body_digest: bytes) -> int:
    """The seed of a request that gives none, a signed 64-bit integer.

    A function of id and body, and as random as the id. So when the request is resumed or repeated, any router
    goes on with the seed that its client was told.
    """
    named = f"{tenant}\0{request_id}\0seed".encode() + body_digest
    return int.from_bytes(hashlib.sha256(named).digest()[:8], signed=True)


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index`, a signed 64-bit integer that depends on `seed` and `index` alone.

    Choice 0 uses the seed itself, so that a request means the same whatever its `n`. Choice i > 0 takes the
    i-th output of SplitMix64 started at the seed (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014).
    """
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK_64
    z ^= z >> 31
    return z - (1 << 64) if z & _SIGN_64 else z


class ChoiceLog:
    """One choice: its ids, its text, its end.

    `end_token_ids` end the choice when the model says them; they count as output and never show as text.
    """

    __slots__ = (
        "_end_token_ids",
        "_last_token_at",
        "_latencies",
        "_num_taken",
        "_pending_logprobs",
        "_pending_text",
        "_text",
        "_text_is_whole",
        "end",
        "ended_at",
        "first_token_at",
        "index",
        "key",
        "num_cached_tokens",
        "output_token_ids",
        "sampling",
        "taken_in",
    )

    def __init__(
        self,
        *,
        key: bytes,
        index: int,
        sampling: SamplingParams,
        text: TextStream,
        end_token_ids: frozenset[int],
        received_at: float,
        latencies: Latencies,
    ) -> None:
        self.key = key
        self.index = index
        self.sampling = sampling
        self.output_token_ids: list[int] = []
        self.num_cached_tokens: int | None = None
        self.first_token_at: float | None = None
        self.ended_at: float | None = None
        self.end: End | None = None
        self.taken_in = False  # by a scheduler: it will end exactly once
        self._text = text
        self._text_is_whole = False  # what was held back has come out
        self._end_token_ids = end_token_ids
        self._last_token_at = received_at
        self._latencies = latencies
        self._num_taken = 0
        self._pending_text: list[str] = []
        self._pending_logprobs: list[TokenLogprobs] = []

    @property
    def num_unread_logprobs(self) -> int:
        """Entries that the client has not taken."""
        return len(self._pending_logprobs)

    @property
    def num_unread(self) -> int:
        """Ids that the client has not taken."""
        return len(self.output_token_ids) - self._num_taken

    @property
    def started(self) -> bool:
        """Whether the scheduler has begun with it."""
        return self.num_cached_tokens is not None

    def start(self, num_cached_tokens: int) -> None:
        """Notes what the prefix cache gave; only the first start counts, a later one is a recompute."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = num_cached_tokens

    def append(self, token_ids: abc.Sequence[int], logprobs: abc.Sequence[TokenLogprobs], now: float) -> None:
        """Takes in new ids; `logprobs` has one entry for each, or none at all.

        When one of them completes a stop string the choice ends there, and the ids after it are dropped.
        """
        first, since = self.first_token_at is None, self._last_token_at
        num_taken = self._take(token_ids, logprobs, now)
        self._latencies.tokens(num_taken, since=since, first=first, now=now)
        self._latencies.num_wasted_tokens += len(token_ids) - num_taken

    def _take(self, token_ids: abc.Sequence[int], logprobs: abc.Sequence[TokenLogprobs], now: float) -> int:
        """Takes ids in as far as the choice goes; returns how many."""
        assert self.end is None, "a choice takes nothing in after its end"
        texts = self._pending_text
        if token_ids:
            self._last_token_at = now
            if self.first_token_at is None:
                self.first_token_at = now
        for position, token_id in enumerate(token_ids):
            self.output_token_ids.append(token_id)
            if logprobs:
                self._pending_logprobs.append(logprobs[position])
            if token_id not in self._end_token_ids:
                texts.append(self._text.push_one(token_id))
            if self._text.matched is None and self._is_over(token_id):
                self._release_text()
            if self._text.matched is not None:
                self.finish(End(FinishReason.STOP, matched_stop=self._text.matched), now)
                return position + 1
        return len(token_ids)

    def finish(self, end: End, now: float) -> None:
        """Ends the choice.

        Text that was held back, a possible stop string or half a character, comes out when the model ended or
        ran to its length. It stays back when the choice broke off: whoever resumes from the ids gets it then.
        """
        assert self.end is None, "a choice ends once"
        if end.reason in {FinishReason.STOP, FinishReason.LENGTH} and end.matched_stop is None:
            self._release_text()
            if self._text.matched is not None:  # the last half character completed a stop string
                end = End(FinishReason.STOP, matched_stop=self._text.matched)
        self.end = end
        self.ended_at = now

    def resume(self, token_ids: abc.Sequence[int], now: float) -> None:
        """Begins after ids that the client has, with their text: none of it will be in a delta.

        Raises OverrunError when an id stands behind the end of the choice.
        """
        assert not self.output_token_ids, "a choice is resumed before anything else"
        for position, token_id in enumerate(token_ids):
            if self.end is not None or (position and self._is_over(token_ids[position - 1])):
                raise OverrunError(position)
            self._take((token_id,), (), now)  # no client waits for it: it is no latency
        self._num_taken = len(self.output_token_ids)
        self._pending_text.clear()
        self.first_token_at = None  # none was handed on yet

    def _is_over(self, newest: int) -> bool:
        """Whether the id that came last ends the choice, as the executor judges it."""
        return newest in self._end_token_ids or len(self.output_token_ids) >= self.sampling.max_tokens

    def _release_text(self) -> None:
        if not self._text_is_whole:
            self._text_is_whole = True
            self._pending_text.append(self._text.finish())

    def take_delta(self) -> Delta | None:
        """What has come since the last call, or None when nothing has."""
        text = "".join(self._pending_text)
        token_ids = tuple(self.output_token_ids[self._num_taken :])
        if not text and not token_ids:
            return None
        delta = Delta(self.index, self._num_taken, text, token_ids, tuple(self._pending_logprobs))
        self._num_taken += len(token_ids)
        self._pending_text.clear()
        self._pending_logprobs.clear()
        return delta


class RequestLog:
    """One request: its prompt, its choices, and what a scheduler must be told to take it over.

    `deadline`, `received_at` and `submitted_at` are seconds on the caller's clock. `accepted` means that the
    client may hold the first event (it is set just before that is sent): from then on the request is never
    refused for load. `resume_token` is in that event. A choice's `taken_in` is the scheduler's word for it.
    """

    __slots__ = (
        "accepted",
        "body_digest",
        "cache_salt",
        "choices",
        "deadline",
        "priority",
        "prompt_logprobs",
        "prompt_token_ids",
        "received_at",
        "request_id",
        "resume_token",
        "submitted_at",
        "tenant",
        "traceparent",
    )

    def __init__(
        self,
        *,
        request_id: str,
        tenant: str,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        texts: abc.Iterable[TextStream],
        eos_token_ids: frozenset[int],
        priority: int,
        cache_salt: str,
        body_digest: bytes,
        deadline: float | None,
        received_at: float,
        latencies: Latencies | None = None,
        resume_token: str = "",
        traceparent: str = "",
    ) -> None:
        """Begins a log with one choice for each of `texts`. `latencies` counts how long tokens take.

        `traceparent` names its span to the scheduler; empty when it has none.
        """
        self.request_id = request_id
        self.tenant = tenant
        self.prompt_token_ids = prompt_token_ids
        self.priority = priority
        self.cache_salt = cache_salt
        self.body_digest = body_digest
        self.deadline = deadline
        self.received_at = received_at
        self.resume_token = resume_token
        self.traceparent = traceparent
        self.submitted_at: float | None = None
        self.accepted = False
        self.prompt_logprobs: list[TokenLogprobs] = []  # of the prompt's tokens from the second on
        end_token_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            end_token_ids |= eos_token_ids
        self.choices = tuple(
            ChoiceLog(
                key=choice_key(tenant, request_id, index),
                index=index,
                sampling=replace(
                    sampling,
                    seed=choice_seed(sampling.seed, index),
                    prompt_logprobs=sampling.prompt_logprobs if index == 0 else None,
                ),
                text=text,
                end_token_ids=end_token_ids,
                received_at=received_at,
                latencies=latencies or Latencies(),
            )
            for index, text in enumerate(texts)
        )

    @property
    def taken_in(self) -> bool:
        """Whether a scheduler has taken every choice in."""
        return all(choice.taken_in for choice in self.choices)

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt were asked for and are not all here."""
        if self.choices[0].sampling.prompt_logprobs is None:
            return False
        return len(self.prompt_logprobs) < len(self.prompt_token_ids) - 1

    @property
    def num_prompt_numbers(self) -> int:
        """Log-probabilities that its answers will carry for the prompt: one a token, and its alternatives."""
        num_top = self.choices[0].sampling.prompt_logprobs
        if num_top is None:
            return 0
        return (len(self.prompt_token_ids) - 1) * (1 + num_top) * len(self.choices)

    @property
    def num_unread_numbers(self) -> int:
        """Log-probabilities of outputs that the client has not taken: one a token, and its alternatives."""
        num_top = self.choices[0].sampling.logprobs
        if num_top is None:
            return 0
        return (1 + num_top) * sum(choice.num_unread_logprobs for choice in self.choices)

    def take_prompt_logprobs(self, first_position: int, entries: abc.Sequence[TokenLogprobs]) -> None:
        """Takes in those of the tokens from `first_position` (>= 1) on. What was here before is dropped."""
        num_known = first_position - 1
        assert num_known <= len(self.prompt_logprobs), "they come without a gap"
        self.prompt_logprobs += entries[len(self.prompt_logprobs) - num_known :]

    @property
    def ended(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.end is not None for choice in self.choices)

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens that the cache gave the first choice to start; None before any has started."""
        return next((choice.num_cached_tokens for choice in self.choices if choice.started), None)

    def remaining_ms(self, now: float) -> int | None:
        """Milliseconds until the deadline, at least 0; None without one."""
        return None if self.deadline is None else max(0, int((self.deadline - now) * 1000))

    def waited_ms(self, now: float) -> int:
        """Milliseconds since it was first submitted to a scheduler; 0 before that."""
        return 0 if self.submitted_at is None else max(0, int((now - self.submitted_at) * 1000))
