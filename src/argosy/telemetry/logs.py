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
TOGETHER_S = 0.05
"""Lines that tell of nothing wrong wait so long for others, at most."""

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*")
_context: ContextVar[dict[str, str] | None] = ContextVar("argosy_request", default=None)


def _add_context(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    known = _context.get()
    if known is not None:
        event.update(known)
    return event


_SHARED: list[Processor] = [
    _add_context,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
]
_UNREAD = (OSError, ValueError, AttributeError)
"""Raised by standard error that nobody reads any more: a closed pipe, a full disk, or none at all."""
_OF_LINES = frozenset({"event", "exception", "stack"})
"""Fields that we write, and that may have several lines."""
_encode_text = msgspec.json.Encoder(enc_hook=repr).encode


def _encode(event: EventDict) -> bytes:
    try:
        return _encode_text(event)
    except UnicodeEncodeError:  # a file's name, which may be any bytes
        return json.dumps(event, default=repr).encode()


def _json_line(replica: str) -> Processor:
    """All that `_SHARED` does, and the JSON, in one call: a request writes a line."""

    def line(logger: _StandardError, method: str, event: EventDict) -> bytes:
        event.update(_context.get() or {})
        event["level"] = method
        event["logger"] = logger.name
        event["timestamp"] = _timestamp(time.time_ns())
        if replica:
            event["replica"] = replica
        if "exc_info" in event:
            event = structlog.processors.format_exc_info(logger, method, event)
        return _encode(event)

    return line


def _timestamp(now_ns: int) -> str:
    """ISO 8601 in UTC, to the microsecond."""
    second, rest = divmod(now_ns, 1_000_000_000)
    return f"{_second(second)}.{rest // 1000:06d}Z"


@lru_cache(maxsize=2)
def _second(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


def _printable(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """What clients sent must neither steer a terminal nor look like a line of its own."""
    for name, value in event.items():
        if isinstance(value, str) and not value.isprintable() and name not in _OF_LINES:
            event[name] = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in value)
    return event


def _json_text(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    return _encode(event).decode()


def _encoded(_logger: WrappedLogger, _method: str, line: EventDict | str) -> bytes:
    return str(line).encode("utf-8", "backslashreplace")


class _StandardError:
    """Writes lines to standard error, whatever that is at the moment.

    When nobody reads it any more, lines are lost, and nothing else is.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name
        self._flushes_at = 0.0
        """When lines that were not written at once are, on the monotonic clock."""

    def write(self, method: str, line: bytes) -> None:
        """Write the line of a call of `method`, at once or, of `info`, together with others under an event loop.

        Each write of its own is a system call.
        """
        try:
            sys.stderr.buffer.write(line + b"\n")
        except _UNREAD:
            return
        if method != "info":
            self._flush()
        elif time.monotonic() >= self._flushes_at:
            self._flush_soon()

    def _flush_soon(self) -> None:
        try:
            asyncio.get_running_loop().call_later(TOGETHER_S, self._flush)
        except RuntimeError:  # there is none
            self._flush()
        else:
            self._flushes_at = time.monotonic() + TOGETHER_S

    def _flush(self) -> None:
        # A loop's timer may be early: whatever comes after this asks for another.
        self._flushes_at = 0.0
        with contextlib.suppress(*_UNREAD):
            sys.stderr.buffer.flush()


class _Straight(structlog.BoundLoggerBase):
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


def configure_logs(log_format: LogFormat, level: str = "info", replica: str = "") -> None:
    """Send every log event of the process, the libraries' too, to standard error. Call once.

    Each event carries the name of the `replica` that the process works for, if any. Our own events do not
    pass the standard library's logging, which would make each ten times as dear.
    """
    shared = [*_SHARED, _named(replica)] if replica else _SHARED
    if log_format == "json":
        ours: list[Processor] = [_json_line(replica)]
        theirs: list[Processor] = [structlog.processors.format_exc_info, _json_text]
    else:
        # Plain tracebacks: the pretty ones print local variables, and those hold what users wrote.
        render: Processor = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty() and not os.environ.get("NO_COLOR"),
            exception_formatter=structlog.dev.plain_traceback,
        )
        ours, theirs = [*shared, _printable, render, _encoded], [_printable, render]
    structlog.configure(
        processors=ours,
        wrapper_class=type("Logger", (_Straight, structlog.make_filtering_bound_logger(level)), {}),
        logger_factory=_StandardError,
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


def _named(replica: str) -> Processor:
    def name(_logger: object, _method: str, event: EventDict) -> EventDict:
        event["replica"] = replica
        return event

    return name


def name_request(request_id: str, traceparent: str = "") -> None:
    """Have the events of this task carry `request_id` from now on, and the trace id of a W3C `traceparent` header."""
    known = {"request_id": request_id}
    if traceparent and (trace := _TRACEPARENT.fullmatch(traceparent)):
        known["trace_id"] = trace[1]
    _context.set(known)
