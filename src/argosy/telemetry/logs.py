"""Logs: structured events as JSON lines or for the eye, with the request's id in each of its events."""

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

LogFormat = Literal["json", "console"]
FLUSH_INTERVAL_S = 0.05
"""Lines that tell of nothing wrong wait so long for others, at most."""

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*")
_request_context: ContextVar[dict[str, str] | None] = ContextVar("argosy_request", default=None)


def _add_request_context(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    known = _request_context.get()
    if known is not None:
        event.update(known)
    return event


_SHARED_PROCESSORS: list[Processor] = [
    _add_request_context,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
]
_WRITE_ERRORS = (OSError, ValueError, AttributeError)
"""Raised by standard error that nobody reads any more: a closed pipe, a full disk, or none at all."""
_MULTILINE_FIELDS = frozenset({"event", "exception", "stack"})
"""Fields that we write, and that may have several lines."""
_encode_json = msgspec.json.Encoder(enc_hook=repr).encode


def _encode_event(event: EventDict) -> bytes:
    try:
        return _encode_json(event)
    except UnicodeEncodeError:  # a file's name, which may be any bytes
        return json.dumps(event, default=repr).encode()


def _make_json_processor(replica: str) -> Processor:
    """All that `_SHARED` does, and the JSON, in one call: a request writes a line."""

    def line(logger: _StderrLogger, method: str, event: EventDict) -> bytes:
        event.update(_request_context.get() or {})
        event["level"] = method
        event["logger"] = logger.name
        event["timestamp"] = _format_timestamp(time.time_ns())
        if replica:
            event["replica"] = replica
        if "exc_info" in event:
            event = structlog.processors.format_exc_info(logger, method, event)
        return _encode_event(event)

    return line


def _format_timestamp(now_ns: int) -> str:
    """ISO 8601 in UTC, to the microsecond."""
    second, rest = divmod(now_ns, 1_000_000_000)
    return f"{_format_second(second)}.{rest // 1000:06d}Z"


@lru_cache(maxsize=2)
def _format_second(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


def _escape_unprintable(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """What clients sent must neither steer a terminal nor look like a line of its own."""
    for name, value in event.items():
        if isinstance(value, str) and not value.isprintable() and name not in _MULTILINE_FIELDS:
            event[name] = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in value)
    return event


def _render_json(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    return _encode_event(event).decode()


def _encode_line(_logger: WrappedLogger, _method: str, line: EventDict | str) -> bytes:
    return str(line).encode("utf-8", "backslashreplace")


class _StderrLogger:
    """Writes lines to standard error, whatever that is at the moment.

    When nobody reads it any more, lines are lost, and nothing else is.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name
        self._flush_due_at = 0.0
        """When lines that were not written at once are, on the monotonic clock."""

    def write(self, method: str, line: bytes) -> None:
        """Write the line of a call of `method`, at once or, of `info`, together with others under an event loop.

        Each write of its own is a system call.
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
        except RuntimeError:  # there is none
            self._flush()
        else:
            self._flush_due_at = time.monotonic() + FLUSH_INTERVAL_S

    def _flush(self) -> None:
        # A loop's timer may be early: whatever comes after this asks for another.
        self._flush_due_at = 0.0
        with contextlib.suppress(*_WRITE_ERRORS):
            sys.stderr.buffer.flush()


class _DirectBoundLogger(structlog.BoundLoggerBase):
    """What structlog does between the call of a logger's method and the line, in one step instead of four."""

    def _proxy_to_logger(
        self, method_name: str, event: str | None = None, **event_kw: object
    ) -> None:
        told: Any = {**self._context, **event_kw, "event": event}
        try:
            for process in self._processors:
                told = process(self._logger, method_name, told)
        except structlog.DropEvent:
            return
        self._logger.write(method_name, told)


def configure_logging(log_format: LogFormat, level: str = "info", replica: str = "") -> None:
    """Send every log event of the process, the libraries' too, to standard error. Call once.

    Each event carries the name of the `replica` that the process works for, if any. Our own events do not
    pass the standard library's logging, which would make each ten times as dear.
    """
    shared = [*_SHARED_PROCESSORS, _add_replica_name(replica)] if replica else _SHARED_PROCESSORS
    if log_format == "json":
        ours: list[Processor] = [_make_json_processor(replica)]
        theirs: list[Processor] = [structlog.processors.format_exc_info, _render_json]
    else:
        # Plain tracebacks: the pretty ones print local variables, and those hold what users wrote.
        render: Processor = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty() and not os.environ.get("NO_COLOR"),
            exception_formatter=structlog.dev.plain_traceback,
        )
        ours, theirs = (
            [*shared, _escape_unprintable, render, _encode_line],
            [_escape_unprintable, render],
        )
    structlog.configure(
        processors=ours,
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
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *theirs],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for talkative in ("alembic", "uvicorn"):
        logging.getLogger(talkative).setLevel(logging.WARNING)


def _add_replica_name(replica: str) -> Processor:
    def name(_logger: object, _method: str, event: EventDict) -> EventDict:
        event["replica"] = replica
        return event

    return name


def bind_request(request_id: str, traceparent: str = "") -> None:
    """Have the events of this task carry `request_id` from now on, and the trace id of a W3C `traceparent` header."""
    known = {"request_id": request_id}
    if traceparent and (trace := _TRACEPARENT.fullmatch(traceparent)):
        known["trace_id"] = trace[1]
    _request_context.set(known)
