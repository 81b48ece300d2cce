"""Logs: structured events as JSON lines or for the eye, with the request's id in each of its events."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import structlog

LogFormat = Literal["json", "console"]

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*")
_SHARED: list[structlog.typing.Processor] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
]


def configure_logs(log_format: LogFormat, level: str = "info") -> None:
    """Send every log event of the process, the libraries' too, to standard error. Call once."""
    if log_format == "json":
        render: list[structlog.typing.Processor] = [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ]
    else:
        # Plain tracebacks: the pretty ones print local variables, and those hold what users wrote.
        render = [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
            )
        ]
    structlog.configure(
        processors=[*_SHARED, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_SHARED,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for talkative in ("alembic", "uvicorn"):
        logging.getLogger(talkative).setLevel(logging.WARNING)


def get_log(name: str) -> structlog.typing.FilteringBoundLogger:
    """The logger of the module `name`."""
    log: structlog.typing.FilteringBoundLogger = structlog.get_logger(name)
    return log


@contextmanager
def request_context(request_id: str, traceparent: str = "") -> Iterator[None]:
    """Events logged inside carry `request_id`, and the trace id of a W3C `traceparent` header."""
    known = {"request_id": request_id}
    if trace := _TRACEPARENT.fullmatch(traceparent):
        known["trace_id"] = trace[1]
    with structlog.contextvars.bound_contextvars(**known):
        yield
