"""What a body of /v1/responses asks for. Items become turns of a conversation, the rest is read as a chat's.

Nothing is stored, so whatever names something that a server would have kept is refused. What the answer says
again of the body is kept as JSON text: it is copied into the answer, never looked at again. Pure.
"""

from collections import abc
from dataclasses import dataclass, replace
from typing import Any, Final

from router.chat import ChatMessage, ToolCall
from router.constraints import Constraint, JsonSchema
from router.http.asked import (
    UNUSED,
    Asked,
    check_unused,
    constraint_of,
    conversation_of,
    held,
    request_of,
    sampling_of,
    timeout_of,
)
from router.http.encoding import encoded
from router.http.fields import Fields, checked, json_text, only, shown, unserved
from router.http.tools import NamedFunction, functions_of, tool_use_of
from router.validation import MAX_CHAT_MESSAGES, MAX_TOOL_CALLS, check_tools
from rpc.errors import invalid

MAX_METADATA: Final = 16
MAX_METADATA_NAME_CHARACTERS: Final = 64
MAX_METADATA_VALUE_CHARACTERS: Final = 512
ROLES: Final = ("user", "assistant", "system", "developer")
STATUSES: Final = ("in_progress", "completed", "incomplete")
LOGPROBS: Final = "message.output_text.logprobs"
INCLUDED: Final = (LOGPROBS, "reasoning.encrypted_content")  # of the latter there is none

# What a body calls fields of the contract.
NAMES: Final = {
    **dict.fromkeys(("chat", "chat.messages", "prompt"), "input"),
    "sampling.max_tokens": "max_output_tokens",
    "sampling.logprobs": "top_logprobs",
}

_SHOWN: Final = ("name", "description", "parameters")  # of a tool, to a chat template
_NOTHING_STORED: Final = "nothing is stored here; send the whole conversation as input"
# Fields that would need what is not here, and what to do instead.
_NOT_HERE: Final = {
    "previous_response_id": _NOTHING_STORED,
    "conversation": _NOTHING_STORED,
    "prompt": "no prompts are kept here; send it as instructions and input",
    "max_tool_calls": "it counts calls of OpenAI's own tools, and there are none of them",
}
# What chats call fields of these bodies.
_CALLED_HERE: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": f'include, as ["{LOGPROBS}"]',
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedResponse(Asked):
    """One call, whose answer also says what was asked: `repeated` has its fields, as JSON texts."""

    repeated: abc.Mapping[str, str]


def response(body: Fields) -> AskedResponse:
    """A body of /v1/responses. Raises RequestError, INVALID_ARGUMENT or UNIMPLEMENTED, naming the field."""
    for name in body.names:
        if name in _CALLED_HERE and body.value(name) is not None:
            raise invalid(name, f"{name} is not supported here; it is {_CALLED_HERE[name]} in a response")
    for name, reason in _NOT_HERE.items():
        if body.value(name) is not None:
            raise unserved(name, f"{name} is not supported: {reason}")
    only("background", body.flag("background"), served=False)
    only("truncation", body.text("truncation"), "disabled")
    body.flag("store")  # whatever it says: the answer says that nothing is
    _check_reasoning(body)

    shown_tools, told_tools = _tools(body)
    choice = body.value("tool_choice")
    told_choice: Any = "auto" if choice is None else choice
    match choice:
        case {"type": "function", "name": str(name), **more} if not more:
            choice = NamedFunction(name)
    tool_use = tool_use_of(choice, functions_of(body.entries("tools") or [], _flat))
    parallel = body.flag("parallel_tool_calls")
    instructions = body.text("instructions")
    conversation = conversation_of(body, _messages(body.value("input"), instructions), shown_tools)
    described, told_format = _format(body)
    constraint, names = constraint_of(body, described)
    tool_use, constraint, names = held(tool_use, constraint, names, parallel=parallel)
    logprobs = _logprobs(body)
    if logprobs is not None and tool_use is not None:
        raise unserved(
            "include",
            f"include has {LOGPROBS} beside tools that the answer may call, and a response has no place for "
            "those of calls; leave one out, or ask for a chat completion",
        )
    max_tokens = body.whole("max_output_tokens")
    sampling = sampling_of(body, max_tokens, logprobs, constraint)
    if sampling.prompt_logprobs is not None:
        raise unserved("prompt_logprobs", "prompt_logprobs is not supported here; chat completions have it")
    only("return_token_ids", body.flag("return_token_ids"), served=False)
    request = request_of(body, sampling)
    only("n", request.n, 1)
    repeated = {
        "instructions": instructions,
        "max_output_tokens": max_tokens,
        "metadata": _metadata(body),
        "parallel_tool_calls": parallel is not False,
        "tool_choice": told_choice,
        "top_logprobs": logprobs or 0,
        **{name: body.text(name) for name in UNUSED},
    }
    check_unused(body)
    asked = AskedResponse(
        requests=(replace(request, prompt=conversation),),
        stream=_is_stream(body),
        include_usage=False,
        continuous_usage=False,
        timeout_seconds=timeout_of(body),
        echo=False,
        echo_logprobs=None,
        prompt_logprobs=False,
        return_token_ids=False,
        names=NAMES | names,
        tool_use=tool_use,
        repeated={
            **{name: encoded(value).decode() for name, value in repeated.items()},
            "tools": f"[{','.join(told_tools)}]",
            "text": f'{{"format":{told_format},"verbosity":"medium"}}',
        },
    )
    body.close()
    return asked


# --- options ----------------------------------------------------------------------------------------


def _is_stream(body: Fields) -> bool:
    stream, options = body.flag("stream") or False, body.fields("stream_options")
    if options is not None:
        if not stream:
            raise invalid("stream_options", "stream_options is given; it needs stream to be true")
        where = options.path_of("include_obfuscation")
        only(where, options.flag("include_obfuscation"), served=False)
        options.close()
    return stream


def _check_reasoning(body: Fields) -> None:
    reasoning = body.fields("reasoning")
    for name in [] if reasoning is None else reasoning.names:
        if reasoning is not None and reasoning.value(name) is not None:
            where = reasoning.path_of(name)
            raise unserved(
                where,
                f"{where} is not supported; what the model's chat template knows of thinking is said in "
                "chat_template_kwargs",
            )


def _logprobs(body: Fields) -> int | None:
    """How many alternatives each token is to have; None when log-probabilities are not wanted."""
    included, alternatives = body.texts("include") or (), body.whole("top_logprobs")
    for position, name in enumerate(included):
        if name not in INCLUDED:
            where = f"include[{position}]"
            raise unserved(where, f"{where} is {shown(name)}; it is {' or '.join(INCLUDED)}")
    if LOGPROBS in included:
        return alternatives or 0
    if alternatives:
        raise invalid("top_logprobs", f"top_logprobs is {alternatives}; it needs {LOGPROBS} in include")
    return None


def _metadata(body: Fields) -> dict[str, str]:
    """What the client wants to be told again; OpenAI's limits."""
    values = body.fields("metadata")
    if values is None:
        return {}
    if len(values.names) > MAX_METADATA:
        raise invalid(
            "metadata", f"metadata has {len(values.names)} names; at most {MAX_METADATA} are allowed"
        )
    told = {}
    for name in values.names:
        if len(name) > MAX_METADATA_NAME_CHARACTERS:
            raise invalid(
                "metadata",
                f"metadata has a name of {len(name)} characters; at most {MAX_METADATA_NAME_CHARACTERS} are "
                "allowed",
            )
        value, where = values.text(name), values.path_of(name)
        if value is None:
            raise invalid("metadata", f"{where} is null; it must be a string")
        if len(value) > MAX_METADATA_VALUE_CHARACTERS:
            raise invalid(
                "metadata",
                f"{where} has {len(value)} characters; at most {MAX_METADATA_VALUE_CHARACTERS} are allowed",
            )
        told[name] = value
    return told


def _format(body: Fields) -> tuple[list[tuple[str, Constraint]], str]:
    """What `text.format` holds the output to, and how the answer says it, as JSON text."""
    text = body.fields("text")
    described = None if text is None else text.fields("format")
    if text is not None:
        only(text.path_of("verbosity"), text.text("verbosity"), "medium")
        text.close()
    if described is None:
        return [], '{"type":"text"}'
    found: list[tuple[str, Constraint]] = []
    told = ""
    match described.text("type"):
        case "text":
            told = '{"type":"text"}'
        case "json_object":
            found, told = [("text.format", JsonSchema("{}"))], '{"type":"json_object"}'
        case "json_schema":
            where, name = described.path_of("schema"), described.text("name")
            if not name:
                raise invalid(described.path_of("name"), f"{described.path_of('name')} is missing")
            value = described.value("schema")
            if value is None:
                raise invalid(where, f"{where} is missing")
            schema = json_text(checked(value, dict, "a JSON schema", where), where)
            described.flag("strict")  # it is always
            head = {"type": "json_schema", "name": name, "description": described.text("description")}
            told = f'{encoded(head).decode()[:-1]},"strict":true,"schema":{schema}}}'
            found = [(where, JsonSchema(schema))]
        case kind:
            where = described.path_of("type")
            raise unserved(where, f"{where} is {shown(kind)}; it is text, json_object or json_schema")
    described.close()
    return found, told


# --- tools ------------------------------------------------------------------------------------------


def _flat(tool: Fields) -> Fields:
    """A function whose fields stand in the tool itself."""
    for name in ("name", "description"):
        tool.text(name)
    tool.value("parameters")
    tool.flag("strict")  # arguments that are held to a schema always are; others are as the model writes them
    tool.close()
    return tool


def _tools(body: Fields) -> tuple[list[str], list[str]]:
    """The tools as chat templates know them, and as the answer says them again, as JSON texts."""
    for_template, told = [], []
    for position, value in enumerate(body.entries("tools") or []):
        path = f"tools[{position}]"
        tool = checked(value, dict, "an object", path)
        function = {name: tool[name] for name in _SHOWN if tool.get(name) is not None}
        for_template.append(json_text({"type": "function", "function": function}, path))
        again = {"type": "function", **dict.fromkeys(_SHOWN), **function, "strict": tool.get("strict")}
        told.append(json_text(again, path))
    check_tools(for_template)
    return for_template, told


# --- input ------------------------------------------------------------------------------------------


def _messages(value: object, instructions: str | None) -> list[ChatMessage]:
    """The turns, the instructions before them."""
    before = [ChatMessage("system", instructions)] if instructions else []
    match value:
        case None:
            raise invalid("input", "input is missing; it is text or a list of items")
        case str():
            return [*before, ChatMessage("user", value)]
        case []:
            raise invalid("input", "input is empty; it has at least one item")
        case list() if len(value) > MAX_CHAT_MESSAGES:  # before any of them is looked at
            raise invalid("input", f"input has {len(value)} entries; at most {MAX_CHAT_MESSAGES} are allowed")
        case list():
            return before + _turns(value)
    raise invalid("input", f"input is {shown(value)}; it must be text or a list of items")


def _turns(items: list[object]) -> list[ChatMessage]:
    """Calls belong to the assistant's turn that they stand behind, and so does what is said behind a call."""
    turns: list[list[ChatMessage]] = []
    for position, value in enumerate(items):
        item = _turn(value, f"input[{position}]")
        if turns and _goes_on(turns[-1], item):
            turns[-1].append(item)
        else:
            turns.append([item])
    return list(map(_joined, turns))


def _goes_on(turn: list[ChatMessage], item: ChatMessage) -> bool:
    has_calls = len(turn) > 1 or bool(turn[0].tool_calls or item.tool_calls)
    return has_calls and turn[0].role == item.role == "assistant"


def _joined(turn: list[ChatMessage]) -> ChatMessage:
    if len(turn) == 1:
        return turn[0]
    calls = tuple(call for item in turn for call in item.tool_calls)
    if len(calls) > MAX_TOOL_CALLS:
        raise invalid(
            "input",
            f"input has {len(calls)} function_calls in one turn; at most {MAX_TOOL_CALLS} are allowed",
        )
    return replace(turn[0], content="".join(item.content for item in turn), tool_calls=calls)


def _turn(value: object, path: str) -> ChatMessage:
    """What one item adds to the conversation. Ids and statuses are as earlier answers gave them."""
    item = Fields(checked(value, dict, "an object", path), path)
    match item.text("type"):
        case None | "message":
            role, where = item.text("role"), item.path_of("role")
            if role not in ROLES:
                told = f"{where} is {shown(role)}; it is one of {', '.join(ROLES)}"
                raise invalid(where, f"{where} is missing" if role is None else told)
            turn = ChatMessage(role, _content(item, "content"))
        case "function_call":
            name, call_id = _needed(item, "name"), _needed(item, "call_id")
            turn = ChatMessage(
                "assistant", "", tool_calls=(ToolCall(call_id, name, item.text("arguments") or ""),)
            )
        case "function_call_output":
            turn = ChatMessage("tool", _content(item, "output"), tool_call_id=_needed(item, "call_id"))
        case "item_reference":
            raise unserved(
                path, f"{path} is an item_reference, and nothing is stored here; send the item itself"
            )
        case kind:
            where = item.path_of("type")
            raise unserved(
                where,
                f"{where} is {shown(kind)}; it is message, function_call or function_call_output",
            )
    item.text("id")
    status, where = item.text("status"), item.path_of("status")
    if status not in {None, *STATUSES}:
        raise invalid(where, f"{where} is {shown(status)}; it is one of {', '.join(STATUSES)}")
    item.close()
    return turn


def _needed(item: Fields, name: str) -> str:
    value = item.text(name)
    if not value:
        raise invalid(item.path_of(name), f"{item.path_of(name)} is missing")
    return value


def _content(item: Fields, name: str) -> str:
    """A text, or parts of one."""
    where, value = item.path_of(name), item.value(name)
    if isinstance(value, list):
        return "".join(_part(part, f"{where}[{position}]") for position, part in enumerate(value))
    if value is None:
        raise invalid(where, f"{where} is missing")
    return checked(value, str, "a string or a list of parts", where)


def _part(value: object, path: str) -> str:
    """The text of one part; parts of other kinds (images, files) are refused."""
    part = Fields(checked(value, dict, "an object", path), path)
    kind, text = part.text("type"), part.text("text")
    if kind not in {"input_text", "output_text"}:
        raise unserved(
            path, f"{path} is a part of type {shown(kind)}; only input_text and output_text are supported"
        )
    if text is None:
        raise invalid(f"{path}.text", f"{path}.text is missing")
    if kind == "output_text":  # as an earlier answer has it
        only(part.path_of("annotations"), part.entries("annotations"), [])
        part.entries("logprobs")
    part.close()
    return text
