"""The door: what a client may ask for, and the value of every field that is then in force.

A request is checked in two steps, because the prompt's length is known only after the tokenizer has run:
`checked` looks at everything that can be known before, at a cost bounded by the request's size, and `fitted`
looks at lengths. What comes out is valid; nothing behind the door checks it again.

Every comparison is written so that NaN fails it. It must not know: proto types, the tokenizer, schedulers.
"""

import json
from collections import abc
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, TypeVar

import grpc

from router.chat import RESERVED_VARIABLES, ChatMessage, ToolCall
from router.constraints import Constraint, checked_form, field_of
from router.request_log import SamplingParams
from router.resume import Resume
from rpc.errors import RequestError, invalid

MAX_REQUEST_ID_CHARACTERS: Final = 128
MAX_CHOICES: Final = 16
MAX_STOPS: Final = 16
MAX_STOP_CHARACTERS: Final = 256
MAX_STOP_TOKEN_IDS: Final = 256
MAX_LOGPROBS: Final = 20
# Of one text. What copies it holds up everybody for milliseconds.
MAX_TEXT_CHARACTERS: Final = 8 * 1024 * 1024
# Tokenize and Detokenize: what a thread makes of them at once holds up the others for milliseconds.
MAX_TOKENIZED: Final = 262_144
# Numbers of one call's answer that speak of prompts: two megabytes of them at most.
MAX_PROMPT_NUMBERS: Final = 131_072
MAX_REPETITION_PENALTY: Final = 100
MAX_PENALTY: Final = 2
MAX_BIAS: Final = 100
MAX_LISTED_TOKEN_IDS: Final = 4096
MAX_TEMPERATURE: Final = 100
MAX_PRIORITY: Final = 1000
MAX_CACHE_SALT_BYTES: Final = 128
MAX_CHAT_MESSAGES: Final = 4096
MAX_CHAT_TOOLS: Final = 256
MAX_TOOL_CALLS: Final = 256
# Of a whole conversation: what is parsed, and put into the template, in one go.
MAX_CALLS_IN_ALL: Final = 4096
MAX_TOOLS_CHARACTERS: Final = 524_288
MAX_ARGUMENTS_CHARACTERS: Final = 524_288
MAX_KWARGS_CHARACTERS: Final = 16_384
MAX_KWARGS_DEPTH: Final = 8
_IDS_AT_ONCE: Final = 16_384

_T = TypeVar("_T")


class TooLongError(RequestError):
    """A prompt that does not fit, alone or with the output that is asked for: a shorter one may."""


class SentToolCall(Protocol):
    """One call of a tool that a client sent back, in whatever form the caller holds it."""

    @property
    def id(self) -> str:
        """The client's name for it; may be empty."""

    @property
    def name(self) -> str:
        """The function's name."""

    @property
    def arguments(self) -> str:
        """A JSON object as text."""


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

    @property
    def tool_calls(self) -> abc.Sequence[SentToolCall]:
        """The tools that an assistant's turn called."""

    @property
    def tool_call_id(self) -> str:
        """The call that a tool's turn answers; may be empty."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat as it was sent. The lists are not copied before their lengths are checked.

    `chat_template_kwargs` are variables for the template, a JSON object as text; empty means none.
    """

    messages: abc.Sequence[Turn]
    tools: abc.Sequence[str]
    add_generation_prompt: bool
    continue_final_message: bool = False
    chat_template_kwargs: str = ""


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat that may be put into the template."""

    messages: list[ChatMessage]
    tools: list[str]
    add_generation_prompt: bool
    continue_final_message: bool = False
    variables: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """Sampling as it was sent; None is absent."""

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
    prompt_logprobs: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: abc.Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: abc.Sequence[int] = ()
    banned_token_ids: abc.Sequence[int] = ()
    constraint: Constraint | None = None


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
    """What the model, the cache and the executors behind this router can take.

    `max_total_tokens` is prompt plus output; `features` are names of optional abilities, as `OpenResponse`
    gives them.
    """

    max_total_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Defaults:
    """What an absent field means here. `max_tokens` None means what still fits.

    A `repetition_penalty` is in force where the executors can: a model's wish refuses nobody.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None

    def within(self, limits: Limits) -> "Defaults":
        """Those that can be in force."""
        return self if "penalties" in limits.features else replace(self, repetition_penalty=1.0)


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
    """Refuses an id that could not be written into a log line, or a header. Empty means absent.

    Raises RequestError, INVALID_ARGUMENT.
    """
    if len(request_id) > MAX_REQUEST_ID_CHARACTERS:
        raise invalid(
            "request_id",
            f"request_id has {len(request_id)} characters; at most {MAX_REQUEST_ID_CHARACTERS} are allowed",
        )
    if not (request_id.isascii() and request_id.isprintable()):
        raise invalid("request_id", f"request_id is {_shown(request_id)}; only printable ASCII is allowed")
    if request_id != request_id.strip(" "):
        raise invalid(
            "request_id", f"request_id is {_shown(request_id)}; it must not begin or end with a space"
        )


def checked(request: GenerateRequest, *, model: str, limits: Limits) -> CheckedRequest:
    """Everything that can be known before the tokenizer runs.

    Raises RequestError: INVALID_ARGUMENT naming field, value and limit; NOT_FOUND for another model than
    `model`; UNIMPLEMENTED naming a field that is not served yet.
    """
    check_model(request.model, model)
    check_request_id(request.request_id)
    _check_sampling(request.sampling, limits)
    _check_adjustments(request.sampling, limits)
    _check_features(request.sampling, limits)
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
        sampling=_constrained(request.sampling),
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
            _check_text("text", "text", prompt)
            return prompt
        case Conversation():
            return _checked_chat(prompt)
        case _:
            if not prompt:
                raise invalid("token_ids", "token_ids is empty; a prompt has at least one token")
            check_prompt_length("token_ids", len(prompt), limits)
            token_ids = copied(prompt)
            check_token_ids("token_ids", token_ids, limits.vocab_size)
            return tuple(token_ids)


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
    defaults = defaults.within(limits)
    if not prompt_token_ids:
        raise invalid("prompt", "the prompt has no tokens; at least one is required")
    check_prompt_length("prompt", num_prompt_tokens, limits)
    room = limits.max_total_tokens - num_prompt_tokens
    if asked.max_tokens is not None and asked.max_tokens > room:
        raise _too_long(
            "sampling.max_tokens",
            f"sampling.max_tokens is {asked.max_tokens}: with the {num_prompt_tokens} tokens of the prompt "
            f"that is {num_prompt_tokens + asked.max_tokens}, and {_longest(limits)}; at most {room} are "
            "possible",
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
        prompt_logprobs=asked.prompt_logprobs,
        repetition_penalty=_either(asked.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_either(asked.presence_penalty, 0.0),
        frequency_penalty=_either(asked.frequency_penalty, 0.0),
        logit_bias=tuple(sorted(asked.logit_bias.items())),
        allowed_token_ids=tuple(sorted(set(asked.allowed_token_ids))),
        banned_token_ids=tuple(sorted(set(asked.banned_token_ids))),
        constraint=asked.constraint,
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


def check_prompt_logprobs(num_numbers: int) -> None:
    """Refuses a call whose answer would have more numbers about its prompts. Raises RequestError."""
    if num_numbers > MAX_PROMPT_NUMBERS:
        raise invalid(
            "sampling.prompt_logprobs",
            f"sampling.prompt_logprobs asks for {num_numbers} numbers: tokens of the prompts x (1 + "
            f"alternatives) x n; at most {MAX_PROMPT_NUMBERS} are given",
        )


def check_num_calls(turns: abc.Sequence[Turn]) -> None:
    """Refuses a conversation that called tools too often. Raises RequestError, INVALID_ARGUMENT."""
    num_calls = sum(len(turn.tool_calls) for turn in turns)
    if num_calls > MAX_CALLS_IN_ALL:
        raise invalid(
            "chat.messages",
            f"chat.messages has {num_calls} tool_calls; at most {MAX_CALLS_IN_ALL} are allowed in all",
        )


def check_tools(tools: abc.Sequence[str]) -> None:
    """Refuses more tools than a template is shown. Raises RequestError, INVALID_ARGUMENT."""
    _at_most("chat.tools", len(tools), MAX_CHAT_TOOLS)
    num_characters = sum(map(len, tools))
    if num_characters > MAX_TOOLS_CHARACTERS:
        raise invalid(
            "chat.tools",
            f"chat.tools has {num_characters} characters; at most {MAX_TOOLS_CHARACTERS} are allowed in all",
        )


def check_num_token_ids(field: str, count: int) -> None:
    """Refuses more ids than are turned into text at once. Raises RequestError, INVALID_ARGUMENT."""
    _at_most(field, count, MAX_TOKENIZED)


def copied(token_ids: abc.Sequence[int]) -> abc.Sequence[int]:
    """Ids as Python's own numbers, some at a time: a message's are converted by a call into C."""
    if isinstance(token_ids, tuple):
        return token_ids
    starts = range(0, len(token_ids), _IDS_AT_ONCE)
    return [token_id for first in starts for token_id in token_ids[first : first + _IDS_AT_ONCE]]


def check_token_ids(field: str, token_ids: abc.Sequence[int], vocab_size: int) -> None:
    """Refuses ids outside [0, vocab_size), naming the first. Raises RequestError, INVALID_ARGUMENT."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        position, wrong = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < vocab_size)
        raise invalid(field, f"{field}[{position}] is {wrong}; ids go from 0 to {vocab_size - 1}")


def length_told(num_tokens: int, *, whole: bool) -> str:
    """How long a prompt is, as far as it has been counted."""
    return f"{'the prompt' if whole else 'the beginning of the prompt alone'} has {num_tokens} tokens"


def check_prompt_length(field: str, num_prompt_tokens: int, limits: Limits, *, whole: bool = True) -> None:
    """Refuses a prompt that leaves no room for output. Raises RequestError, INVALID_ARGUMENT.

    If not the `whole` of it has been counted, it is longer still.
    """
    if num_prompt_tokens >= limits.max_total_tokens:
        raise _too_long(
            field,
            f"{length_told(num_prompt_tokens, whole=whole)}; {_longest(limits)}, prompt and output together, "
            f"so a prompt may have at most {limits.max_total_tokens - 1}",
        )


def _longest(limits: Limits) -> str:
    """In the words by which programs know it, where they are told no code."""
    return f"this model's maximum context length is {limits.max_total_tokens} tokens"


def _too_long(field: str, message: str) -> TooLongError:
    return TooLongError(grpc.StatusCode.INVALID_ARGUMENT, message, field=field)


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
    _in_range("sampling.prompt_logprobs", sampling.prompt_logprobs, 0, MAX_LOGPROBS)
    if sampling.constraint is not None and sampling.ignore_eos:
        raise invalid(
            "sampling.ignore_eos",
            "sampling.ignore_eos is set, and a constrained output ends with an end token; leave one out",
        )
    _at_most("sampling.stop_token_ids", len(sampling.stop_token_ids), MAX_STOP_TOKEN_IDS)
    check_token_ids("sampling.stop_token_ids", sampling.stop_token_ids, limits.vocab_size)


def _check_adjustments(sampling: SamplingRequest, limits: Limits) -> None:
    """Bias, penalties and lists of tokens: ranges, and that they leave something to choose."""
    repetition = sampling.repetition_penalty
    if repetition is not None and not 0 < repetition <= MAX_REPETITION_PENALTY:
        raise invalid(
            "sampling.repetition_penalty",
            f"sampling.repetition_penalty is {repetition}; it must be more than 0 and at most "
            f"{MAX_REPETITION_PENALTY}",
        )
    _in_range("sampling.presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _in_range("sampling.frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    _at_most("sampling.logit_bias", len(sampling.logit_bias), MAX_LISTED_TOKEN_IDS)
    for token_id, bias in sampling.logit_bias.items():
        if not 0 <= token_id < limits.vocab_size:
            raise invalid(
                "sampling.logit_bias",
                f"sampling.logit_bias has token {token_id}; ids go from 0 to {limits.vocab_size - 1}",
            )
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise invalid(
                "sampling.logit_bias",
                f"sampling.logit_bias of token {token_id} is {bias}; "
                f"it must be from {-MAX_BIAS} to {MAX_BIAS}",
            )
    for name, token_ids in (
        ("sampling.allowed_token_ids", sampling.allowed_token_ids),
        ("sampling.banned_token_ids", sampling.banned_token_ids),
    ):
        _at_most(name, len(token_ids), MAX_LISTED_TOKEN_IDS)
        check_token_ids(name, token_ids, limits.vocab_size)
    _check_choice_is_left(sampling, limits)


def _check_choice_is_left(sampling: SamplingRequest, limits: Limits) -> None:
    allowed, banned = set(sampling.allowed_token_ids), set(sampling.banned_token_ids)

    def leaves_nothing(excluded: set[int]) -> bool:
        return allowed <= excluded if allowed else len(excluded) >= limits.vocab_size

    if leaves_nothing(banned):
        raise invalid(
            "sampling.banned_token_ids",
            "sampling.banned_token_ids leaves no token to choose; one must be allowed and not banned",
        )
    ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else limits.eos_token_ids)
    if sampling.min_tokens and leaves_nothing(banned | ends):
        raise invalid(
            "sampling.min_tokens",
            f"sampling.min_tokens is {sampling.min_tokens} and only end tokens may be chosen, which are held "
            "back until min_tokens are out; allow another token, or leave min_tokens 0",
        )


def _check_features(sampling: SamplingRequest, limits: Limits) -> None:
    """Refuses what not every executor can do. Values that mean "off" ask for nothing."""
    needs = {
        "prompt_logprobs": sampling.prompt_logprobs is not None and "prompt_logprobs",
        "repetition_penalty": sampling.repetition_penalty not in {None, 1} and "penalties",
        "presence_penalty": bool(sampling.presence_penalty) and "penalties",
        "frequency_penalty": bool(sampling.frequency_penalty) and "penalties",
        "logit_bias": bool(sampling.logit_bias) and "logit_bias",
        "allowed_token_ids": bool(sampling.allowed_token_ids) and "token_lists",
        "banned_token_ids": bool(sampling.banned_token_ids) and "token_lists",
    }
    if sampling.constraint is not None:
        needs[field_of(sampling.constraint).removeprefix("sampling.")] = "constraints"
    for name, feature in needs.items():
        if feature and feature not in limits.features:
            raise RequestError(
                grpc.StatusCode.UNIMPLEMENTED,
                f"sampling.{name} needs the ability {feature!r}, which the executors here do not all have",
                field=f"sampling.{name}",
            )


def _constrained(sampling: SamplingRequest) -> SamplingRequest:
    """The sampling with its constraint checked for form."""
    constraint = sampling.constraint
    return sampling if constraint is None else replace(sampling, constraint=checked_form(constraint))


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
    check_tools(conversation.tools)
    if conversation.continue_final_message:
        if conversation.add_generation_prompt:
            raise invalid(
                "chat.continue_final_message",
                "chat.continue_final_message is set, and so is add_generation_prompt: an answer either goes "
                "on with the last message or begins a new one",
            )
        if (role := conversation.messages[-1].role) != "assistant":
            raise invalid(
                "chat.continue_final_message",
                f"chat.continue_final_message is set, and the last message is of {_shown(role)}; only an "
                "assistant's can be continued",
            )
    check_num_calls(conversation.messages)
    return Chat(
        messages=[_checked_message(turn, position) for position, turn in enumerate(conversation.messages)],
        tools=list(conversation.tools),
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        variables=_template_variables(conversation.chat_template_kwargs),
    )


def _template_variables(text: str) -> dict[str, Any]:
    """What the template is to see beside the conversation. Raises RequestError, INVALID_ARGUMENT."""
    path = "chat.chat_template_kwargs"
    if not text:
        return {}
    if len(text) > MAX_KWARGS_CHARACTERS:
        raise invalid(
            path, f"{path} has {len(text)} characters as JSON; at most {MAX_KWARGS_CHARACTERS} are allowed"
        )
    try:
        variables = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise _too_deep(path) from error
    except ValueError as error:
        raise invalid(path, f"{path} is not JSON: {error}") from error
    if not isinstance(variables, dict):
        raise invalid(path, f"{path} must be a JSON object: names of the template's variables, with values")
    for name in variables:
        if name in RESERVED_VARIABLES:
            raise invalid(path, f"{path} has {_shown(name)}, which the server itself sets; leave it out")
    level: list[Any] = [variables]
    for _ in range(MAX_KWARGS_DEPTH):
        level = [inner for outer in level for inner in _inner(outer)]
    if level:
        raise _too_deep(path)
    return variables


def _inner(outer: dict[str, Any] | list[Any]) -> list[Any]:
    """The objects and lists right within one."""
    values = outer.values() if isinstance(outer, dict) else outer
    return [value for value in values if isinstance(value, dict | list)]


def _too_deep(path: str) -> RequestError:
    return invalid(path, f"{path} is nested too deeply; at most {MAX_KWARGS_DEPTH} levels are allowed")


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def _checked_message(turn: Turn, position: int) -> ChatMessage:
    path = f"chat.messages[{position}]"
    if not turn.role:
        raise invalid("chat.messages", f"{path}.role is missing")
    _at_most(f"{path}.tool_calls", len(turn.tool_calls), MAX_TOOL_CALLS)
    if turn.tool_calls and turn.role != "assistant":
        raise invalid(
            "chat.messages", f"{path}.tool_calls is set, and its role is {_shown(turn.role)}; assistants call"
        )
    if turn.tool_call_id and turn.role != "tool":
        raise invalid(
            "chat.messages", f"{path}.tool_call_id is set, and its role is {_shown(turn.role)}; tools answer"
        )
    for number, call in enumerate(turn.tool_calls):
        where = f"{path}.tool_calls[{number}]"
        if not call.name:
            raise invalid("chat.messages", f"{where}.name is missing")
        if len(call.arguments) > MAX_ARGUMENTS_CHARACTERS:
            raise invalid(
                "chat.messages",
                f"{where}.arguments has {len(call.arguments)} characters; at most "
                f"{MAX_ARGUMENTS_CHARACTERS} are allowed",
            )
    _check_text("chat.messages", f"{path}.content", turn.content)
    return ChatMessage(
        role=turn.role,
        content=turn.content,
        name=turn.name,
        tool_calls=tuple(ToolCall(call.id, call.name, call.arguments) for call in turn.tool_calls),
        tool_call_id=turn.tool_call_id,
    )


def _check_text(field: str, where: str, text: str) -> None:
    if len(text) > MAX_TEXT_CHARACTERS:
        raise invalid(field, f"{where} has {len(text)} characters; at most {MAX_TEXT_CHARACTERS} are allowed")


def _in_range(field: str, value: float | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise invalid(field, f"{field} is {value}; it must be from {low} to {high}")


def _at_most(field: str, count: int, limit: int) -> None:
    if count > limit:
        raise invalid(field, f"{field} has {count} entries; at most {limit} are allowed")


def _either(value: _T | None, default: _T) -> _T:
    """The value, or the default when it is absent (zero is not absent)."""
    return default if value is None else value


def _shown(text: str) -> str:
    """A client's text in an error sentence: quoted, and cut when long."""
    return repr(text if len(text) <= MAX_REQUEST_ID_CHARACTERS else text[:MAX_REQUEST_ID_CHARACTERS] + "…")
