"""What a client was told of an answer by servers that keep no journal, and the events that tell it more."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import msgspec

from argosy.gateway.backends.backend_adapter import CHAT_PATH
from argosy.gateway.backends.stop_string_filter import StopStringFilter
from argosy.protocol import format_event

_COMMON_FIELDS = ("id", "object", "created", "model", "system_fingerprint")
_TOKEN_ID_FIELDS = ("token_ids", "prompt_token_ids")
RESUMED_FINGERPRINT = "carried-on"
"""The `system_fingerprint` of events after a seam: with it the API says that a seed need not give the same again."""


@dataclass(slots=True)
class EmittedChoice:
    """One choice of one answer; survives the servers that gave it."""

    path: bytes
    first_chunk: dict[str, Any] | None = None
    """The first event: all that follow must be of one answer with it."""
    text_pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: array[int] | None = None
    has_token_ids: bool = True
    """All of the text came with its ids."""
    stop_filter: StopStringFilter | None = None
    """Where the gateway keeps the stop strings."""
    system_fingerprint: str = ""
    """What the events say from now on, instead of what the first said."""
    is_text_only: bool = True
    """No tool call, no reasoning: nothing that a text cannot carry on."""
    is_finished: bool = False
    """Its finish reason was told."""
    is_usage_delivered: bool = False
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    counts_at_last_text: tuple[int, int] = (0, 0)
    """Ids and tokens that had come when the last text had."""
    ends_on_token: bool = True
    """That text ends where its ids do: it came with one. Of several the last may be half a character, without text."""
    delivered_id_count: int = 0
    """Ids that the client has been given, if it asked for them."""

    def restart(self) -> None:
        """No text was told yet: what else came is forgotten, but not that the answer has begun."""
        self.token_ids.clear()
        self.prompt_token_ids = None
        self.has_token_ids = True
        self.output_tokens = 0
        self.counts_at_last_text, self.ends_on_token = (0, 0), True
        if self.stop_filter is not None:
            self.stop_filter.held_text = ""

    def record_text(self, id_count: int) -> None:
        """An event has brought text, with so many ids."""
        self.ends_on_token = id_count <= 1
        self.counts_at_last_text = len(self.token_ids), self.output_tokens

    def take_undelivered_ids(self, last_count: int) -> list[int]:
        """Of so many ids that came last, those that the client has not been given: they count as given now."""
        new = self.token_ids[max(self.delivered_id_count, len(self.token_ids) - last_count) :]
        self.delivered_id_count = max(self.delivered_id_count, len(self.token_ids))
        return new

    def drop_textless_tokens(self) -> None:
        """Tokens that came without text are parts of a character, which the next server gives anew.

        From within one vLLM goes on with the text of its whole prompt, and others may lose that character.
        """
        ids, self.output_tokens = self.counts_at_last_text
        del self.token_ids[ids:]

    def full_text(self) -> str:
        """What was told, and what is held back."""
        return "".join(self.text_pieces) + (
            self.stop_filter.held_text if self.stop_filter is not None else ""
        )

    def common_fields(self) -> dict[str, Any]:
        """What the events of this answer have in common."""
        first = self.first_chunk or {}
        head = {name: first[name] for name in _COMMON_FIELDS if name in first}
        return head | (
            {"system_fingerprint": self.system_fingerprint} if self.system_fingerprint else {}
        )

    def build_usage(self) -> dict[str, int]:
        """Tokens of the prompt and of all that was told."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
        }

    def build_choice(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        """A choice that tells more, in the shape of the first event's."""
        shape = (
            dict(self.first_chunk["choices"][0]) if self.first_chunk is not None else {"index": 0}
        )
        shape |= {name: None for name in _TOKEN_ID_FIELDS if name in shape}
        shape["finish_reason"] = finish_reason
        if self.path == CHAT_PATH:
            return shape | {"delta": {"content": text} if text else {}}
        return shape | {"text": text}

    def build_held_event(self) -> bytes:
        """The event that tells what is held back of the choice, nothing where that is nothing."""
        text = self.stop_filter.finish("", None) if self.stop_filter is not None else ""
        return (
            encode_event(self.common_fields() | {"choices": [self.build_choice(text, None)]})
            if text
            else b""
        )

    def build_finish_event(self, finish_reason: str) -> bytes:
        """The event that ends the choice, with what was held back of it."""
        text = self.stop_filter.finish("", None) if self.stop_filter is not None else ""
        return encode_event(
            self.common_fields() | {"choices": [self.build_choice(text, finish_reason)]}
        )

    def build_usage_event(self) -> bytes:
        """The event that tells the usage."""
        return encode_event(self.common_fields() | {"choices": [], "usage": self.build_usage()})


def encode_event(chunk: dict[str, Any]) -> bytes:
    """As an event."""
    return format_event(msgspec.json.encode(chunk))
