"""What a body asks for, in the router's own terms: OpenAI's fields, and a few that other servers have too.

OpenAI's fields keep OpenAI's names and meanings; docs/clients.md lists all fields. A field that is known but
not served is refused by name, unless its value says "off". Pure; it must not know tokens, sockets, events.
"""

import json
from collections import abc
from dataclasses import dataclass, replace
from typing import Any, Final

import grpc

from router.chat import ChatMessage, ToolCall
from router.constraints import Choice, Constraint, JsonSchema, Regex, field_of
from router.http.fields import Fields, checked, shown, wholes
from router.validation import (
    MAX_CHAT_MESSAGES,
    MAX_TOOL_CALLS,
    Conversation,
    GenerateRequest,
    SamplingRequest,
    check_num_calls,
)
from rpc.errors import RequestError, invalid

MAX_CHOICES_IN_ALL: Final = 128
MAX_COMPLETION_LOGPROBS: Final = 5
MAX_TOKEN_ID_DIGITS: Final = 18
MAX_TIMEOUT_SECONDS: Final = 86_400.0
# Room for the number that is put behind the id of a call to name one prompt of several.
MAX_REQUEST_ID_CHARACTERS: Final = 124
# What stands behind these words of JSON schema is no schema, or has schemas behind names of the client's own.
_KEYWORDS_OF_DATA: Final = frozenset({"const", "enum", "default", "examples"})
_KEYWORDS_OF_NAMES: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)


@dataclass(frozen=True, slots=True)
class Asked:
    """One call: a request for each prompt, and how its answer is to look.

    `include_usage` asks for a last chunk of usage, `continuous_usage` for the usage so far in each chunk.
    `prompt_logprobs` says that the answer has a list of that name. An `echo` repeats the prompt, with
    `echo_logprobs` the log-probabilities of its tokens too, so many alternatives each. `names` says what the
    body calls fields of the contract, where that depends on the body.
    """

    requests: tuple[GenerateRequest, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    timeout_seconds: float | None
    echo: bool
    echo_logprobs: int | None
    prompt_logprobs: bool
    return_token_ids: bool
    names: abc.Mapping[str, str]
    tool_use: "ForcedFunction | OfferedTools | None" = None

    @property
    def num_choices_each(self) -> int:
        """Choices of each request."""
        return self.requests[0].n


@dataclass(frozen=True, slots=True)
class ForcedFunction:
    """The function whose arguments the answer is, by the word of `tool_choice`.

    `schema` is that of its arguments as JSON text, `where_held` what the body calls it; `finish_reason` is
    what OpenAI calls its end.
    """

    name: str
    schema: str
    where_held: str
    finish_reason: str


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """Tools that the answer may call: calls are to be found in its text, at most `max_calls` (None: all).

    `schema` is what the output is held to, one call as bare JSON; None when it may say anything.
    """

    names: frozenset[str]
    max_calls: int | None = None
    schema: str | None = None


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
    constraint, names = _constraint(body)
    sampling = _sampling(body, body.whole("max_tokens"), logprobs, constraint)
    has_prompt_logprobs = sampling.prompt_logprobs is not None
    if echo and logprobs is not None:
        names |= {} if has_prompt_logprobs else {"sampling.prompt_logprobs": "logprobs"}
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
    tool_use = _tool_use(body)
    conversation = _conversation(body)
    alternatives = body.whole("top_logprobs")
    wanted = body.flag("logprobs") or False
    if alternatives and not wanted:
        raise invalid("top_logprobs", f"top_logprobs is {alternatives}; it needs logprobs to be true")
    parallel = body.flag("parallel_tool_calls")
    _only("modalities", body.entries("modalities"), ["text"])
    max_tokens, older = body.whole("max_completion_tokens"), body.whole("max_tokens")
    if max_tokens is not None and older is not None:
        raise invalid("max_tokens", "max_tokens and max_completion_tokens are both given; one is enough")
    constraint, names = _constraint(body)
    if tool_use is not None and tool_use.schema is not None:
        if constraint is not None:
            name = names[field_of(constraint)]
            raise invalid(
                name, f"{name} is given beside tool_choice, which holds the output to a tool's schema"
            )
        constraint = JsonSchema(tool_use.schema)
        where_held = tool_use.where_held if isinstance(tool_use, ForcedFunction) else "tools"
        names = {field_of(constraint): where_held}
    elif isinstance(tool_use, OfferedTools):
        # What the client holds the output to is no call; of several calls it may want no more than one.
        tool_use = (
            None if constraint is not None else replace(tool_use, max_calls=1 if parallel is False else None)
        )
    sampling = _sampling(
        body, older if max_tokens is None else max_tokens, (alternatives or 0) if wanted else None, constraint
    )
    length = "max_tokens" if max_tokens is None else "max_completion_tokens"
    names |= {"sampling.logprobs": "top_logprobs", "sampling.max_tokens": length, "prompt": "messages"}
    has_prompt_logprobs = sampling.prompt_logprobs is not None
    request = _request(body, sampling)
    return _asked(
        body, request, [conversation], prompt_logprobs=has_prompt_logprobs, names=names, tool_use=tool_use
    )


def tokenizing(body: Fields) -> Tokenizing:
    """A body of /tokenize: `prompt`, or `messages` as in a chat. Raises RequestError, INVALID_ARGUMENT."""
    model = body.text("model") or ""
    text = body.text("prompt")
    if text is None:
        _tool_use(body)  # it does not change the prompt; it is right or refused as in a chat
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
    tool_use: ForcedFunction | OfferedTools | None = None,
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
    include_usage, continuous_usage = (False, False) if options is None else _usage_asked(options)
    timeout_seconds = body.number("timeout")
    if timeout_seconds is not None and not 0 < timeout_seconds <= MAX_TIMEOUT_SECONDS:
        raise invalid(
            "timeout",
            f"timeout is {timeout_seconds:g}; it must be more than 0 and at most {MAX_TIMEOUT_SECONDS:g} "
            "seconds",
        )
    for name in ("user", "safety_identifier", "prompt_cache_key"):
        body.text(name)  # for OpenAI's own records; nothing here depends on it
    metadata = body.value("metadata")  # likewise; it is JSON or refused, as all of a body
    if metadata is not None:
        _json_text(checked(metadata, dict, "an object", "metadata"), "metadata")
    _only("store", body.flag("store"), served=False)
    if (tier := body.text("service_tier")) not in {None, "auto", "default"}:
        raise _unserved("service_tier", f"service_tier is {shown(tier)}; it is auto or default")
    asked = Asked(
        requests=tuple(replace(request, prompt=prompt) for prompt in prompts),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        timeout_seconds=timeout_seconds,
        echo=echo,
        echo_logprobs=echo_logprobs,
        prompt_logprobs=prompt_logprobs,
        return_token_ids=body.flag("return_token_ids") or False,
        names=names,
        tool_use=tool_use,
    )
    body.close()
    return asked


def _usage_asked(options: Fields) -> tuple[bool, bool]:
    """Whether usage is told at the end, and with each chunk, as vLLM tells it."""
    at_the_end = options.flag("include_usage") or False
    with_each = options.flag("continuous_usage_stats") or False
    if with_each and not at_the_end:
        where = options.path_of("continuous_usage_stats")
        raise invalid(where, f"{where} is given; it needs include_usage to be true")
    _only(options.path_of("include_obfuscation"), options.flag("include_obfuscation"), served=False)
    options.close()
    return at_the_end, with_each


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


def _sampling(
    body: Fields, max_tokens: int | None, logprobs: int | None, constraint: Constraint | None
) -> SamplingRequest:
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
        constraint=constraint,
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
        if (bias := values.number(name)) is None:
            raise invalid("logit_bias", f"{path} is null; it must be a number")
        biases[int(name)] = bias
    return biases


def _constraint(body: Fields) -> tuple[Constraint | None, dict[str, str]]:
    """What the output must match, by whichever of the fields, and what the body calls it."""
    found: list[tuple[str, Constraint]] = []
    response_format = body.fields("response_format")
    if response_format is not None:
        found += _of_response_format(response_format)
        response_format.close()
    schema = body.value("json_schema")
    if schema is not None:
        found.append(("json_schema", JsonSchema(_schema_text(schema, "json_schema"))))
    pattern = body.text("regex")
    if pattern is not None:
        found.append(("regex", Regex(pattern)))
    values = body.texts("choice")
    if values is not None:
        found.append(("choice", Choice(values)))
    if len(found) > 1:
        first, second = found[0][0], found[1][0]
        raise invalid(second, f"{second} is given beside {first}; an output can be held to one of them")
    if not found:
        return None, {}
    name, constraint = found[0]
    return constraint, {field_of(constraint): name}


def _of_response_format(response_format: Fields) -> list[tuple[str, Constraint]]:
    match response_format.text("type"):
        case "text":
            return []
        case "json_object":
            return [("response_format", JsonSchema("{}"))]
        case "json_schema":
            described = response_format.fields("json_schema")
            if described is None:
                raise invalid("response_format.json_schema", "response_format.json_schema is missing")
            for name in ("name", "description"):
                described.text(name)  # for OpenAI's own prompt; nothing here depends on it
            described.flag("strict")  # it is always
            where = described.path_of("schema")
            schema = described.value("schema")
            described.close()
            return [(where, JsonSchema("{}" if schema is None else _schema_text(schema, where)))]
        case kind:
            raise _unserved(
                "response_format.type",
                f"response_format.type is {shown(kind)}; it is text, json_object or json_schema",
            )


def _schema_text(schema: object, path: str) -> str:
    """A schema as JSON text; it may stand in the body as that, or as itself."""
    if isinstance(schema, str):
        return schema
    return _json_text(checked(schema, dict, "a JSON schema", path), path)


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
    tools = [_tool(tool, i) for i, tool in enumerate(body.entries("tools") or [])]
    choice = body.value("tool_choice")
    continued = body.flag("continue_final_message") or False
    opened = body.flag("add_generation_prompt")
    messages = [_message(checked(m, dict, "an object", f"messages[{i}]"), i) for i, m in enumerate(values)]
    check_num_calls(messages)
    kwargs = body.value("chat_template_kwargs")
    return Conversation(
        messages=messages,
        tools=[] if choice == "none" else tools,
        add_generation_prompt=not continued if opened is None else opened,
        continue_final_message=continued,
        chat_template_kwargs="" if kwargs is None else _variables(kwargs, "chat_template_kwargs"),
    )


def _variables(value: object, path: str) -> str:
    return _json_text(checked(value, dict, "an object", path), path)


def _tool_use(body: Fields) -> ForcedFunction | OfferedTools | None:
    """Which tools the answer may call, or must, by the word of `tool_choice`."""
    choice, functions = body.value("tool_choice"), _functions(body)
    match choice:
        case "none":
            return None
        case None | "auto":
            names = frozenset(function.name for function in functions)
            return OfferedTools(names) if names else None
        case "required":
            if not functions:
                raise invalid("tool_choice", "tool_choice is required and there are no tools; it needs one")
            return _forced(functions[0], "tool_calls") if len(functions) == 1 else _any_of(functions)
        case {"type": "function", "function": {"name": str(name), **others}, **more} if not (others or more):
            for function in functions:
                if function.name == name:
                    return _forced(function, "stop")
            raise invalid("tool_choice", f"tool_choice names {shown(name)}, which is none of tools")
        case _:
            raise _unserved(
                "tool_choice", "tool_choice is supported as auto, none, required, or the name of a function"
            )


@dataclass(frozen=True, slots=True)
class _Function:
    """One of the tools. `parameters` is the schema of its arguments, which are an object."""

    name: str
    parameters: dict[str, Any]
    position: int

    @property
    def where_held(self) -> str:
        """What the body calls the schema."""
        return f"tools[{self.position}].function.parameters"


def _functions(body: Fields) -> list[_Function]:
    """The tools, all of which are functions, and no two of one name: a call could be of either."""
    functions: list[_Function] = []
    positions: dict[str, int] = {}
    for position, tool in enumerate(body.entries("tools") or []):
        function = _function(tool, position)
        first = positions.setdefault(function.name, position)
        if first != position:
            where = f"tools[{position}].function.name"
            raise invalid(where, f"{where} is {shown(function.name)}, and so is that of tools[{first}]")
        functions.append(function)
    return functions


def _function(value: object, position: int) -> _Function:
    """One tool. What else stands in it is between the client and the template."""
    path = f"tools[{position}]"
    tool = Fields(checked(value, dict, "an object", path), path)
    kind, function = tool.text("type"), tool.fields("function")
    if kind not in {None, "function"}:
        where = tool.path_of("type")
        raise _unserved(where, f"{where} is {shown(kind)}; only function is supported")
    if function is None:
        raise invalid(tool.path_of("function"), f"{tool.path_of('function')} is missing")
    name, parameters = function.text("name"), function.value("parameters")
    if not name:
        raise invalid(function.path_of("name"), f"{function.path_of('name')} is missing")
    if parameters is None:  # it takes none
        return _Function(name, {"type": "object", "properties": {}, "additionalProperties": False}, position)
    where = function.path_of("parameters")
    kind = checked(parameters, dict, "a JSON schema", where).get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise invalid(where, f"{where} has the type {shown(kind)}; the arguments of a call are an object")
    return _Function(name, {**parameters, "type": "object"}, position)


def _forced(function: _Function, finish_reason: str) -> ForcedFunction:
    schema = _json_text(function.parameters, function.where_held)
    return ForcedFunction(function.name, schema, function.where_held, finish_reason)


def _any_of(functions: list[_Function]) -> OfferedTools:
    """A call of whichever tool, in the form of JSON that `tool_calls` reads."""
    calls = []
    for function in functions:
        try:
            root = f"#/anyOf/{function.position}/properties/arguments"
            arguments = _moved(function.parameters, root)
        except RecursionError as error:
            where = function.where_held
            raise invalid(where, f"{where} is nested too deeply") from error
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function.name}, "arguments": arguments},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    names = frozenset(function.name for function in functions)
    return OfferedTools(names, schema=_json_text({"anyOf": calls}, "tools"))


def _moved(schema: Any, to: str) -> Any:
    """A schema that stands within another at `to`: what it calls its root is there."""
    match schema:
        case {"$id": _}:  # the root of its own references
            return schema
        case dict():
            return {name: _moved_keyword(name, value, to) for name, value in schema.items()}
        case list():
            return [_moved(entry, to) for entry in schema]
    return schema


def _moved_keyword(name: str, value: Any, to: str) -> Any:
    if name in _KEYWORDS_OF_DATA:
        return value
    if name in _KEYWORDS_OF_NAMES and isinstance(value, dict):  # the names within are the client's own
        return {own: _moved(schema, to) for own, schema in value.items()}
    if name == "$ref" and isinstance(value, str) and value.startswith("#"):
        return to + value[1:]
    return _moved(value, to)


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
    calls = message.entries("tool_calls") or []
    if len(calls) > MAX_TOOL_CALLS:
        where = message.path_of("tool_calls")
        raise invalid(where, f"{where} has {len(calls)} entries; at most {MAX_TOOL_CALLS} are allowed")
    if content is None and not calls:
        raise invalid(message.path_of("content"), f"{message.path_of('content')} is missing")
    message_read = ChatMessage(
        role=role,
        content=content or "",
        name=message.text("name") or "",
        tool_calls=tuple(
            _call(call, f"{message.path_of('tool_calls')}[{i}]") for i, call in enumerate(calls)
        ),
        tool_call_id=message.text("tool_call_id") or "",
    )
    _only(message.path_of("refusal"), message.text("refusal"), "")
    # As OpenAI's answers bring them when they are sent back, and as lm-eval marks its messages.
    _only(message.path_of("annotations"), message.entries("annotations"), [])
    _only(message.path_of("type"), message.text("type"), "text")
    message.close()
    return message_read


def _call(value: object, path: str) -> ToolCall:
    """One call in an assistant's turn, as OpenAI writes it."""
    call = Fields(checked(value, dict, "an object", path), path)
    _only(call.path_of("type"), call.text("type"), "function")
    function = call.fields("function")
    if function is None:
        raise invalid(call.path_of("function"), f"{call.path_of('function')} is missing")
    name, arguments = function.text("name"), function.text("arguments")
    if not name:
        raise invalid(function.path_of("name"), f"{function.path_of('name')} is missing")
    call_id = call.text("id") or ""
    call.whole("index")  # as chunks of a stream bring it
    function.close()
    call.close()
    return ToolCall(call_id, name, arguments or "")


def _part(value: object, path: str) -> str:
    """The text of one part of a message; parts of other kinds (images, sound) are refused."""
    part = Fields(checked(value, dict, "an object", path), path)
    kind, text = part.text("type"), part.text("text")
    if kind != "text":
        raise _unserved(path, f"{path} is a part of type {shown(kind)}; only text is supported")
    if text is None:
        raise invalid(f"{path}.text", f"{path}.text is missing")
    part.close()
    return text


def _tool(value: object, position: int) -> str:
    path = f"tools[{position}]"
    return _json_text(checked(value, dict, "an object", path), path)


def _json_text(value: dict[str, Any], path: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise invalid(path, f"{path} is nested too deeply") from error
    except ValueError as error:
        raise invalid(path, f"{path} holds a number that is not finite") from error


def _only(name: str, value: object, served: object) -> None:
    """Refuses any value but the one that is served; absent is served too."""
    if value is not None and value != served:
        raise _unserved(name, f"{name} is supported as {json.dumps(served)} alone")


def _unserved(field: str, message: str) -> RequestError:
    return RequestError(grpc.StatusCode.UNIMPLEMENTED, message, field=field)
