"""Responses and errors of Anthropic's Messages API, built from a chat's output."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from argosy.protocol.dialects.dialect_output import (
    MESSAGES_FIELDS,
    CallKind,
    DialectOutput,
    OutputIdentity,
    parse_call_arguments,
)
from argosy.protocol.errors import ApiError
from argosy.protocol.openai_responses import TokenUsage

_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_TOO_LONG_PREFIX = "prompt is too long: "
"""Start of the message by which Claude Code recognises that it has to compact the conversation."""
UNSUPPORTED_THREAD = "unsupported_thread"
_THREAD_DETAILS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Details of the error after which SDKs send the whole conversation. Without them they would raise it."""
_encode = msgspec.json.Encoder().encode


def encode_anthropic_error(error: ApiError, request_id: str) -> bytes:
    """Encode the body of an error response, which is also the data of an error event."""
    error = MESSAGES_FIELDS.rename(error)
    default_type = "api_error" if error.status >= 500 else "invalid_request_error"
    message = error.message
    if error.code == "context_length_exceeded":
        message = _TOO_LONG_PREFIX + message
    fields: dict[str, Any] = {
        "type": _ERROR_TYPES.get(error.status, default_type),
        "message": message,
        **error.details,
    }
    if error.code == UNSUPPORTED_THREAD:
        fields["details"] = _THREAD_DETAILS
    return _encode({"type": "error", "error": fields, "request_id": request_id or None})


class AnthropicOutput(DialectOutput):
    """Message of the Messages API, streamed or whole.

    Args:
        stop_sequences: Stop sequences of the request.
        max_tokens: The request's limit on output tokens; None if it is unknown.
        shows_thinking: Whether the request enabled thinking. If not, reasoning is left out, as clients that did not
            enable it expect text in the first block.
    """

    def __init__(
        self,
        stop_sequences: Sequence[str] = (),
        *,
        max_tokens: int | None = None,
        shows_thinking: bool = True,
    ) -> None:
        super().__init__()
        self._stop_sequences = stop_sequences
        self._max_tokens = max_tokens
        self._shows_thinking = shows_thinking
        self._message: dict[str, Any] = {}
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[str] = []
        """Text of the open block so far."""
        self._is_open = False
        """Whether the last block is open."""

    def start(self, identity: OutputIdentity, tokens: TokenUsage) -> None:
        # The first event of a replica has as many tokens as were ready, so the number would differ between runs.
        tokens = TokenUsage(
            tokens.prompt_tokens, tokens.cached_tokens, min(tokens.output_tokens, 1)
        )
        self._message = {
            "id": f"msg_{identity.id}",
            "type": "message",
            "role": "assistant",
            "model": identity.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(tokens),
        }
        self._send("message_start", message=self._message)

    def add_reasoning(self, text: str) -> None:
        if self._shows_thinking:
            self._open("thinking", {"thinking": "", "signature": ""})
            self._texts.append(text)
            self._send_delta("thinking_delta", thinking=text)

    def add_text(self, text: str, logprobs: Sequence[dict[str, Any]]) -> None:  # noqa: ARG002 - not in this API
        if text:
            self._open("text", {"text": ""})
            self._texts.append(text)
            self._send_delta("text_delta", text=text)

    def start_call(self, call_id: str, name: str, kind: CallKind) -> None:  # noqa: ARG002 - all functions
        self._close()
        tool_id = "toolu_" + call_id.removeprefix("call_")
        self._start_block({"type": "tool_use", "id": tool_id, "name": name, "input": {}})

    def add_call_text(self, text: str) -> None:
        self._texts.append(text)
        self._send_delta("input_json_delta", partial_json=text)

    def finish(self, finish_reason: str, stop_reason: int | str | None, tokens: TokenUsage) -> None:
        self._close()
        message = self._message
        message["content"] = self._blocks
        message["stop_reason"] = self._stop_reason(finish_reason, stop_reason, tokens)
        if message["stop_reason"] == "stop_sequence":
            message["stop_sequence"] = stop_reason
        message["usage"] = usage = _usage(tokens)
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        self._send("message_delta", delta=delta, usage=usage)
        self._send("message_stop")

    def fail(self, error: ApiError) -> None:
        self._unsent.append(_frame("error", encode_anthropic_error(error, "")))

    def heartbeat(self, event: bytes) -> bytes:  # noqa: ARG002 - this API has a type for them
        return _frame("ping", b'{"type":"ping"}')

    def build_response(self) -> dict[str, Any]:
        return self._message

    def _stop_reason(
        self, finish_reason: str, stop_reason: int | str | None, tokens: TokenUsage
    ) -> str:
        match finish_reason:
            case "stop" if stop_reason in self._stop_sequences:
                return "stop_sequence"
            case "stop" if self._blocks and self._blocks[-1]["type"] == "tool_use":
                return "tool_use"  # a chat ends with "stop" after a call that its tool choice named
            case "length" if stop_reason is None and 0 < tokens.output_tokens < (
                self._max_tokens or 0
            ):
                return "model_context_window_exceeded"
        return _STOP_REASONS.get(finish_reason, "end_turn")

    def _open(self, kind: str, fields: dict[str, Any]) -> None:
        """Start a block of this type, unless the open block has the type."""
        if not (self._is_open and self._blocks[-1]["type"] == kind):
            self._close()
            self._start_block({"type": kind, **fields})

    def _start_block(self, block: dict[str, Any]) -> None:
        self._send("content_block_start", index=len(self._blocks), content_block=block)
        self._blocks.append(block)
        self._is_open = True

    def _close(self) -> None:
        """End the open block, and give it its whole content."""
        if not self._is_open:
            return
        block, text = self._blocks[-1], "".join(self._texts)
        match block["type"]:
            case "tool_use":
                if not text:
                    self._send_delta("input_json_delta", partial_json="")
                block["input"] = parse_call_arguments(text)
            case "thinking":
                block["thinking"] = text
                block["signature"] = self._sign(text)
                self._send_delta("signature_delta", signature=block["signature"])
            case kind:
                block[kind] = text
        self._send("content_block_stop", index=len(self._blocks) - 1)
        self._texts, self._is_open = [], False

    def _sign(self, text: str) -> str:
        """Return the signature of a thinking block. Clients only send it back."""
        return hashlib.sha256(f"{self._message['id']}\0{text}".encode()).hexdigest()

    def _send_delta(self, kind: str, **fields: str) -> None:
        index = len(self._blocks) - 1
        self._send("content_block_delta", index=index, delta={"type": kind, **fields})

    def _send(self, kind: str, **fields: Any) -> None:  # noqa: ANN401 - any JSON
        self._unsent.append(_frame(kind, _encode({"type": kind, **fields})))


def _frame(kind: str, data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)


def _usage(tokens: TokenUsage) -> dict[str, Any]:
    """Return the counts in this API's sense, in which `input_tokens` excludes cached tokens."""
    usage: dict[str, Any] = {
        "input_tokens": tokens.prompt_tokens - tokens.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": tokens.cached_tokens,
        "output_tokens": tokens.output_tokens,
    }
    if tokens.reasoning_tokens:
        usage["output_tokens_details"] = {"thinking_tokens": tokens.reasoning_tokens}
    return usage
