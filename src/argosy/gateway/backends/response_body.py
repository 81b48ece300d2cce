"""Body of a response in one piece, decoded once: its usage, finish reasons, and the error or early end in it."""

from __future__ import annotations

from codecs import BOM_UTF8
from typing import Any

import msgspec

from argosy.gateway.backends.backend_adapter import INCOMPLETE_FINISH_REASONS, BackendAdapter
from argosy.gateway.backends.stream_events import MALFORMED_EVENT_ERRORS, error_chunk_status
from argosy.gateway.backends.stream_parser import DeliveredOutput
from argosy.gateway.backends.tool_calls import ToolCallNormalizer
from argosy.gateway.backends.usage import MessageDelta, ReportedUsage
from argosy.gateway.request_fields import BYTES_PER_TOKEN, MAX_CHOICES, RequestFields


class ResponseChoice(msgspec.Struct):
    """Fields of one choice that the gateway reads. Log-probabilities are skipped."""

    text: Any = None
    message: Any = None
    finish_reason: Any = None
    stop_reason: Any = None

    @property
    def estimated_tokens(self) -> int:
        """Estimated number of tokens in the content; 0 without any. Parts, tool calls and audio count as JSON."""
        values: list[object] = [self.text]
        if isinstance(self.message, dict):
            message = msgspec.convert(self.message, MessageDelta)
            values = [*message.texts, message.function_call, message.audio]
        size = sum(
            len(value.encode() if isinstance(value, str) else msgspec.json.encode(value))
            for value in values
            if value
        )
        return max(size // BYTES_PER_TOKEN, 1 if size else 0)

    @property
    def has_calls(self) -> bool:
        """Whether the message has tool calls."""
        message = self.message
        return isinstance(message, dict) and bool(
            message.get("tool_calls") or message.get("function_call")
        )


class ResponseBody(msgspec.Struct):
    """Fields of a response in one piece that the gateway reads. It is empty if the body cannot be parsed."""

    usage: Any = None
    choices: list[ResponseChoice] | None = None
    error: Any = None

    def find_status(self) -> int:
        """Return the status that a 200 response stands for. A server may fail or refuse after it sent the head.

        Returns:
            The status of an error in the body, or 500 if it has none. 500 too for an incomplete response and for one
            with more than `MAX_CHOICES` choices. Otherwise 200.
        """
        choices = self.choices or ()
        if not choices and self.error is not None:
            return error_chunk_status({"error": self.error}) or 500
        if len(choices) > MAX_CHOICES:
            return 500
        is_complete = all(
            choice.finish_reason not in INCOMPLETE_FINISH_REASONS
            for choice in choices
            if isinstance(choice.finish_reason, str)
        )
        return 200 if is_complete else 500

    def find_usage(self, fields: RequestFields, adapter: BackendAdapter) -> ReportedUsage:
        """Return the reported usage; empty if the server reports none or it is malformed.

        If the server reports only the usage of the first choice, the tokens of the others are estimated.
        """
        try:
            usage = msgspec.convert(self.usage, ReportedUsage | None) or ReportedUsage()
        except msgspec.ValidationError:
            return ReportedUsage()
        if fields.choice_count == 1 or not adapter.has_per_choice_usage or self.usage is None:
            return usage
        others = sum(max(1, choice.estimated_tokens) for choice in (self.choices or ())[1:])
        output = None if usage.completion_tokens is None else usage.completion_tokens + others
        prompt = usage.prompt_tokens if fields.prompt_count == 1 else None
        return ReportedUsage(prompt, output, usage.prompt_tokens_details)

    def estimate_tokens(self, size: int) -> int:
        """Estimate the output tokens of a response of `size` bytes whose server does not report them."""
        choices = self.choices or ()
        return sum(max(1, choice.estimated_tokens) for choice in choices) or size // BYTES_PER_TOKEN

    @property
    def content_tokens(self) -> int:
        """Estimated number of tokens in the content of all choices; 0 without any."""
        return sum(choice.estimated_tokens for choice in self.choices or ())

    def record_finish_reasons(self, delivered: DeliveredOutput) -> None:
        """Record the finish reasons, except those that are missing."""
        for index, choice in enumerate(self.choices or ()):
            if choice.finish_reason and isinstance(choice.finish_reason, str):
                delivered.record_finish(index, choice.finish_reason, choice.stop_reason)


_decode = msgspec.json.Decoder(ResponseBody).decode


def parse_response_body(content: bytes) -> ResponseBody:
    """Decode a response in one piece."""
    try:
        return _decode(content)
    except MALFORMED_EVENT_ERRORS:
        return ResponseBody()


def normalize_calls(content: bytes, parsed: ResponseBody) -> tuple[bytes, ResponseBody]:
    """Return a response in one piece and its fields, with its tool calls as clients need them."""
    if not any(choice.has_calls for choice in parsed.choices or ()):
        return content, parsed
    normalized = ToolCallNormalizer().normalize(content)
    return (
        (content, parsed)
        if normalized is content
        else (normalized, parse_response_body(normalized))
    )


def is_json_object(content: bytes) -> bool:
    """Whether `content` looks like one whole JSON object, not HTML, text, a truncated or a compressed body."""
    text = content.removeprefix(BOM_UTF8).strip()
    return text.startswith(b"{") and text.endswith(b"}")
