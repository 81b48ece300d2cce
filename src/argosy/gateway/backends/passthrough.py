"""Parser for streams that cannot be resumed: events pass with their calls normalized, and their tokens are counted."""

from __future__ import annotations

from typing import Any

import msgspec

from argosy.gateway.backends.backend_adapter import INCOMPLETE_FINISH_REASONS
from argosy.gateway.backends.stream_events import (
    DONE_DATA,
    MALFORMED_EVENT_ERRORS,
    describe_error_chunk,
    error_chunk_status,
    split_events,
)
from argosy.gateway.backends.stream_parser import DeliveredOutput, StreamParser
from argosy.gateway.backends.tool_calls import ToolCallNormalizer
from argosy.gateway.backends.usage import (
    ChoiceUsageSum,
    MessageDelta,
    ReportedUsage,
    estimate_tokens,
)
from argosy.gateway.request_fields import MAX_CHOICES
from argosy.protocol import EVENT_END, SSE_DONE, EventSplitter, event_data, format_event


class ResponseIdentity(msgspec.Struct):
    """Fields that all events of one response share."""

    id: str = ""
    created: int = 0
    model: str = ""


class _StreamChoice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: MessageDelta | None = None
    finish_reason: str | None = None
    stop_reason: Any = None

    @property
    def has_content(self) -> bool:
        return bool(self.text) or (self.delta is not None and self.delta.has_content)

    @property
    def estimated_tokens(self) -> int:
        return estimate_tokens(self.text) if self.delta is None else self.delta.estimated_tokens


class _StreamChunk(msgspec.Struct):
    choices: list[_StreamChoice] | None = None
    usage: ReportedUsage | None = None
    error: Any = None
    object: str | None = None


class PassthroughParser(StreamParser):
    """Stream parser for one attempt that cannot be resumed.

    Output tokens are estimated from the length of the text (`estimate_tokens`) until the server reports its usage.
    """

    def __init__(
        self,
        delivered: DeliveredOutput,
        *,
        include_usage: bool,
        has_echo: bool,
        choice_usages: ChoiceUsageSum | None,
    ) -> None:
        """Create a parser that counts tokens in `delivered`.

        The flag `include_usage` means that the client requested the usage event, `has_echo` that each choice starts
        with its prompt. The sum `choice_usages` is for servers that report the usage of each choice.
        """
        self._delivered = delivered
        self._include_usage = include_usage
        self._has_echo = has_echo
        self._choice_usages = choice_usages
        self._started_choices: set[int] = set()
        """Choices that have content."""
        self._decode = msgspec.json.Decoder(_StreamChunk).decode
        self._splitter = EventSplitter()
        self._calls = ToolCallNormalizer()
        self._first_data = b""
        self.is_committed = False
        """Whether the client received an event with data, so that no other replica can give the response."""
        self.is_usage_delivered = False
        """Whether the last event carried the usage."""

    @property
    def response_identity(self) -> ResponseIdentity | None:
        """Id, creation time and model of the response; None before the first event."""
        try:
            return msgspec.json.decode(self._first_data, type=ResponseIdentity)
        except MALFORMED_EVENT_ERRORS:
            return None

    def feed(self, body: bytes) -> bytes:
        """Count the events that `body` completes and return those that the client receives."""
        if self.is_done or self.failure:
            return b""
        events = map(self._process_event, split_events(self._splitter, body))
        kept = [event for event in events if event is not None]
        self.is_committed = self.is_committed or any(
            event_data(event) is not None for event in kept
        )
        return b"".join([event + EVENT_END for event in kept])

    def flush(self) -> bytes:
        """Return the `[DONE]` event."""
        return SSE_DONE

    def _process_event(self, event: bytes) -> bytes | None:
        """Count an event and return what the client receives of it; None for nothing."""
        if self.is_done or self.failure:
            return None
        data = event_data(event)
        if data == DONE_DATA:
            self.is_done = True
            total = None if self._choice_usages is None else self._choice_usages.total()
            if total is not None:
                total.apply_to(self._delivered)
            return None
        if data is None:
            return event
        try:
            chunk = self._decode(data)
        except (msgspec.DecodeError, RecursionError):
            return event  # not an OpenAI chunk, but the client may understand it
        if chunk.error is not None or chunk.object == "error":
            error = msgspec.json.decode(data)
            self.failure, self.failure_status = (
                describe_error_chunk(error),
                error_chunk_status(error),
            )
            return None
        choices = chunk.choices or ()
        if len(choices) > MAX_CHOICES:
            self.failure = f"an event of the replica's stream has more than {MAX_CHOICES} choices"
            return None
        for choice in choices:
            if choice.finish_reason in INCOMPLETE_FINISH_REASONS:
                self.failure = "the replica ended the response early"
                return None
            if self._calls.has_calls or (choice.delta is not None and choice.delta.has_calls):
                normalized = self._calls.normalize(data)
                if normalized is not data:
                    event, chunk = (
                        format_event(normalized)[: -len(EVENT_END)],
                        self._decode(normalized),
                    )
                break
        self._first_data = self._first_data or data
        self._record_chunk(chunk)
        is_kept = chunk.choices or chunk.usage is None or self._include_usage
        return event if is_kept else None

    def _record_chunk(self, chunk: _StreamChunk) -> None:
        delivered, usage = self._delivered, chunk.usage
        for choice in chunk.choices or ():
            if choice.has_content:
                is_prompt = self._has_echo and choice.index not in self._started_choices
                delivered.output_tokens += 1 if is_prompt else choice.estimated_tokens
                self._started_choices.add(choice.index)
            if choice.finish_reason:
                delivered.record_finish(choice.index, choice.finish_reason, choice.stop_reason)
        self.is_usage_delivered = usage is not None
        if usage is not None and self._choice_usages is not None:
            usage = self._choice_usages.add(usage)
        if usage is not None:
            usage.apply_to(delivered)
