"""Fake native replica that streams scripted deltas with resume metadata, and can be cut after any token.

Never compared with a native replica.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from argosy.protocol import SSE_DONE, format_comment, format_event
from tests.support.fake_upstream import FakeUpstream, UpstreamRequest

Delta = dict[str, Any]
PROMPT_TOKENS = 7


@dataclass(frozen=True, kw_only=True)
class NativeScript:
    """Output of a chat request's only choice."""

    deltas: list[Delta]
    """Delta of each token in order; an empty one for a token whose text the parser holds back."""
    finish_reason: str = "stop"
    warnings: list[dict[str, Any]] = field(default_factory=list)
    report: dict[str, Any] | None = None
    content: dict[str, Any] = field(default_factory=dict)
    """Part of the report that is sent only if the gateway logs content."""

    @property
    def num_tokens(self) -> int:
        """Number of output tokens. The last one is the end-of-sequence token, which has no delta."""
        return len(self.deltas) + 1


@dataclass
class NativeUpstream(FakeUpstream):
    """Replica of kind `argosy` that answers every chat with one script."""

    native_script: NativeScript = field(default_factory=lambda: NativeScript(deltas=[]))
    cut_after: int | None = None
    """Reset the connection of the next stream after this number of tokens; None for never."""

    def __post_init__(self) -> None:
        self.script = self._stream

    async def _stream(self, request: UpstreamRequest) -> None:
        script, encoder = self.native_script, EventEncoder(request)
        resumed = len((request.body.get("resume") or {}).get("token_ids", []))
        request.start_stream()
        request.send_chunk(format_comment(b"argosy prompt %d 0" % PROMPT_TOKENS))
        if not resumed:
            request.send_chunk(encoder.encode_choice({"role": "assistant", "content": ""}))
        for number in range(resumed, script.num_tokens + 1):
            if number == self.cut_after:
                self.cut_after = None
                await request.writer.drain()
                request.writer.transport.abort()
                return
            if number < script.num_tokens:
                request.send_chunk(encoder.encode_token(script, number))
        if request.wants_usage:
            request.send_chunk(encoder.encode_usage(script))
        request.send_chunk(SSE_DONE)
        request.send_chunk(b"")


class EventEncoder:
    """Encoder of the events for one request, as a replica writes them."""

    def __init__(self, request: UpstreamRequest) -> None:
        response_id, created = request.headers["x-argosy-response-id"].split()
        self._envelope: dict[str, Any] = {
            "id": response_id,
            "object": "chat.completion.chunk",
            "created": int(created),
            "model": request.body["model"],
        }
        self._null_usage: dict[str, Any] = {"usage": None} if request.wants_usage else {}
        self._requested_report = request.headers.get("x-argosy-report")

    def encode_token(self, script: NativeScript, number: int) -> bytes:
        """Encode the events and the metadata of a token."""
        ids = b"argosy 0 %d" % (100 + number)
        if number < len(script.deltas):
            delta = script.deltas[number]
            return (self.encode_choice(delta) if delta else b"") + format_comment(ids)
        event = self.encode_choice({}, script.finish_reason, script.warnings)
        metadata = format_comment(ids + b" " + script.finish_reason.encode())
        return event + self._encode_report(script) + metadata

    def encode_choice(
        self,
        delta: Delta,
        finish_reason: str | None = None,
        warnings: list[dict[str, Any]] | None = None,
    ) -> bytes:
        """Encode a chunk with one choice."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        if finish_reason is not None:
            choice["stop_reason"] = None
        more: dict[str, Any] = {"warnings": warnings} if warnings else {}
        return self._encode({"choices": [choice]} | more | self._null_usage)

    def encode_usage(self, script: NativeScript) -> bytes:
        """Encode the usage event."""
        usage: dict[str, Any] = {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": script.num_tokens,
            "total_tokens": PROMPT_TOKENS + script.num_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        if script.report is not None and "reasoning_tokens" in script.report:
            accepted, rejected = script.report["prediction"]
            usage["completion_tokens_details"] = {
                "reasoning_tokens": script.report["reasoning_tokens"],
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": rejected,
            }
        return self._encode({"choices": [], "usage": usage})

    def _encode_report(self, script: NativeScript) -> bytes:
        if script.report is None or self._requested_report is None:
            return b""
        report = script.report | (script.content if self._requested_report == "content" else {})
        return format_comment(b"argosy report " + json.dumps(report).encode())

    def _encode(self, chunk: dict[str, Any]) -> bytes:
        return format_event(json.dumps(self._envelope | chunk, separators=(",", ":")).encode())


def start_call(index: int, name: str, kind: str = "function") -> Delta:
    """Delta that starts a tool call."""
    body = {"name": name, "arguments" if kind == "function" else "input": ""}
    return {"tool_calls": [{"index": index, "id": f"call_{index}", "type": kind, kind: body}]}


def continue_call(index: int, text: str, kind: str = "function") -> Delta:
    """Delta with more arguments of a tool call."""
    field_name = "arguments" if kind == "function" else "input"
    return {"tool_calls": [{"index": index, kind: {field_name: text}}]}


def think(text: str) -> Delta:
    """Delta with reasoning."""
    return {"reasoning_content": text, "reasoning": text}
