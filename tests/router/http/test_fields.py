import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.fields import MAX_INT, MIN_INT, parsed
from rpc.errors import RequestError


def refusal(body: bytes, read: str = "", name: str = "x") -> RequestError:
    def read_all() -> None:
        fields = parsed(body)
        if read:
            getattr(fields, read)(name)
        fields.close()

    with pytest.raises(RequestError) as raised:
        read_all()
    return raised.value


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'"text"', "must be a JSON object"),
        (b"[1]", "a list"),
        (b"null", "must be a JSON object"),
        (b'{"x": "\xff"}', "not UTF-8"),
        (b'{"x": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes, says: str) -> None:
    assert says in refusal(body).message


@pytest.mark.parametrize(
    "value", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"1" + b"0" * 400, b'"1"', b"true"]
)
def test_b55_a_number_that_is_not_finite_is_refused_naming_the_field(value: bytes) -> None:
    error = refusal(b'{"x": ' + value + b"}", "number")
    assert error.field == "x"
    assert "number" in error.message


@pytest.mark.parametrize(
    "value", ["1.0", "1.5", '"100"', "true", str(MAX_INT + 1), str(MIN_INT - 1), "NaN", "1e3"]
)
def test_b61_a_whole_number_is_one_of_64_bits(value: str) -> None:
    assert refusal(f'{{"x": {value}}}'.encode(), "whole").field == "x"


@pytest.mark.parametrize("value", [MIN_INT, -1, 0, MAX_INT])
def test_whole_numbers_within_64_bits_are_taken(value: int) -> None:
    assert parsed(json.dumps({"x": value}).encode()).whole("x") == value


@pytest.mark.parametrize(
    "body",
    [
        rb'{"x": "a\ud800"}',
        rb'{"x": ["\udc00 b"]}',
        rb'{"x": {"y": "\udc00\ud800"}}',
        rb'{"\ud800": 1}',
    ],
)
def test_b104_half_a_character_is_refused(body: bytes) -> None:
    assert "lone surrogate" in refusal(body).message


def test_b104_a_pair_is_one_character() -> None:
    assert parsed(rb'{"x": "\ud83d\ude00"}').text("x") == "😀"


@pytest.mark.parametrize(
    ("read", "entry"), [("texts", "null"), ("wholes", "null"), ("wholes", "true"), ("texts", "1")]
)
def test_b98_a_wrong_entry_of_a_list_is_refused_by_its_place(read: str, entry: str) -> None:
    good = '"a"' if read == "texts" else "1"
    assert refusal(f'{{"x": [{good}, {entry}]}}'.encode(), read).field == "x[1]"


@pytest.mark.parametrize("read", ["text", "flag", "whole", "number", "entries", "texts", "wholes", "fields"])
def test_b77_null_is_absent(read: str) -> None:
    fields = parsed(b'{"x": null, "never heard of": null}')
    assert getattr(fields, read)("x") is None
    fields.close()


def test_what_nobody_reads_is_refused_by_name() -> None:
    assert refusal(b'{"x": 1, "y": 2}', "whole").field == "y"


def test_an_inner_object_knows_where_it_stands() -> None:
    inner = parsed(b'{"x": {"y": 1}}').fields("x")
    assert inner is not None
    with pytest.raises(RequestError, match=r"x\.y is 1; it must be a string"):
        inner.text("y")


@pytest.mark.parametrize(
    "body",
    [
        b'{"%s": "\\ud800"}' % (b"k" * 100_000),
        b'{"a": %s"\\ud800"%s}' % (b'{"kkkkkkkkkkkkkkkkkkkkkk": ' * 500, b"}" * 500),
        b'{"a": %s"\\ud800"%s}' % (b"[" * 500, b"]" * 500),
        b'{"%s": 1}' % (b"k" * 100_000),
        b'{"%s": 1, "%s": 1}' % (b"k" * 100_000, b"k" * 100_000),
    ],
    ids=["name", "names", "lists", "unread", "twice"],
)
def test_where_something_wrong_stands_is_told_in_few_words(body: bytes) -> None:
    with pytest.raises(RequestError) as raised:
        parsed(body).close()
    assert len(raised.value.field) < 400
    assert len(raised.value.message) < 500


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(
    value=JSON,
    read=st.sampled_from(["text", "flag", "whole", "number", "entries", "texts", "wholes", "fields"]),
)
def test_whatever_stands_there_is_the_right_type_or_a_sentence(value: object, read: str) -> None:
    with contextlib.suppress(RequestError):
        got = getattr(parsed(json.dumps({"x": value}).encode()), read)("x")
        assert got is None or type(got) in {str, bool, int, float, list, tuple} or read == "fields"


@given(st.binary(max_size=200))
def test_no_body_is_a_defect(body: bytes) -> None:
    with contextlib.suppress(RequestError):
        parsed(body).close()


@pytest.mark.parametrize(
    "body",
    [
        b'{"n": 1, "n": 2}',
        b'{"a": [{"n": null, "n": 2}]}',
        b'{"n": 1, "\\u006e": 1}',
        b'{"logit_bias": {"n": 1, "n": 1}}',
    ],
)
def test_a_name_that_stands_twice_is_refused_wherever_it_stands(body: bytes) -> None:
    with pytest.raises(RequestError, match='"n" stands twice'):
        parsed(body)
