"""Pinned prompts: requests whose answers a new version of a pool must give before it gets traffic."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_TEXT = 100_000


class ExpectedText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conditions for an answer, which must meet all that are given.

    Raises:
        ValueError: Nothing is expected, or the regular expression is invalid.
    """

    contains: Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)] | None = None
    """Text that the answer contains."""
    regex: Annotated[str, Meta(min_length=1, max_length=1000)] | None = None
    """Regular expression in Python's syntax that matches a part of the answer."""

    def __post_init__(self) -> None:
        if self.contains is None and self.regex is None:
            raise ValueError("expect needs `contains`, `regex` or both")
        try:
            re.compile(self.regex or "")
        except re.error as error:
            raise ValueError(f"regex is invalid: {error}") from None


class PinnedMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Message of a pinned chat."""

    role: Literal["system", "user", "assistant"] = "user"
    content: Annotated[str, Meta(max_length=MAX_TEXT)]


class PinnedPrompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request at temperature 0 with a fixed seed, and the answer that is expected.

    Raises:
        ValueError: It has neither a prompt nor messages, or both.
    """

    prompt: Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)] | None = None
    """Text to complete. Use `messages` for a chat."""
    messages: Annotated[tuple[PinnedMessage, ...], Meta(max_length=100)] = ()
    """Messages of a chat. The model needs a chat template."""
    max_tokens: Annotated[int, Meta(ge=1, le=4096)] = 32
    """Longest answer."""
    expect: Literal["same"] | ExpectedText = "same"
    """`same` for the bytes that the stable version answers, if both versions have the same weights and arithmetic. With
    other weights the answers differ rightly, and only their absence is a failure; use `{contains: TEXT}` or
    `{regex: PATTERN}` there."""

    def __post_init__(self) -> None:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("a pinned prompt needs either `prompt` or `messages`")
