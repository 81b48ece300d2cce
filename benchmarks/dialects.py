"""Measure what other API dialects cost a gateway: CPU of each translated chunk, and disk of stored conversations.

    python -m benchmarks.dialects [--chunks 20000] [--responses 1000]

Prints a JSON line for each dialect, with the median over rounds, and one for conversations of ten turns in SQLite.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

from argosy.protocol.dialects import (
    AnthropicOutput,
    DialectOutput,
    DialectTranslator,
    OllamaOutput,
    OutputIdentity,
    ReasoningCipher,
    ResponsesRequest,
    parse_responses_request,
    translate_responses_request,
)
from argosy.store import ItemOwner, StoredResponse, open_store

ROUNDS = 7
IDENTITY = OutputIdentity(id="0123456789abcdef", created=1_760_000_000, model="big")
CHUNK = {
    "id": "chatcmpl-1",
    "object": "chat.completion.chunk",
    "created": 1_760_000_000,
    "model": "big",
    "choices": [{"index": 0, "delta": {"content": " word"}, "finish_reason": None}],
}
END = CHUNK | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
TURNS = 10
TURN_CHARACTERS = 1_000
"""Characters of the text of a turn, for the user and for the model each."""


def build_output(dialect: str) -> DialectOutput:
    """Return the builder of a response in a dialect."""
    if dialect == "anthropic":
        return AnthropicOutput([])
    if dialect == "ollama":
        return OllamaOutput("big:latest", "chat", time.time)
    request, _ = parse_responses_request(
        ResponsesRequest, b'{"model": "big", "input": "Hi", "stream": true}'
    )
    cipher = ReasoningCipher(lambda text: text, lambda text: text)
    return translate_responses_request(request, cipher, request.input_items()).output


def measure_dialect(dialect: str, chunks: int) -> dict[str, object]:
    """Translate a stream with one chunk at a time, as it arrives from a replica."""
    event = b"data: " + json.dumps(CHUNK).encode() + b"\n\n"
    end = b"data: " + json.dumps(END).encode() + b"\n\ndata: [DONE]\n\n"
    microseconds = []
    for _ in range(ROUNDS):
        translator = DialectTranslator(build_output(dialect), IDENTITY)
        started_at = time.process_time()
        for _ in range(chunks):
            translator.translate_events(event)
        translator.translate_events(end)
        asyncio.run(translator.finish_stream())
        microseconds.append((time.process_time() - started_at) / chunks * 1e6)
    return {"dialect": dialect, "us_per_chunk": round(statistics.median(microseconds), 2)}


def measure_conversations(responses: int) -> dict[str, object]:
    """Store conversations in which each response continues the one before."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "argosy.db"
        store = open_store(f"sqlite:///{path}")
        store.migrate()
        owner = ItemOwner("org", "project")
        for number in range(responses):
            turn = number % TURNS
            store.responses.create(
                owner,
                StoredResponse(
                    id=f"resp_{number:032x}",
                    status="completed",
                    previous=f"resp_{number - 1:032x}" if turn else None,
                    body={"object": "response", "model": "big", "temperature": 0.5},
                    input=[build_message(number, "user")],
                    output=[build_message(number, "assistant")],
                ),
                30 * 86_400,
            )
        store.close()
        stored_bytes = sum(file.stat().st_size for file in Path(folder).iterdir())
    return {
        "conversations": responses // TURNS,
        "turns": TURNS,
        "bytes_per_turn": round(stored_bytes / responses),
        "text_bytes_per_turn": 2 * TURN_CHARACTERS,
    }


def build_message(number: int, role: str) -> dict[str, object]:
    """Return a message as the Responses API stores it."""
    kind = "input_text" if role == "user" else "output_text"
    text = f"{number} " + "x" * (TURN_CHARACTERS - len(str(number)) - 1)
    content = [{"type": kind, "text": text}]
    return {"id": f"msg_{role}_{number:024x}", "type": "message", "role": role, "content": content}


def main() -> None:
    """Print a JSON line for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=20_000)
    parser.add_argument("--responses", type=int, default=1_000)
    options = parser.parse_args()
    for dialect in ("responses", "anthropic", "ollama"):
        print(json.dumps(measure_dialect(dialect, options.chunks)), flush=True)
    print(json.dumps(measure_conversations(options.responses)), flush=True)


if __name__ == "__main__":
    main()
