"""Turns a conversation into the text that the model continues, by the model's chat template, sandboxed.

Equal to `apply_chat_template` of Hugging Face transformers, character by character: same environment, same
filters and functions. The template comes with the model and is code: it runs in jinja2's immutable sandbox,
and its work is bounded (`MAX_LOOP_STEPS` over all its `range` loops, `MAX_CHARACTERS` of text; loops over the
conversation are bounded by its size), so that a foolish template costs a refusal and not the server. What it
raises becomes a ChatError, a sentence for the client.

It must not know tokens. Rendering is CPU work of up to seconds for huge conversations: keep it off the loop.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MAX_LOOP_STEPS = 1_000_000
MAX_CHARACTERS = 16 * 1024 * 1024
# What a template sees under these names is the renderer's to say.
RESERVED_VARIABLES = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("bos_token", "eos_token", "range", "raise_exception", "strftime_now"),
    }
)
_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatError(ValueError):
    """The conversation cannot be put into the template; the text is a sentence for the client.

    It begins with `field`, the contract's name of what is wrong.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class TemplateError(ValueError):
    """The model's template is not a template; the text is a sentence for the operator."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool, in an assistant's turn. `arguments` are a JSON object as text; empty: none."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn. What is empty beside role and content is not handed to the template."""

    role: str
    content: str
    name: str = ""
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""


class ChatTemplate:
    """One model's template, compiled once. Rendering may run in several threads at once.

    `special_tokens` are the texts that templates know as `bos_token` and `eos_token`.
    """

    __slots__ = ("_knows_developers", "_knows_tools", "_special_tokens", "_template")

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        try:
            environment = _environment()
            self._template = environment.from_string(source)
            self._knows_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template is broken at line {error.lineno}: {error.message}"
            ) from error
        self._knows_developers = "developer" in source
        self._special_tokens = special_tokens

    def render(
        self,
        messages: list[ChatMessage],
        tools: list[str],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The conversation as text. `tools` are definitions as JSON text; an empty list means no tools.

        With `continue_final_message` it ends with the last message's content: what closes a turn is cut off.
        The template sees `variables` as well, none of which has a name of `RESERVED_VARIABLES`.
        The arguments of a call are an object for it; those that are none, such as some that were cut short,
        are the text that they are.
        Raises ChatError when there is no message, a tool is not JSON or the template knows no tools, the
        template refuses or fails, its work passes the bounds, or the last message cannot be continued.
        """
        if not messages:
            raise ChatError("chat.messages", "chat.messages is empty; at least one message is needed")
        if tools and not self._knows_tools:
            raise ChatError(
                "chat.tools",
                "chat.tools: the model's chat template does not know tools; describe them in a message, or "
                "hold the output to a JSON schema",
            )
        shown = _marked(messages) if continue_final_message else messages
        seen = {
            **variables,
            **self._special_tokens,
            "messages": [self._as_it_sees(message) for message in shown],
            "tools": _parsed_tools(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "range": _BoundedRange(),
        }
        try:
            text = _bounded_join(self._template.generate(seen))
            return _cut_at_mark(messages[-1].content, text) if continue_final_message else text
        except _RefusedByTemplateError as error:
            raise ChatError(
                "chat", f"chat: the model's chat template refuses this conversation: {error}"
            ) from error
        except ChatError:
            raise
        except Exception as error:  # foreign code may raise anything, and only this request is hurt by it
            reason = str(error) or type(error).__name__
            failed = f"the model's chat template failed on this conversation: {reason}"
            wrong = _first_that_is_no_object(messages)
            if wrong is not None:
                raise ChatError(
                    "chat.messages", f"chat.messages: {wrong} is no JSON object, and {failed}"
                ) from error
            raise ChatError("chat", f"chat: {failed}") from error

    def _as_it_sees(self, message: ChatMessage) -> dict[str, Any]:
        role = message.role
        if role == "developer" and not self._knows_developers:
            role = "system"  # OpenAI's newer name for it, which older templates pass over without a word
        seen: dict[str, Any] = {"role": role, "content": message.content}
        if message.name:
            seen["name"] = message.name
        if message.tool_call_id:
            seen["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            seen["tool_calls"] = [_call_as_it_sees(call) for call in message.tool_calls]
        return seen


class _RefusedByTemplateError(jinja2.TemplateError):
    """The template called `raise_exception`."""


class _BoundedRange:
    """`range` for one rendering. Nested loops call it once a round, so what is counted is their product."""

    def __init__(self) -> None:
        self._steps_left = MAX_LOOP_STEPS

    def __call__(self, *bounds: int) -> range:
        steps = range(*bounds)
        self._steps_left -= len(steps)
        if self._steps_left < 0:
            raise ChatError(
                "chat", f"chat: the model's chat template loops for more than {MAX_LOOP_STEPS} steps"
            )
        return steps


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}`: marks text for training in some templates; here, its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates call it by position as transformers allows
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002 - likewise
) -> str:
    """JSON as it is, where jinja2's own filter would escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise _RefusedByTemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # noqa: DTZ005 - the server's local date, as transformers gives it


def _call_as_it_sees(call: ToolCall) -> dict[str, Any]:
    """As transformers documents it for templates: the arguments are an object, not its text."""
    seen = {"type": "function", "function": {"name": call.name, "arguments": _arguments(call)}}
    return {"id": call.id, **seen} if call.id else seen


def _arguments(call: ToolCall) -> dict[str, Any] | str:
    """A model's calls come back from agents as it made them, and with what was wrong with them."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return call.arguments
    return arguments if isinstance(arguments, dict) else call.arguments


def _first_that_is_no_object(messages: list[ChatMessage]) -> str | None:
    """Where the first arguments stand that are none."""
    for position, message in enumerate(messages):
        for number, call in enumerate(message.tool_calls):
            if isinstance(_arguments(call), str):
                return f"messages[{position}].tool_calls[{number}].arguments"
    return None


def _marked(messages: list[ChatMessage]) -> list[ChatMessage]:
    """The conversation with a mark behind its last content."""
    last = messages[-1]
    return [*messages[:-1], replace(last, content=last.content + _CONTINUE_MARK)]


def _cut_at_mark(said: str, text: str) -> str:
    """The text up to the mark, as transformers cuts it: the mark's space shows whether spaces are kept."""
    position = text.rfind(_CONTINUE_MARK.strip())
    if position < 0 or said.strip() not in text:
        raise ChatError(
            "chat.continue_final_message",
            "chat.continue_final_message: the model's chat template does not show the last message's content "
            "as it is, so it cannot be continued",
        )
    before = text[:position]
    return before if text.startswith(_CONTINUE_MARK, position) else before.rstrip()


def _parsed_tools(tools: list[str]) -> list[Any]:
    parsed = []
    for index, tool in enumerate(tools):
        try:
            parsed.append(json.loads(tool))
        except (ValueError, RecursionError) as error:
            raise ChatError("chat.tools", f"chat.tools[{index}] is not JSON: {error}") from error
    return parsed


def _bounded_join(chunks: Iterable[str]) -> str:
    text = []
    num_characters = 0
    for chunk in chunks:
        num_characters += len(chunk)
        if num_characters > MAX_CHARACTERS:
            raise ChatError(
                "chat", f"chat: the model's chat template makes more than {MAX_CHARACTERS} characters of this"
            )
        text.append(chunk)
    return "".join(text)
