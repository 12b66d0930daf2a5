import pytest

import executor.constraints
from router import constraint_worker
from router.constraints import Choice, Constraint, JsonSchema, Regex, checked_form
from rpc.errors import RequestError


@pytest.mark.parametrize(
    "constraint",
    [
        JsonSchema("{}"),
        JsonSchema('{"type": "null"}'),
        Regex("x" * 4096),
        Choice(["é"] * 1024),
        Choice(["a" * 256]),
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
    assert theirs.grammar(theirs.Regex('a/b\n"')) == constraint_worker.grammar("regex", 'a/b\n"')
    values = ['"', "é😀", "\n\\"]
    assert theirs.grammar(theirs.Choice(tuple(values))) == constraint_worker.grammar("choice", values)
