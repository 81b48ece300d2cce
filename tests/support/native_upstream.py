"""Fake native replica that streams scripted deltas with resume metadata, and can be cut after any token."""

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
        script = self.native_script
        resumed = len((request.body.get("resume") or {}).get("token_ids", []))
        request.start_stream()
        request.send_chunk(format_comment(b"argosy prompt %d 0" % PROMPT_TOKENS))
        if not resumed:
            request.send_chunk(encode_choice({"role": "assistant", "content": ""}))
        for number in range(resumed, script.num_tokens):
            if number == self.cut_after:
                self.cut_after = None
                await request.writer.drain()
                request.writer.transport.abort()
                return
            is_last = number == len(script.deltas)
            request.send_chunk(self._encode_token(script, number, is_last=is_last))
        requested = request.headers.get("x-argosy-report")
        if script.report is not None and requested is not None:
            report = script.report | (script.content if requested == "content" else {})
            request.send_chunk(format_comment(b"argosy report " + json.dumps(report).encode()))
        request.send_chunk(SSE_DONE)
        request.send_chunk(b"")

    def _encode_token(self, script: NativeScript, number: int, *, is_last: bool) -> bytes:
        ids = b"argosy 0 %d" % (100 + number)
        if is_last:
            event = encode_choice({}, script.finish_reason, script.warnings)
            return event + format_comment(ids + b" " + script.finish_reason.encode())
        delta = script.deltas[number]
        return (encode_choice(delta) if delta else b"") + format_comment(ids)


def encode_choice(
    delta: Delta, finish_reason: str | None = None, warnings: list[dict[str, Any]] | None = None
) -> bytes:
    """Encode a chunk with one choice, as a replica writes it."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    if finish_reason is not None:
        choice["stop_reason"] = None
    chunk: dict[str, Any] = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [choice],
    }
    if warnings:
        chunk["warnings"] = warnings
    return format_event(json.dumps(chunk, separators=(",", ":")).encode())


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
