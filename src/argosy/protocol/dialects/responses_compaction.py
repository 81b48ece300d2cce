"""Compaction of a conversation (`POST /v1/responses/compact`): a chat that summarises it, and its response."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from argosy.protocol.dialects.chat_request import TranslatedRequest, drop_unset
from argosy.protocol.dialects.dialect_output import (
    CallKind,
    DialectOutput,
    OutputEnd,
    OutputError,
    OutputIdentity,
    OutputTokens,
)
from argosy.protocol.dialects.responses_input import InputTranslator, normalize_input
from argosy.protocol.dialects.responses_output import render_usage
from argosy.protocol.dialects.responses_requests import ReasoningCipher
from argosy.protocol.dialects.responses_tools import translate_tools
from argosy.protocol.openai_requests import JsonObject
from argosy.protocol.parsing import parse_request_body

_PROMPT = (
    "Summarise the conversation so far for a colleague who continues it without seeing it. "
    "Keep the goal, decisions, facts, names, open questions and the next step. Write only the summary."
)
_SUMMARY_PREFIX = "Summary of the conversation so far:\n"


class CompactRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/responses/compact`."""

    model: str
    input: str | list[JsonObject] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None

    def input_items(self) -> list[JsonObject]:
        """Return the new input as items."""
        return normalize_input(self.input)


def parse_compact_request(
    body: bytes, *, refuse_unknown: bool = False
) -> tuple[CompactRequest, tuple[str, ...]]:
    """Parse the body. Returns the request and the paths of unknown fields.

    Raises:
        ApiError: 400 if the body is invalid.
    """
    return parse_request_body(CompactRequest, body, refuse_unknown=refuse_unknown)


def translate_compact_request(
    request: CompactRequest,
    cipher: ReasoningCipher,
    items: Sequence[JsonObject],
    history: Sequence[JsonObject],
) -> TranslatedRequest[CompactionOutput]:
    """Translate a request to a chat that summarises the conversation. Arguments are those of a response.

    Raises:
        ApiError: 400 if the conversation cannot be expressed as a chat.
    """
    translator = InputTranslator(translate_tools([]), cipher.decrypt)
    messages = translator.translate(request.instructions, history, items)
    fields = {
        "model": request.model,
        "messages": [*messages, {"role": "user", "content": _PROMPT}],
        "stream": False,
        "prompt_cache_key": request.prompt_cache_key,
        "service_tier": request.service_tier,
    }
    output = CompactionOutput(cipher.encrypt)
    return TranslatedRequest(
        body=drop_unset(fields), output=output, ignored=tuple(translator.ignored)
    )


class CompactionOutput(DialectOutput):
    """Response with the summary in one encrypted item, which a later request has as its first input.

    Args:
        encrypt: Encrypts the summary.
    """

    def __init__(self, encrypt: Callable[[str], str]) -> None:
        super().__init__()
        self._encrypt = encrypt
        self._identity: OutputIdentity | None = None
        self._texts: list[str] = []
        self._response: dict[str, Any] = {}

    def start(self, identity: OutputIdentity, tokens: OutputTokens) -> None:  # noqa: ARG002 - only at the end
        self._identity = identity

    def add_reasoning(self, text: str) -> None:
        """Leave reasoning out."""

    def add_text(self, text: str, logprobs: Sequence[dict[str, Any]]) -> None:  # noqa: ARG002 - not in this API
        self._texts.append(text)

    def start_call(self, call_id: str, name: str, kind: CallKind) -> None:
        """Leave calls out. The chat offers no tools."""

    def add_call_text(self, text: str) -> None:
        """Leave calls out."""

    def finish(self, end: OutputEnd) -> None:
        identity = self._identity
        assert identity is not None  # noqa: S101 - set by `start`
        summary = _SUMMARY_PREFIX + "".join(self._texts)
        item = {
            "id": f"cmp_{identity.id}",
            "type": "compaction",
            "encrypted_content": self._encrypt(summary),
        }
        self._response = {
            "id": f"resp_{identity.id}",
            "object": "response.compaction",
            "created_at": identity.created,
            "output": [item],
            "usage": render_usage(end.tokens),
        }

    def fail(self, error: OutputError) -> None:
        """Do nothing, since the response is never a stream."""

    def build_response(self) -> dict[str, Any]:
        return self._response
