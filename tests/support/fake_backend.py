"""Fake upstream that speaks the wire format of one backend, with a deterministic model and faults on demand.

The model is a list of tokens. A request that resumes from a prefix of them, as text or as token ids, gets the rest.
Any other resume gets `WRONG_TOKENS`, so that a wrongly assembled response shows.

`backend_formats` says which formats were compared with real servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from tests.support.fake_upstream import (
    STREAM_HEAD,
    FakeUpstream,
    Json,
    UpstreamRequest,
    encode_chunk,
    listening,
)

ANSWER_TOKENS = ("Once", " upon ", "a", " time", ",", " said\n", "the", " cät", ".")
"""Some end with white space, which a model that resumes from text repeats."""
ANSWER_TEXT = "".join(ANSWER_TOKENS)
PROMPT_IDS = (901, 902, 903, 904)
FIRST_TOKEN_ID = 100
"""Token id of the first token of the answer; the others follow."""
WRONG_TOKENS = (" WRONG",)


@dataclass(frozen=True, slots=True)
class Fault:
    """Fault of one request after a number of events of its stream."""

    kind: Literal["disconnect", "stall", "error", "abort", "reject"]
    events: int = 0
    status: int = 503
    """Status of a rejection."""


@dataclass(slots=True)
class Generation:
    """Tokens generated for one request, from `offset` of the answer on."""

    offset: int
    tokens: tuple[str, ...]
    finish_reason: str
    prompt_tokens: int
    stop_string: str | None = None
    """Stop string that ended the generation."""

    @property
    def usage(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.tokens),
            "total_tokens": self.prompt_tokens + len(self.tokens),
        }


@dataclass
class FakeBackend(FakeUpstream):
    """Server of one backend; subclasses override what is specific to their format."""

    separates_probes: ClassVar[bool] = False
    owner: ClassVar[str] = ""
    model: ClassVar[str] = "cat"
    default_tokens: ClassVar[int] = 1000
    answer_tokens: ClassVar[tuple[str, ...]] = ANSWER_TOKENS
    """Answer of the model. A token without text is a part of the next token's character."""

    name: str = ""
    prompt_ids: tuple[int, ...] = PROMPT_IDS
    """Token ids of every prompt."""
    faults: deque[Fault] = field(default_factory=deque)
    """Faults of the next requests, shared by the backends that are served together."""
    num_running: int = 0
    num_waiting: int = 0
    kv_event_sources: Json = field(default_factory=dict)
    """Addresses of the KV event publishers, in the backend's format."""

    def __post_init__(self) -> None:
        self.script = self.respond

    # --- overridden by formats -------------------------------------------------------------------

    def load_pages(self) -> dict[str, object]:
        """Pages that identify the backend and report its load."""
        return {}

    def stream_events(self, request: UpstreamRequest, generation: Generation) -> Iterator[bytes]:
        """Yield the events of a stream."""
        raise NotImplementedError

    def build_response(self, request: UpstreamRequest, generation: Generation) -> Json:
        """Build a non-streaming response."""
        text = "".join(generation.tokens)
        message: Json = {"message": {"role": "assistant", "content": text}}
        choice = {
            "index": 0,
            "finish_reason": generation.finish_reason,
            **(message if request.is_chat else {"text": text}),
        }
        return {
            "id": "whole-1",
            "model": self.model,
            "choices": [choice],
            "usage": generation.usage,
        }

    def build_error(self, status: int, message: str) -> Json:
        """Build the body of an error, which is also the error event of a stream."""
        return {"error": {"message": message, "type": "InternalServerError", "code": status}}

    def rejection(self, request: UpstreamRequest) -> str | None:
        """Return why a request is invalid, or None if it is valid."""
        return None

    def continued_text(self, request: UpstreamRequest) -> str | None:
        """Return the text to resume from: empty for the start, None if unknown."""
        if not request.is_chat:
            prompt = request.body["prompt"]
            return prompt.removeprefix("Tell me") if isinstance(prompt, str) else None
        last = request.body["messages"][-1]
        if last["role"] != "assistant":
            return ""
        return last["content"] if self.continues_last_message(request.body) else None

    def continues_last_message(self, body: Json) -> bool:
        """Whether the model continues the last message of a chat."""
        return (
            bool(body.get("continue_final_message")) and body.get("add_generation_prompt") is False
        )

    # --- the model -------------------------------------------------------------------------------

    def generate(self, request: UpstreamRequest) -> Generation:
        """Generate the response of the model."""
        offset, prompt_tokens = self._find_offset(request), len(self.prompt_ids)
        tokens = WRONG_TOKENS if offset is None else self.answer_tokens[offset:]
        if offset and tokens and not isinstance(request.body.get("prompt"), list):
            before = "".join(self.answer_tokens[:offset])
            tokens = (before[len(before.rstrip()) :] + tokens[0], *tokens[1:])
        max_tokens = request.body.get("max_completion_tokens") or request.body.get("max_tokens")
        default = self.default_tokens if not request.is_chat else 1000
        limit = max_tokens if max_tokens and max_tokens > 0 else default  # llama.cpp: -1 is none
        finish_reason = "stop" if len(tokens) < limit else "length"
        offset = offset or 0
        return Generation(offset, tokens[:limit], finish_reason, prompt_tokens + offset)

    def _find_offset(self, request: UpstreamRequest) -> int | None:
        prompt = request.body.get("prompt")
        if isinstance(prompt, list):
            output_ids = prompt[len(self.prompt_ids) :]
            expected = [*self.prompt_ids, *range(FIRST_TOKEN_ID, FIRST_TOKEN_ID + len(output_ids))]
            return len(output_ids) if prompt == expected else None
        text = self.continued_text(request)
        counts = range(len(self.answer_tokens) + 1)
        prefixes = ["".join(self.answer_tokens[:count]).rstrip() for count in counts]
        is_known = text is not None and text.rstrip() in prefixes
        return prefixes.index(text.rstrip()) if text is not None and is_known else None

    # --- HTTP ------------------------------------------------------------------------------------

    def get_pages(self) -> dict[str, object]:
        card = {"id": self.model, "object": "model", "created": 1, "owned_by": self.owner}
        models = {"object": "list", "data": [card]}
        return {"/v1/models": models, "/health": {}, **self.load_pages()}

    async def respond(self, request: UpstreamRequest) -> None:
        """Respond to a generation, with the next fault if one is left."""
        fault = self.faults.popleft() if self.faults else None
        if fault is not None and fault.kind == "reject":
            request.send_page(fault.status, self.build_error(fault.status, "not now"))
            return
        rejection = self.rejection(request)
        if rejection is not None:
            request.send_page(400, self.build_error(400, rejection))
            return
        generation = self.generate(request)
        if not request.body.get("stream"):
            request.send_page(200, self.build_response(request, generation))
            return
        request.writer.write(STREAM_HEAD)
        for count, event in enumerate(self.stream_events(request, generation)):
            if fault is not None and count == fault.events:
                await self._fail(fault, request)
                return
            request.send_chunk(event)
            await request.writer.drain()
        if fault is not None:  # after the last event and before the end of the body
            await self._fail(fault, request)
            return
        request.writer.write(encode_chunk(b""))

    async def _fail(self, fault: Fault, request: UpstreamRequest) -> None:
        if fault.kind in {"error", "abort"}:
            choice: Json = {"index": 0, "text": "", "delta": {}, "finish_reason": "abort"}
            aborted = {"id": "x", "created": 7, "model": self.model, "choices": [choice]}
            error = self.build_error(500, "EngineCore died")
            request.send_chunk(sse(error if fault.kind == "error" else aborted))
            request.send_chunk(b"data: [DONE]\n\n")
            request.writer.write(encode_chunk(b""))
            return
        await request.writer.drain()
        if fault.kind == "stall":
            await asyncio.Event().wait()
        request.writer.close()


def sse(data: object) -> bytes:
    """Encode an event with compact JSON, as most backends do."""
    return (
        b"data: " + json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"
    )


@contextlib.asynccontextmanager
async def serve_backends(*backends: FakeBackend) -> AsyncIterator[None]:
    """Let backends listen on free ports and share the faults of the first one."""
    for backend in backends:
        backend.faults = backends[0].faults
    async with listening(*backends):
        yield
