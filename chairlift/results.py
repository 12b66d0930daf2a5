"""What the client library returns and raises: answers, pieces of a stream, and its one kind of error."""

import enum
from dataclasses import dataclass
from typing import Any


class FinishReason(enum.StrEnum):
    """Why a choice ended."""

    STOP = "stop"  # the model was done, or a stop was met
    LENGTH = "length"  # max_tokens, the model's length or the cache was reached
    ABORT = "abort"  # the server gave it up
    DEADLINE = "deadline"  # the time was over
    ERROR = "error"  # it could not be computed


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool that an assistant's turn called; `arguments` is a JSON object as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `role` is system, user, assistant or tool.

    `tool_calls` are an assistant's, and `tool_call_id` says which of them a tool's turn answers.
    """

    role: str
    content: str
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely a token was (natural logarithm), its rank from 1, and the likeliest as (id, logprob)."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one choice; cached ones are prompt tokens that need not be computed."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished choice.

    `matched` is the stop string or the token id that ended it, None when neither did. `logprobs` has one
    entry for each token id when they were asked for, else none. Times are seconds since the request came in.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    matched: str | int | None
    usage: Usage
    first_token_seconds: float | None
    total_seconds: float


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. The same request with this `seed` gives the same one.

    `prompt_logprobs` has an entry for each token of the prompt from the second on when they were asked for.
    """

    request_id: str
    seed: int
    choices: tuple[Choice, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text


@dataclass(frozen=True, slots=True)
class Piece:
    """More of one choice, as it comes. The last piece of a choice says why it ended, and brings no text."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """What is served. Prompt and output together may have `max_total_tokens`.

    `defaults` are the sampling values of a request that leaves them out, by the names of options.
    """

    name: str
    max_total_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    defaults: dict[str, float]
    dtype: str
    has_chat_template: bool
    max_message_bytes: int


class ChairliftError(Exception):
    """A call that failed for good: retries, where they make sense, have been made.

    `code` is the name of a gRPC status such as INVALID_ARGUMENT; `message` a sentence; `field` the request's
    field that is to blame, or empty; `retry_after_seconds` when trying again makes sense, or None.
    """

    def __init__(
        self, code: str, message: str, *, field: str = "", retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.retry_after_seconds = retry_after_seconds

    def __reduce__(self) -> tuple[Any, ...]:
        """As pools of processes hand it on, whole: by Exception's own way it could not be made again."""
        return _failed, (type(self), self.code, self.message, self.field, self.retry_after_seconds)

    def __str__(self) -> str:
        sentence = f"{self.message} [{self.code}]"
        if self.retry_after_seconds is not None:
            sentence += f"; try again in {self.retry_after_seconds:.1f} s"
        return sentence


def _failed(
    kind: type[ChairliftError], code: str, message: str, field: str, retry_after_seconds: float | None
) -> ChairliftError:
    return kind(code, message, field=field, retry_after_seconds=retry_after_seconds)
