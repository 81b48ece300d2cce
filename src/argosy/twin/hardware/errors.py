"""Error of a question that the hardware model cannot answer."""

from __future__ import annotations


class CapacityError(ValueError):
    """A question is impossible. The message names the bound that it breaks, and what to change."""
