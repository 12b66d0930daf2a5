"""The tools that a body offers, and which of them the answer may call, or must, by the word of `tool_choice`.

OpenAI writes a tool in two ways, with the function within it or flat; whoever reads a body says where the
function's fields stand. Pure; it must not know the other fields of a body, or how a call is told.
"""

from collections import abc
from dataclasses import dataclass
from typing import Any

from router.http.fields import Fields, checked, json_text, shown, unserved
from router.json_schemas import moved
from rpc.errors import invalid


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

    `schema` is what the output is held to, one call as bare JSON; None when it may say anything. `functions`
    are there when the client holds text to a schema of its own: the answer is such text, or calls of them.
    """

    names: frozenset[str]
    max_calls: int | None = None
    schema: str | None = None
    functions: tuple["Function", ...] = ()


@dataclass(frozen=True, slots=True)
class NamedFunction:
    """A `tool_choice` that is one function, by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class Function:
    """One of the tools. `parameters` is the schema of its arguments, which are an object.

    `where_held` is what the body calls the schema.
    """

    name: str
    parameters: dict[str, Any]
    position: int
    where_held: str


def tool_use_of(choice: object, functions: list[Function]) -> ForcedFunction | OfferedTools | None:
    """Which tools the answer may call, or must. A choice of one function is a `NamedFunction`.

    Raises RequestError, INVALID_ARGUMENT or UNIMPLEMENTED, naming `tool_choice`.
    """
    match choice:
        case "none":
            return None
        case None | "auto":
            names = frozenset(function.name for function in functions)
            return OfferedTools(names, functions=tuple(functions)) if names else None
        case "required":
            if not functions:
                raise invalid("tool_choice", "tool_choice is required and there are no tools; it needs one")
            return _forced(functions[0], "tool_calls") if len(functions) == 1 else _any_of(functions)
        case NamedFunction(name):
            for function in functions:
                if function.name == name:
                    return _forced(function, "stop")
            raise invalid("tool_choice", f"tool_choice names {shown(name)}, which is none of tools")
        case _:
            raise unserved(
                "tool_choice", "tool_choice is supported as auto, none, required, or the name of a function"
            )


def functions_of(tools: abc.Sequence[object], function_in: abc.Callable[[Fields], Fields]) -> list[Function]:
    """The tools, all of which are functions, and no two of one name: a call could be of either.

    `function_in` finds a tool's function. Raises RequestError, INVALID_ARGUMENT or UNIMPLEMENTED.
    """
    functions: list[Function] = []
    positions: dict[str, int] = {}
    for position, value in enumerate(tools):
        path = f"tools[{position}]"
        tool = Fields(checked(value, dict, "an object", path), path)
        kind = tool.text("type")
        if kind not in {None, "function"}:
            where = tool.path_of("type")
            raise unserved(where, f"{where} is {shown(kind)}; only function is supported")
        described = function_in(tool)
        function = _function(described, position)
        first = positions.setdefault(function.name, position)
        if first != position:
            where = described.path_of("name")
            raise invalid(where, f"{where} is {shown(function.name)}, and so is that of tools[{first}]")
        functions.append(function)
    return functions


def _function(described: Fields, position: int) -> Function:
    name, parameters = described.text("name"), described.value("parameters")
    where = described.path_of("parameters")
    if not name:
        raise invalid(described.path_of("name"), f"{described.path_of('name')} is missing")
    if parameters is None:  # it takes none
        nothing = {"type": "object", "properties": {}, "additionalProperties": False}
        return Function(name, nothing, position, where)
    kind = checked(parameters, dict, "a JSON schema", where).get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise invalid(where, f"{where} has the type {shown(kind)}; the arguments of a call are an object")
    return Function(name, {**parameters, "type": "object"}, position, where)


def _forced(function: Function, finish_reason: str) -> ForcedFunction:
    schema = json_text(function.parameters, function.where_held)
    return ForcedFunction(function.name, schema, function.where_held, finish_reason)


def _any_of(functions: list[Function]) -> OfferedTools:
    """A call of whichever tool, in the form of JSON that `tool_calls` reads."""
    calls = [call_schema(function, f"#/anyOf/{function.position}") for function in functions]
    names = frozenset(function.name for function in functions)
    return OfferedTools(names, schema=json_text({"anyOf": calls}, "tools"))


def call_schema(function: Function, root: str, arguments: str = "arguments") -> dict[str, Any]:
    """A call of the function as JSON, its schema to stand at `root`. Raises RequestError."""
    try:
        parameters = moved(function.parameters, f"{root}/properties/{arguments}")
    except RecursionError as error:
        where = function.where_held
        raise invalid(where, f"{where} is nested too deeply") from error
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, arguments: parameters},
        "required": ["name", arguments],
        "additionalProperties": False,
    }
