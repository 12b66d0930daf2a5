"""The door: what a client may ask, and every value that is then in force.

A request is checked in two steps, because the prompt's length is known only after the tokenizer has run:
`checked` looks at everything that can be known before, at a cost bounded by the request's size, and `fitted`
looks at lengths. What comes out is valid; nothing behind the door checks it again.

Every comparison is written so that NaN fails it. It must not know: proto types, the tokenizer, schedulers.
"""

from collections import abc
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import grpc

from router.chat import ChatMessage
from router.request_log import SamplingParams
from router.resume import Resume
from rpc.errors import RequestError, invalid

MAX_REQUEST_ID_CHARACTERS: Final = 128
MAX_CHOICES: Final = 16
MAX_STOPS: Final = 16
MAX_STOP_CHARACTERS: Final = 256
MAX_STOP_TOKEN_IDS: Final = 256
MAX_LOGPROBS: Final = 20
MAX_TEMPERATURE: Final = 100
MAX_PRIORITY: Final = 1000
MAX_CACHE_SALT_BYTES: Final = 128
MAX_CHAT_MESSAGES: Final = 4096
MAX_CHAT_TOOLS: Final = 256

_T = TypeVar("_T")


class Turn(Protocol):
    """One message of a conversation, in whatever form the caller holds it."""

    @property
    def role(self) -> str:
        """Who speaks."""

    @property
    def content(self) -> str:
        """What is said."""

    @property
    def name(self) -> str:
        """The speaker's name; may be empty."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat as it was sent. The lists are not copied before their lengths are checked."""

    messages: abc.Sequence[Turn]
    tools: abc.Sequence[str]
    add_generation_prompt: bool


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat that may be put into the template."""

    messages: list[ChatMessage]
    tools: list[str]
    add_generation_prompt: bool


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """Sampling as it was sent; None is absent. `unserved` names the fields set that are not served yet."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    stop_token_ids: abc.Sequence[int] = ()
    logprobs: int | None = None
    unserved: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request as it was sent. `prompt` is text, token ids, a conversation, or None when it is missing."""

    request_id: str = ""
    model: str = ""
    prompt: str | abc.Sequence[int] | Conversation | None = None
    sampling: SamplingRequest = SamplingRequest()
    n: int = 0
    stop: abc.Sequence[str] = ()
    include_stop: bool = False
    priority: int = 0
    cache_salt: str = ""
    resume: Resume | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model and the cache behind this router can take, tokens."""

    max_total_tokens: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Defaults:
    """What an absent field means here. `max_tokens` None means what still fits."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request of which everything is right but, perhaps, its length."""

    prompt: str | tuple[int, ...] | Chat
    sampling: SamplingRequest
    n: int
    stop: tuple[str, ...]
    include_stop: bool
    priority: int
    cache_salt: str


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A request that will be served: `sampling` has every value in force."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    n: int
    stop: tuple[str, ...]
    include_stop: bool
    priority: int
    cache_salt: str


def check_model(model: str, served: str) -> None:
    """Refuses a model that is not served here. Raises RequestError, NOT_FOUND."""
    if model not in {"", served}:
        raise RequestError(
            grpc.StatusCode.NOT_FOUND,
            f"model is {_shown(model)}; the model served here is {_shown(served)}",
            field="model",
        )


def check_request_id(request_id: str) -> None:
    """Refuses an id that could not be written into a log line. Empty means absent. Raises RequestError."""
    if len(request_id) > MAX_REQUEST_ID_CHARACTERS:
        raise invalid(
            "request_id",
            f"request_id has {len(request_id)} characters; at most {MAX_REQUEST_ID_CHARACTERS} are allowed",
        )
    if not (request_id.isascii() and request_id.isprintable()):
        raise invalid("request_id", f"request_id is {_shown(request_id)}; only printable ASCII is allowed")


def checked(request: GenerateRequest, *, model: str, limits: Limits) -> CheckedRequest:
    """Everything that can be known before the tokenizer runs.

    Raises RequestError: INVALID_ARGUMENT naming field, value and limit; NOT_FOUND for another model than
    `model`; UNIMPLEMENTED naming a field that is not served yet.
    """
    check_model(request.model, model)
    check_request_id(request.request_id)
    for name in request.sampling.unserved:
        raise _unserved(f"sampling.{name}")
    _check_sampling(request.sampling, limits)
    _in_range("n", request.n, 0, MAX_CHOICES)
    _in_range("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    _check_stops(request.stop)
    num_salt_bytes = len(request.cache_salt.encode())
    if num_salt_bytes > MAX_CACHE_SALT_BYTES:
        raise invalid(
            "cache_salt", f"cache_salt has {num_salt_bytes} bytes; at most {MAX_CACHE_SALT_BYTES} are allowed"
        )
    return CheckedRequest(
        prompt=checked_prompt(request.prompt, limits),
        sampling=request.sampling,
        n=request.n or 1,
        stop=tuple(request.stop),
        include_stop=request.include_stop,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )


def checked_prompt(
    prompt: str | abc.Sequence[int] | Conversation | None, limits: Limits
) -> str | tuple[int, ...] | Chat:
    """A prompt that may be tokenized, or ids that may be sent on. Raises RequestError, INVALID_ARGUMENT."""
    match prompt:
        case None:
            raise invalid(
                "prompt", "the prompt is missing: exactly one of text, token_ids and chat is required"
            )
        case str():
            if not prompt:
                raise invalid("text", "text is empty; a prompt has at least one character")
            return prompt
        case Conversation():
            return _checked_chat(prompt)
        case _:
            if not prompt:
                raise invalid("token_ids", "token_ids is empty; a prompt has at least one token")
            _check_prompt_length("token_ids", len(prompt), limits)
            check_token_ids("token_ids", prompt, limits.vocab_size)
            return tuple(prompt)


def fitted(
    request: CheckedRequest,
    prompt_token_ids: abc.Sequence[int],
    *,
    limits: Limits,
    defaults: Defaults,
    drawn_seed: int,
) -> ValidRequest:
    """The request with its prompt's ids and every default filled in; `drawn_seed` is used if none was given.

    Raises RequestError, INVALID_ARGUMENT with the numbers, when prompt and output do not fit.
    """
    asked, num_prompt_tokens = request.sampling, len(prompt_token_ids)
    if not prompt_token_ids:
        raise invalid("prompt", "the prompt has no tokens; at least one is required")
    _check_prompt_length("prompt", num_prompt_tokens, limits)
    room = limits.max_total_tokens - num_prompt_tokens
    if asked.max_tokens is not None and asked.max_tokens > room:
        raise invalid(
            "sampling.max_tokens",
            f"sampling.max_tokens is {asked.max_tokens}: with the {num_prompt_tokens} tokens of the prompt "
            f"that is {num_prompt_tokens + asked.max_tokens}, more than the {limits.max_total_tokens} that "
            f"fit; at most {room} are possible",
        )
    max_tokens = min(room, _either(asked.max_tokens, _either(defaults.max_tokens, room)))
    min_tokens = _either(asked.min_tokens, 0)
    if min_tokens > max_tokens:
        raise invalid(
            "sampling.min_tokens",
            f"sampling.min_tokens is {min_tokens}; it must be at most max_tokens, which is {max_tokens}",
        )
    top_k = _either(asked.top_k, defaults.top_k)
    sampling = SamplingParams(
        temperature=_either(asked.temperature, defaults.temperature),
        top_p=_either(asked.top_p, defaults.top_p),
        top_k=top_k if 0 < top_k < limits.vocab_size else 0,
        min_p=_either(asked.min_p, defaults.min_p),
        seed=_either(asked.seed, drawn_seed),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=asked.ignore_eos,
        stop_token_ids=tuple(dict.fromkeys(asked.stop_token_ids)),
        logprobs=asked.logprobs,
    )
    return ValidRequest(
        prompt_token_ids=tuple(prompt_token_ids),
        sampling=sampling,
        n=request.n,
        stop=request.stop,
        include_stop=request.include_stop,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )


def check_token_ids(field: str, token_ids: abc.Sequence[int], vocab_size: int) -> None:
    """Refuses ids outside [0, vocab_size), naming the first. Raises RequestError, INVALID_ARGUMENT."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        position, wrong = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < vocab_size)
        raise invalid(field, f"{field}[{position}] is {wrong}; ids go from 0 to {vocab_size - 1}")


def _check_prompt_length(field: str, num_prompt_tokens: int, limits: Limits) -> None:
    if num_prompt_tokens >= limits.max_total_tokens:
        raise invalid(
            field,
            f"the prompt has {num_prompt_tokens} tokens; prompt and output together may have "
            f"{limits.max_total_tokens}, so a prompt may have at most {limits.max_total_tokens - 1}",
        )


def _check_sampling(sampling: SamplingRequest, limits: Limits) -> None:
    _in_range("sampling.temperature", sampling.temperature, 0, MAX_TEMPERATURE)
    if sampling.top_p is not None and not 0 < sampling.top_p <= 1:
        raise invalid(
            "sampling.top_p", f"sampling.top_p is {sampling.top_p}; it must be more than 0 and at most 1"
        )
    if sampling.top_k is not None and sampling.top_k < -1:
        raise invalid(
            "sampling.top_k", f"sampling.top_k is {sampling.top_k}; it must be at least -1 (-1 and 0: off)"
        )
    _in_range("sampling.min_p", sampling.min_p, 0, 1)
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise invalid(
            "sampling.max_tokens", f"sampling.max_tokens is {sampling.max_tokens}; it must be at least 1"
        )
    if sampling.min_tokens is not None and sampling.min_tokens < 0:
        raise invalid(
            "sampling.min_tokens", f"sampling.min_tokens is {sampling.min_tokens}; it must be at least 0"
        )
    _in_range("sampling.logprobs", sampling.logprobs, 0, MAX_LOGPROBS)
    _at_most("sampling.stop_token_ids", len(sampling.stop_token_ids), MAX_STOP_TOKEN_IDS)
    check_token_ids("sampling.stop_token_ids", sampling.stop_token_ids, limits.vocab_size)


def _check_stops(stops: abc.Sequence[str]) -> None:
    _at_most("stop", len(stops), MAX_STOPS)
    for position, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise invalid(
                "stop",
                f"stop[{position}] has {len(stop)} characters; it must have 1 to {MAX_STOP_CHARACTERS}",
            )


def _checked_chat(conversation: Conversation) -> Chat:
    if not conversation.messages:
        raise invalid("chat.messages", "chat.messages is empty; at least one message is required")
    _at_most("chat.messages", len(conversation.messages), MAX_CHAT_MESSAGES)
    _at_most("chat.tools", len(conversation.tools), MAX_CHAT_TOOLS)
    return Chat(
        messages=[
            ChatMessage(role=turn.role, content=turn.content, name=turn.name)
            for turn in conversation.messages
        ],
        tools=list(conversation.tools),
        add_generation_prompt=conversation.add_generation_prompt,
    )


def _in_range(field: str, value: float | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise invalid(field, f"{field} is {value}; it must be from {low} to {high}")


def _at_most(field: str, count: int, limit: int) -> None:
    if count > limit:
        raise invalid(field, f"{field} has {count} entries; at most {limit} are allowed")


def _either(value: _T | None, default: _T) -> _T:
    """The value, or the default when it is absent (zero is not absent)."""
    return default if value is None else value


def _unserved(field: str) -> RequestError:
    return RequestError(grpc.StatusCode.UNIMPLEMENTED, f"{field} is not served by this version", field=field)


def _shown(text: str) -> str:
    """A client's text in an error sentence: quoted, and cut when long."""
    return repr(text if len(text) <= MAX_REQUEST_ID_CHARACTERS else text[:MAX_REQUEST_ID_CHARACTERS] + "…")
