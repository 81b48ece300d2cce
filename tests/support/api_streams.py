"""Raw streams of all APIs, without what differs between two streams of the same response."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2

VOLATILE = {
    *("id", "item_id", "response_id", "created", "created_at", "completed_at", "sequence_number"),
    *("total_duration", "load_duration", "prompt_eval_duration", "eval_duration"),
}
"""Ids, times and the numbers of events."""
MAX_TOKENS = 500


@dataclass
class ApiStream:
    """Events of a stream. Text is joined, because a server may send several tokens in one event."""

    request: str = field(default="", compare=False)
    """Id of the request in the gateway's ledger and traces."""
    text: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    """Events without text and volatile fields. Those of adjacent deltas are one."""

    def add_line(self, line: str) -> None:
        """Add a line of an SSE or NDJSON stream. Comments, event names and the end marker are no events."""
        data = line.removeprefix("data: ")
        if not data.startswith("{"):
            return
        event = without_volatile(json.loads(data))
        for holder, name in (
            (event, "delta"),
            (event.get("delta"), "text"),
            (event.get("message"), "content"),
            *((choice["delta"], "content") for choice in event.get("choices", ())),
        ):
            if isinstance(holder, dict) and isinstance(holder.get(name), str):
                self.text += holder.pop(name)
        if self.events[-1:] != [event]:
            self.events.append(event)


def without_volatile(value: Any) -> Any:  # noqa: ANN401 - any JSON
    """Return a JSON value without volatile fields."""
    match value:
        case dict():
            kept = value.items()
            return {name: without_volatile(item) for name, item in kept if name not in VOLATILE}
        case list():
            return [without_volatile(item) for item in value]
    return value


def stream_requests(model: str, prompt: str, salt: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return path and body of a greedy streaming request by API. No prefix is cached for a new `salt`.

    The output is limited, because a small replica has KV memory for few requests that may fill the context.
    """
    messages = [{"role": "user", "content": prompt}]
    common = {"model": model, "stream": True, "cache_salt": salt}
    greedy, chat = {"temperature": 0, **common}, {"messages": messages}
    usage = {"stream_options": {"include_usage": True}}
    return {
        "chat": ("/v1/chat/completions", greedy | chat | usage | {"max_tokens": MAX_TOKENS}),
        "responses": ("/v1/responses", greedy | {"input": prompt, "max_output_tokens": MAX_TOKENS}),
        "anthropic": ("/v1/messages", greedy | chat | {"max_tokens": MAX_TOKENS}),
        "ollama": (
            "/api/chat",
            common | chat | {"options": {"temperature": 0, "num_predict": MAX_TOKENS}},
        ),
    }


async def read_api_stream(
    client: httpx2.AsyncClient,
    path: str,
    body: dict[str, Any],
    on_text: Callable[[], object] = lambda: None,
) -> ApiStream:
    """Read a stream. `on_text` is called after each line once there is text."""
    result = ApiStream()
    async with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        result.request = response.headers["x-argosy-request"]
        async for line in response.aiter_lines():
            result.add_line(line)
            if result.text:
                on_text()
    return result
