"""Output of a chat as the replica sends it: whole, and as a stream with any division into deltas."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

CHAT_IDENTITY = {"id": "chatcmpl-0123456789abcdef", "created": 1_760_000_000, "model": "big"}
USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 9,
    "total_tokens": 29,
    "prompt_tokens_details": {"cached_tokens": 5},
    "completion_tokens_details": {"reasoning_tokens": 3},
}


@dataclass(frozen=True)
class Call:
    """Tool call of an output."""

    name: str
    text: str
    is_custom: bool = False


@dataclass(frozen=True)
class ChatOutput:
    """Output of one chat: reasoning, then text, then tool calls."""

    reasoning: str = ""
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    finish_reason: str = "stop"
    stop_reason: str | None = None

    def body(self) -> bytes:
        """Return the whole response."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text or None}
        if self.reasoning:
            message |= {"reasoning_content": self.reasoning, "reasoning": self.reasoning}
        if self.calls:
            message["tool_calls"] = [
                self._call(number, call, call.text) for number, call in enumerate(self.calls)
            ]
        choice = {"index": 0, "message": message, **self._ending()}
        return json.dumps({**CHAT_IDENTITY, "choices": [choice], "usage": USAGE}).encode()

    def stream(self, piece_chars: int = 3, *, interleaves_calls: bool = False) -> bytes:
        """Return the stream, with at most `piece_chars` characters in each delta.

        If `interleaves_calls`, all calls start before their text, of which each gets one piece in turn.
        """
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": None}]
        deltas += [
            {"reasoning_content": piece, "reasoning": piece}
            for piece in _pieces(self.reasoning, piece_chars)
        ]
        deltas += [{"content": piece} for piece in _pieces(self.text, piece_chars)]
        calls = [self._call_deltas(number, piece_chars) for number in range(len(self.calls))]
        rounds: Iterable[Iterable[dict[str, Any] | None]] = (
            zip_longest(*calls) if interleaves_calls else calls
        )
        deltas += [delta for one in rounds for delta in one if delta is not None]
        unfinished = {"logprobs": None, "finish_reason": None}
        choices = [{"index": 0, "delta": delta, **unfinished} for delta in deltas]
        choices.append({"index": 0, "delta": {}, "logprobs": None, **self._ending()})
        chunks: list[dict[str, Any]] = [{"choices": [one], "usage": None} for one in choices]
        chunks.append({"choices": [], "usage": USAGE})
        return (
            b"".join(
                b"data: " + json.dumps(CHAT_IDENTITY | chunk).encode() + b"\n\n" for chunk in chunks
            )
            + b"data: [DONE]\n\n"
        )

    def _call_deltas(self, number: int, piece_chars: int) -> list[dict[str, Any]]:
        call = self.calls[number]
        kind, name = ("custom", "input") if call.is_custom else ("function", "arguments")
        pieces = [{kind: {name: piece}} for piece in _pieces(call.text, piece_chars)]
        return [
            {"tool_calls": [{"index": number, **part}]}
            for part in [self._call(number, call, ""), *pieces]
        ]

    def _ending(self) -> dict[str, Any]:
        return {"finish_reason": self.finish_reason, "stop_reason": self.stop_reason}

    def _call(self, number: int, call: Call, text: str) -> dict[str, Any]:
        kind, name = ("custom", "input") if call.is_custom else ("function", "arguments")
        return {"id": f"call_{number:024}", "type": kind, kind: {"name": call.name, name: text}}


def _pieces(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]
