"""Traces: spans of what a service does, sent to a collector that speaks OTLP (OpenTelemetry) over gRPC.

Off, which is the default, the libraries are not imported and there is no `Tracer`. On, a span that has ended
is laid into a bounded queue, and a thread of its own sends: nothing here ever waits for a collector. While
that one is away spans are dropped, and the log says so once. How spans are sampled, batched and labelled, and
with which headers and certificates they are sent, the standard `OTEL_*` variables say.

What the spans mean, the services say. Times are seconds on the monotonic clock.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import structlog

from rpc.address import Address, AddressError
from rpc.errors import StartError
from rpc.settings import ServiceSettings
from rpc.version import version

Attributes = Mapping[str, str | int | float | bool | Sequence[str]]

_FAREWELL_SECONDS: Final = 2.0
_EXPORTER_LOGGERS: Final = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.sdk._shared_internal",
)

_log = structlog.get_logger()


class Span:
    """One stretch of work that is under way; made by `Tracer.begin`, and over with `end`."""

    __slots__ = ("_offset_ns", "_span", "traceparent")

    def __init__(self, span: Any, offset_ns: int) -> None:
        self._span = span
        self._offset_ns = offset_ns  # from the monotonic clock to the one on the wall, as of its beginning
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        """What names it to others (W3C Trace Context), so that their spans become its children."""

    @property
    def is_recorded(self) -> bool:
        """Whether it will be sent; a sampler may have left it out."""
        return bool(self._span.is_recording())

    def event(self, name: str, at: float, attributes: Attributes | None = None) -> None:
        """Something happened."""
        self._span.add_event(name, attributes, self._wall_ns(at))

    def end(self, at: float, attributes: Attributes | None = None, *, error: str = "") -> None:
        """It is over; `error` says in a word why it failed."""
        if attributes:
            self._span.set_attributes(attributes)
        if error:
            from opentelemetry.trace import StatusCode

            self._span.set_attribute("error.type", error)
            self._span.set_status(StatusCode.ERROR)
        self._span.end(self._wall_ns(at))

    def _wall_ns(self, at: float) -> int:
        return int(at * 1e9) + self._offset_ns


class Tracer:
    """Begins spans."""

    def __init__(self, tracer: Any) -> None:
        """`tracer` is OpenTelemetry's."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracer
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
        from opentelemetry import trace

        span = self._tracer.start_span(
            name,
            context=self._context(traceparent, tracestate),
            kind=trace.SpanKind.SERVER,
            attributes=attributes,
            links=[
                trace.Link(trace.get_current_span(self._context(link)).get_span_context()) for link in links
            ],
            start_time=int(at * 1e9) + (offset_ns := time.time_ns() - time.monotonic_ns()),
        )
        return Span(span, offset_ns)

    def _context(self, traceparent: str, tracestate: str = "") -> Any:
        from opentelemetry.context import Context

        return self._propagator.extract({"traceparent": traceparent, "tracestate": tracestate}, Context())


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
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise StartError(
            f"--traces needs libraries that are not installed ({error.name}); "
            "`pip install 'chairlift[tracing]'` brings them"
        ) from error
    exporter = OTLPSpanExporter(
        endpoint=address.target,
        insecure=not is_secured,
        channel_options=(("grpc.default_authority", "localhost"),) if address.unix_path else None,
    )
    ours = Resource.create({"service.name": f"chairlift-{service}", "service.version": version()})
    provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
    sender = BatchSpanProcessor(exporter)
    provider.add_span_processor(sender)
    _tell_of_outages(exporter, settings.traces)
    try:
        yield Tracer(provider.get_tracer("chairlift", version()))
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
