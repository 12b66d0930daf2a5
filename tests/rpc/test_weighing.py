"""What a message would cost is told from its bytes, whatever they are."""

import random

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from protos.v1.router_pb2 import Chat, GenerateRequest, Message, TokenIds
from rpc import weighing
from rpc.errors import RequestError

KIND = GenerateRequest.DESCRIPTOR
NUMBER = {field.name: field.number for field in KIND.fields}


def varint(value: int) -> bytes:
    head = b""
    while value > 0x7F:
        head += bytes([value & 0x7F | 0x80])
        value >>= 7
    return head + bytes([value])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def field_of_chat(name: str, content: bytes) -> bytes:
    return field(Chat.DESCRIPTOR.fields_by_name[name].number, content)


def messages(count: int) -> bytes:
    return field(NUMBER["chat"], field_of_chat("messages", b"") * count)


def refused(raw: bytes) -> str:
    assert not weighing.is_light(raw, KIND)
    with pytest.raises(RequestError) as caught:
        weighing.check_weight(raw, KIND)
    return caught.value.message


def test_as_many_parts_as_are_allowed_are_and_one_more_is_not() -> None:
    weighing.check_weight(messages(weighing.MAX_FIELDS - 1), KIND)  # the chat is a field too
    too_many = refused(messages(weighing.MAX_FIELDS))
    assert "more than 65536 fields and entries, most in chat.messages;" in too_many
    most = field(NUMBER["token_ids"], field(1, b"\x80\x01" * weighing.MAX_NUMBERS))
    weighing.check_weight(most, KIND)
    more = field(NUMBER["token_ids"], field(1, b"\x01" * (weighing.MAX_NUMBERS + 1)))
    assert "more than 1048576 numbers" in refused(more)
    assert "more than 1048576 numbers" in refused(field(NUMBER["token_ids"], field(1, b"\xff" * (5 << 20))))


@pytest.mark.parametrize(
    "tail",
    [
        b"\x1a\x7fab",  # a text longer than what is left
        b"\x80",  # half a tag
        b"\x80" * 12,  # no number
        b"\x07",  # no wire type
        b"\x1a\xff\xff\xff\xff\x0f",
    ],
)
def test_what_stands_before_broken_bytes_counts(tail: bytes) -> None:
    """The parser takes it apart too, before it meets them."""
    refused(messages(weighing.MAX_FIELDS) + tail)
    refused(field(NUMBER["chat"], field_of_chat("messages", b"") * weighing.MAX_FIELDS + tail))
    with pytest.raises(DecodeError):
        GenerateRequest.FromString(messages(3) + tail)


def test_parts_are_found_in_groups_and_behind_unknown_fields() -> None:
    unknown = varint(999 << 3) + b"\x05" + varint(998 << 3 | 1) + b"8 bytes." + varint(997 << 3 | 5) + b"four"
    group = varint(996 << 3 | 3) + unknown + varint(996 << 3 | 4)
    GenerateRequest.FromString(unknown + group)
    refused(unknown + group + messages(weighing.MAX_FIELDS))


def test_what_people_send_is_light_unless_it_is_long() -> None:
    for request in (
        GenerateRequest(text="x" * 200_000, n=3, stop=["a"]),
        GenerateRequest(token_ids=TokenIds(ids=range(20_000, 80_000))),
        GenerateRequest(chat=Chat(messages=[Message(role="user", content="y" * 9)] * 150)),
    ):
        assert weighing.is_light(request.SerializeToString(), KIND)
    long = GenerateRequest(text="x" * 5_000_000).SerializeToString()
    assert not weighing.is_light(long, KIND)  # parsing it takes milliseconds, however few its parts
    weighing.check_weight(long, KIND)
    biased = GenerateRequest(sampling={"logit_bias": dict.fromkeys(range(4096), 1.0)})
    weighing.check_weight(biased.SerializeToString(), KIND)


@given(st.binary(max_size=200), st.integers(0, 2**32))
def test_no_bytes_are_too_odd(raw: bytes, seed: int) -> None:
    chance = random.Random(seed)
    right = bytearray(GenerateRequest(text="abc", chat=Chat(tools=["x"]), priority=-1).SerializeToString())
    for _ in range(3):
        right[chance.randrange(len(right))] = chance.randrange(256)
    for odd in (raw, bytes(right), field(NUMBER["chat"], raw)):
        assert weighing.is_light(odd, KIND)
        weighing.check_weight(odd, KIND)
