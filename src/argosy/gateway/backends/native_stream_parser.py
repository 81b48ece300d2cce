"""Parser for the stream of a native replica, with the resume metadata that another replica continues from.

`argosy.engine.serving.api_server.event_writers` writes the metadata and documents its format.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from argosy.gateway.backends.stream_events import (
    MALFORMED_EVENT_ERRORS,
    describe_error_chunk,
    error_chunk_status,
)
from argosy.gateway.backends.stream_parser import DeliveredOutput, StreamParser
from argosy.protocol import EVENT_END, EventSplitter, parse_replica_report

_METADATA_PREFIX = b": argosy "
_METADATA_START = EVENT_END + _METADATA_PREFIX
_METADATA_START_BYTES = len(_METADATA_START)
_COMMENT_START = b"\n:"
_REPORT_PREFIX = _METADATA_PREFIX + b"report "
_REPORT_START = EVENT_END + _REPORT_PREFIX
_DATA_PREFIX = b"data:"
_DONE_EVENT = b"data: [DONE]"
_ERROR_PREFIX = b'data: {"error":'
_TOKEN_IDS_PATTERN = re.compile(rb"[0-9]{0,10}(?:,[0-9]{0,10})*")
_PROMPT_COUNTS_PATTERN = re.compile(rb"prompt [0-9]{1,9} [0-9]{1,9}(?: .*)?")
MAX_HELD_BYTES = 64 * 1024 * 1024
"""Maximum size in bytes of events whose metadata comment has not arrived."""


class NativeStreamParser(StreamParser):
    """Stream parser for one attempt at a native replica.

    The parser holds events back until their metadata comment arrives, because only then are their tokens known.
    A stream that breaks in between is resumed before these events.
    """

    def __init__(self, delivered: DeliveredOutput, resume_tokens: int = 0) -> None:
        """Create a parser that records tokens in `delivered`.

        Args:
            delivered: Output of earlier attempts, extended in place.
            resume_tokens: Number of token ids in the client's own `resume` field, which count as prompt tokens.
        """
        self._delivered = delivered
        self._resume_tokens = resume_tokens
        self._completed_choices = delivered.finish_reasons.keys() - delivered.token_id_pieces.keys()
        """Choices that finished without a token. No token id shows the next replica that they were delivered."""
        self._splitter = EventSplitter()
        self._held_events: list[bytes] = []
        """Events without their ends."""
        self._bytes_since_metadata = 0
        """Bytes of the bodies from the one with the last metadata comment on, of which some may be held."""

    def feed(self, body: bytes) -> bytes:
        """Parse `body`. After malformed metadata, return only the events before it and set `failure`."""
        if self.failure:
            return b""
        if (
            not self._splitter
            and not self._held_events
            and body.startswith(_DATA_PREFIX)
            and body.endswith(EVENT_END)
        ):
            # The usual case is one whole token: its events, then their metadata comment.
            end = body.rfind(_METADATA_START)
            entry = end + _METADATA_START_BYTES
            if (
                end > 0
                and body.find(b"\n", entry) == len(body) - 2
                and body.find(_COMMENT_START, 0, end) < 0
                and not body.startswith(_REPORT_START, end)
            ):
                return body[: end + 2] if self._accept_metadata(body[entry:-2]) else b""
        forwarded: list[bytes] = []
        held = self._held_events
        for block in self._splitter.feed(body):
            if not block.startswith(b":"):
                held.append(block)
                if block == _DONE_EVENT:
                    self.is_done = True
                elif block.startswith(_ERROR_PREFIX):
                    self._record_error(block)
                    break
            elif block.startswith(_REPORT_PREFIX):
                self._record_report(block[len(_REPORT_PREFIX) :])
            elif block.startswith(_METADATA_PREFIX):
                if self._accept_metadata(block[len(_METADATA_PREFIX) :]):
                    forwarded += held
                held.clear()
                self._bytes_since_metadata = 0
                if self.failure:
                    break
        self._bytes_since_metadata += len(body)
        if self._bytes_since_metadata > MAX_HELD_BYTES:
            self.failure = f"more than {MAX_HELD_BYTES} bytes of events wait for resume metadata"
        return _join_events(forwarded)

    @property
    def can_use_fast_path(self) -> bool:
        """Whether no event is held or incomplete, so that native code may forward the next tokens."""
        return not (self._splitter or self._held_events or self.is_done or self.failure)

    def flush(self) -> bytes:
        """Return the events that no metadata follows: the usage and `[DONE]`, or an error."""
        held = _join_events(self._held_events)
        self._held_events.clear()
        return held

    def _accept_metadata(self, metadata: bytes) -> bool:
        """Apply a metadata comment and return whether to forward the events before it."""
        try:
            return self._apply_metadata(metadata)
        except (ValueError, LookupError) as error:
            self.failure = f"the replica's stream cannot be read ({error})"
            return False

    def _apply_metadata(self, metadata: bytes) -> bool:
        """Record a metadata comment and return whether to forward the events before it.

        Raises:
            ValueError, LookupError: The comment is malformed. Nothing of it was recorded.
        """
        delivered = self._delivered
        words = metadata.split(b" ")
        if words[0] == b"prompt":
            if not _PROMPT_COUNTS_PATTERN.fullmatch(metadata):
                raise ValueError("malformed prompt token counts")
            delivered.prompt_tokens = int(words[1]) + self._resume_tokens
            delivered.cached_tokens = min(int(words[2]), delivered.prompt_tokens)
            delivered.prompt_blocks = words[3] if len(words) > 3 else b""
            return True
        choice, ids = int(words[0]), words[1]
        finish_reason = words[2].decode() if len(words) > 2 else None
        if choice in self._completed_choices:
            return False
        if ids:
            if not _TOKEN_IDS_PATTERN.fullmatch(ids):
                raise ValueError("malformed token ids")
            pieces = delivered.token_id_pieces.get(choice)
            if pieces is None:
                pieces = delivered.token_id_pieces[choice] = []
            pieces.append(ids)
            delivered.output_tokens += ids.count(b",") + 1
        if finish_reason is not None:
            stop_reason = words[3].decode() if len(words) > 3 else None
            delivered.record_finish(choice, finish_reason, stop_reason)
        return True

    def _record_error(self, event: bytes) -> None:
        """Record the error that ended the response, of which the request or the replica may be the cause."""
        try:
            chunk = msgspec.json.decode(event[len(_DATA_PREFIX) :], type=dict[str, Any])
        except MALFORMED_EVENT_ERRORS as error:
            self.failure = f"the replica's stream cannot be read ({error})"
            return
        self.failure = describe_error_chunk(chunk)
        self.failure_status = error_chunk_status(chunk)

    def _record_report(self, text: bytes) -> None:
        """Record the replica's report. A report that cannot be read is no reason to fail the response."""
        report = parse_replica_report(text)
        if report is not None:
            self._delivered.report = report
            self._delivered.reasoning_tokens = report.reasoning_tokens
            self._delivered.prediction = report.prediction


def _join_events(events: list[bytes]) -> bytes:
    """Return the events, each with its end."""
    return EVENT_END.join([*events, b""]) if events else b""
