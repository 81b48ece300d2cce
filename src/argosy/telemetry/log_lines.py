"""Lines of log files: those that a reader wants to see, in the form that a person reads, and what a log has gained.

The lines are whatever a process wrote, which may contain what users sent. None of them makes a function here fail.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, tzinfo
from itertools import chain
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from argosy.telemetry.logs import escape_unprintable, open_text_renderer

LogLevel = Literal["debug", "info", "warning", "error"]

_RANKS = {"debug": 0, "info": 1, "warning": 2, "warn": 2, "error": 3, "critical": 4, "fatal": 4}
_TEXT_LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z) \[(\w+) *\] ")
"""Beginning of a line that was logged as text instead of as JSON."""
_LEVEL_WORD = re.compile(r"\b(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b")
_LEVEL_WORD_END = 60
"""Number of characters at the start of a line of another program in which it may name its level."""
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_TRACEBACK_FIELDS = frozenset({"exception", "stack"})
_HIDDEN_FIELDS = frozenset({"exc_info", "logger"})
_TEXT_FIELDS = frozenset({"event", "level", "timestamp"})


class LogLine(msgspec.Struct, frozen=True):
    """A line of a log."""

    text: str
    at: float = 0.0
    """Seconds since the epoch. A line without a time has that of the line before it; 0 if none has one."""
    level: str = ""
    """Level in lower case; empty if the line names none."""
    is_event: bool = False
    """Whether it is an event in JSON."""


class _EventHeader(msgspec.Struct):
    """Fields of an event by which it is selected. Its others are decoded when it is formatted."""

    event: Any = None
    timestamp: Any = None
    level: Any = None


class LogSelection(msgspec.Struct, frozen=True, kw_only=True):
    """Lines that a reader wants to see."""

    since: float = 0.0
    """Only lines at this time or later."""
    level: LogLevel = "debug"
    """Only lines of this level or a higher one, and lines that name none, which a process may write as it crashes."""
    request: Annotated[str, Meta(max_length=200)] = ""
    """Only lines that contain this id of a request."""

    def matches(self, line: LogLine) -> bool:
        """Return whether the reader wants to see a line."""
        lowest = _RANKS[self.level]
        is_important = _RANKS.get(line.level, lowest) >= lowest
        return is_important and line.at >= self.since and self.request in line.text


def parse_log(lines: Iterable[str], at: float = 0.0) -> Iterator[LogLine]:
    """Return the lines with their times and levels, as far as they have some. The first ones are as of `at`."""
    for text in lines:
        header = _decode_header(text)
        if header is not None:
            timestamp, level = header.timestamp, str(header.level or "").lower()
        elif match := _TEXT_LINE.match(text):
            timestamp, level = match[1], match[2]
        else:
            word = _LEVEL_WORD.search(text, 0, _LEVEL_WORD_END)
            timestamp, level = None, "" if word is None else word[1].lower()
        at = _parse_timestamp(timestamp) or at
        yield LogLine(text, at, level, header is not None)


def find_new_lines(old: Sequence[str], new: Sequence[str]) -> tuple[Sequence[str], bool]:
    """Return the lines that a log has gained between two reads of its end, and whether some of them are missing.

    The last line of the old read may have been unfinished. If it is longer by now, it counts as gained.
    """
    known = max(0, len(old) - 1)
    starts = chain(range(max(0, known - len(new)), known), range(-1, -len(new) if known else 0, -1))
    start = next((start for start in starts if _is_overlap(old, new, known, start)), known)
    gained = new[known - start :]
    has_last = bool(old) and gained[:1] == old[-1:]
    is_missing = start == known > 0 and bool(new) and not has_last
    return gained[has_last:], is_missing


def _is_overlap(old: Sequence[str], new: Sequence[str], known: int, start: int) -> bool:
    """Return whether all lines that the known ones of `old` share with `new` are equal, if `new` begins at `start`."""
    left, right = max(start, 0), max(-start, 0)
    is_possible = old[left : left + 1] == new[right : right + 1]  # without copying all
    return is_possible and old[left:known] == new[right : known - start]


class LogFormatter:
    """Formats lines for people, as `log_format: console` logs them.

    Args:
        colors: Whether to colour them for a terminal.
        zone: Time zone of the times; None for that of this machine.
    """

    def __init__(self, *, colors: bool = False, zone: tzinfo | None = UTC) -> None:
        self._render = open_text_renderer(colors=colors)
        self._zone = zone

    def format(self, line: LogLine) -> str:
        """Return the text of a line, without what could control a terminal. A traceback has lines of its own."""
        if line.is_event:
            with contextlib.suppress(ValueError, OverflowError, RecursionError):
                return self._format_event(line)
        return _escape(_COLOR.sub("", line.text))

    def _format_event(self, line: LogLine) -> str:
        event = {
            _escape(name): _escape_value(name, value)
            for name, value in json.loads(line.text).items()
            if value is not None and name not in _HIDDEN_FIELDS
        }
        if line.at:
            moment = datetime.fromtimestamp(line.at, UTC).astimezone(self._zone)
            event["timestamp"] = f"{moment:%Y-%m-%d %H:%M:%S}.{moment.microsecond // 1000:03}"
        return str(self._render(None, "", event))


_decode = msgspec.json.Decoder(_EventHeader).decode


def _decode_header(text: str) -> _EventHeader | None:
    if not text.startswith("{"):
        return None
    try:
        header = _decode(text)
    except msgspec.DecodeError:
        try:  # unlike msgspec, it decodes names of files that are not UTF-8
            fields = json.loads(text)
        except (ValueError, RecursionError):
            return None
        header = _EventHeader(*map(fields.get, _EventHeader.__struct_fields__))
    except RecursionError:
        return None
    return None if header.event is None and header.timestamp is None else header


def _parse_timestamp(timestamp: object) -> float:
    """Return seconds since the epoch, or 0 for what is no time in ISO 8601."""
    if not isinstance(timestamp, str):
        return 0.0
    try:
        moment = datetime.fromisoformat(timestamp)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def _escape_value(name: str, value: object) -> object:
    if name in _TRACEBACK_FIELDS:
        return "\n".join(map(_escape, str(value).split("\n")))
    return _escape(str(value)) if isinstance(value, str) or name in _TEXT_FIELDS else value


def _escape(text: str) -> str:
    """Escape what could control a terminal, except tabs."""
    return "\t".join(map(escape_unprintable, text.split("\t")))
