"""Stop strings, kept by the gateway for servers that are asked to leave them in their text.

A server that looks for stop strings itself holds text back whose token ids it has told, so text and ids would not end
at the same place where it breaks off.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class StopStringFilter:
    """The end of one answer's text, over all servers that give it: what could become a stop string is held back."""

    stop_strings: tuple[str, ...]
    held_text: str = ""
    """Text that came and that the client has not been given."""
    _max_held_chars: int = field(init=False)
    """Characters that may be the beginning of a stop string."""

    def __post_init__(self) -> None:
        self._max_held_chars = max(map(len, self.stop_strings)) - 1

    def feed(self, text: str) -> str:
        """What the client may have, now that `text` has come too."""
        self.held_text += text
        free = max(0, len(self.held_text) - self._max_held_chars)
        passed, self.held_text = self.held_text[:free], self.held_text[free:]
        return passed

    def finish(self, text: str, stop_string: object) -> str:
        """What the client still gets when the server ended with `text`, at the string `stop` if it is one."""
        whole, self.held_text = self.held_text + text, ""
        return whole.removesuffix(stop_string) if isinstance(stop_string, str) else whole

    def match_across_resume(self, text: str) -> tuple[str, str] | None:
        """What the client still gets, and the stop string that began in what is held and is complete with `text`.

        The server that gives `text` cannot see it. None: there is none.
        """
        whole, begun = self.held_text + text, len(self.held_text) - 1
        places = {whole.find(stop, 0, begun + len(stop)): stop for stop in self.stop_strings}
        places.pop(-1, None)
        if not places:
            return None
        self.held_text = ""
        return whole[: min(places)], places[min(places)]
