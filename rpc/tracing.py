"""Traces: spans of what a service does, sent to a collector that speaks OTLP (OpenTelemetry) over gRPC.

When traces are off, which is the default, the libraries are not imported and there is no `Tracer`. When they
are on, a span that has ended is put into a bounded queue, from which a separate thread sends: nothing here
ever waits for a collector. While the collector is away, spans are dropped, and the log says so once. The
standard `OTEL_*` variables set how spans are sampled, batched and labelled, and with which headers and
certificates they are sent.

What the spans mean is up to the services. Times are seconds on the monotonic clock.
"""

import contextlib
import logging
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog

from rpc.address import Address, AddressError
from rpc.errors import StartError
from rpc.settings import ServiceSettings
from rpc.version import version

Attributes = Mapping[str, str | int | float | bool | tuple[str, ...]]

# How spans are named here, and mostly elsewhere; the library reads all that the grammar allows.
_OURS: Final = re.compile("00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_FAREWELL_SECONDS: Final = 2.0
_EXPORTER_LOGGERS: Final = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.sdk._shared_internal",
)

_log = structlog.get_logger()


class Span:
    """One stretch of work that is under way; made by `Tracer.begin`, and over with `end`.

    It keeps what it is told as it is told, and becomes OpenTelemetry's when it is over: that library's own
    spans copy and check every attribute when they are told of it, which takes four times as long.
    """

    __slots__ = ("_begun", "_events", "_offset_ns", "_tracer", "is_recorded", "traceparent")

    def __init__(self, tracer: "Tracer", begun: "_Begun", offset_ns: int, *, is_recorded: bool) -> None:
        self._tracer = tracer
        self._begun = begun
        self._events: list[tuple[str, int, Attributes | None]] = []
        self._offset_ns = offset_ns  # from the monotonic clock to the one on the wall, as of its beginning
        self.is_recorded = is_recorded
        """Whether it will be sent; a sampler may have left it out."""
        context = begun.context
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        """What names it to others (W3C Trace Context), so that their spans become its children."""

    def event(self, name: str, at: float, attributes: Attributes | None = None) -> None:
        """Something happened."""
        if self.is_recorded:
            self._events.append((name, self._wall_ns(at), attributes))

    def end(self, at: float, attributes: Attributes | None = None, *, error: str = "") -> None:
        """It is over; `error` says in a word why it failed."""
        if self.is_recorded:
            self._tracer.ended(self._begun, self._events, self._wall_ns(at), attributes or {}, error)

    def _wall_ns(self, at: float) -> int:
        return int(at * 1e9) + self._offset_ns


@dataclass(frozen=True, slots=True)
class _Begun:
    """What is known of a span from its beginning on. Contexts and links are OpenTelemetry's."""

    name: str
    context: Any
    parent: Any
    attributes: Attributes
    links: Sequence[Any]
    start_ns: int


class Tracer:
    """Begins spans."""

    def __init__(self, tracer: Any) -> None:
        """`tracer` is OpenTelemetry's, and says how spans are named, sampled, labelled and sent on."""
        from opentelemetry import context, trace
        from opentelemetry.sdk import trace as sdk
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace, self._sdk, self._nowhere = trace, sdk, context.Context()
        self._sampler = tracer.sampler
        self._ids = tracer.id_generator
        self._resource = tracer.resource
        self._processor = tracer.span_processor
        self._scope = InstrumentationScope("chairlift", version())
        self._propagator = TraceContextTextMapPropagator()

    def begin(
        self,
        name: str,
        at: float,
        attributes: Attributes,
        *,
        traceparent: str = "",
        tracestate: str = "",
        links: Sequence[str] = (),
    ) -> Span:
        """A span that began `at`, under the one that `traceparent` names.

        Without a parent, or with one that is none by W3C's grammar, it is the first of a trace of its own.
        `links` name spans that it has to do with and does not belong to.
        """
        trace, parent = self._trace, self._named(traceparent, tracestate)
        above = self._nowhere
        if parent is not None:
            above = trace.set_span_in_context(trace.NonRecordingSpan(parent), above)
        trace_id = self._ids.generate_trace_id() if parent is None else parent.trace_id
        linked = [trace.Link(context) for link in links if (context := self._named(link))]
        sampled = self._sampler.should_sample(
            above, trace_id, name, trace.SpanKind.SERVER, attributes, linked
        )
        is_random = self._ids.is_trace_id_random() if parent is None else parent.trace_flags.random_trace_id
        flags = trace.TraceFlags.SAMPLED if sampled.decision.is_sampled() else trace.TraceFlags.DEFAULT
        context = trace.SpanContext(
            trace_id,
            self._ids.generate_span_id(),
            is_remote=False,
            trace_flags=trace.TraceFlags(flags | (trace.TraceFlags.RANDOM_TRACE_ID if is_random else 0)),
            trace_state=sampled.trace_state,
        )
        offset_ns = time.time_ns() - time.monotonic_ns()
        begun = _Begun(name, context, parent, sampled.attributes, linked, int(at * 1e9) + offset_ns)
        return Span(self, begun, offset_ns, is_recorded=sampled.decision.is_recording())

    def ended(
        self,
        begun: _Begun,
        events: Iterable[tuple[str, int, Attributes | None]],
        end_ns: int,
        attributes: Attributes,
        error: str,
    ) -> None:
        """A span is over: it is laid into the queue of those to be sent."""
        trace, sdk = self._trace, self._sdk
        told = {**begun.attributes, **attributes}
        if error:
            told["error.type"] = error
        self._processor.on_end(
            sdk.ReadableSpan(
                begun.name,
                begun.context,
                begun.parent,
                self._resource,
                told,
                [sdk.Event(name, about, at_ns) for name, at_ns, about in events],
                begun.links,
                trace.SpanKind.SERVER,
                status=trace.Status(trace.StatusCode.ERROR if error else trace.StatusCode.UNSET),
                start_time=begun.start_ns,
                end_time=end_ns,
                instrumentation_scope=self._scope,
            )
        )

    def _named(self, traceparent: str, tracestate: str = "") -> Any:
        """The context of the span that is named, None when none is."""
        if not traceparent:
            return None
        if not tracestate and (ours := _OURS.fullmatch(traceparent)):
            trace_id, span_id, flags = (int(part, 16) for part in ours.groups())
            context = self._trace.SpanContext(
                trace_id, span_id, is_remote=True, trace_flags=self._trace.TraceFlags(flags)
            )
        else:
            carrier = {"traceparent": traceparent, "tracestate": tracestate}
            context = self._trace.get_current_span(
                self._propagator.extract(carrier, self._nowhere)
            ).get_span_context()
        return context if context.is_valid else None


@contextlib.contextmanager
def opened(settings: ServiceSettings, service: str) -> Iterator[Tracer | None]:
    """The tracer that `--traces` asks for, None without it. What was recorded is sent when the block is left.

    Raises StartError when the address is none, or the libraries, an extra, are not there.
    """
    if not settings.traces:
        yield None
        return
    is_secured, address = _collector(settings.traces)
    try:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import Tracer as SdkTracer
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from rpc.span_encoding import Exporter
    except ImportError as error:
        raise StartError(
            f"--traces needs libraries that are not installed ({error.name}); "
            "`pip install 'chairlift[tracing]'` brings them"
        ) from error
    exporter = Exporter(
        endpoint=address.target,
        insecure=not is_secured,
        channel_options=(("grpc.default_authority", "localhost"),) if address.unix_path else None,
    )
    ours = Resource.create({"service.name": f"chairlift-{service}", "service.version": version()})
    provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
    sender = BatchSpanProcessor(exporter)
    provider.add_span_processor(sender)
    _tell_of_outages(exporter, settings.traces)
    tracer = provider.get_tracer("chairlift", version())
    try:
        yield Tracer(tracer) if isinstance(tracer, SdkTracer) else None  # OTEL_SDK_DISABLED
    finally:
        closing = threading.Thread(target=sender.shutdown, daemon=True)
        closing.start()
        closing.join(_FAREWELL_SECONDS)
        if closing.is_alive():  # the collector is away: what it has not taken is lost
            exporter.shutdown()


def _collector(given: str) -> tuple[bool, Address]:
    """Whether it is spoken to by TLS, and where it is. Raises StartError."""
    is_secured = given.startswith("https://")
    try:
        address = given.removeprefix("https://").removeprefix("http://").rstrip("/")
        return is_secured, Address.parse(address, field="--traces")
    except AddressError as error:
        raise StartError(str(error)) from error


def _tell_of_outages(exporter: Any, address: str) -> None:
    """One line when the collector goes, one when it is back, in place of one each second."""
    outage = _Outage(address)
    for name in _EXPORTER_LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [outage]
        logger.propagate = False
    export = exporter.export

    def export_and_look(spans: Any) -> Any:
        result = export(spans)
        if result.name == "SUCCESS":
            outage.over()
        return result

    exporter.export = export_and_look


class _Outage(logging.Handler):
    """Whether spans are being lost. Called on the thread that sends, and on the loop when a queue is full."""

    def __init__(self, address: str) -> None:
        super().__init__(logging.WARNING)
        self._address = address
        self._is_on = False

    def emit(self, record: logging.LogRecord) -> None:
        """The library complains."""
        if not self._is_on:
            self._is_on = True
            _log.warning("traces_lost", collector=self._address, reason=record.getMessage())

    def over(self) -> None:
        """Spans were taken."""
        if self._is_on:
            self._is_on = False
            _log.info("traces_sent_again", collector=self._address)
