"""Clock that a test advances itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class FakeClock:
    """Callable clock whose time changes only when a test assigns `now`."""

    now: float

    def __call__(self) -> float:
        return self.now
