import json
import re
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.constraints import Choice, Constraint, ConstraintError, Constraints, JsonSchema, Matcher, Regex
from tests.rig.tiny_model import BOS_ID, EOS_ID, IM_END_ID, IM_START_ID, VOCAB_SIZE

PERSON = JsonSchema(
    json.dumps(
        {
            "type": "object",
            "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
            "required": ["name", "age"],
            "additionalProperties": False,
        }
    )
)
WORDS = [b"true", b'{"', b'": ', b'"name"', "é".encode(), b" \n"]  # beside the single bytes

TOKENS = [bytes([byte]) for byte in range(256)] + [b"<s>", b"</s>", b"<|im_start|>", b"<|im_end|>", *WORDS]
SPECIAL = [BOS_ID, EOS_ID, IM_START_ID, IM_END_ID]


@pytest.fixture(scope="module")
def constraints() -> Constraints:
    return Constraints(TOKENS, special_ids=SPECIAL, eos_token_ids=[EOS_ID, IM_END_ID], vocab_size=VOCAB_SIZE)


def ids_of(matcher: Matcher) -> set[int]:
    return set(np.flatnonzero(matcher.allowed()).tolist())


def said(constraints: Constraints, constraint: Constraint, choose: Sequence[int], most: int = 60) -> bytes:
    """An output made by taking, of what is allowed, the one that each number points at."""
    matcher = constraints.matcher(constraint, [])
    output = b""
    for number in [*choose, *[0] * most]:
        allowed = sorted(ids_of(matcher))
        ends = [EOS_ID, IM_END_ID]
        assert set(ends) <= set(allowed) or not set(ends) & set(allowed), "end tokens come together"
        token_id = allowed[number % len(allowed)]
        if token_id in ends:
            return output
        output += TOKENS[token_id]
        matcher.take(token_id)
    return output + b"..."


def test_what_nobody_waits_for_any_more_is_not_built() -> None:
    own = Constraints(TOKENS, special_ids=SPECIAL, eos_token_ids=[EOS_ID], vocab_size=VOCAB_SIZE)
    begun, go_on, built = threading.Event(), threading.Event(), []

    def build(constraint: Constraint, _: list[int]) -> Any:
        begun.set()
        go_on.wait(20)
        built.append(constraint)

    own._build = build  # type: ignore[method-assign, assignment]
    first, given_up = own.matcher(Regex("a"), []), own.matcher(Regex("b"), [])
    last = own.matcher(Regex("c"), [])
    assert begun.wait(20)
    del given_up
    go_on.set()
    last._building.result(20)
    assert built == [Regex("a"), Regex("c")]
    assert first.fault is None


def test_only_what_matches_may_be_said_and_then_the_end(constraints: Constraints) -> None:
    matcher = constraints.matcher(Choice(("ja", "jawohl", 'nein "x"\n')), [])
    assert ids_of(matcher) == {ord("j"), ord("n")}
    for byte in b"ja":
        matcher.take(byte)
    assert ids_of(matcher) == {ord("w"), EOS_ID, IM_END_ID}
    for byte in b"wohl":
        matcher.take(byte)
    assert ids_of(matcher) == {EOS_ID, IM_END_ID}, "nothing can follow: it must end"


@given(st.lists(st.integers(0, 10_000), max_size=60))
def test_whatever_is_drawn_the_output_matches(constraints: Constraints, choose: list[int]) -> None:
    assert said(constraints, Choice(("a", "ab", "é{")), choose).decode() in {"a", "ab", "é{"}
    pattern = r"[a-c]{2,5}(é|true)"
    assert re.fullmatch(pattern, said(constraints, Regex(pattern), choose).decode())
    output = said(constraints, PERSON, [*choose, *[ord('"')] * 5], most=200)
    if not output.endswith(b"..."):
        person = json.loads(output)
        assert isinstance(person["name"], str)
        assert isinstance(person["age"], int)
        assert set(person) == {"name", "age"}


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=40), st.integers(0, 40))
def test_after_a_preemption_it_goes_on_as_it_would_have(
    constraints: Constraints, choose: list[int], cut: int
) -> None:
    going, output = constraints.matcher(PERSON, []), []
    for number in choose:
        allowed = sorted(ids_of(going) - {EOS_ID, IM_END_ID})
        if not allowed:
            break
        output.append(allowed[number % len(allowed)])
        going.take(output[-1])
    before = output[:cut]
    resumed = constraints.matcher(PERSON, before)
    for token_id in output[cut:]:
        resumed.take(token_id)
    assert ids_of(resumed) == ids_of(going)


def test_an_empty_schema_is_any_object(constraints: Constraints) -> None:
    matcher = constraints.matcher(JsonSchema("{}"), [])
    assert {TOKENS[token_id][:1] for token_id in ids_of(matcher)} == {b"{"}


def test_white_space_between_parts_is_bounded(constraints: Constraints) -> None:
    matcher = constraints.matcher(PERSON, list(b"{" + b"\n" * 20))
    assert ord("\n") not in ids_of(matcher)
    assert ord('"') in ids_of(matcher)


@pytest.mark.parametrize(
    "constraint",
    [
        JsonSchema(""),
        JsonSchema("[]"),
        JsonSchema("[" * 100_000),
        JsonSchema('{"type": "objct"}'),
        JsonSchema('{"not": {}}'),
        JsonSchema('{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'),
        Regex("("),
        Regex("(?=a)b"),
        Choice(()),
    ],
)
def test_b99_a_degenerate_constraint_is_a_fault_of_its_own(
    constraints: Constraints, constraint: Constraint
) -> None:
    matcher = constraints.matcher(constraint, [])
    for _ in range(2):
        with pytest.raises(ConstraintError):
            matcher.allowed()
    assert matcher.fault
    assert "\n" not in matcher.fault
    matcher.take(97)
    assert ids_of(constraints.matcher(Choice(("x",)), [])) == {ord("x")}, "and of nobody else"


@pytest.mark.parametrize("pattern", ["(a{1000}){1000}", "(a?){5000}a{5000}", "(.*a.{200}){20}"])
def test_b100_what_explodes_passes_a_bound_soon(constraints: Constraints, pattern: str) -> None:
    matcher = constraints.matcher(Regex(pattern), [])
    for _ in range(30):
        try:
            matcher.allowed()
        except ConstraintError as error:
            assert "too many" in str(error)  # noqa: PT017 - it may also go well
            return
        matcher.take(ord("a"))


def test_an_output_that_does_not_match_is_a_fault(constraints: Constraints) -> None:
    with pytest.raises(ConstraintError):
        constraints.matcher(Choice(("ab",)), [ord("x")]).allowed()


def test_ids_past_the_vocabulary_may_not_be_said(constraints: Constraints) -> None:
    assert constraints.matcher(Regex(".*"), []).allowed()[len(TOKENS) :].sum() == 0
