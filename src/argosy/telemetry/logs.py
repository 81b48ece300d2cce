"""Structured logs as JSON lines or as text for a console, with the request id in each event of a request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import sys
import time
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, Literal

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from argosy.telemetry.log_redaction import needs_redaction, redact_event

LogFormat = Literal["json", "console"]
FLUSH_INTERVAL_S = 0.05
"""Longest time for which lines of level info are buffered."""

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*")
_request_context: ContextVar[dict[str, str] | None] = ContextVar("argosy_request", default=None)


def _add_request_context(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    event.update(_request_context.get() or {})
    return event


_SHARED_PROCESSORS: list[Processor] = [
    _add_request_context,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
]
_WRITE_ERRORS = (OSError, ValueError, AttributeError)
"""Errors of an unusable standard error, such as a closed pipe, a full disk, or none at all."""
_MULTILINE_FIELDS = frozenset({"event", "exception", "stack"})
"""Fields written by Argosy itself, which may have several lines."""
_encode_json = msgspec.json.Encoder(enc_hook=repr).encode


def _encode_event(event: EventDict) -> bytes:
    try:
        return _encode_json(event)
    except UnicodeEncodeError:  # a file name may contain any bytes
        return json.dumps(event, default=repr).encode()


def _make_json_processor(replica: str) -> Processor:
    """Return a processor that does the work of `_SHARED_PROCESSORS` and encodes the JSON in one call, for speed."""

    def encode_line(logger: _StderrLogger, method: str, event: EventDict) -> bytes:
        event.update(_request_context.get() or {})
        event["level"] = method
        event["logger"] = logger.name
        event["timestamp"] = _format_timestamp(time.time_ns())
        if replica:
            event["replica"] = replica
        if "exc_info" in event:
            event = structlog.processors.format_exc_info(logger, method, event)
        line = _encode_event(event)
        if needs_redaction(line):
            line = _encode_event(redact_event(logger, method, event))
        return line

    return encode_line


def _format_timestamp(now_ns: int) -> str:
    """Return an ISO 8601 time in UTC with microseconds."""
    second, nanosecond = divmod(now_ns, 1_000_000_000)
    return f"{_format_second(second)}.{nanosecond // 1000:06d}Z"


@lru_cache(maxsize=2)
def _format_second(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


def _escape_fields(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Escape client input, so that it can neither control a terminal nor imitate a log line."""
    for name, value in event.items():
        if isinstance(value, str) and not value.isprintable() and name not in _MULTILINE_FIELDS:
            event[name] = escape_unprintable(value)
    return event


def escape_unprintable(text: str) -> str:
    """Return the text with unprintable characters as their codes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def open_text_renderer(*, colors: bool) -> Processor:
    """Return the processor that formats an event for people."""
    # Pretty tracebacks would print local variables, which contain what users wrote.
    return structlog.dev.ConsoleRenderer(
        colors=colors, exception_formatter=structlog.dev.plain_traceback
    )


def _encode_line(_logger: WrappedLogger, _method: str, line: EventDict | str) -> bytes:
    return str(line).encode("utf-8", "backslashreplace")


class _StderrLogger:
    """Logger that writes lines to the current `sys.stderr` and drops them if that fails."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self._flush_due_at = 0.0
        """Time on the monotonic clock at which buffered lines are flushed."""

    def write(self, method: str, line: bytes) -> None:
        """Write a line of level `method`.

        Lines of level info are buffered while an event loop runs, because each flush is a system call. All other lines
        are flushed at once.
        """
        try:
            sys.stderr.buffer.write(line + b"\n")
        except _WRITE_ERRORS:
            return
        if method != "info":
            self._flush()
        elif time.monotonic() >= self._flush_due_at:
            self._flush_soon()

    def _flush_soon(self) -> None:
        try:
            asyncio.get_running_loop().call_later(FLUSH_INTERVAL_S, self._flush)
        except RuntimeError:  # no event loop is running
            self._flush()
        else:
            self._flush_due_at = time.monotonic() + FLUSH_INTERVAL_S

    def _flush(self) -> None:
        # Timers of an event loop may fire early, so the next line always schedules another one.
        self._flush_due_at = 0.0
        with contextlib.suppress(*_WRITE_ERRORS):
            sys.stderr.buffer.flush()


class _DirectBoundLogger(structlog.BoundLoggerBase):
    """Bound logger that runs the processors and writes the line in one step instead of structlog's four."""

    def _proxy_to_logger(
        self, method_name: str, event: str | None = None, **event_kw: object
    ) -> None:
        result: Any = {**self._context, **event_kw, "event": event}
        try:
            for process in self._processors:
                result = process(self._logger, method_name, result)
        except structlog.DropEvent:
            return
        self._logger.write(method_name, result)


def configure_logging(log_format: LogFormat, level: str = "info", replica: str = "") -> None:
    """Send all log events of the process, including those of libraries, to standard error. Call it once.

    Argosy's own events bypass the standard library's logging, which would cost ten times as much per event.

    Args:
        log_format: JSON lines or text for a console.
        level: Lowest level that is logged.
        replica: Name of the process's replica, added to each event; empty for none.
    """
    shared = [*_SHARED_PROCESSORS, _add_replica_name(replica)] if replica else _SHARED_PROCESSORS
    if log_format == "json":
        own_processors: list[Processor] = [_make_json_processor(replica)]
        library_processors: list[Processor] = [
            structlog.processors.format_exc_info,
            redact_event,
            lambda _logger, _method, event: _encode_event(event).decode(),
        ]
    else:
        colors = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        render = open_text_renderer(colors=colors)
        library_processors = [
            structlog.processors.format_exc_info,
            *(redact_event, _escape_fields, render),
        ]
        own_processors = [*shared, *library_processors, _encode_line]
    structlog.configure(
        processors=own_processors,
        wrapper_class=type(
            "Logger", (_DirectBoundLogger, structlog.make_filtering_bound_logger(level)), {}
        ),
        logger_factory=_StderrLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *library_processors,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for name in ("alembic", "httpx2"):  # they log every step and every request
        logging.getLogger(name).setLevel(logging.WARNING)


def _add_replica_name(replica: str) -> Processor:
    def add_name(_logger: object, _method: str, event: EventDict) -> EventDict:
        event["replica"] = replica
        return event

    return add_name


def bind_request(request_id: str, traceparent: str = "") -> None:
    """Add `request_id`, and the trace id of a W3C `traceparent` header, to all further events of this task."""
    context = {"request_id": request_id}
    if traceparent and (trace := _TRACEPARENT.fullmatch(traceparent)):
        context["trace_id"] = trace[1]
    _request_context.set(context)
