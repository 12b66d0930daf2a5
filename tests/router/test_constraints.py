import pytest

import executor.constraints
from router import constraint_worker
from router.constraints import (
    Choice,
    Constraint,
    JsonOrTagged,
    JsonSchema,
    Regex,
    Tagged,
    checked_form,
)
from rpc.errors import RequestError

TAGGED = Tagged("<", "{}", ">")


@pytest.mark.parametrize(
    "constraint",
    [
        JsonSchema("{}"),
        JsonSchema('{"type": "null"}'),
        Regex("x" * 4096),
        Choice(["é"] * 1024),
        Choice(["a" * 256]),
        JsonOrTagged("{}", (TAGGED,) * 256, "a" * 256, max_tags=256),
    ],
)
def test_what_is_within_the_limits_is_taken(constraint: Constraint) -> None:
    assert checked_form(constraint) == constraint or isinstance(constraint, Choice)


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (JsonSchema(""), r"sampling\.json_schema is not JSON"),
        (JsonSchema("[]"), r"sampling\.json_schema must be a JSON object"),
        (JsonSchema("true"), r"sampling\.json_schema must be a JSON object"),
        (JsonSchema('{"a":' * 10_000), r"sampling\.json_schema is nested too deeply"),
        (JsonSchema(" " * 65_537), r"sampling\.json_schema has 65537 bytes; at most 65536"),
        (Regex(""), r"sampling\.regex has 0 characters; it must have 1 to 4096"),
        (Regex("x" * 4097), r"sampling\.regex has 4097 characters"),
        (Choice([]), r"sampling\.choice has 0 values; it must have 1 to 1024"),
        (Choice(["a"] * 1025), r"sampling\.choice has 1025 values"),
        (Choice(["a", "b\x7f"]), r"sampling\.choice\[1\] holds the control character U\+007F"),
        (JsonOrTagged("{}", []), r"sampling\.json_or_tagged\.tags has 0 entries; it must have 1 to 256"),
        (JsonOrTagged("{}", [TAGGED] * 257), r"tags has 257 entries"),
        (
            JsonOrTagged("{}", [TAGGED], max_tags=0),
            r"json_or_tagged\.max_tags is 0; it must be from 1 to 256",
        ),
        (JsonOrTagged("[]", [TAGGED]), r"sampling\.json_or_tagged\.json_schema must be a JSON object"),
        (
            JsonOrTagged("{}", [TAGGED, Tagged("", "x", "")]),
            r"sampling\.json_or_tagged\.tags\[1\]\.json_schema is not JSON",
        ),
        (
            JsonOrTagged("{}", [Tagged("a" * 257, "{}", "")]),
            r"json_or_tagged\.tags\[0\]\.begin has 257 characters; at most 256",
        ),
        (JsonOrTagged("{}", [TAGGED], closing="\x7f"), r"json_or_tagged\.closing holds .* U\+007F"),
        (
            JsonOrTagged("{}", [Tagged("", " " * 65_000 + "{}", "")] * 5),
            r"sampling\.json_or_tagged has 325012 bytes in its schemas and texts; at most 262144",
        ),
        (Choice(["a", ""]), r"sampling\.choice\[1\] has 0 characters; it must have 1 to 256"),
    ],
)
def test_b99_other_forms_are_refused_with_the_limit(constraint: Constraint, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        checked_form(constraint)


def test_the_executor_builds_what_was_tried() -> None:
    theirs = executor.constraints
    assert theirs.LIMITS == constraint_worker.LIMITS
    assert theirs.WHITESPACE == constraint_worker.WHITESPACE
    for schema in ("{}", '{"type": "string", "x-guidance": {"whitespace_flexible": true}}'):
        assert theirs.grammar(theirs.JsonSchema(schema)) == constraint_worker.grammar("json_schema", schema)
    tags = [("<a>\n", '{"type": "null"}', ""), ('"\\é', "{}", "</a>")]
    for opening, separator, closing, max_tags in (("[", ", ", "]", 3), ("", "", "", None), ("", "; ", "", 1)):
        either = theirs.JsonOrTagged(
            "{}", tuple(theirs.Tagged(*tag) for tag in tags), opening, separator, closing, max_tags
        )
        value = {
            "json_schema": "{}",
            "tags": tags,
            "opening": opening,
            "separator": separator,
            "closing": closing,
            "max_tags": max_tags,
        }
        assert theirs.grammar(either) == constraint_worker.grammar("json_or_tagged", value)
    assert theirs.grammar(theirs.Regex('a/b\n"')) == constraint_worker.grammar("regex", 'a/b\n"')
    values = ['"', "é😀", "\n\\"]
    assert theirs.grammar(theirs.Choice(tuple(values))) == constraint_worker.grammar("choice", values)
