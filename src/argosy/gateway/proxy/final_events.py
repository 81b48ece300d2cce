"""Final events of a response that the gateway ends: finish reasons, usage and `[DONE]`."""

from __future__ import annotations

from typing import Any

import msgspec

from argosy.gateway.backends import ResponseIdentity, is_token_ids_requested
from argosy.gateway.request_context import CHAT, RequestContext
from argosy.protocol import SSE_DONE, EarlyStopReason, format_event


def build_final_events(
    context: RequestContext,
    stream_identity: ResponseIdentity,
    stop_reason: EarlyStopReason | None = None,
) -> bytes:
    """Build the final events of a stream.

    Args:
        context: The request.
        stream_identity: Id, creation time and model of the stream's chunks.
        stop_reason: Why the choices that have not finished end early; None if only their length is the reason.
    """
    fields, delivered = context.fields, context.delivered
    empty_delta: dict[str, Any] = {"delta": {}} if context.api is CHAT else {"text": ""}
    final_choice = {
        **empty_delta,
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": stop_reason,
    }
    if is_token_ids_requested(fields):
        final_choice["token_ids"] = []
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": choice, **final_choice}]}
        for choice in range(fields.choice_count)
        if choice not in delivered.finish_reasons
    ]
    if fields.include_usage:
        chunks = [chunk | {"usage": None} for chunk in chunks]
        chunks.append({"choices": [], "usage": delivered.usage.to_wire()})
    envelope = {
        "id": stream_identity.id,
        "object": context.api.chunk_object_type,
        "created": stream_identity.created,
        "model": stream_identity.model,
    }
    return (
        b"".join(format_event(msgspec.json.encode(envelope | chunk)) for chunk in chunks) + SSE_DONE
    )
