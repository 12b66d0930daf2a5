"""What a body asks for, in the router's own terms: OpenAI's fields, and a few that other servers have too.

Names and meanings of OpenAI's fields are theirs; docs/clients.md lists all. A field that is known but not
served is refused by name, unless its value says "off". Pure; it must not know tokens, sockets, events.
"""

import json
from collections import abc
from dataclasses import dataclass, replace
from typing import Any, Final

import grpc

from router.chat import ChatMessage
from router.http.fields import Fields, checked, wholes
from router.validation import MAX_CHAT_MESSAGES, Conversation, GenerateRequest, SamplingRequest
from rpc.errors import RequestError, invalid

MAX_CHOICES_IN_ALL: Final = 128
MAX_COMPLETION_LOGPROBS: Final = 5
MAX_TOKEN_ID_DIGITS: Final = 18
MAX_TIMEOUT_SECONDS: Final = 86_400.0
# Room for the number that is put behind the id of a call to name one prompt of several.
MAX_REQUEST_ID_CHARACTERS: Final = 124


@dataclass(frozen=True, slots=True)
class Asked:
    """One call: a request for each prompt, and how its answer is to look.

    `prompt_logprobs` says that the answer has a list of that name. An `echo` repeats the prompt, with
    `echo_logprobs` the log-probabilities of its tokens too, so many alternatives each. `names` says what the
    body calls fields of the contract, where that depends on the body.
    """

    requests: tuple[GenerateRequest, ...]
    stream: bool
    include_usage: bool
    timeout_seconds: float | None
    echo: bool
    echo_logprobs: int | None
    prompt_logprobs: bool
    return_token_ids: bool
    names: abc.Mapping[str, str]

    @property
    def num_choices_each(self) -> int:
        """Choices of each request."""
        return self.requests[0].n


@dataclass(frozen=True, slots=True)
class Tokenizing:
    """What is to become token ids."""

    model: str
    prompt: str | Conversation


@dataclass(frozen=True, slots=True)
class Detokenizing:
    """What is to become text."""

    model: str
    token_ids: tuple[int, ...]
    include_special: bool


def completion(body: Fields) -> Asked:
    """A body of /v1/completions. Raises RequestError, INVALID_ARGUMENT or UNIMPLEMENTED, naming the field."""
    prompts = _prompts(body.value("prompt"))
    logprobs = body.whole("logprobs")
    if logprobs is not None and not 0 <= logprobs <= MAX_COMPLETION_LOGPROBS:
        raise invalid("logprobs", f"logprobs is {logprobs}; it must be from 0 to {MAX_COMPLETION_LOGPROBS}")
    echo = body.flag("echo") or False
    _only("suffix", body.text("suffix"), "")
    sampling = _sampling(body, body.whole("max_tokens"), logprobs)
    has_prompt_logprobs = sampling.prompt_logprobs is not None
    names = {}
    if echo and logprobs is not None:
        names = {} if has_prompt_logprobs else {"sampling.prompt_logprobs": "logprobs"}
        sampling = replace(sampling, prompt_logprobs=max(logprobs, sampling.prompt_logprobs or 0))
    request = _request(body, sampling)
    _only("best_of", body.whole("best_of"), request.n)
    return _asked(
        body,
        request,
        prompts,
        echo=echo,
        echo_logprobs=logprobs if echo else None,
        prompt_logprobs=has_prompt_logprobs,
        names=names,
    )


def chat(body: Fields) -> Asked:
    """A body of /v1/chat/completions. Raises RequestError as `completion` does."""
    conversation = _conversation(body)
    alternatives = body.whole("top_logprobs")
    wanted = body.flag("logprobs") or False
    if alternatives is not None and not wanted:
        raise invalid("top_logprobs", f"top_logprobs is {alternatives}; it needs logprobs to be true")
    max_tokens, older = body.whole("max_completion_tokens"), body.whole("max_tokens")
    if max_tokens is not None and older is not None:
        raise invalid("max_tokens", "max_tokens and max_completion_tokens are both given; one is enough")
    sampling = _sampling(
        body, older if max_tokens is None else max_tokens, (alternatives or 0) if wanted else None
    )
    length = "max_tokens" if max_tokens is None else "max_completion_tokens"
    names = {"sampling.logprobs": "top_logprobs", "sampling.max_tokens": length}
    has_prompt_logprobs = sampling.prompt_logprobs is not None
    request = _request(body, sampling)
    return _asked(body, request, [conversation], prompt_logprobs=has_prompt_logprobs, names=names)


def tokenizing(body: Fields) -> Tokenizing:
    """A body of /tokenize: `prompt`, or `messages` as in a chat. Raises RequestError, INVALID_ARGUMENT."""
    model = body.text("model") or ""
    text = body.text("prompt")
    prompt = _conversation(body) if text is None else text
    body.close()  # refuses messages beside a prompt
    return Tokenizing(model, prompt)


def detokenizing(body: Fields) -> Detokenizing:
    """A body of /detokenize: `tokens`. Raises RequestError, INVALID_ARGUMENT."""
    model, token_ids = body.text("model") or "", body.wholes("tokens")
    include_special = body.flag("include_special") or False
    if token_ids is None:
        raise invalid("tokens", "tokens is missing; it is a list of token ids")
    body.close()
    return Detokenizing(model, token_ids, include_special)


# --- what both have in common -----------------------------------------------------------------------


def _asked(
    body: Fields,
    request: GenerateRequest,
    prompts: abc.Sequence[str | tuple[int, ...] | Conversation],
    *,
    echo: bool = False,
    echo_logprobs: int | None = None,
    prompt_logprobs: bool,
    names: abc.Mapping[str, str],
) -> Asked:
    if request.n * len(prompts) > MAX_CHOICES_IN_ALL:
        raise invalid(
            "n",
            f"n is {request.n} and there are {len(prompts)} prompts; together at most {MAX_CHOICES_IN_ALL} "
            "choices are allowed",
        )
    stream = body.flag("stream") or False
    options = body.fields("stream_options")
    if options is not None and not stream:
        raise invalid("stream_options", "stream_options is given; it needs stream to be true")
    include_usage = options.flag("include_usage") or False if options is not None else False
    if options is not None:
        options.close()
    timeout_seconds = body.number("timeout")
    if timeout_seconds is not None and not 0 < timeout_seconds <= MAX_TIMEOUT_SECONDS:
        raise invalid(
            "timeout",
            f"timeout is {timeout_seconds:g}; it must be more than 0 and at most {MAX_TIMEOUT_SECONDS:g} "
            "seconds",
        )
    body.text("user")  # a name for OpenAI's own records; nothing here depends on it
    asked = Asked(
        requests=tuple(replace(request, prompt=prompt) for prompt in prompts),
        stream=stream,
        include_usage=include_usage,
        timeout_seconds=timeout_seconds,
        echo=echo,
        echo_logprobs=echo_logprobs,
        prompt_logprobs=prompt_logprobs,
        return_token_ids=body.flag("return_token_ids") or False,
        names=names,
    )
    body.close()
    return asked


def _request(body: Fields, sampling: SamplingRequest) -> GenerateRequest:
    """Everything but the prompt."""
    n = body.whole("n")
    if n is not None and n < 1:
        raise invalid("n", f"n is {n}; it must be at least 1")
    request_id = body.text("request_id") or ""
    if len(request_id) > MAX_REQUEST_ID_CHARACTERS:
        raise invalid(
            "request_id",
            f"request_id has {len(request_id)} characters; at most {MAX_REQUEST_ID_CHARACTERS} are allowed",
        )
    return GenerateRequest(
        request_id=request_id,
        model=body.text("model") or "",
        sampling=sampling,
        n=1 if n is None else n,
        stop=_stops(body),
        include_stop=body.flag("include_stop") or False,
        priority=body.whole("priority") or 0,
        cache_salt=body.text("cache_salt") or "",
    )


def _sampling(body: Fields, max_tokens: int | None, logprobs: int | None) -> SamplingRequest:
    response_format = body.fields("response_format")
    if response_format is not None:
        _only("response_format.type", response_format.text("type"), "text")
        response_format.close()
    return SamplingRequest(
        temperature=body.number("temperature"),
        top_p=body.number("top_p"),
        top_k=body.whole("top_k"),
        min_p=body.number("min_p"),
        seed=body.whole("seed"),
        max_tokens=max_tokens,
        min_tokens=body.whole("min_tokens"),
        ignore_eos=body.flag("ignore_eos") or False,
        stop_token_ids=body.wholes("stop_token_ids") or (),
        logprobs=logprobs,
        prompt_logprobs=None if body.value("prompt_logprobs") is False else body.whole("prompt_logprobs"),
        repetition_penalty=body.number("repetition_penalty"),
        presence_penalty=body.number("presence_penalty"),
        frequency_penalty=body.number("frequency_penalty"),
        logit_bias=_logit_bias(body),
        allowed_token_ids=body.wholes("allowed_token_ids") or (),
        banned_token_ids=body.wholes("banned_token_ids") or (),
    )


def _logit_bias(body: Fields) -> dict[int, float]:
    """OpenAI's object: its names are token ids."""
    values, biases = body.fields("logit_bias"), {}
    if values is None:
        return {}
    for name in values.names:
        path = values.path_of(name[:MAX_TOKEN_ID_DIGITS])
        digits = name[:MAX_TOKEN_ID_DIGITS]
        if not (name.isascii() and digits.isdigit() and name == str(int(digits))):  # else two name one token
            raise invalid("logit_bias", f"{path} names no token; names in logit_bias are token ids")
        biases[int(name)] = values.number(name) or 0.0
    return biases


def _stops(body: Fields) -> tuple[str, ...]:
    value = body.value("stop")
    if isinstance(value, str):
        return (value,)
    return body.texts("stop") or ()


# --- prompts ----------------------------------------------------------------------------------------


def _prompts(value: object) -> list[str | tuple[int, ...]]:
    """One prompt or several: a text, token ids, a list of texts, a list of lists of token ids."""
    match value:
        case None:
            raise invalid("prompt", "prompt is missing; it is text, token ids, or a list of either")
        case str():
            return [value]
        case []:
            raise invalid("prompt", "prompt is empty; it has at least one text or one token id")
        case [str(), *_]:
            texts = [
                checked(entry, str, "a string, as the first is", f"prompt[{i}]")
                for i, entry in enumerate(value)
            ]
            for position, text in enumerate(texts):
                if not text:
                    raise invalid(f"prompt[{position}]", f"prompt[{position}] is empty")
            return list(texts)
        case [list(), *_]:
            return [
                wholes(checked(entry, list, "a list, as the first is", f"prompt[{i}]"), f"prompt[{i}]")
                for i, entry in enumerate(value)
            ]
        case list():
            return [wholes(value, "prompt")]
        case _:
            raise invalid("prompt", "prompt must be text, token ids, or a list of either")


def _conversation(body: Fields) -> Conversation:
    values = body.entries("messages")
    if values is None:
        raise invalid("messages", "messages is missing; a chat has at least one")
    if len(values) > MAX_CHAT_MESSAGES:  # before any of them is looked at
        raise invalid(
            "messages", f"messages has {len(values)} entries; at most {MAX_CHAT_MESSAGES} are allowed"
        )
    tools = body.entries("tools") or []
    choice = body.value("tool_choice")
    if choice not in (None, "auto", "none"):
        raise _unserved("tool_choice", "tool_choice is supported as auto and none alone")
    opened = body.flag("add_generation_prompt")
    return Conversation(
        messages=[_message(checked(m, dict, "an object", f"messages[{i}]"), i) for i, m in enumerate(values)],
        tools=[] if choice == "none" else [_tool(tool, i) for i, tool in enumerate(tools)],
        add_generation_prompt=True if opened is None else opened,
    )


def _message(values: dict[str, Any], position: int) -> ChatMessage:
    message = Fields(values, f"messages[{position}]")
    role = message.text("role")
    if not role:
        raise invalid(message.path_of("role"), f"{message.path_of('role')} is missing")
    content = message.value("content")
    if isinstance(content, list):
        content = "".join(_part(part, f"{message.path_of('content')}[{i}]") for i, part in enumerate(content))
    else:
        content = message.text("content")
    if content is None:
        raise invalid(message.path_of("content"), f"{message.path_of('content')} is missing")
    name = message.text("name") or ""
    message.close()
    return ChatMessage(role=role, content=content, name=name)


def _part(value: object, path: str) -> str:
    """The text of one part of a message; parts of other kinds (images, sound) are refused."""
    part = Fields(checked(value, dict, "an object", path), path)
    kind, text = part.text("type"), part.text("text")
    if kind != "text":
        raise _unserved(path, f"{path} is a part of type {kind!r}; only text is supported")
    if text is None:
        raise invalid(f"{path}.text", f"{path}.text is missing")
    part.close()
    return text


def _tool(value: object, position: int) -> str:
    path = f"tools[{position}]"
    try:
        return json.dumps(checked(value, dict, "an object", path), ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise invalid(path, f"{path} holds a number that is not finite") from error


def _only(name: str, value: object, served: object) -> None:
    """Refuses any value but the one that is served; absent is served too."""
    if value is not None and value != served:
        raise _unserved(name, f"{name} is supported as {json.dumps(served)} alone")


def _unserved(field: str, message: str) -> RequestError:
    return RequestError(grpc.StatusCode.UNIMPLEMENTED, message, field=field)
