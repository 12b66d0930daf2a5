from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

from rpc.span_encoding import encoded
from tests.rig.spans import Recorder

PARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"

_VALUES: st.SearchStrategy[Any] = (
    st.sampled_from([0, 0.0, False, 1, 1.0, True, "", "1", ()])
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.lists(st.text(), max_size=3).map(tuple)
)
_ATTRIBUTES = st.dictionaries(st.sampled_from("abcdef"), _VALUES)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            _ATTRIBUTES,
            st.lists(st.tuples(st.text(), _ATTRIBUTES), max_size=3),
            st.sampled_from([("", ""), (PARENT, ""), (PARENT, "lift=1,car=2")]),
            st.booleans(),
            st.sampled_from(["", "ABORTED"]),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_spans_are_encoded_as_the_library_encodes_them(given_spans: list[Any]) -> None:
    recorder = Recorder()
    for attributes, events, (traceparent, tracestate), is_linked, error in given_spans:
        span = recorder.tracer.begin(
            "ride",
            1.0,
            attributes,
            traceparent=traceparent,
            tracestate=tracestate,
            links=[PARENT] if is_linked else (),
        )
        for name, about in events:
            span.event(name, 1.5, about)
        span.end(2.0, error=error)
    assert encoded(recorder.spans) == encode_spans(recorder.spans)
