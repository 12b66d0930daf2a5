"""Logs: one event a line on stderr, JSON for machines or columns for people.

Every line carries the service and whatever was bound to the context (request_id, step_id). Tracebacks never
show local variables: prompts live there. Lines of other libraries take the same form.

Nothing waits for the reader of stderr (see line_writer.py). What Python itself would write there about
exceptions that nobody caught becomes a line like the others, after those that led to it.
"""

import atexit
import logging
import sys
import threading
from types import TracebackType
from typing import Literal

import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import EventDict, Processor, WrappedLogger

from rpc.line_writer import LineWriter

_log = structlog.get_logger()


def configure(service: str, *, fmt: Literal["console", "json"], level: str) -> None:
    """Sets logging up for this process; called once, before anything is logged."""

    def name_service(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event["service"] = service
        return event

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        name_service,
    ]
    numeric_level = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(numeric_level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = _WriterHandler(LineWriter(sys.stderr.fileno(), _tell_dropped))
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers(fmt)],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(numeric_level)
    atexit.register(flush)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_end_of_thread
    sys.unraisablehook = _log_unraisable


def write(line: str) -> None:
    """Writes a finished line among those of this log: one for people, or one that another process logged."""
    writers = _writers()
    for writer in writers:
        writer.take(line + "\n")
    if not writers:
        print(line, file=sys.stderr, flush=True)  # noqa: T201 - nothing is set up yet


def flush() -> bool:
    """Waits until what was logged is written, for a second at most; returns whether it is.

    The interpreter does so when it exits; whoever ends the process otherwise (`os._exit`) calls this first.
    """
    return all(writer.flush() for writer in _writers())


def _writers() -> list[LineWriter]:
    """The one of this log; none before it is set up."""
    return [handler.writer for handler in logging.getLogger().handlers if isinstance(handler, _WriterHandler)]


def _tell_dropped(num_lines: int) -> None:
    _log.error("log_lines_dropped", num_lines=num_lines)


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
    else:
        _log.error("failed", exc_info=error)


def _log_end_of_thread(failure: threading.ExceptHookArgs) -> None:
    if not issubclass(failure.exc_type, SystemExit):
        name = failure.thread.name if failure.thread else ""
        _log.error("thread_failed", thread=name, exc_info=failure.exc_value)


def _log_unraisable(failure: "sys.UnraisableHookArgs") -> None:
    where = f"{failure.err_msg or 'Exception ignored in'}: {failure.object!r}"
    _log.error("exception_ignored", where=where, exc_info=failure.exc_value)


class _WriterHandler(logging.Handler):
    """Makes lines in the thread that logs, to whose context they belong, and hands them on."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self.writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.writer.take(self.format(record) + "\n")
        except Exception:  # noqa: BLE001 - as every handler: what cannot be made a line stops nobody
            self.handleError(record)


def _renderers(fmt: Literal["console", "json"]) -> list[Processor]:
    if fmt == "json":
        without_locals = ExceptionDictTransformer(show_locals=False)
        return [
            structlog.processors.ExceptionRenderer(without_locals),
            structlog.processors.JSONRenderer(ensure_ascii=False),
        ]
    return [
        structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    ]
