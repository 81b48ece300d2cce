"""Stop strings applied by the gateway, for servers that are asked to keep them in their text.

A server that searches for stop strings itself holds text back although it has sent the token ids. Text and ids of
a broken stream would then end at different places.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class StopStringFilter:
    """Filter that holds back the end of a text while it may become a stop string. One filter covers all servers."""

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
