import json
import re
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.constraints import (
    Choice,
    Constraint,
    ConstraintError,
    Constraints,
    JsonOrTagged,
    JsonSchema,
    Matcher,
    Regex,
    Tagged,
)
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


NULL = JsonSchema('{"type": "null"}').text
EITHER = JsonOrTagged(
    '{"const": "é"}',
    (Tagged("a<|im_start|>\n", NULL, "<s>"), Tagged("<|im_start|>b", NULL, "</s>.")),
    opening="(",
    separator=", ",
    closing=")",
    max_tags=3,
)


def ids_said(constraints: Constraints, constraint: Constraint, ids: Sequence[int]) -> list[int]:
    """As many of the ids as may come; an end token behind them when it may."""
    matcher, told = constraints.matcher(constraint, []), []
    for token_id in ids:
        if token_id not in ids_of(matcher):
            return told
        matcher.take(token_id)
        told.append(token_id)
    return [*told, EOS_ID] if EOS_ID in ids_of(matcher) else told


def test_json_or_what_stands_between_tags(constraints: Constraints) -> None:
    json_text = [
        ord('"'),
        TOKENS.index("é".encode()),
        ord('"'),
    ]  # where one thing may come, its longest token
    first, second = [*b"a", IM_START_ID, *b"\nnull", BOS_ID], [IM_START_ID, *b"bnull</s>."]
    assert ids_said(constraints, EITHER, json_text) == [*json_text, EOS_ID]
    for calls in ([first], [second], [second, first], [first, first, second]):
        text = [*b"(", *calls[0]]
        for call in calls[1:]:
            text += [*b", ", *call]
        text += b")"
        assert ids_said(constraints, EITHER, text) == [*text, EOS_ID]
    four = [*b"(", *first, *b", ", *first, *b", ", *first, *b", "]
    assert ids_said(constraints, EITHER, four) == four[:-2]
    assert ids_said(constraints, EITHER, [*b"(", *first]) == [*b"(", *first]


def test_a_special_token_in_a_tag_is_that_token_and_not_its_letters(constraints: Constraints) -> None:
    assert ids_said(constraints, EITHER, [*b"(a<|im_start|>"]) == [*b"(a"]
    # What ends an output does so wherever it stands: it has letters alone.
    assert ids_said(constraints, EITHER, [*b"(", IM_START_ID, *b"bnull", EOS_ID]) == [
        *b"(", IM_START_ID, *b"bnull",
    ]  # fmt: skip


def test_either_goes_on_behind_what_was_said_before(constraints: Constraints) -> None:
    matcher = constraints.matcher(EITHER, [*b"(a", IM_START_ID])
    assert ids_of(matcher) == {ord("\n")}


def test_either_without_tags_or_with_what_is_no_schema_is_a_fault(constraints: Constraints) -> None:
    for wrong in (JsonOrTagged("{}", ()), JsonOrTagged("[]", EITHER.tags)):
        with pytest.raises(ConstraintError):
            constraints.matcher(wrong, []).allowed()


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


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=40), st.integers(0, 40), st.integers(1, 8))
def test_what_may_follow_guesses_is_what_may_once_they_were_said_and_the_present_stays(
    constraints: Constraints, choose: list[int], cut: int, most: int
) -> None:
    said_one_by_one, output = constraints.matcher(PERSON, []), []
    for number in choose:
        allowed = sorted(ids_of(said_one_by_one) - {EOS_ID, IM_END_ID})
        if not allowed:
            break
        output.append(allowed[number % len(allowed)])
        said_one_by_one.take(output[-1])
    guesses = output[cut : cut + most]
    now = constraints.matcher(PERSON, output[:cut])
    before, guessed = ids_of(now), now
    for token_id in guesses:
        guessed = guessed.after(token_id)
    told = constraints.matcher(PERSON, output[: cut + len(guesses)])
    assert ids_of(guessed) == ids_of(told)
    assert ids_of(now) == before


def test_a_guess_that_is_not_allowed_is_a_fault_behind_it_alone(constraints: Constraints) -> None:
    now = constraints.matcher(Choice(("ja", "nein")), [])
    wrong = now.after(ord("x"))
    for later in (wrong, wrong.after(ord("a"))):
        with pytest.raises(ConstraintError, match="cannot be kept to"):
            later.allowed()
    assert now.fault is None
    assert ids_of(now) == {ord("j"), ord("n")}
    assert ids_of(now.after(ord("j"))) == {ord("a")}
    unreadable = constraints.matcher(Regex("("), []).after(ord("a"))
    with pytest.raises(ConstraintError):
        unreadable.allowed()


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
