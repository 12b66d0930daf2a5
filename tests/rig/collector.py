"""A collector of traces: an OTLP server in the test's own process, and what it was sent as plain values."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Event:
    name: str
    at_ns: int
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Span:
    """Ids are hexadecimal; `parent` is empty for the first of a trace."""

    service: str
    name: str
    trace: str
    span: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: tuple[Event, ...]
    links: tuple[tuple[str, str], ...]
    is_error: bool
    state: str

    @property
    def phases(self) -> list[str]:
        return [event.name for event in self.events]

    def event(self, name: str) -> Event:
        (found,) = (event for event in self.events if event.name == name)
        return found


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes spans at a Unix socket until it is closed."""

    def __init__(self, folder: Path) -> None:
        self.address = f"unix:{folder}/otlp.sock"
        self._spans: list[Span] = []
        self._news = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the contract's name
        spans = [
            span_of(message, values(of_process.resource.attributes)["service.name"])
            for of_process in request.resource_spans
            for scope in of_process.scope_spans
            for message in scope.spans
        ]
        with self._news:
            self._spans += spans
            self._news.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, wanted: Callable[[Span], bool], count: int = 1) -> list[Span]:
        """The spans that are wanted, as soon as there are so many, in the order of their beginnings."""
        deadline = time.monotonic() + SECONDS
        with self._news:
            while len(found := [span for span in self._spans if wanted(span)]) < count:
                assert self._news.wait(deadline - time.monotonic()), f"{len(found)} of {count}: {self._spans}"
        return sorted(found, key=lambda span: span.start_ns)

    def close(self) -> None:
        self._server.stop(0).wait()


def values(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)


def span_of(message: Any, service: str) -> Span:
    return Span(
        service=service,
        name=message.name,
        trace=message.trace_id.hex(),
        span=message.span_id.hex(),
        parent=message.parent_span_id.hex(),
        start_ns=message.start_time_unix_nano,
        end_ns=message.end_time_unix_nano,
        attributes=values(message.attributes),
        events=tuple(Event(e.name, e.time_unix_nano, values(e.attributes)) for e in message.events),
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in message.links),
        is_error=message.status.code == message.status.STATUS_CODE_ERROR,
        state=message.trace_state,
    )
