"""Detection of the first content of a stream, which ends a replica's time to first token.

Response head, comments, a lone role and empty deltas are not content.
"""

from __future__ import annotations

from typing import Any

import msgspec

from argosy.gateway.backends.stream_events import MALFORMED_EVENT_ERRORS
from argosy.protocol import EventParser

_decode = msgspec.json.Decoder(dict[str, Any]).decode


class FirstContentDetector:
    """Detector for one stream, fed from the first byte."""

    def __init__(self) -> None:
        self._event_parser = EventParser()

    def feed(self, body: bytes) -> bool:
        """Whether `body` completes an event with content, or an event that is no chunk (an error or the end)."""
        return any(_has_content(data) for data in self._event_parser.feed(body))


def _has_content(data: bytes) -> bool:
    try:
        choices = _decode(data).get("choices")
        return choices is None or any(_choice_has_content(choice) for choice in choices)
    except MALFORMED_EVENT_ERRORS:
        return bool(data.strip())


def _choice_has_content(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    has_delta = any(value for name, value in delta.items() if name != "role")
    return bool(has_delta or choice.get("text") or choice.get("finish_reason"))
