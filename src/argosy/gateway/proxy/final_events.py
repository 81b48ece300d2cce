"""The events that end an answer where a limit stops it: a finish reason for each choice, the usage, `[DONE]`."""

from __future__ import annotations

from typing import Any

import msgspec

from argosy.gateway.backends import Identity, shows_ids
from argosy.gateway.proxy.response_writers import usage
from argosy.gateway.request_context import CHAT, Journey
from argosy.protocol import SSE_DONE, event


def closing(journey: Journey, identity: Identity, reason: str) -> bytes:
    """The last events of an answer whose unfinished choices end for `reason`."""
    ask, delivered = journey.ask, journey.delivered
    empty: dict[str, Any] = {"delta": {}} if journey.api is CHAT else {"text": ""}
    ending = {**empty, "logprobs": None, "finish_reason": reason, "stop_reason": None}
    if shows_ids(ask):
        ending["token_ids"] = []
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": choice, **ending}]}
        for choice in range(ask.choices)
        if choice not in delivered.finished
    ]
    if ask.include_usage:
        chunks = [chunk | {"usage": None} for chunk in chunks]
        chunks.append({"choices": [], "usage": usage(delivered)})
    envelope = {
        "id": identity.id,
        "object": journey.api.chunk,
        "created": identity.created,
        "model": identity.model,
    }
    return b"".join(event(msgspec.json.encode(envelope | chunk)) for chunk in chunks) + SSE_DONE
