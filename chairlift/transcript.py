"""Turns the events of a stream, and of those that resume it, into pieces; nothing is shown twice.

When a stream breaks, the request is resumed with the token of its first event and the ids that are there
(docs/protocol.md, "Resuming as a client"), and goes on after them. Where no router knows the token any more,
it is asked again with the seed that its first stream told: the same request with the same seed gives the
same tokens. What comes once more is compared with what is there and dropped; where it differs, the answer
cannot be continued, and `Diverged` says so rather than splice two answers.

A state machine without I/O. It must not know channels, clocks, retries.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from chairlift.results import Answer, Choice, FinishReason, Model, Piece, TokenLogprobs, Usage
from protos.v1 import common_pb2, router_pb2

_REASONS = {
    common_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    common_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    common_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
    common_pb2.FINISH_REASON_DEADLINE: FinishReason.DEADLINE,
    common_pb2.FINISH_REASON_ERROR: FinishReason.ERROR,
}


class Diverged(Exception):  # noqa: N818 - it is what happened, and the shell makes an error of it
    """The answer does not go on with the one that was begun."""


@dataclass(slots=True)
class _Choice:
    """One choice as it is known, and how far the present stream has come in it."""

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: router_pb2.Finished | None = None
    shown_text: str = ""  # when the present stream began
    num_characters: int = 0  # of the present stream
    num_token_ids: int = 0  # of the present stream


class Transcript:
    """One request's answer, in the making. `request` is what to ask next."""

    def __init__(self, request: router_pb2.GenerateRequest) -> None:
        self.request = request
        self._asked = request
        self._accepted = router_pb2.Accepted()
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._choices = [_Choice() for _ in range(max(1, request.n))]

    @property
    def complete(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finished is not None for choice in self._choices)

    def restart(self) -> None:
        """The stream broke; `request` is now what goes on with it."""
        for choice in self._choices:
            choice.shown_text = "".join(choice.pieces)
            choice.num_characters = choice.num_token_ids = 0
        if not self._accepted.request_id:
            return  # nothing has been shown, and the same is asked
        self.request = router_pb2.GenerateRequest()
        self.request.CopyFrom(self._asked)
        if self._accepted.resume_token:
            self._resume()
        else:
            self.request.request_id = ""  # the old one may still be in use
            self.request.sampling.seed = self._accepted.seed

    def _resume(self) -> None:
        self.request.request_id = self._accepted.request_id
        self.request.resume.resume_token = self._accepted.resume_token
        for index, choice in enumerate(self._choices):
            self.request.resume.received.add(index=index, token_ids=choice.token_ids)
            choice.num_characters, choice.num_token_ids = len(choice.shown_text), len(choice.token_ids)

    def forget_token(self) -> None:
        """No router that is asked knows the resume token."""
        self._accepted.resume_token = ""

    def take(self, event: router_pb2.GenerateEvent) -> Piece | None:
        """What is new in an event; None when nothing is. Raises Diverged."""
        match event.WhichOneof("event"):
            case "accepted":
                self._accepted = event.accepted
            case "prompt_info":
                self._prompt_logprobs = tuple(map(_logprobs, event.prompt_info.logprobs))
            case "delta":
                return self._grow(event.delta)
            case "finished":
                return self._finish(event.finished)
        return None

    def answer(self) -> Answer:
        """The whole answer, once it is complete."""
        assert self.complete, "an answer is whole when every choice has ended"
        return Answer(
            self._accepted.request_id,
            self._accepted.seed,
            tuple(
                _choice(index, "".join(one.pieces), one.token_ids, one.logprobs, one.finished)
                for index, one in enumerate(self._choices)
                if one.finished is not None
            ),
            self._prompt_logprobs,
        )

    def _grow(self, delta: router_pb2.Delta) -> Piece | None:
        choice = self._choices[delta.index]
        text = _beyond(choice.shown_text[choice.num_characters :], delta.text)
        num_repeated = min(len(choice.token_ids) - choice.num_token_ids, len(delta.token_ids))
        known = choice.token_ids[choice.num_token_ids : choice.num_token_ids + num_repeated]
        if text is None or known != list(delta.token_ids[:num_repeated]):
            raise Diverged
        choice.num_characters += len(delta.text)
        choice.num_token_ids += len(delta.token_ids)
        token_ids = tuple(delta.token_ids[num_repeated:])
        logprobs = tuple(map(_logprobs, delta.logprobs[num_repeated:]))
        choice.pieces.append(text)
        choice.token_ids += token_ids
        choice.logprobs += logprobs
        return Piece(delta.index, text, token_ids, logprobs) if text or token_ids else None

    def _finish(self, finished: router_pb2.Finished) -> Piece | None:
        choice = self._choices[finished.index]
        if choice.num_token_ids < len(choice.token_ids) or choice.num_characters < len(choice.shown_text):
            raise Diverged  # it ended earlier than before
        if choice.finished is not None:
            return None
        choice.finished = finished
        return Piece(finished.index, "", (), (), _REASONS[finished.reason])


def whole_answer(response: router_pb2.GenerateResponse) -> Answer:
    """The answer of a call that was not streamed."""
    return Answer(
        response.accepted.request_id,
        response.accepted.seed,
        tuple(
            _choice(one.index, one.text, one.token_ids, map(_logprobs, one.logprobs), one.finished)
            for one in response.choices
        ),
        tuple(map(_logprobs, response.prompt_info.logprobs)),
    )


def model(response: router_pb2.GetModelResponse) -> Model:
    """What a router says of its model."""
    return Model(
        name=response.model,
        max_total_tokens=response.max_total_tokens,
        vocab_size=response.vocab_size,
        eos_token_ids=tuple(response.eos_token_ids),
        defaults={field.name: value for field, value in response.defaults.ListFields()},
        dtype=response.dtype,
        has_chat_template=response.has_chat_template,
        max_message_bytes=response.max_message_bytes,
    )


def _beyond(shown: str, text: str) -> str | None:
    """What of a repeated text is new, given what was shown from its place on; None when they differ."""
    if len(shown) >= len(text):
        return "" if shown.startswith(text) else None
    return text[len(shown) :] if text.startswith(shown) else None


def _choice(
    index: int,
    text: str,
    token_ids: Iterable[int],
    logprobs: Iterable[TokenLogprobs],
    finished: router_pb2.Finished,
) -> Choice:
    usage, timing = finished.usage, finished.timing
    matched: str | int | None = None
    match finished.WhichOneof("matched"):
        case "stop":
            matched = finished.stop
        case "token_id":
            matched = finished.token_id
    return Choice(
        index=index,
        text=text,
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs),
        finish_reason=_REASONS[finished.reason],
        matched=matched,
        usage=Usage(usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_output_tokens),
        first_token_seconds=timing.first_token_seconds if timing.HasField("first_token_seconds") else None,
        total_seconds=timing.total_seconds,
    )


def _logprobs(entry: common_pb2.TokenLogprobs) -> TokenLogprobs:
    top = tuple(zip(entry.top_token_ids, entry.top_logprobs, strict=True))
    return TokenLogprobs(entry.token_id, entry.logprob, entry.rank, top)
