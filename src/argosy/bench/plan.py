"""Load plan: data that states which requests are sent when, with which prompts and lengths."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import msgspec

RequestPhase = Literal["warmup", "ramp", "measured"]


class SyntheticSpan(msgspec.Struct, frozen=True):
    """Span of `tokens` synthetic tokens, generated from `seed`. Equal spans have equal text."""

    seed: int
    tokens: int


class SyntheticPrompt(msgspec.Struct, frozen=True, tag="spans"):
    """Synthetic prompt, made of consecutive spans."""

    spans: tuple[SyntheticSpan, ...]

    @property
    def tokens(self) -> int:
        """Intended length in tokens."""
        return sum(span.tokens for span in self.spans)


class TextPrompt(msgspec.Struct, frozen=True, tag="text"):
    """Prompt from a file, unchanged."""

    text: str


class ChatPrompt(msgspec.Struct, frozen=True, tag="messages"):
    """Conversation from a file, unchanged, for the chat API."""

    messages: tuple[dict[str, Any], ...]


PlannedPrompt = SyntheticPrompt | TextPrompt | ChatPrompt


class PlannedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Planned request. A later turn of a conversation is sent after the history of its earlier turns."""

    index: int
    """Index in the plan. The same request has the same index in every run of the plan."""
    session: int
    turn: int = 0
    at_s: float | None = None
    """Scheduled send in seconds after the start. None sends the request when a concurrency slot is free (closed loop),
    or `think_s` after the previous response."""
    think_s: float = 0.0
    prompt: PlannedPrompt
    output_tokens: int
    phase: RequestPhase = "measured"


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Conversations in the order of their starts. Most have one turn."""

    warmup: tuple[PlannedRequest, ...] = ()
    """Warm-up requests, which are sent at once before all others and waited for."""
    sessions: tuple[tuple[PlannedRequest, ...], ...]
    concurrency: int | None = None
    """Maximum number of requests in flight. Without times in the plan it is exactly this number (closed loop)."""
    ramp_s: float = 0.0
    """Requests scheduled before this time are not measured."""
    duration_s: float | None = None
    """A closed loop starts no request after this time."""

    @property
    def request_count(self) -> int:
        """Number of requests without warm-up."""
        return sum(len(session) for session in self.sessions)

    def digest(self) -> str:
        """Return a hash of the plan. Equal plans have equal digests."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=8).hexdigest()


def derive_seed(*parts: int) -> int:
    """Derive a seed below 2**63 from seeds and indices. Different parts give different seeds."""
    packed = b"".join(part.to_bytes(16, "little", signed=True) for part in parts)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1
