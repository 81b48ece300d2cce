"""Removal of personal data and secrets from log events, whatever the rules of their projects."""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

import msgspec
from structlog.typing import EventDict, WrappedLogger

from argosy.policy.content import DETECTORS, Matcher, Rule, TextFilter

LOG_DETECTORS = (
    *("email", "phone", "card", "iban", "secret"),
    *("us_ssn", "br_cpf", "es_dni", "it_codice_fiscale", "uk_nino"),
)
"""Detectors whose matches are removed. Others find addresses of replicas, or numbers such as bytes."""
_OWN_FIELDS = frozenset({"level", "logger", "timestamp", "replica", "actor"})
"""Fields with names that operators or Argosy chose."""
MAX_VALUE_CHARS = 1 << 16
"""Longest text that is filtered. The rest of a longer one is left out."""


@cache
def _matcher() -> Matcher:
    return Matcher([Rule(each, "redact") for name in LOG_DETECTORS for each in DETECTORS[name]])


def needs_redaction(line: bytes) -> bool:
    """Return whether an event, encoded as JSON, may have something to remove.

    An escape of JSON ends with a letter that the text does not have, and so could hide a match after it.
    """
    return not line.isascii() or b"\\" in line or _matcher().may_match(line)


def redact_log(log: bytes) -> bytes:
    """Remove personal data and secrets from the text of a log, of which other programs may have written lines."""
    return b"\n".join(
        _redact_line(line) if needs_redaction(line) else line for line in log.split(b"\n")
    )


def redact_event(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Remove personal data and secrets from the texts of an event. A processor of structlog."""
    for name, value in event.items():
        if name not in _OWN_FIELDS:
            event[name] = _redact(value)
    return event


def _redact_line(line: bytes) -> bytes:
    """Remove them from a line: from the values of an event in JSON, or from text."""
    if line.startswith(b"{"):
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            event = msgspec.json.decode(line, type=dict[str, Any])
            return msgspec.json.encode(redact_event(None, "", event))
    redacted: str = _redact(line.decode(errors="replace"))
    return redacted.encode()


def _redact(value: Any) -> Any:  # noqa: ANN401 - any field
    if isinstance(value, str):
        text_filter = TextFilter(_matcher())
        return text_filter.feed(value[:MAX_VALUE_CHARS]) + text_filter.flush()
    if isinstance(value, list | tuple | set | frozenset):
        return [_redact(each) for each in value]
    if isinstance(value, dict):
        return {_redact(name): _redact(each) for name, each in value.items()}
    return value
