"""The one exception of this room: what was asked for cannot be measured, and why."""

from __future__ import annotations


class BenchError(Exception):
    """Nothing was measured; the message is one sentence for the person who asked."""
