"""Logs: one event a line on stderr, JSON for machines or columns for people.

Every line carries the service and whatever was bound to the context (request_id, step_id). Tracebacks never
show local variables: prompts live there. Lines of other libraries take the same form.
"""

import logging
import sys
from typing import Literal

import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import EventDict, Processor, WrappedLogger


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
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers(fmt)],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(numeric_level)


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
