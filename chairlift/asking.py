"""Turns what a caller of the client library asks for into the message that is sent. Pure."""

import contextlib
import json
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

from chairlift.results import Message
from protos.v1 import common_pb2, router_pb2

Prompt = str | Sequence[int] | Sequence[Message | Mapping[str, Any]]
"""A text to continue, token ids, or a conversation (messages, or mappings of the same fields)."""


class Options(TypedDict, total=False):
    """What may be said beside the prompt. What is left out, or None, is the server's default.

    The fields are those of `GenerateRequest` and `SamplingParams` in protos/v1, with their limits. For
    conversations alone, of `Chat`: `tools` (definitions as mappings), `add_generation_prompt`,
    `continue_final_message`, `chat_template_kwargs` (a mapping). Of `json_schema` (a mapping, or JSON text),
    `regex`, `choice` and `json_or_tagged` (a mapping of that message's fields) one may be given: the answer's
    text matches it. `stop` is a text or a list of them.
    """

    model: str | None
    request_id: str | None
    n: int | None
    stop: str | Sequence[str] | None
    include_stop: bool | None
    priority: int | None
    cache_salt: str | None
    tools: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: Mapping[str, Any] | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    ignore_eos: bool | None
    stop_token_ids: Sequence[int] | None
    logprobs: int | None
    prompt_logprobs: int | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    banned_token_ids: Sequence[int] | None
    json_schema: str | Mapping[str, Any] | None
    regex: str | None
    choice: Sequence[str] | None
    json_or_tagged: Mapping[str, Any] | None


_OF_CHATS = frozenset({"tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"})
_CONSTRAINTS = frozenset({"json_schema", "regex", "choice", "json_or_tagged"})
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
        with _named("prompt"):
            request.text = prompt
        return
    request.token_ids.SetInParent()
    position = 0
    entries = _listed("prompt", prompt, "a text or a list")
    with _named(lambda: f"prompt[{position}]"):
        for position, entry in enumerate(entries):  # noqa: B007 - an error is told with it
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
        tools = _listed(name, value)
        with _named(name):
            request.chat.tools.extend(json.dumps(tool, ensure_ascii=False) for tool in tools)
    elif name == "chat_template_kwargs":
        with _named(name):
            request.chat.chat_template_kwargs = json.dumps(dict(value), ensure_ascii=False)
    else:
        with _named(name):
            setattr(request.chat, name, value)


def _put_constraint(sampling: common_pb2.SamplingParams, name: str, value: Any) -> None:
    present = sampling.WhichOneof("constraint")
    if present is not None:
        raise ValueError(f"{name} is given beside {present}; an answer can be held to one of them")
    if name == "choice":
        values = _listed(name, value)
        with _named(name):
            sampling.choice.values.extend(values)
    elif name == "json_or_tagged":
        with _named(name):
            sampling.json_or_tagged.CopyFrom(common_pb2.JsonOrTagged(**value))
    elif name == "json_schema" and not isinstance(value, str):
        with _named(name):
            sampling.json_schema = json.dumps(value, ensure_ascii=False)
    else:
        _put(sampling, name, value)


def _put(message: router_pb2.GenerateRequest | common_pb2.SamplingParams, name: str, value: object) -> None:
    field = message.DESCRIPTOR.fields_by_name[name]
    is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
    values = _listed(name, value) if field.is_repeated and not is_map else value
    with _named(name):
        if is_map:
            getattr(message, name).update(values)
        elif field.is_repeated:
            getattr(message, name).extend(values)
        else:
            setattr(message, name, values)


@contextlib.contextmanager
def _named(name: str | Callable[[], str]) -> Iterator[None]:
    """Says what it was that protobuf, or JSON, would not have: their own sentences do not."""
    try:
        yield
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        where = name if isinstance(name, str) else name()
        raise kind(f"{where} does not fit into the contract: {error}") from error


def _listed(name: str, values: Any, form: str = "a list") -> Any:
    """The values as they are. A text, bytes or a mapping alone raises TypeError: it would be taken apart."""
    if isinstance(values, str | bytes | bytearray | Mapping) or not isinstance(values, Iterable):
        raise TypeError(f"{name} is {reprlib.repr(values)}, and must be {form}")
    return values
