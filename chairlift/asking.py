"""Turns what a caller of the client library asks for into the message that is sent. Pure."""

import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from chairlift.results import Message
from protos.v1 import common_pb2, router_pb2

Prompt = str | Sequence[int] | Sequence[Message | Mapping[str, Any]]
"""A text to continue, token ids, or a conversation (messages, or mappings of the same fields)."""


class Options(TypedDict, total=False):
    """What may be said beside the prompt. What is left out is the server's default.

    The fields are those of `GenerateRequest` and `SamplingParams` in protos/v1, with their limits. For
    conversations alone, of `Chat`: `tools` (definitions as mappings), `add_generation_prompt`,
    `continue_final_message`, `chat_template_kwargs` (a mapping). Of `json_schema` (a mapping, or JSON text),
    `regex` and `choice` one may be given: the answer's text matches it. `stop` is a text or a list of them.
    """

    model: str
    request_id: str
    n: int
    stop: str | Sequence[str]
    include_stop: bool
    priority: int
    cache_salt: str
    tools: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: Sequence[int]
    logprobs: int
    prompt_logprobs: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    banned_token_ids: Sequence[int]
    json_schema: str | Mapping[str, Any]
    regex: str
    choice: Sequence[str]


_OF_CHATS = frozenset({"tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"})
_CONSTRAINTS = frozenset({"json_schema", "regex", "choice"})
_OF_SAMPLING = frozenset(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name)


def generate_request(prompt: Prompt, options: Options) -> router_pb2.GenerateRequest:
    """The request. None stands for what is left out.

    Raises:
        TypeError: an option that there is not, or a value of the wrong type.
        ValueError: a number that the contract cannot hold; what is for conversations, and there is none.
    """
    request = router_pb2.GenerateRequest()
    _put_prompt(request, prompt)
    for name, value in options.items():
        if name not in Options.__annotations__:
            options_there_are = ", ".join(sorted(Options.__annotations__))
            raise TypeError(f"{name!r} is no option; options are {options_there_are}")
        if value is None:
            continue
        if name in _OF_CHATS:
            _put_of_chat(request, name, value)
        elif name in _CONSTRAINTS:
            _put_constraint(request.sampling, name, value)
        elif name == "stop" and isinstance(value, str):
            request.stop.append(value)
        else:
            _put(request.sampling if name in _OF_SAMPLING else request, name, value)
    return request


def _put_prompt(request: router_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
        return
    request.token_ids.SetInParent()
    for entry in _listed("prompt", prompt, "a text or a list"):
        if isinstance(entry, Message):
            turn = request.chat.messages.add(role=entry.role, content=entry.content, name=entry.name)
            turn.tool_call_id = entry.tool_call_id
            for call in entry.tool_calls:
                turn.tool_calls.add(id=call.id, name=call.name, arguments=call.arguments)
        elif isinstance(entry, Mapping):
            request.chat.messages.add(**entry)
        else:
            request.token_ids.ids.append(entry)
    if max(len(request.token_ids.ids), len(request.chat.messages)) < len(prompt):
        raise TypeError("the prompt has token ids beside messages; it is either the ones or the others")


def tokenize_request(prompt: str | Sequence[Message | Mapping[str, Any]]) -> router_pb2.TokenizeRequest:
    """What is to become ids. Raises TypeError and ValueError as `generate_request` does."""
    asked = generate_request(prompt, {})
    if isinstance(prompt, str):
        return router_pb2.TokenizeRequest(text=asked.text)
    return router_pb2.TokenizeRequest(chat=asked.chat)


def detokenize_request(token_ids: Sequence[int], *, include_special: bool) -> router_pb2.DetokenizeRequest:
    """What is to become text. Raises TypeError and ValueError as `generate_request` does."""
    ids = _listed("token_ids", token_ids)
    return router_pb2.DetokenizeRequest(token_ids=ids, include_special=include_special)


def _put_of_chat(request: router_pb2.GenerateRequest, name: str, value: Any) -> None:
    if not request.HasField("chat"):
        raise ValueError(f"{name} is for a conversation, and the prompt is none")
    if name == "tools":
        request.chat.tools.extend(json.dumps(tool, ensure_ascii=False) for tool in _listed(name, value))
    elif name == "chat_template_kwargs":
        request.chat.chat_template_kwargs = json.dumps(dict(value), ensure_ascii=False)
    else:
        setattr(request.chat, name, value)


def _put_constraint(sampling: common_pb2.SamplingParams, name: str, value: Any) -> None:
    present = sampling.WhichOneof("constraint")
    if present is not None:
        raise ValueError(f"{name} is given beside {present}; an answer can be held to one of them")
    if name == "choice":
        sampling.choice.values.extend(_listed(name, value))
    elif name == "json_schema" and not isinstance(value, str):
        sampling.json_schema = json.dumps(value, ensure_ascii=False)
    else:
        _put(sampling, name, value)


def _put(message: router_pb2.GenerateRequest | common_pb2.SamplingParams, name: str, value: object) -> None:
    field = message.DESCRIPTOR.fields_by_name[name]
    try:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, name).update(value)
        elif field.is_repeated:
            getattr(message, name).extend(_listed(name, value))
        else:
            setattr(message, name, value)
    except ValueError as error:
        raise ValueError(f"{name} does not fit into the contract: {value} ({error})") from error


def _listed(name: str, values: Any, form: str = "a list") -> Any:
    """The values as they are. A text, bytes or a mapping alone raises TypeError: it would be taken apart."""
    if isinstance(values, str | bytes | bytearray | Mapping) or not isinstance(values, Iterable):
        raise TypeError(f"{name} is {reprlib.repr(values)}, and must be {form}")
    return values
