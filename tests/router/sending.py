"""Sends the gRPC door whatever its contract allows to be written: `python -m tests.router.sending ADDRESS
NUM_INPUTS SEED`, which prints how many it sent.

Messages are made from the contract's descriptors, so a new field is sent as soon as it is there: odd numbers,
texts of any kind, lists, maps, fields of a later revision. Half of the requests begin as good ones, so that
what is wrong with the rest is met behind the first check too. A process of its own for the long form.
"""

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from protos.v1 import common_pb2, router_pb2, router_pb2_grpc
from rpc.address import Address
from rpc.channel import connect_blocking
from tests.router.afar import drawn

OF_LATER = b"\xfa\x3f\x03new"  # field 1023, of a later revision
REFUSALS: Final = {"INVALID_ARGUMENT", "UNIMPLEMENTED", "NOT_FOUND", "RESOURCE_EXHAUSTED", "ALREADY_EXISTS"}
MAX_DETAILS = 4096
_SERVICE: Final = router_pb2.DESCRIPTOR.services_by_name["Router"]
_PROBE: Final = router_pb2.GenerateRequest(text="Hi")
_GOOD: Final = router_pb2.GenerateRequest(
    text="Hi", sampling=common_pb2.SamplingParams(max_tokens=5, temperature=0), request_id=""
)

# --- any message ------------------------------------------------------------------------------------


def _whole(bits: int, *, signed: bool) -> st.SearchStrategy[int]:
    least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return st.sampled_from([0, 1, 2, 7, 100, least, most]) | st.integers(least, most)


_TEXTS: Final = st.sampled_from(
    ["", "a", "Hi", " ", "\x00", "é", "👩‍👩‍👧", "{}", '{"type": "object"}', "[ab]+", "user", "a" * 5_000]
) | st.text(max_size=20)
_SCALARS: Final[dict[int, st.SearchStrategy[Any]]] = {
    FieldDescriptor.CPPTYPE_INT32: _whole(32, signed=True),
    FieldDescriptor.CPPTYPE_INT64: _whole(64, signed=True),
    FieldDescriptor.CPPTYPE_UINT32: _whole(32, signed=False),
    FieldDescriptor.CPPTYPE_UINT64: _whole(64, signed=False),
    FieldDescriptor.CPPTYPE_DOUBLE: st.sampled_from([0.0, -0.0, 0.5, 1.0, math.nan, math.inf, -1.0, 1e308])
    | st.floats(),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(0, 9),
}


def _one(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    """A value of a field, or of one place in it."""
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=20)
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return _TEXTS
    if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        return messages(GetMessageClass(field.message_type)(), depth - 1)
    return _SCALARS[field.cpp_type]


@st.composite
def messages(draw: st.DrawFn, begun: Message, depth: int = 4) -> Message:
    """A message like the one that was begun, with some of its fields set anew."""
    message = type(begun)()
    message.CopyFrom(begun)
    fields = [field for field in message.DESCRIPTOR.fields if depth or field.message_type is None]
    chosen = draw(st.lists(st.sampled_from(fields), max_size=5, unique_by=lambda f: f.name)) if fields else []
    for field in chosen:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields
            entries = draw(st.dictionaries(_one(key, depth), _one(value, depth), max_size=4))
            getattr(message, field.name).update(entries)
        elif field.is_repeated:
            values = draw(st.lists(_one(field, depth), max_size=4)) * draw(st.sampled_from([1, 1, 1, 100]))
            getattr(message, field.name).extend(values)
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(draw(_one(field, depth)))
        else:
            setattr(message, field.name, draw(_one(field, depth)))
    if draw(st.integers(0, 19)) == 7:
        message.MergeFromString(OF_LATER)
    return message


# --- what comes of it ---------------------------------------------------------------------------------


def send(address: str, num_inputs: int, start: int) -> int:
    """So many messages to each call. Each is served, or refused with a sentence; and a good one is served.

    Returns how many were sent.
    """
    num_sent = itertools.count()
    with connect_blocking(Address.parse(address, field=""), max_message_bytes=1 << 26) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        for method in _SERVICE.methods:
            if method.name == "Watch":
                continue  # it does not end
            kind = GetMessageClass(method.input_type)
            good = _GOOD if kind is router_pb2.GenerateRequest else kind()
            call = getattr(stub, method.name)

            @drawn(num_inputs, start, message=messages(kind()) | messages(good))
            def once(message: Message) -> None:
                next(num_sent)
                _check(call, message)  # noqa: B023 - called within the loop

            once()
        assert stub.Complete(_PROBE, timeout=30).choices[0].text == "ok"
    return next(num_sent)


def _check(call: Callable[..., Any], message: Message) -> None:
    """It is served, or refused in the contract's words."""
    try:
        answer = call(message, timeout=60)
        if isinstance(answer, Iterator):
            assert all(event.WhichOneof("event") is not None for event in answer)
    except grpc.RpcError as error:
        code, details = error.code().name, error.details() or ""
        assert code in REFUSALS or (code == "UNAVAILABLE" and _is_constrained(message)), (
            message,
            code,
            details,
        )
        assert 0 < len(details) < MAX_DETAILS, details


def _is_constrained(message: Message) -> bool:
    """What tries constraints may not get its turn in time on a busy machine, and says so."""
    is_request = isinstance(message, router_pb2.GenerateRequest)
    return is_request and message.sampling.WhichOneof("constraint") is not None


if __name__ == "__main__":
    print(send(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))  # noqa: T201 - for who started it
