"""Logs: one event a line on stderr, JSON for machines or columns for people.

Every line carries the service and whatever was bound to the context (request_id, step_id). Tracebacks never
show local variables: prompts live there. Lines of other libraries take the same form.

Nobody waits for whoever reads stderr: a thread writes what the others have logged. While the reader stands
still lines are kept up to a bound, and behind it dropped; how many, the log says when it goes on.
"""

import atexit
import logging
import os
import select
import sys
import threading
from typing import Final, Literal

import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import EventDict, Processor, WrappedLogger

MAX_WAITING_CHARACTERS: Final = 4 * 1024 * 1024
FLUSH_SECONDS: Final = 1.0
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
    handler = _WriterHandler(_Writer(sys.stderr.fileno()))
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


def flush() -> bool:
    """Waits until what was logged is written, for FLUSH_SECONDS at most; returns whether it is.

    An interpreter that ends does so by itself; who ends the process without that calls it before.
    """
    return all(
        handler.writer.flush()
        for handler in logging.getLogger().handlers
        if isinstance(handler, _WriterHandler)
    )


class _WriterHandler(logging.Handler):
    """Makes lines in the thread that logs, to whose context they belong, and hands them on."""

    def __init__(self, writer: "_Writer") -> None:
        super().__init__()
        self.writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.writer.take(self.format(record) + "\n")
        except Exception:  # noqa: BLE001 - as every handler: what cannot be made a line stops nobody
            self.handleError(record)


class _Writer:
    """A thread that writes lines to a file descriptor, in the order in which it was given them.

    Not to a stream: at its end the interpreter would wait for the lock of one that is being written to.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lines: list[str] = []
        self._num_characters = 0  # not written yet, of `_lines` and of what is being written
        self._num_dropped = 0
        self._is_writing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write_on, name="log", daemon=True)
        self._thread.start()

    def take(self, line: str) -> None:
        """Keeps a line to be written, or drops it. Waits for nothing."""
        with self._changed:
            # Once one is dropped all are, until those before it are written and the gap is told of.
            is_full = self._num_dropped or self._num_characters + len(line) > MAX_WAITING_CHARACTERS
            if is_full and threading.current_thread() is not self._thread:
                self._num_dropped += 1
                return
            self._lines.append(line)
            self._num_characters += len(line)
            self._changed.notify_all()

    def flush(self) -> bool:
        """Waits until all is written, for FLUSH_SECONDS at most; returns whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._lines or self._is_writing), FLUSH_SECONDS)

    def _write_on(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._lines)
                self._is_writing = True
                lines, self._lines = self._lines, []
            for line in lines:  # each by itself, so that it stays whole beside those of other processes
                _write(self._fd, line.encode(errors="backslashreplace"))
            with self._changed:
                self._num_characters -= sum(map(len, lines))
                num_dropped = 0 if self._lines else self._num_dropped
            if num_dropped:
                _log.error("log_lines_dropped", num_lines=num_dropped)
                with self._changed:
                    self._num_dropped -= num_dropped


def _write(fd: int, data: bytes) -> None:
    """Writes all of it, however long that takes; nothing where nobody can ever read it."""
    try:
        while data:
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:  # another holder of the same pipe has made it so
                select.select([], [fd], [])
    except OSError:
        return


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
