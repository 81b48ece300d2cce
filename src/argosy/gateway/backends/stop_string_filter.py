"""Stop strings, kept by the gateway for servers that are asked to leave them in their text.

A server that looks for stop strings itself holds text back whose token ids it has told, so text and ids would not end
at the same place where it breaks off.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class StopGate:
    """The end of one answer's text, over all servers that give it: what could become a stop string is held back."""

    stops: tuple[str, ...]
    held: str = ""
    """Text that came and that the client has not been given."""
    _most: int = field(init=False)
    """Characters that may be the beginning of a stop string."""

    def __post_init__(self) -> None:
        self._most = max(map(len, self.stops)) - 1

    def pass_on(self, text: str) -> str:
        """What the client may have, now that `text` has come too."""
        self.held += text
        free = max(0, len(self.held) - self._most)
        passed, self.held = self.held[:free], self.held[free:]
        return passed

    def end(self, text: str, stop: object) -> str:
        """What the client still gets when the server ended with `text`, at the string `stop` if it is one."""
        whole, self.held = self.held + text, ""
        return whole.removesuffix(stop) if isinstance(stop, str) else whole

    def end_across(self, text: str) -> tuple[str, str] | None:
        """What the client still gets, and the stop string that began in what is held and is complete with `text`.

        The server that gives `text` cannot see it. None: there is none.
        """
        whole, begun = self.held + text, len(self.held) - 1
        places = {whole.find(stop, 0, begun + len(stop)): stop for stop in self.stops}
        places.pop(-1, None)
        if not places:
            return None
        self.held = ""
        return whole[: min(places)], places[min(places)]
