"""A tracer whose spans stay in this process, for tests of listeners."""

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased

from rpc.tracing import Tracer


class Recorder:
    """`tracer`, and the spans that have ended."""

    def __init__(self, *, is_on: bool = True) -> None:
        provider = TracerProvider(sampler=ParentBased(ALWAYS_ON if is_on else ALWAYS_OFF))
        self._exporter = InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = Tracer(provider.get_tracer("test"))

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    @property
    def only(self) -> ReadableSpan:
        (span,) = self.spans
        return span


def phases(span: ReadableSpan) -> list[str]:
    return [event.name for event in span.events]


def told(span: ReadableSpan, name: str) -> object:
    assert span.attributes is not None
    return span.attributes.get(name)


def parent_of(span: ReadableSpan) -> str:
    return "" if span.parent is None else f"{span.parent.span_id:016x}"
