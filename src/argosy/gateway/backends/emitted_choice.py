"""What a client was told of an answer by servers that keep no journal, and the events that tell it more."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import msgspec

from argosy.gateway.backends.backend_adapter import CHAT_PATH
from argosy.gateway.backends.stop_string_filter import StopGate
from argosy.protocol import event

_HEAD = ("id", "object", "created", "model", "system_fingerprint")
_IDS = ("token_ids", "prompt_token_ids")
CARRIED_ON = "carried-on"
"""The `system_fingerprint` of events after a seam: with it the API says that a seed need not give the same again."""


@dataclass(slots=True)
class Told:
    """One choice of one answer; survives the servers that gave it."""

    path: bytes
    first: dict[str, Any] | None = None
    """The first event: all that follow must be of one answer with it."""
    text: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    prompt_ids: array[int] | None = None
    has_ids: bool = True
    """All of the text came with its ids."""
    gate: StopGate | None = None
    """Where the gateway keeps the stop strings."""
    fingerprint: str = ""
    """What the events say from now on, instead of what the first said."""
    only_text: bool = True
    """No tool call, no reasoning: nothing that a text cannot carry on."""
    finished: bool = False
    """Its finish reason was told."""
    usage_told: bool = False
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    said: tuple[int, int] = (0, 0)
    """Ids and tokens that had come when the last text had."""
    ends_whole: bool = True
    """That text ends where its ids do: it came with one. Of several the last may be half a character, without text."""
    shown: int = 0
    """Ids that the client has been given, if it asked for them."""

    def begin_again(self) -> None:
        """No text was told yet: what else came is forgotten, but not that the answer has begun."""
        self.ids.clear()
        self.prompt_ids = None
        self.has_ids = True
        self.tokens = 0
        self.said, self.ends_whole = (0, 0), True
        if self.gate is not None:
            self.gate.held = ""

    def says(self, ids: int) -> None:
        """An event has brought text, with so many ids."""
        self.ends_whole = ids <= 1
        self.said = len(self.ids), self.tokens

    def show(self, last: int) -> list[int]:
        """Of so many ids that came last, those that the client has not been given: they count as given now."""
        new = self.ids[max(self.shown, len(self.ids) - last) :]
        self.shown = max(self.shown, len(self.ids))
        return new

    def forget_unsaid(self) -> None:
        """Tokens that came without text are parts of a character, which the next server gives anew.

        From within one vLLM goes on with the text of its whole prompt, and others may lose that character.
        """
        ids, self.tokens = self.said
        del self.ids[ids:]

    def whole_text(self) -> str:
        """What was told, and what is held back."""
        return "".join(self.text) + (self.gate.held if self.gate is not None else "")

    def head(self) -> dict[str, Any]:
        """What the events of this answer have in common."""
        first = self.first or {}
        head = {name: first[name] for name in _HEAD if name in first}
        return head | ({"system_fingerprint": self.fingerprint} if self.fingerprint else {})

    def usage(self) -> dict[str, int]:
        """Tokens of the prompt and of all that was told."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens,
            "total_tokens": self.prompt_tokens + self.tokens,
        }

    def choice(self, text: str, finish: str | None) -> dict[str, Any]:
        """A choice that tells more, in the shape of the first event's."""
        shape = dict(self.first["choices"][0]) if self.first is not None else {"index": 0}
        shape |= {name: None for name in _IDS if name in shape}
        shape["finish_reason"] = finish
        if self.path == CHAT_PATH:
            return shape | {"delta": {"content": text} if text else {}}
        return shape | {"text": text}

    def held_event(self) -> bytes:
        """The event that tells what is held back of the choice, nothing where that is nothing."""
        text = self.gate.end("", None) if self.gate is not None else ""
        return encode(self.head() | {"choices": [self.choice(text, None)]}) if text else b""

    def finish_event(self, reason: str) -> bytes:
        """The event that ends the choice, with what was held back of it."""
        text = self.gate.end("", None) if self.gate is not None else ""
        return encode(self.head() | {"choices": [self.choice(text, reason)]})

    def usage_event(self) -> bytes:
        """The event that tells the usage."""
        return encode(self.head() | {"choices": [], "usage": self.usage()})


def encode(chunk: dict[str, Any]) -> bytes:
    """As an event."""
    return event(msgspec.json.encode(chunk))
