"""What a body asks for, in the router's own terms: OpenAI's fields, and a few that other servers have too.

OpenAI's fields keep OpenAI's names and meanings; docs/clients.md lists all fields. A field that is known but
not served is refused by name, unless its value says "off". Pure; it must not know tokens, sockets, events.
"""

from collections import abc
from dataclasses import dataclass, replace
from typing import Any, Final

from router.chat import ChatMessage, ToolCall
from router.constraints import Choice, Constraint, JsonSchema, Regex, field_of
from router.http.fields import Fields, checked, json_text, only, shown, unserved, wholes
from router.http.tools import (
    ForcedFunction,
    NamedFunction,
    OfferedTools,
    functions_of,
    tool_use_of,
)
from router.validation import (
    MAX_CHAT_MESSAGES,
    MAX_TOOL_CALLS,
    Conversation,
    GenerateRequest,
    SamplingRequest,
    check_num_calls,
)
from rpc.errors import invalid

MAX_CHOICES_IN_ALL: Final = 128
MAX_COMPLETION_LOGPROBS: Final = 5
MAX_TOKEN_ID_DIGITS: Final = 18
MAX_TIMEOUT_SECONDS: Final = 86_400.0
# Room for the number that is put behind the id of a call to name one prompt of several.
MAX_REQUEST_ID_CHARACTERS: Final = 124
UNUSED: Final = ("user", "safety_identifier", "prompt_cache_key")


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
    tool_use: ForcedFunction | OfferedTools | None = None

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
    only("suffix", body.text("suffix"), "")
    constraint, names = constraint_of(body, _of_response_format(body))
    sampling = sampling_of(body, body.whole("max_tokens"), logprobs, constraint)
    has_prompt_logprobs = sampling.prompt_logprobs is not None
    if echo and logprobs is not None:
        names |= {} if has_prompt_logprobs else {"sampling.prompt_logprobs": "logprobs"}
        sampling = replace(sampling, prompt_logprobs=max(logprobs, sampling.prompt_logprobs or 0))
    request = request_of(body, sampling)
    only("best_of", body.whole("best_of"), request.n)
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
    only("modalities", body.entries("modalities"), ["text"])
    max_tokens, older = body.whole("max_completion_tokens"), body.whole("max_tokens")
    if max_tokens is not None and older is not None:
        raise invalid("max_tokens", "max_tokens and max_completion_tokens are both given; one is enough")
    constraint, names = constraint_of(body, _of_response_format(body))
    tool_use, constraint, names = held(tool_use, constraint, names, parallel=parallel)
    sampling = sampling_of(
        body, older if max_tokens is None else max_tokens, (alternatives or 0) if wanted else None, constraint
    )
    length = "max_tokens" if max_tokens is None else "max_completion_tokens"
    names |= {"sampling.logprobs": "top_logprobs", "sampling.max_tokens": length, "prompt": "messages"}
    has_prompt_logprobs = sampling.prompt_logprobs is not None
    request = request_of(body, sampling)
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


# --- what several have in common -----------------------------------------------------------------------


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
    timeout_seconds = timeout_of(body)
    check_unused(body)
    metadata = body.value("metadata")  # nothing depends on it; it is JSON or refused, as all of a body
    if metadata is not None:
        json_text(checked(metadata, dict, "an object", "metadata"), "metadata")
    only("store", body.flag("store"), served=False)
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


def timeout_of(body: Fields) -> float | None:
    """Seconds that the client gives the call. Raises RequestError."""
    timeout_seconds = body.number("timeout")
    if timeout_seconds is not None and not 0 < timeout_seconds <= MAX_TIMEOUT_SECONDS:
        raise invalid(
            "timeout",
            f"timeout is {timeout_seconds:g}; it must be more than 0 and at most {MAX_TIMEOUT_SECONDS:g} "
            "seconds",
        )
    return timeout_seconds


def check_unused(body: Fields) -> None:
    """Refuses what is wrong among the fields for OpenAI's own records. Raises RequestError."""
    for name in UNUSED:
        body.text(name)  # nothing here depends on it
    if (tier := body.text("service_tier")) not in {None, "auto", "default"}:
        raise unserved("service_tier", f"service_tier is {shown(tier)}; it is auto or default")


def _usage_asked(options: Fields) -> tuple[bool, bool]:
    """Whether usage is told at the end, and with each chunk, as vLLM tells it."""
    at_the_end = options.flag("include_usage") or False
    with_each = options.flag("continuous_usage_stats") or False
    if with_each and not at_the_end:
        where = options.path_of("continuous_usage_stats")
        raise invalid(where, f"{where} is given; it needs include_usage to be true")
    only(options.path_of("include_obfuscation"), options.flag("include_obfuscation"), served=False)
    options.close()
    return at_the_end, with_each


def held(
    tool_use: ForcedFunction | OfferedTools | None,
    constraint: Constraint | None,
    names: dict[str, str],
    *,
    parallel: bool | None,
) -> tuple[ForcedFunction | OfferedTools | None, Constraint | None, dict[str, str]]:
    """The three as they are in force beside each other. Raises RequestError when they cannot be.

    `parallel` is what the client says of several calls in one answer. A schema is one of text: it says
    nothing of calls, whether the answer may call or must.
    """
    if tool_use is not None and constraint is not None and not isinstance(constraint, JsonSchema):
        name = names[field_of(constraint)]
        raise invalid(
            name,
            f"{name} is given beside tools that the answer may call, and calls do not match it; set "
            "tool_choice to none, or hold the text to a JSON schema",
        )
    if tool_use is not None and tool_use.schema is not None:
        constraint = JsonSchema(tool_use.schema)
        where_held = tool_use.where_held if isinstance(tool_use, ForcedFunction) else "tools"
        return tool_use, constraint, {field_of(constraint): where_held}
    if isinstance(tool_use, OfferedTools):
        functions = () if constraint is None else tool_use.functions
        tool_use = replace(tool_use, max_calls=1 if parallel is False else None, functions=functions)
    return tool_use, constraint, names


def request_of(body: Fields, sampling: SamplingRequest) -> GenerateRequest:
    """Everything but the prompt. Raises RequestError."""
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


def sampling_of(
    body: Fields, max_tokens: int | None, logprobs: int | None, constraint: Constraint | None
) -> SamplingRequest:
    """How tokens are chosen: by fields that are called the same in all bodies. Raises RequestError."""
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


def constraint_of(
    body: Fields, found: list[tuple[str, Constraint]]
) -> tuple[Constraint | None, dict[str, str]]:
    """What the output must match, by whichever of the fields, and what the body calls it.

    `found` has what OpenAI's own field says, if it says anything. Raises RequestError.
    """
    found = [*found, *_constraints(body, "json_schema")]
    as_vllm = body.fields("structured_outputs")
    if as_vllm is not None:
        found += _constraints(as_vllm, "json")
        if as_vllm.flag("json_object"):
            found.append((as_vllm.path_of("json_object"), JsonSchema("{}")))
        as_vllm.close()
    if len(found) > 1:
        first, second = found[0][0], found[1][0]
        raise invalid(second, f"{second} is given beside {first}; an output can be held to one of them")
    if not found:
        return None, {}
    name, constraint = found[0]
    return constraint, {field_of(constraint): name}


def _constraints(fields: Fields, schema_name: str) -> list[tuple[str, Constraint]]:
    """What these fields hold an output to, each under its path. A schema is called `schema_name`."""
    found: list[tuple[str, Constraint]] = []
    schema, where = fields.value(schema_name), fields.path_of(schema_name)
    if schema is not None:
        found.append((where, JsonSchema(_schema_text(schema, where))))
    pattern = fields.text("regex")
    if pattern is not None:
        found.append((fields.path_of("regex"), Regex(pattern)))
    values = fields.texts("choice")
    if values is not None:
        found.append((fields.path_of("choice"), Choice(values)))
    return found


def _of_response_format(body: Fields) -> list[tuple[str, Constraint]]:
    response_format = body.fields("response_format")
    if response_format is None:
        return []
    found: list[tuple[str, Constraint]] = []
    match response_format.text("type"):
        case "text":
            pass
        case "json_object":
            found = [("response_format", JsonSchema("{}"))]
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
            found = [(where, JsonSchema("{}" if schema is None else _schema_text(schema, where)))]
        case kind:
            raise unserved(
                "response_format.type",
                f"response_format.type is {shown(kind)}; it is text, json_object or json_schema",
            )
    response_format.close()
    return found


def _schema_text(schema: object, path: str) -> str:
    """A schema as JSON text; it may stand in the body as that, or as itself."""
    if isinstance(schema, str):
        return schema
    return json_text(checked(schema, dict, "a JSON schema", path), path)


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
    messages = [_message(checked(m, dict, "an object", f"messages[{i}]"), i) for i, m in enumerate(values)]
    return conversation_of(body, messages, tools)


def conversation_of(
    body: Fields, messages: abc.Sequence[ChatMessage], tools: abc.Sequence[str]
) -> Conversation:
    """The prompt that they are, as the body wants it put. `tools` are as templates know them, as JSON texts.

    Raises RequestError.
    """
    check_num_calls(messages)
    choice = body.value("tool_choice")
    continued = body.flag("continue_final_message") or False
    opened = body.flag("add_generation_prompt")
    kwargs = body.value("chat_template_kwargs")
    return Conversation(
        messages=messages,
        tools=[] if choice == "none" else tools,
        add_generation_prompt=not continued if opened is None else opened,
        continue_final_message=continued,
        chat_template_kwargs="" if kwargs is None else _variables(kwargs, "chat_template_kwargs"),
    )


def _variables(value: object, path: str) -> str:
    return json_text(checked(value, dict, "an object", path), path)


def _tool_use(body: Fields) -> ForcedFunction | OfferedTools | None:
    """Which tools the answer may call, or must."""
    choice = body.value("tool_choice")
    match choice:
        case {"type": "function", "function": {"name": str(name), **others}, **more} if not (others or more):
            choice = NamedFunction(name)
    return tool_use_of(choice, functions_of(body.entries("tools") or [], _function_in))


def _function_in(tool: Fields) -> Fields:
    """What else stands in a tool, or in its function, is between the client and the template."""
    function = tool.fields("function")
    if function is None:
        raise invalid(tool.path_of("function"), f"{tool.path_of('function')} is missing")
    return function


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
    only(message.path_of("refusal"), message.text("refusal"), "")
    # As OpenAI's answers bring them when they are sent back, and as lm-eval marks its messages.
    only(message.path_of("annotations"), message.entries("annotations"), [])
    only(message.path_of("type"), message.text("type"), "text")
    message.close()
    return message_read


def _call(value: object, path: str) -> ToolCall:
    """One call in an assistant's turn, as OpenAI writes it."""
    call = Fields(checked(value, dict, "an object", path), path)
    only(call.path_of("type"), call.text("type"), "function")
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
        raise unserved(path, f"{path} is a part of type {shown(kind)}; only text is supported")
    if text is None:
        raise invalid(f"{path}.text", f"{path}.text is missing")
    part.close()
    return text


def _tool(value: object, position: int) -> str:
    path = f"tools[{position}]"
    return json_text(checked(value, dict, "an object", path), path)
