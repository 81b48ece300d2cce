"""Compaction of a conversation (`POST /v1/responses/compact`): a chat that summarises it, and its response."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from argosy.protocol.dialects.chat_output_reader import read_text
from argosy.protocol.dialects.chat_request import RenderedRequest, drop_unset
from argosy.protocol.dialects.dialect_output import OutputIdentity
from argosy.protocol.dialects.responses_input import InputTranslator
from argosy.protocol.dialects.responses_output import render_usage
from argosy.protocol.dialects.responses_requests import ReasoningCipher
from argosy.protocol.openai_requests import JsonObject

_PROMPT = (
    "Summarise the conversation so far for a colleague who continues it without seeing it. "
    "Keep the goal, decisions, facts, names, open questions and the next step. Write only the summary."
)
_SUMMARY_PREFIX = "Summary of the conversation so far:\n"


class CompactRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/responses/compact`."""

    model: str | None = None
    input: str | list[JsonObject] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None


def translate_compact_request(
    request: CompactRequest,
    cipher: ReasoningCipher,
    identity: OutputIdentity,
    items: Sequence[JsonObject],
    history: Sequence[JsonObject],
) -> RenderedRequest:
    """Translate a request to a chat that summarises the conversation. Arguments are those of a response.

    The response has the summary in one encrypted item, which a later request has as its first input.

    Raises:
        ApiError: 400 if the conversation cannot be expressed as a chat.
    """
    translator = InputTranslator(cipher.decrypt)
    messages = translator.translate(request.instructions, history, items)
    fields = {
        "model": request.model,
        "messages": [*messages, {"role": "user", "content": _PROMPT}],
        "stream": False,
        "prompt_cache_key": request.prompt_cache_key,
        "service_tier": request.service_tier,
    }

    def render(response: bytes) -> bytes:
        summary, tokens = read_text(response)
        item = {
            "id": f"cmp_{identity.id}",
            "type": "compaction",
            "encrypted_content": cipher.encrypt(_SUMMARY_PREFIX + summary),
        }
        compacted = {
            "id": f"resp_{identity.id}",
            "object": "response.compaction",
            "created_at": identity.created,
            "output": [item],
            "usage": render_usage(tokens),
        }
        return msgspec.json.encode(compacted)

    ignored = tuple(translator.ignored)
    return RenderedRequest(body=drop_unset(fields), render=render, ignored=ignored)
