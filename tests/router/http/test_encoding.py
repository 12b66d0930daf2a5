"""JSON is the same whether it is made in one go or in pieces, and no piece is long."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http import encoding
from router.http.encoding import Written, encoded, event

LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30
)


def a_long_answer() -> dict[str, Any]:
    alternatives = [{"token": "ü", "logprob": -1.5, "bytes": [195, 188]}] * 20
    entry = {**alternatives[0], "top_logprobs": alternatives}
    choices = [
        {"index": index, "text": 'ß"\n' * 50_000, "logprobs": {"content": [entry] * 100, "refusal": None}}
        for index in range(3)
    ]
    return {
        "id": "x",
        "choices": choices,
        "tokens": list(range(1000)),
        "none": {},
        "few": [],
        "tuple": (1, 2),
    }


@given(VALUES)
def test_in_pieces_it_is_the_same(value: Any) -> None:
    assert encoded(value, is_long=True) == encoded(value)
    assert json.loads(encoded(value)) == value


def test_a_long_answer_is_made_of_short_pieces() -> None:
    answer = a_long_answer()
    whole = encoded(answer)
    assert encoded(answer, is_long=True) == whole
    assert json.loads(whole) == json.loads(json.dumps(answer))
    assert len(whole) > 1_000_000
    assert max(map(len, encoding._pieces(answer))) < 500_000


def test_half_characters_go_out_as_question_marks_and_nan_not_at_all() -> None:
    assert encoded("a\ud800") == encoded("a\ud800", is_long=True) == b'"a?"'
    for is_long in (False, True):
        with pytest.raises(ValueError, match="JSON compliant"):
            encoded({"a": [float("nan")]}, is_long=is_long)


def test_an_event_is_one_line_of_data() -> None:
    assert event({"a": "b\n\n"}) == b'data: {"a":"b\\n\\n"}\n\n'
    assert event({"a": 1}, kind="a.kind") == b'event: a.kind\ndata: {"a":1}\n\n'


def test_a_long_response_within_an_event_is_made_of_short_pieces() -> None:
    answer = a_long_answer()
    logprobs = answer["choices"][0]["logprobs"]["content"]
    text = {"type": "output_text", "text": answer["choices"][0]["text"], "logprobs": logprobs}
    output = [{"type": "message", "content": [text]}, {"type": "function_call"}] * 20
    told = {"type": "response.completed", "response": {"output": output}}
    assert encoded(told, is_long=True) == encoded(told)
    assert max(map(len, encoding._pieces(told))) < 500_000


def test_what_is_written_already_stands_as_it_is() -> None:
    value = {"a": {"b": Written('{"c":[1,"ü"]}')}, "d": 1}
    assert encoded(value, is_long=True) == '{"a":{"b":{"c":[1,"ü"]}},"d":1}'.encode()
