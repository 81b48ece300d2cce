"""Outcome of a non-streaming response that its body reveals: error, early end, finish reasons."""

from __future__ import annotations

from codecs import BOM_UTF8
from typing import Any

import msgspec

from argosy.gateway.backends.backend_adapter import INCOMPLETE_FINISH_REASONS
from argosy.gateway.backends.delivered_output import DeliveredOutput
from argosy.gateway.backends.stream_events import MALFORMED_EVENT_ERRORS, error_chunk_status
from argosy.gateway.request_fields import MAX_CHOICES


class _ChoiceFinish(msgspec.Struct):
    finish_reason: str | None = None
    stop_reason: Any = None


class _FinishBody(msgspec.Struct):
    choices: list[_ChoiceFinish] | None = None
    error: Any = None


def is_json_object(content: bytes) -> bool:
    """Whether `content` looks like one whole JSON object, not HTML, text, a truncated or a compressed body."""
    text = content.removeprefix(BOM_UTF8).strip()
    return text.startswith(b"{") and text.endswith(b"}")


def status_in_body(content: bytes) -> int:
    """Return the status that a 200 response stands for. A server may fail or refuse after it sent the head.

    Returns:
        The status of an error in the body, or 500 if it has none. 500 too for an incomplete response and for one
        with more than `MAX_CHOICES` choices. Otherwise 200.
    """
    try:
        body = msgspec.json.decode(content, type=_FinishBody)
    except MALFORMED_EVENT_ERRORS:
        return 200
    if not body.choices and body.error is not None:
        return error_chunk_status({"error": body.error}) or 500
    if len(body.choices or ()) > MAX_CHOICES:
        return 500
    reasons = {choice.finish_reason for choice in body.choices or ()}
    return 200 if reasons.isdisjoint(INCOMPLETE_FINISH_REASONS) else 500


def record_finish_reasons(content: bytes, delivered: DeliveredOutput) -> None:
    """Record the finish reasons of a non-streaming response, except those that are missing."""
    try:
        choices = msgspec.json.decode(content, type=_FinishBody).choices or ()
    except MALFORMED_EVENT_ERRORS:
        return
    for index, choice in enumerate(choices):
        if choice.finish_reason:
            delivered.record_finish(index, choice.finish_reason, choice.stop_reason)
