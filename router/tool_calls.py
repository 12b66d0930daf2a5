"""Finds tool calls in an answer's text, as it comes, in the form in which the model was taught to make them.

  HERMES        <tool_call>{"name": "f", "arguments": {}}</tool_call>    Hermes, Qwen 2.5 and 3, SmolLM 3
  LLAMA3_JSON   {"name": "f", "parameters": {}}                          Llama 3; <|python_tag|> may lead it
  MISTRAL       [{"name": "f", "arguments": {}}]                         Mistral; [TOOL_CALLS] may lead it
                [TOOL_CALLS]f[ARGS]{}                                    later; [CALL_ID]x may stand behind f

Where tags are special tokens the text must show them all the same: `TAGS`.

Rules:
  1. What comes out is a function of the text, the form and the tools, never of how the text is cut.
  2. A call is an object of a tool's name and an object of arguments; beside them `type` and `id` may stand.
     In the later form the name stands before the arguments. Whatever begins like a call and is none is
     content, to the letter.
  3. Arguments are handed on as the model wrote them.
  4. White space around a call is the form's, and between calls and behind the last one a `;` is Llama 3's; in
     a list that has begun with a call, `,` and the `]` that ends it are Mistral's. All other text is content.
  5. Held back is what may be of a call: from its first character on, and white space before it.
  6. Where an answer is either text or calls (`is_apart`), calls are what it begins with, Mistral's with their
     tag; what begins with something other is text to its end.
  7. No character is read twice: behind an attempt that failed, reading goes on where it failed.

Pure. It must not know tokens, doors, or how a call is told.
"""

import enum
import json
import re
from collections import abc
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol

_TAG: Final = "<tool_call>"
_END_TAG: Final = "</tool_call>"
_PYTHON_TAG: Final = "<|python_tag|>"
_CALLS_TAG: Final = "[TOOL_CALLS]"
_ID_TAG: Final = "[CALL_ID]"
_ARGUMENTS_TAG: Final = "[ARGS]"
_SPACE: Final = " \t\r\n"
CALL_NAMES: Final = ("name", "arguments", "parameters", "type", "id")
"""What an object that is a call may have."""
_FIRST_NAMES: Final = tuple(f'"{name}"' for name in CALL_NAMES)
# As templates write a call of Llama 3's form, within a string of theirs or not.
_WRITES_PARAMETERS: Final = re.compile(r'\\?"parameters\\?":')
_NO_SPACE: Final = re.compile(rf"[^{_SPACE}]|\Z")
_IN_STRING: Final = re.compile(r'[^"\\\x00-\x1f]*')
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]*")
_NAMED_BEFORE: Final = re.compile(
    rf"{re.escape(_CALLS_TAG)}[{_SPACE}]*({_NAME.pattern})(?:{re.escape(_ID_TAG)}{_NAME.pattern})?"
    rf"{re.escape(_ARGUMENTS_TAG)}"
)
_OUTSIDE_STRINGS: Final = re.compile(rf"[{_SPACE}:,0-9+\-.a-zE]*")


class ToolCallForm(enum.Enum):
    """How a model writes calls."""

    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"


@dataclass(frozen=True, slots=True)
class Called:
    """One call; `arguments` are a JSON object as text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CallWriting:
    """How one model is to write calls where it is held to it, so that a parser of its form finds them.

    `opening` stands before the first call, `separator` between two, `closing` behind the last; each is an
    object between `begin` and `end`. `begin` may have `{name}` in it, and then the object is the arguments;
    without, it has the name and, as `arguments`, those.
    """

    begin: str
    end: str
    separator: str
    opening: str = ""
    closing: str = ""
    arguments: str = "arguments"

    @property
    def names_first(self) -> bool:
        """Whether the name stands before the object."""
        return "{name}" in self.begin


_WRITTEN: Final[abc.Mapping["ToolCallForm", CallWriting]] = {
    ToolCallForm.HERMES: CallWriting(f"{_TAG}\n", f"\n{_END_TAG}", "\n"),
    ToolCallForm.LLAMA3_JSON: CallWriting("", "", "; ", arguments="parameters"),
    ToolCallForm.MISTRAL: CallWriting("", "", ", ", opening=f"{_CALLS_TAG}[", closing="]"),
}
_WRITTEN_NAMES_FIRST: Final = CallWriting(f"{_CALLS_TAG}{{name}}{_ARGUMENTS_TAG}", "", "")


def writing_of(form: ToolCallForm | None, template: str | None) -> CallWriting | None:
    """How a model of that form writes them, by its template where there are several ways."""
    if form is ToolCallForm.MISTRAL and template is not None and _ARGUMENTS_TAG in template:
        return _WRITTEN_NAMES_FIRST
    return None if form is None else _WRITTEN[form]


TAGS: Final[abc.Mapping[ToolCallForm, tuple[str, ...]]] = {
    ToolCallForm.HERMES: (_TAG, _END_TAG),
    ToolCallForm.LLAMA3_JSON: (),
    ToolCallForm.MISTRAL: (_CALLS_TAG, _ID_TAG, _ARGUMENTS_TAG),
}
"""What calls cannot be told by without."""


def chosen_form(setting: str, template: str | None) -> ToolCallForm | None:
    """The form by the router's setting: a form's name, `none`, or `auto`: as the template shows."""
    if setting == "none":
        return None
    return form_of(template) if setting == "auto" else ToolCallForm(setting)


def form_of(template: str | None) -> ToolCallForm | None:
    """The form that a chat template shows to its model; None when it shows none of ours."""
    if template is None:
        return None
    if _TAG in template:
        return ToolCallForm.HERMES
    if _CALLS_TAG in template:
        return ToolCallForm.MISTRAL
    if _PYTHON_TAG in template or _WRITES_PARAMETERS.search(template):
        return ToolCallForm.LLAMA3_JSON
    return None


class ToolCallParser:
    """Parts the text of one answer into content and calls.

    `names` are those of the tools. Behind `max_calls` calls all text is content. `is_apart` says that the
    answer is held to be either text or calls.
    """

    __slots__ = (
        "_attempt",
        "_form",
        "_gap",
        "_held",
        "_is_apart",
        "_is_behind_call",
        "_is_in_list",
        "_is_text",
        "_max_calls",
        "_names",
        "num_calls",
    )

    def __init__(
        self,
        form: ToolCallForm,
        names: abc.Container[str],
        *,
        max_calls: int | None = None,
        is_apart: bool = False,
    ) -> None:
        self._form = form
        self._names = names
        self._max_calls = max_calls
        self._is_apart = is_apart
        self._is_text = False  # something has come that is of no call
        self.num_calls = 0
        self._attempt: _Attempt | None = None
        self._held: list[str] = []  # what the attempt has read
        self._gap: list[str] = []  # what stands before it and is content only if something other follows
        self._is_behind_call = False  # nothing but a gap has come since
        self._is_in_list = False  # one that began with a call

    def push(self, text: str) -> list[str | Called]:
        """Takes in more text; returns what is certain now."""
        parts: list[str | Called] = []
        position = 0
        while position < len(text):
            if self._attempt is None:
                start = self._next_start(text, position)
                parts += self._content(text[position:start])
                position = start
                if start < len(text):
                    self._attempt = _Attempt(self._form, text[start], needs_tag=self._needs_tag)
                continue
            end, outcome = self._attempt.read(text, position)
            self._held.append(text[position:end])
            position = end
            if outcome is not _Outcome.MORE:
                parts += self._settled(is_call=outcome is _Outcome.DONE)
        return parts

    def finish(self) -> list[str | Called]:
        """The text has ended; returns what was held back. An object that is whole needs no end tag here."""
        parts: list[str | Called] = []
        if self._attempt is not None:
            parts += self._settled(is_call=self._attempt.has_object)
        if self._gap and not self._is_behind_call:
            parts.append(self._taken_gap())
        return parts

    @property
    def _needs_tag(self) -> bool:
        """Whether no call can begin here but with Mistral's tag."""
        return self._is_apart and self._form is ToolCallForm.MISTRAL and not self.num_calls

    def _next_start(self, text: str, position: int) -> int:
        """Where the next attempt begins; the text's end when none does."""
        if self._max_calls is not None and self.num_calls >= self._max_calls:
            return len(text)
        start = _START_OF_TAG if self._needs_tag else _START[self._form]
        found = start.search(text, position)
        if found is None:
            return len(text)
        if self._is_apart and (self._is_text or text[position : found.start()].strip(_SPACE)):
            return len(text)
        return found.start()

    def _settled(self, *, is_call: bool) -> list[str | Called]:
        """What the attempt came to."""
        text = "".join(self._held)
        self._held.clear()
        self._attempt = None
        named = _NAMED_BEFORE.match(text)
        call = None
        if is_call:
            told = text[text.index("{") : text.rindex("}") + 1]
            call = _named_call(named[1], told, self._names) if named else _call(told, self._names)
        if call is None:
            return self._content(text)
        self._gap.clear()
        self._is_behind_call = True
        self._is_in_list = not named and (self._is_in_list or text.startswith("["))
        self.num_calls += 1
        return [call]

    def _content(self, text: str) -> list[str | Called]:
        """Text that is of no call, but for what stands at its end and may be before one."""
        if self._is_behind_call:
            text = self._taken_gap() + text
            if self._is_in_list and (end := _END_OF_LIST.match(text)):
                self._is_in_list, text = False, text[end.end() :]
            between = _BETWEEN_IN_LIST if self._is_in_list else _BETWEEN[self._form]
            if between.fullmatch(text):
                self._gap.append(text)
                return []
            self._is_behind_call = False
        kept = text.rstrip(_SPACE)
        self._is_text = self._is_text or bool(kept)
        told: list[str | Called] = [self._taken_gap() + kept] if kept else []
        self._gap.append(text[len(kept) :])
        return told

    def _taken_gap(self) -> str:
        gap = "".join(self._gap)
        self._gap.clear()
        return gap


# --- one attempt to read a call ---------------------------------------------------------------------


class _Outcome(enum.Enum):
    """How far reading has come: to the end of the text, to the end of what is read, or to what is wrong."""

    MORE = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


class _Piece(Protocol):
    """A piece of a call."""

    def read(self, text: str, position: int) -> tuple[int, _Outcome]:
        """Reads on from `position`; returns where it stopped: behind the piece, or at what is wrong."""


class _Gap:
    """White space, or none."""

    def read(self, text: str, position: int) -> tuple[int, _Outcome]:
        found = _NO_SPACE.search(text, position)
        assert found is not None, "the end of the text is found if nothing else"
        return found.start(), _Outcome.DONE if found.group() else _Outcome.MORE


class _OneOf:
    """One of several words, none of which begins another."""

    def __init__(self, *words: str) -> None:
        self._left = words
        self._num_read = 0

    def read(self, text: str, position: int) -> tuple[int, _Outcome]:
        for at in range(position, len(text)):
            left = tuple(word for word in self._left if word[self._num_read] == text[at])
            if not left:
                return at, _Outcome.FAILED
            self._left = left
            self._num_read += 1
            if self._num_read == len(left[0]):
                return at + 1, _Outcome.DONE
        return len(text), _Outcome.MORE


class _Name:
    """A function's name or a call's, which the next tag ends."""

    def __init__(self) -> None:
        self._num_read = 0

    def read(self, text: str, position: int) -> tuple[int, _Outcome]:
        end = _NAME.match(text, position).end()  # type: ignore[union-attr]  # it matches nothing too
        self._num_read += end - position
        if end == len(text):
            return end, _Outcome.MORE
        return end, _Outcome.DONE if self._num_read else _Outcome.FAILED


class _Rest:
    """An object from behind its first name to its end. It only finds the end: JSON is judged when whole."""

    def __init__(self) -> None:
        self._closers = ["}"]
        self._is_in_string = False
        self._is_escaped = False

    def read(self, text: str, position: int) -> tuple[int, _Outcome]:
        while position < len(text):
            if self._is_escaped:
                self._is_escaped = False
            else:
                run = _IN_STRING if self._is_in_string else _OUTSIDE_STRINGS
                position = run.match(text, position).end()  # type: ignore[union-attr]  # it matches nothing too
                if position == len(text):
                    break
                if not self._takes(text[position]):
                    return position, _Outcome.FAILED
                if not self._closers:
                    return position + 1, _Outcome.DONE
            position += 1
        return position, _Outcome.MORE

    def _takes(self, character: str) -> bool:
        match character:
            case '"':
                self._is_in_string = not self._is_in_string
            case "\\":
                self._is_escaped = self._is_in_string
                return self._is_in_string
            case "{" | "[" if not self._is_in_string:
                self._closers.append("}" if character == "{" else "]")
            case "}" | "]" if not self._is_in_string:
                return self._closers.pop() == character
            case _:
                return False
        return True


@dataclass(frozen=True, slots=True)
class _Choice:
    """What follows is told by its first character."""

    by_first: abc.Mapping[str, list["_Piece | _Choice"]]
    otherwise: list["_Piece | _Choice"]

    def pieces(self, first: str) -> list["_Piece | _Choice"]:
        return self.by_first.get(first, self.otherwise)


class _Attempt:
    """Reads what may be a call, piece by piece. `first` is the character that it begins with.

    `needs_tag` says that Mistral's tag must stand before it.
    """

    __slots__ = ("_left",)

    def __init__(self, form: ToolCallForm, first: str, *, needs_tag: bool = False) -> None:
        pieces: list[_Piece | _Choice] = [_OneOf("{"), _Gap(), _OneOf(*_FIRST_NAMES), _Rest()]
        if form is ToolCallForm.HERMES:
            pieces = [_OneOf(_TAG), _Gap(), *pieces, _Gap(), _OneOf(_END_TAG)]
        elif first == "<":
            pieces = [_OneOf(_PYTHON_TAG), _Gap(), *pieces]
        elif needs_tag:
            pieces = [_OneOf("["), *_behind_tag(pieces)]
        elif first == "[":
            pieces = [_OneOf("["), _Choice({"T": _behind_tag(pieces)}, [_Gap(), *pieces])]
        self._left = pieces[::-1]

    @property
    def has_object(self) -> bool:
        """Whether the object is whole, whatever is to follow."""
        return not any(isinstance(piece, _Rest | _Choice) for piece in self._left)

    def read(self, text: str, position: int) -> tuple[int, _Outcome]:
        """As a piece does, over all of them: the last one that is left is read first, and taken off."""
        left = self._left
        while left:
            piece = left[-1]
            if isinstance(piece, _Choice):
                if position == len(text):
                    return position, _Outcome.MORE
                left[-1:] = piece.pieces(text[position])[::-1]
                continue
            position, outcome = piece.read(text, position)
            if outcome is not _Outcome.DONE:
                return position, outcome
            left.pop()
        return position, _Outcome.DONE


def _behind_tag(call: list[_Piece | _Choice]) -> list[_Piece | _Choice]:
    """From the second character of Mistral's tag on: a list that begins with `call`, or a function's name."""
    identified: list[_Piece | _Choice] = [_OneOf(_ID_TAG[1:]), _Name(), _OneOf(_ARGUMENTS_TAG)]
    by_tag = _Choice({_ID_TAG[1]: identified}, [_OneOf(_ARGUMENTS_TAG[1:])])
    named: list[_Piece | _Choice] = [_Name(), _OneOf("["), by_tag, _Gap(), _OneOf("{"), _Rest()]
    return [_OneOf(_CALLS_TAG[1:]), _Gap(), _Choice({"[": [_OneOf("["), _Gap(), *call]}, named)]


_START: Final = {
    ToolCallForm.HERMES: re.compile("<"),
    ToolCallForm.LLAMA3_JSON: re.compile("[<{]"),
    ToolCallForm.MISTRAL: re.compile(r"[\[{]"),
}
_START_OF_TAG: Final = re.compile(r"\[")
_BETWEEN: Final = {
    ToolCallForm.HERMES: re.compile(rf"[{_SPACE}]*"),
    ToolCallForm.LLAMA3_JSON: re.compile(rf"[{_SPACE};]*"),
    ToolCallForm.MISTRAL: re.compile(rf"[{_SPACE}]*"),
}
_BETWEEN_IN_LIST: Final = re.compile(rf"[{_SPACE}]*,?[{_SPACE}]*")
_END_OF_LIST: Final = re.compile(rf"[{_SPACE}]*\]")


# --- what an object says ----------------------------------------------------------------------------


def _call(text: str, names: abc.Container[str]) -> Called | None:
    """The call that an object is, if it is one."""
    try:
        members = _members(text)
    except (ValueError, RecursionError):
        return None
    name, _ = members.get("name", (None, ""))
    given = [members[key] for key in ("arguments", "parameters") if key in members]
    if (
        not isinstance(name, str)
        or name not in names
        or len(given) != 1
        or not members.keys() <= set(CALL_NAMES)
    ):
        return None
    ((arguments, as_written),) = given
    return Called(name, as_written) if isinstance(arguments, dict) else None


def _named_call(name: str, arguments: str, names: abc.Container[str]) -> Called | None:
    """The same where the name stands before the arguments."""
    try:
        given, end = _DECODER.raw_decode(arguments)
    except (ValueError, RecursionError):
        return None
    is_call = name in names and isinstance(given, dict) and end == len(arguments)
    return Called(name, arguments) if is_call else None


def _members(text: str) -> dict[str, tuple[Any, str]]:
    """The members of an object that begins and ends the text: each value, and how it is written.

    Raises ValueError when it is no JSON, or a name stands twice.
    """
    members: dict[str, tuple[Any, str]] = {}
    position, separator = _behind_space(text, 1), ","
    while separator == ",":
        name, position = _DECODER.raw_decode(text, position)
        position = _behind_space(text, position)
        if not isinstance(name, str) or name in members or text[position : position + 1] != ":":
            raise ValueError("an object is made of names, each once, with values")
        start = _behind_space(text, position + 1)
        value, end = _DECODER.raw_decode(text, start)
        members[name] = (value, text[start:end])
        position = _behind_space(text, end)
        separator = text[position : position + 1]
        position = _behind_space(text, position + 1)
    if separator != "}" or position != len(text):
        raise ValueError("an object ends once")
    return members


def _behind_space(text: str, position: int) -> int:
    return _NO_SPACE.search(text, position).start()  # type: ignore[union-attr]  # the end is found if nothing else


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse_constant)
