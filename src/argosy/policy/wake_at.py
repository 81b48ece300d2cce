"""Effect by which a pure state machine asks to be called again."""

from __future__ import annotations

from typing import NamedTuple


class WakeAt(NamedTuple):
    """Effect: send the next tick at this time."""

    at: float
