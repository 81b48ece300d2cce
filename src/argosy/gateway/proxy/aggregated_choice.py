"""Aggregation of one choice from the chunks of a native replica's stream."""

from __future__ import annotations

from typing import Any

import msgspec

_CALL_BODIES = {"function": "arguments", "custom": "input"}
"""Field of a tool call's body that arrives in pieces, by the type of the call."""


class _AggregatedCall(msgspec.Struct):
    """A tool call, aggregated from the deltas so far. Only the first delta has the id and the name."""

    id: str
    type: str
    name: str
    pieces: list[str] = []

    def build(self) -> dict[str, Any]:
        """Build the call as in a whole message."""
        body = {"name": self.name, _CALL_BODIES[self.type]: "".join(self.pieces)}
        return {"id": self.id, "type": self.type, self.type: body}


class AggregatedChoice(msgspec.Struct):
    """A choice, aggregated from the chunks so far."""

    text_parts: list[str] = []
    reasoning_parts: list[str] = []
    calls: dict[int, _AggregatedCall] = {}
    """Tool calls by their index."""
    function_name: str = ""
    """Name in the `function_call` of a request that used the older `functions`."""
    function_arguments: list[str] = []
    logprobs: dict[str, Any] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add_chunk(self, chunk: dict[str, Any]) -> None:
        """Add the choice's part of a chunk."""
        delta = chunk.get("delta", chunk)
        self.text_parts.append(delta.get("content") or chunk.get("text") or "")
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        if reasoning:
            self.reasoning_parts.append(reasoning)
        if delta.get("tool_calls"):
            for call in delta["tool_calls"]:
                self._add_call(call)
        function_call = delta.get("function_call")
        if function_call is not None:
            self.function_name += function_call.get("name", "")
            self.function_arguments.append(function_call["arguments"])
        if chunk.get("logprobs") is not None:
            self._add_logprobs(chunk["logprobs"])
        if "token_ids" in chunk:
            self.token_ids = self.token_ids or []
            self.token_ids += chunk["token_ids"]
        if "prompt_token_ids" in chunk:
            self.prompt_token_ids = chunk["prompt_token_ids"]
        if chunk["finish_reason"] is not None:
            self.finish_reason, self.stop_reason = chunk["finish_reason"], chunk["stop_reason"]

    def build_chat_choice(self, index: int) -> dict[str, Any]:
        """Build the choice of a whole chat completion."""
        text = "".join(self.text_parts)
        has_more = bool(self.calls or self.function_name or self.reasoning_parts)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if has_more and not text else text,
            "refusal": None,
        }
        if self.reasoning_parts:
            reasoning = "".join(self.reasoning_parts)
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if self.calls:
            message["tool_calls"] = [self.calls[number].build() for number in sorted(self.calls)]
        if self.function_name:
            arguments = "".join(self.function_arguments)
            message["function_call"] = {"name": self.function_name, "arguments": arguments}
        return {"index": index, "message": message, **self._tail()}

    def build_completion_choice(self, index: int) -> dict[str, Any]:
        """Build the choice of a whole text completion."""
        return {
            "index": index,
            "text": "".join(self.text_parts),
            **self._tail(),
            "prompt_token_ids": self.prompt_token_ids,
            "prompt_logprobs": None,
        }

    def _tail(self) -> dict[str, Any]:
        return {
            "logprobs": self.logprobs,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "token_ids": self.token_ids,
        }

    def _add_call(self, delta: dict[str, Any]) -> None:
        index = delta["index"]
        call = self.calls.get(index)
        if call is None:
            kind = delta["type"]
            call = _AggregatedCall(delta["id"], kind, delta[kind]["name"])
            self.calls[index] = call
        call.pieces.append(delta[call.type][_CALL_BODIES[call.type]])

    def _add_logprobs(self, logprobs: dict[str, Any]) -> None:
        aggregated = self.logprobs = self.logprobs or {}
        for name, values in logprobs.items():
            if isinstance(values, list):
                aggregated.setdefault(name, []).extend(values)
            else:
                aggregated[name] = values
