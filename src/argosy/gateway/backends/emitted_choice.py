"""The one choice of a resumable stream: what the client received of it, and the events that complete it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import msgspec

from argosy.gateway.backends.backend_adapter import CHAT_PATH
from argosy.protocol import format_event

_COMMON_FIELDS = ("id", "object", "created", "model", "system_fingerprint")
_TOKEN_ID_FIELDS = ("token_ids", "prompt_token_ids")
RESUMED_FINGERPRINT = "resumed"
"""`system_fingerprint` of the events after a resume.

By the OpenAI API a changed fingerprint means that the same seed may give another result.
"""


@dataclass(slots=True)
class StopStringFilter:
    """Filter that holds back the end of a text while it may become a stop string. One filter covers all servers.

    The gateway applies it for servers that are asked to keep stop strings in their text. A server that searches for
    them itself holds text back although it has sent the token ids. Text and ids of a broken stream would then end at
    different places.
    """

    stop_strings: tuple[str, ...]
    held_text: str = ""
    """Text that arrived and that the client has not received."""
    _max_held_chars: int = field(init=False)
    """Maximum number of characters that may be the beginning of a stop string."""

    def __post_init__(self) -> None:
        self._max_held_chars = max(map(len, self.stop_strings)) - 1

    def feed(self, text: str) -> str:
        """Add `text` and return the text that the client may receive now."""
        self.held_text += text
        free_chars = max(0, len(self.held_text) - self._max_held_chars)
        released, self.held_text = self.held_text[:free_chars], self.held_text[free_chars:]
        return released

    def finish(self, text: str, stop_string: object) -> str:
        """Return the rest of the text after the server ended it with `text`.

        Args:
            text: Last text of the server.
            stop_string: Stop string that ended it, which is removed; anything but a string removes nothing.
        """
        whole, self.held_text = self.held_text + text, ""
        return whole.removesuffix(stop_string) if isinstance(stop_string, str) else whole

    def match_across_resume(self, text: str) -> tuple[str, str] | None:
        """Find a stop string that starts in the held text and ends in `text`, which another server generated.

        The server that generated `text` cannot see such a stop string.

        Returns:
            The text before the stop string and the stop string; None if there is no match.
        """
        whole, last_start = self.held_text + text, len(self.held_text) - 1
        matches = {whole.find(stop, 0, last_start + len(stop)): stop for stop in self.stop_strings}
        matches.pop(-1, None)
        if not matches:
            return None
        self.held_text = ""
        return whole[: min(matches)], matches[min(matches)]


class EmittedChoice(msgspec.Struct, eq=False):
    """The choice that a client receives from servers without resume metadata. The object outlives these servers."""

    path: bytes
    first_chunk: dict[str, Any] | None = None
    """First chunk that the client received. All later events repeat its id and model."""
    text_pieces: list[str] = msgspec.field(default_factory=list)
    token_ids: list[int] = msgspec.field(default_factory=list)
    prompt_token_ids: array[int] | None = None
    has_token_ids: bool = True
    """Whether token ids are known for the whole text."""
    stop_filter: StopStringFilter | None = None
    """Filter for stop strings, if the gateway applies them instead of the server."""
    system_fingerprint: str = ""
    """Value that replaces `system_fingerprint` in later events; empty if they keep the first chunk's."""
    is_text_only: bool = True
    """Whether the choice has only text. Tool calls and reasoning cannot be resumed from a text."""
    is_finished: bool = False
    """Whether the client received the finish reason."""
    is_usage_delivered: bool = False
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    counts_at_last_text: tuple[int, int] = (0, 0)
    """Number of token ids and `output_tokens` when the last text arrived."""
    ends_on_token: bool = True
    """Whether the last text ends at a token boundary, because it arrived with at most one token id.

    The last of several ids may be half a character, which has no text yet.
    """
    delivered_id_count: int = 0
    """Number of token ids that the client received, if it requested them."""

    def restart(self) -> None:
        """Forget the output of a server that sent no text. The stream itself stays started."""
        self.token_ids.clear()
        self.prompt_token_ids = None
        self.has_token_ids = True
        self.output_tokens = 0
        self.counts_at_last_text, self.ends_on_token = (0, 0), True
        if self.stop_filter is not None:
            self.stop_filter.held_text = ""

    def record_text(self, id_count: int) -> None:
        """Record that an event carried text together with `id_count` token ids."""
        self.ends_on_token = id_count <= 1
        self.counts_at_last_text = len(self.token_ids), self.output_tokens

    def take_undelivered_ids(self, last_count: int) -> list[int]:
        """Return those of the last `last_count` ids that the client has not received, and mark them as delivered."""
        new = self.token_ids[max(self.delivered_id_count, len(self.token_ids) - last_count) :]
        self.delivered_id_count = max(self.delivered_id_count, len(self.token_ids))
        return new

    def drop_textless_tokens(self) -> None:
        """Drop the last tokens without text. They are parts of a character that the next server generates again.

        vLLM that resumes inside a character repeats the text of the whole prompt. Other servers may lose the
        character.
        """
        ids, self.output_tokens = self.counts_at_last_text
        del self.token_ids[ids:]

    def full_text(self) -> str:
        """Return the delivered text and the text that the stop string filter holds back."""
        return "".join(self.text_pieces) + (
            self.stop_filter.held_text if self.stop_filter is not None else ""
        )

    def common_fields(self) -> dict[str, Any]:
        """Return the fields that all events of this response share."""
        first = self.first_chunk or {}
        common = {name: first[name] for name in _COMMON_FIELDS if name in first}
        return common | (
            {"system_fingerprint": self.system_fingerprint} if self.system_fingerprint else {}
        )

    def build_usage(self) -> dict[str, int]:
        """Build the `usage` object for the prompt and the output of all servers."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
        }

    def build_choice(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        """Build a choice with more text, in the shape of the first chunk's choice."""
        choice = (
            dict(self.first_chunk["choices"][0]) if self.first_chunk is not None else {"index": 0}
        )
        choice |= {name: None for name in _TOKEN_ID_FIELDS if name in choice}
        choice["finish_reason"] = finish_reason
        if self.path == CHAT_PATH:
            return choice | {"delta": {"content": text} if text else {}}
        return choice | {"text": text}

    def build_held_event(self) -> bytes:
        """Build the event with the text that the stop string filter holds back; empty if there is none."""
        text = self.stop_filter.finish("", None) if self.stop_filter is not None else ""
        return (
            encode_event(self.common_fields() | {"choices": [self.build_choice(text, None)]})
            if text
            else b""
        )

    def build_finish_event(self, finish_reason: str) -> bytes:
        """Build the event that finishes the choice, with the text held back."""
        text = self.stop_filter.finish("", None) if self.stop_filter is not None else ""
        return encode_event(
            self.common_fields() | {"choices": [self.build_choice(text, finish_reason)]}
        )

    def build_usage_event(self) -> bytes:
        """Build the usage event."""
        return encode_event(self.common_fields() | {"choices": [], "usage": self.build_usage()})


def encode_event(chunk: dict[str, Any]) -> bytes:
    """Encode a chunk as a server-sent event."""
    return format_event(msgspec.json.encode(chunk))
