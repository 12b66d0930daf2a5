"""A router's side of one scheduler: what to send, and what to make of what comes back.

A state machine without I/O, in the manner of h11. The caller carries messages and tells the time:
`next_message` is what to write next, `receive` takes what was read, `connected` and `disconnected` say that a
stream began or broke.

Rules:
  1. Each stream begins anew: fresh handles, and every live request is submitted again with the ids it has.
  2. A message that belongs to a stream that was left is dropped, whole.
  3. A message is checked whole before any of it is applied; one that does not fit ends the stream, loudly.
  4. A choice is here from its submission to its end, and ends once: by the scheduler's word, by a stop
     string, by `cancel`, or because the scheduler stayed away for longer than the recovery timeout. Or it
     leaves without an end: to a newer log of the same request (`hand_over`), or to another scheduler
     (`abandon`).

It must not know: gRPC, asyncio, the clock, text.
"""

import enum
from collections import abc, deque
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from router.request_log import ChoiceLog, End, FinishReason, RequestLog, SamplingParams, TokenLogprobs

PROTOCOL_REVISION: Final = 1
# Most prompt ids in one Submit (64 KiB of them): a cancel never waits behind more.
PART_TOKENS: Final = 16_384
# The number of gRPC's status UNAVAILABLE.
UNAVAILABLE: Final = 14
# Breaks of the protocol that follow one another faster than this are one affair.
SOUND_SECONDS: Final = 10.0

_T = TypeVar("_T")


class SessionError(Exception):
    """The scheduler broke the protocol; its text says how. The stream must be given up."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Opens a session."""

    router_id: str
    protocol_revision: int
    stream: int  # counts those of this router: the scheduler looks at nothing of an older one


@dataclass(frozen=True, slots=True)
class Submit:
    """One choice to compute, or one part of it: a later part carries the handle and prompt ids alone.

    `num_parts` is 1 when the whole prompt fits into one message.
    """

    handle: int
    prompt_token_ids: tuple[int, ...]
    part: int
    num_parts: int
    body: "SubmitBody | None"


@dataclass(frozen=True, slots=True)
class SubmitBody:
    """What a Submit carries beside the prompt."""

    key: bytes
    request_id: str
    sample_index: int
    group: int
    output_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int
    tenant: str
    remaining_ms: int | None
    waited_ms: int
    cache_salt: str
    body_digest: bytes
    accepted_before: bool
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Gives one choice up."""

    key: bytes
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Ack:
    """Everything up to this message has been taken in."""

    message_id: int


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """What two processes must share for their numbers to mean the same; "" is "not known"."""

    model: str = ""
    tokenizer: str = ""
    numerics: str = ""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The session is open: the model, the limits and the optional abilities of this scheduler."""

    scheduler_id: str
    term: int
    protocol_revision: int
    max_total_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    fingerprints: Fingerprints
    dtype: str
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ServingStatus:
    """Whether a request sent now would get a token, and if not, why."""

    serving: bool
    reason: str


@dataclass(frozen=True, slots=True)
class SequenceFinished:
    """A choice has ended, by the scheduler's word."""

    handle: int
    end: End
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Tokens and ends since the message before. `token_ids` is ragged: `num_tokens[i]` ids for `handles[i]`.

    `accepted` are handles that were taken in. `logprobs` maps a handle to one entry for each of its ids in
    this message; `started` maps a handle to the prompt tokens that the cache gave it; `prompt_logprobs` maps
    a handle to a position in its prompt and one entry for each token from there on.
    """

    message_id: int
    handles: tuple[int, ...]
    num_tokens: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: abc.Mapping[int, tuple[TokenLogprobs, ...]]
    finished: tuple[SequenceFinished, ...]
    started: abc.Mapping[int, int]
    step_id: int
    accepted: tuple[int, ...] = ()
    prompt_logprobs: abc.Mapping[int, tuple[int, tuple[TokenLogprobs, ...]]] = field(default_factory=dict)


RouterMessage = Hello | Submit | Cancel | Ack
SchedulerMessage = Welcome | ServingStatus | StepOutput


@dataclass(frozen=True, slots=True)
class Progressed:
    """Something came for this request: a start, tokens, an end."""

    request: RequestLog


@dataclass(frozen=True, slots=True)
class ServingChanged:
    """Whether new requests are taken has changed; `refusal` says why not, None that they are."""

    refusal: str | None


Event = Progressed | ServingChanged


@dataclass(frozen=True, slots=True)
class TokenizerIdentity:
    """What this router's tokenizer is, to be compared with what the scheduler's model wants."""

    fingerprint: str
    vocab_size: int


class _State(enum.Enum):
    """Where a session stands."""

    AWAY = "away"  # no stream
    GREETED = "greeted"  # Hello is out; the scheduler may still wait for its first executor
    OPEN = "open"  # welcomed: requests travel
    UNFIT = "unfit"  # welcomed to a model that this router's tokenizer does not belong to


# Which messages may come when; any other breaks the protocol.
_EXPECTED: Final[dict[_State, tuple[type[SchedulerMessage], ...]]] = {
    _State.GREETED: (Welcome, ServingStatus),
    _State.OPEN: (ServingStatus, StepOutput),
    _State.UNFIT: (ServingStatus,),
}


class _Live:
    """A choice that has not ended, with what it has on the present stream."""

    __slots__ = ("choice", "group", "handle", "next_part", "request")

    def __init__(self, request: RequestLog, choice: ChoiceLog) -> None:
        self.request = request
        self.choice = choice
        self.handle = 0
        self.group = 0
        self.next_part = 0


class SchedulerSession:
    """All dealings of one router with one scheduler, across any number of streams.

    `welcome` is the newest Welcome of a fitting model, kept while the scheduler is away.
    """

    def __init__(
        self, *, router_id: str, tokenizer: TokenizerIdentity, recovery_timeout_seconds: float
    ) -> None:
        """Begins away. With a recovery timeout of 0 a lost stream ends every live request at once."""
        self.welcome: Welcome | None = None
        self._router_id = router_id
        self._tokenizer = tokenizer
        self._recovery_timeout_seconds = recovery_timeout_seconds
        self._state = _State.AWAY
        self._away_since: float | None = None
        self._breaking_since = 0.0
        self._last_break: float | None = None
        self._away_reason = "the scheduler has not been reached yet"
        self._unfit_reason = ""
        self._serving_status = ServingStatus(serving=False, reason="")
        self._connection = 0
        self._last_message_id = 0
        self._next_handle = 1
        self._live: dict[bytes, _Live] = {}  # by key, in the order of submission
        self._by_handle: dict[int, _Live] = {}  # the live ones of this stream
        self._hello_due = False
        self._ack_due = False
        self._cancels: deque[Cancel] = (
            deque()
        )  # outlives a stream: what was given up while away is told later
        self._unsent: deque[_Live] = deque()

    @property
    def refusal(self) -> str | None:
        """Why a new request is not taken, as the rest of a sentence; None when it is."""
        match self._state:
            case _State.AWAY:
                return self._away_reason
            case _State.GREETED:
                return self._serving_status.reason or "the scheduler has no executor yet"
            case _State.UNFIT:
                return self._unfit_reason
            case _State.OPEN if not self._serving_status.serving:
                return self._serving_status.reason or "the scheduler is not serving"
            case _State.OPEN:
                return None

    @property
    def num_live(self) -> int:
        """Choices that have not ended."""
        return len(self._live)

    @property
    def away_since(self) -> float | None:
        """When the scheduler was lost; None while it is here, and before it has ever been."""
        return self._away_since

    @property
    def requests(self) -> list[RequestLog]:
        """Those with a choice that has not ended, in the order of submission."""
        return list(dict.fromkeys(live.request for live in self._live.values()))

    @property
    def recovery_deadline(self) -> float | None:
        """When `expire` will end the live requests; None while none of them waits for a scheduler."""
        if self._away_since is None or not self._live:
            return None
        return self._away_since + self._recovery_timeout_seconds

    # --- the stream ---------------------------------------------------------------------------------

    def connected(self) -> int:
        """A stream has begun; returns the number that `receive` wants with each of its messages."""
        assert self._state is _State.AWAY, "one stream at a time"
        self._state = _State.GREETED
        self._serving_status = ServingStatus(serving=False, reason="")
        self._connection += 1
        self._last_message_id = 0
        self._next_handle = 1
        self._hello_due = True
        return self._connection

    def disconnected(self, reason: str, now: float) -> list[Event]:
        """The stream broke, or could not be had; `reason` is the rest of a sentence about the scheduler."""
        refusal_before = self.refusal
        self._state = _State.AWAY
        self._away_reason = reason
        if self._away_since is None:
            self._away_since = now
        self._by_handle.clear()
        self._unsent.clear()
        self._hello_due = self._ack_due = False
        return self._serving_events(refusal_before) + self.expire(now)

    def broke_protocol(self, reason: str, now: float) -> list[Event]:
        """The stream was given up because the scheduler broke the protocol; otherwise as `disconnected`.

        One that comes back and breaks it again is as good as away: the recovery timeout counts from the
        first of such breaks.
        """
        if self._last_break is None or now - self._last_break > SOUND_SECONDS:
            self._breaking_since = now
        self._last_break = now
        if self._away_since is None:
            self._away_since = self._breaking_since
        return self.disconnected(reason, now)

    def expire(self, now: float) -> list[Event]:
        """Ends what waited for the scheduler for longer than the recovery timeout."""
        if self._away_since is None or now < self._away_since + self._recovery_timeout_seconds:
            return []
        self._cancels.clear()  # the scheduler has long aborted what nobody asked for again
        why = self.refusal or "the scheduler was away"
        if self._state is _State.GREETED and not self._serving_status.reason:
            why = self._away_reason  # a stream that has just begun says nothing newer
        message = f"The request could not go on: {why}."
        end = End(FinishReason.ERROR, message=message, status_code=UNAVAILABLE)
        requests = dict.fromkeys(live.request for live in self._live.values())
        for live in self._live.values():
            live.choice.finish(end, now)
        self._live.clear()
        return [Progressed(request) for request in requests]

    def next_message(self, now: float) -> RouterMessage | None:
        """What to write next, or None when there is nothing. Cancels go before requests."""
        if self._hello_due:
            self._hello_due = False
            return Hello(self._router_id, PROTOCOL_REVISION, self._connection)
        if self._state is not _State.OPEN:
            return None
        if self._ack_due:
            self._ack_due = False
            return Ack(self._last_message_id)
        if self._cancels:
            return self._cancels.popleft()
        while self._unsent and self._unsent[0].handle not in self._by_handle:  # it has left
            self._unsent.popleft()
        return self._next_submit(self._unsent[0], now) if self._unsent else None

    # --- requests -----------------------------------------------------------------------------------

    def submit(self, request: RequestLog, now: float) -> None:
        """Takes in the choices of a request that have not ended; `refusal` must be None.

        They go on after the ids they have, if they have any. A choice that had its stop string before it came
        here may be running all the same, under another router's eyes: the scheduler is told.
        """
        assert self.refusal is None, "ask `refusal` first"
        assert not any(choice.key in self._live for choice in request.choices), "a request is submitted once"
        group = self._next_handle
        for choice in request.choices:
            if choice.end is None:
                live = self._live[choice.key] = _Live(request, choice)
                self._enrol(live, group)
            elif choice.end.matched_stop is not None:
                self._cancels.append(Cancel(choice.key, choice.end.reason))
        if request.submitted_at is None:
            request.submitted_at = now

    def hand_over(self, request: RequestLog) -> None:
        """Forgets a request without a word to the scheduler: a newer log of it will be submitted and attach.

        Unless half a prompt is over there, waiting for the rest.
        """
        for live in self._of(request):
            self._leave(live)
            if live.next_part > 0 and live in self._unsent:
                self._cancels.append(Cancel(live.choice.key, FinishReason.ABORT))

    def abandon(self, request: RequestLog) -> None:
        """Forgets a request that goes on at another scheduler; this one is told, when it can be."""
        for live in self._of(request):
            self._leave(live)
            self._cancels.append(Cancel(live.choice.key, FinishReason.ABORT))

    def cancel(self, key: bytes, end: End, now: float) -> None:
        """Gives one choice up for a reason of this side; one that is not live any more is no error."""
        live = self._live.get(key)
        if live is None:
            return
        live.choice.finish(end, now)
        self._leave(live)
        self._cancels.append(Cancel(key, end.reason))

    # --- what comes in ------------------------------------------------------------------------------

    def receive(self, connection: int, message: SchedulerMessage, now: float) -> list[Event]:
        """Applies one message of the stream with this number.

        Raises SessionError when it does not fit; nothing of it has been applied then.
        """
        if connection != self._connection or self._state is _State.AWAY:
            return []
        if not isinstance(message, _EXPECTED[self._state]):
            raise SessionError(
                f"{type(message).__name__} is out of place: the session is {self._state.value}"
            )
        match message:
            case StepOutput():
                return self._take_output(message, now)
            case ServingStatus():
                refusal_before = self.refusal
                self._serving_status = message
                return self._serving_events(refusal_before)
            case Welcome():
                return self._open(message)

    def _open(self, welcome: Welcome) -> list[Event]:
        refusal_before = self.refusal
        mismatch = self._mismatch(welcome)
        if mismatch is not None:
            self._unfit_reason = mismatch
            self._state = _State.UNFIT
            return self._serving_events(refusal_before)
        self.welcome = welcome
        self._state = _State.OPEN
        self._away_since = None
        groups: dict[RequestLog, int] = {}
        for live in self._live.values():
            self._enrol(live, groups.setdefault(live.request, self._next_handle))
        return self._serving_events(refusal_before)

    def _mismatch(self, welcome: Welcome) -> str | None:
        """Why this router's tokenizer does not belong to the model, naming both; None when it may."""
        ours, theirs = self._tokenizer.fingerprint, welcome.fingerprints.tokenizer
        if ours and theirs and ours != theirs:
            return (
                f"the tokenizer of this router (fingerprint {ours}) does not belong to the model of "
                f"scheduler {welcome.scheduler_id} (tokenizer fingerprint {theirs})"
            )
        if self._tokenizer.vocab_size > welcome.vocab_size:
            return (
                f"the tokenizer of this router has {self._tokenizer.vocab_size} ids and the model of "
                f"scheduler {welcome.scheduler_id} only {welcome.vocab_size}"
            )
        return None

    def _take_output(self, output: StepOutput, now: float) -> list[Event]:
        if output.message_id <= self._last_message_id:
            return []  # a duplicate: it has been applied
        self._check(output)
        touched: dict[_Live, None] = {}
        for live, _ in self._living((handle, None) for handle in output.accepted):
            live.choice.taken_in = True
            touched[live] = None
        for live, num_cached_tokens in self._living(output.started.items()):
            live.choice.start(num_cached_tokens)
            touched[live] = None
        for live, (first_position, entries) in self._living(output.prompt_logprobs.items()):
            live.request.take_prompt_logprobs(first_position, entries)
            touched[live] = None
        for live, token_ids in self._living(_rows(output)):
            live.choice.append(token_ids, output.logprobs.get(live.handle, ()), now)
            touched[live] = None
        for live, finished in self._living((finished.handle, finished) for finished in output.finished):
            live.choice.start(finished.num_cached_tokens)
            if live.choice.end is None:  # else a stop string came first
                live.choice.finish(finished.end, now)
            self._leave(live)
            touched[live] = None
        for live in touched:
            if (
                live.choice.end is not None and live.handle in self._by_handle
            ):  # a stop string, and it runs on
                self._leave(live)
                self._cancels.append(Cancel(live.choice.key, live.choice.end.reason))
        self._last_message_id = output.message_id
        self._ack_due = True
        return [Progressed(request) for request in dict.fromkeys(live.request for live in touched)]

    def _check(self, output: StepOutput) -> None:
        """Raises SessionError unless every column of the message fits."""
        if output.message_id != self._last_message_id + 1:
            raise SessionError(f"message {output.message_id} came after message {self._last_message_id}")
        if len(output.handles) != len(output.num_tokens):
            raise SessionError(f"{len(output.handles)} handles stand beside {len(output.num_tokens)} counts")
        if sum(output.num_tokens) != len(output.token_ids):
            raise SessionError(f"{len(output.token_ids)} ids came, {sum(output.num_tokens)} were counted")
        if len(set(output.handles)) != len(output.handles):
            raise SessionError("a handle has two rows in one message")
        self._check_handles(output)
        assert self.welcome is not None, "an open session has been welcomed"
        if output.token_ids and max(output.token_ids) >= self.welcome.vocab_size:
            raise SessionError(
                f"token id {max(output.token_ids)} is outside the vocabulary of {self.welcome.vocab_size}"
            )
        for live, (first_position, entries) in self._living(output.prompt_logprobs.items()):
            self._check_prompt_logprobs(live, first_position, entries)
        for handle, token_ids in _rows(output):
            self._check_row(handle, token_ids, output.logprobs.get(handle, ()))
            self._check_prompt_is_told(handle, output)

    def _check_handles(self, output: StepOutput) -> None:
        ended = [finished.handle for finished in output.finished]
        if len(set(ended)) != len(ended):
            raise SessionError("a handle ends twice in one message")
        told = (*output.accepted, *output.started, *output.prompt_logprobs, *output.logprobs)
        for handle in (*told, *output.handles, *ended):
            if not 0 < handle < self._next_handle:
                raise SessionError(f"handle {handle} was never given on this stream")

    def _check_prompt_is_told(self, handle: int, output: StepOutput) -> None:
        """Log-probabilities of the prompt come before the first token."""
        live = self._by_handle.get(handle)
        if live is None or live.choice.sampling.prompt_logprobs is None:
            return
        first_position, entries = output.prompt_logprobs.get(handle, (1, ()))
        num_told = max(len(live.request.prompt_logprobs), first_position - 1 + len(entries))
        if num_told < (num_due := len(live.request.prompt_token_ids) - 1):
            raise SessionError(
                f"handle {handle} got tokens after {num_told} of {num_due} log-probabilities of its prompt"
            )

    def _check_prompt_logprobs(
        self, live: _Live, first_position: int, entries: tuple[TokenLogprobs, ...]
    ) -> None:
        if live.choice.sampling.prompt_logprobs is None:
            raise SessionError(f"handle {live.handle} got log-probabilities of its prompt and asked for none")
        if not 1 <= first_position <= len(live.request.prompt_logprobs) + 1:
            raise SessionError(
                f"handle {live.handle} got log-probabilities of its prompt from {first_position} on; "
                f"{len(live.request.prompt_logprobs) + 1} is next"
            )
        told = tuple(entry.token_id for entry in entries)
        if told != live.request.prompt_token_ids[first_position : first_position + len(told)]:
            raise SessionError(f"handle {live.handle} got log-probabilities of another prompt than its own")

    def _check_row(
        self, handle: int, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]
    ) -> None:
        if not token_ids:
            raise SessionError(f"handle {handle} has a row without tokens")
        live = self._by_handle.get(handle)
        if live is None:
            return  # it has ended here; its tokens are nobody's
        choice = live.choice
        if len(choice.output_token_ids) + len(token_ids) > choice.sampling.max_tokens:
            raise SessionError(
                f"handle {handle} got more than its max_tokens of {choice.sampling.max_tokens}"
            )
        wanted = 0 if choice.sampling.logprobs is None else len(token_ids)
        if len(logprobs) != wanted:
            raise SessionError(f"handle {handle} got {len(logprobs)} log-probabilities, {wanted} are due")

    def _living(self, columns: abc.Iterable[tuple[int, _T]]) -> abc.Iterator[tuple[_Live, _T]]:
        """The values whose handles have not ended here, each with its choice."""
        for handle, value in columns:
            if live := self._by_handle.get(handle):
                yield live, value

    # --- small steps --------------------------------------------------------------------------------

    def _serving_events(self, refusal_before: str | None) -> list[Event]:
        return [] if self.refusal == refusal_before else [ServingChanged(self.refusal)]

    def _enrol(self, live: _Live, group: int) -> None:
        """Gives a live choice a fresh handle on this stream and lines its Submit up."""
        live.handle = self._next_handle
        live.group = group
        live.next_part = 0
        self._next_handle += 1
        self._by_handle[live.handle] = live
        self._unsent.append(live)

    def _of(self, request: RequestLog) -> list[_Live]:
        return [live for live in self._live.values() if live.request is request]

    def _leave(self, live: _Live) -> None:
        """Forgets a choice. Its handle stays known as one that was given, without a record."""
        del self._live[live.choice.key]
        self._by_handle.pop(live.handle, None)

    def _next_submit(self, live: _Live, now: float) -> Submit:
        request, choice, part = live.request, live.choice, live.next_part
        num_parts = max(1, -(-len(request.prompt_token_ids) // PART_TOKENS))
        live.next_part += 1
        if live.next_part == num_parts:
            self._unsent.popleft()
        body = None
        if part == 0:
            body = SubmitBody(
                key=choice.key,
                request_id=request.request_id,
                sample_index=choice.index,
                group=live.group,
                output_token_ids=tuple(choice.output_token_ids),
                sampling=(
                    choice.sampling
                    if request.lacks_prompt_logprobs
                    else replace(choice.sampling, prompt_logprobs=None)  # computed again for nobody
                ),
                priority=request.priority,
                tenant=request.tenant,
                remaining_ms=request.remaining_ms(now),
                waited_ms=request.waited_ms(now),
                cache_salt=request.cache_salt,
                body_digest=request.body_digest,
                accepted_before=request.accepted,
                traceparent=request.traceparent,
            )
        prompt_part = request.prompt_token_ids[part * PART_TOKENS : (part + 1) * PART_TOKENS]
        return Submit(live.handle, prompt_part, part, num_parts, body)


def _rows(output: StepOutput) -> abc.Iterator[tuple[int, tuple[int, ...]]]:
    """Each handle with its ids."""
    start = 0
    for handle, num_tokens in zip(output.handles, output.num_tokens, strict=True):
        yield handle, output.token_ids[start : start + num_tokens]
        start += num_tokens
