"""A plan is data: which requests are sent when, with which prompts and lengths."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import msgspec

RequestPhase = Literal["warmup", "ramp", "measured"]


class SyntheticSpan(msgspec.Struct, frozen=True):
    """`tokens` synthetic tokens that are a function of `seed`; equal spans are equal text."""

    seed: int
    tokens: int


class SyntheticPrompt(msgspec.Struct, frozen=True, tag="spans"):
    """A synthetic prompt: its spans one after the other."""

    spans: tuple[SyntheticSpan, ...]

    @property
    def tokens(self) -> int:
        """The length that is aimed at."""
        return sum(span.tokens for span in self.spans)


class TextPrompt(msgspec.Struct, frozen=True, tag="text"):
    """A prompt out of a file, as it stands there."""

    text: str


class ChatPrompt(msgspec.Struct, frozen=True, tag="messages"):
    """A conversation out of a file, as it stands there; for the chat API."""

    messages: tuple[dict[str, Any], ...]


PlannedPrompt = SyntheticPrompt | TextPrompt | ChatPrompt


class PlannedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request. A turn after the first is sent with the conversation so far before its prompt."""

    index: int
    """Place in the plan; the same request has the same index in every run of the plan."""
    session: int
    turn: int = 0
    at_s: float | None = None
    """Scheduled send, in seconds after the start. None: when there is room (closed loop), or
    `think_s` after the answer before it."""
    think_s: float = 0.0
    prompt: PlannedPrompt
    output_tokens: int
    phase: RequestPhase = "measured"


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Conversations (most of one turn) in the order in which they begin."""

    warmup: tuple[PlannedRequest, ...] = ()
    """Sent before everything else, all at once, and waited for."""
    sessions: tuple[tuple[PlannedRequest, ...], ...]
    concurrency: int | None = None
    """Most requests at once; with no times in the plan, exactly so many (closed loop)."""
    ramp_s: float = 0.0
    """What is scheduled in the first so many seconds is not measured."""
    duration_s: float | None = None
    """A closed loop begins nothing after so many seconds."""

    @property
    def request_count(self) -> int:
        """Requests, without those that warm up."""
        return sum(len(session) for session in self.sessions)

    def digest(self) -> str:
        """A name for exactly this plan: equal for equal plans."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=8).hexdigest()


def derive_seed(*parts: int) -> int:
    """A seed below 2**63 out of seeds and places; different parts, different seeds."""
    packed = b"".join(part.to_bytes(16, "little", signed=True) for part in parts)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1
