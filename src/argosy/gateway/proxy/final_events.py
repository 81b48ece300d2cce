"""The events that end an answer where a limit stops it: a finish reason for each choice, the usage, `[DONE]`."""

from __future__ import annotations

from typing import Any

import msgspec

from argosy.gateway.backends import ResponseIdentity, is_token_ids_requested
from argosy.gateway.proxy.response_writers import build_usage
from argosy.gateway.request_context import CHAT, RequestContext
from argosy.protocol import SSE_DONE, format_event


def build_final_events(
    context: RequestContext, stream_identity: ResponseIdentity, finish_reason: str
) -> bytes:
    """The last events of an answer whose unfinished choices end for `reason`."""
    ask, delivered = context.fields, context.delivered
    empty: dict[str, Any] = {"delta": {}} if context.api is CHAT else {"text": ""}
    ending = {**empty, "logprobs": None, "finish_reason": finish_reason, "stop_reason": None}
    if is_token_ids_requested(ask):
        ending["token_ids"] = []
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": choice, **ending}]}
        for choice in range(ask.choice_count)
        if choice not in delivered.finish_reasons
    ]
    if ask.include_usage:
        chunks = [chunk | {"usage": None} for chunk in chunks]
        chunks.append({"choices": [], "usage": build_usage(delivered)})
    envelope = {
        "id": stream_identity.id,
        "object": context.api.chunk_object_type,
        "created": stream_identity.created,
        "model": stream_identity.model,
    }
    return (
        b"".join(format_event(msgspec.json.encode(envelope | chunk)) for chunk in chunks) + SSE_DONE
    )
