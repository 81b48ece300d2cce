"""Which addresses a name has, going by answers that may lack some of them, or all, for a while."""

from __future__ import annotations

import math
from collections.abc import Collection

MISSING_GRACE_S = 15.0
"""An address goes when answers have lacked it for so long,"""
EMPTY_ANSWER_GRACE_S = 60.0
"""or for so long while they have none at all: that is more often the resolver's fault than the whole fleet's end."""


class ResolvedAddresses:
    """One name's."""

    def __init__(self) -> None:
        self._missing_since: dict[str, float] = {}
        """Infinite: the last answer had it."""

    def update(self, resolved: Collection[str], now: float) -> frozenset[str]:
        """Take in an answer; the addresses that there are now."""
        patience = MISSING_GRACE_S if resolved else EMPTY_ANSWER_GRACE_S
        known = dict.fromkeys(resolved, math.inf)
        for address in self._missing_since.keys() - known.keys():
            since = min(self._missing_since[address], now)
            if now - since < patience:
                known[address] = since
        self._missing_since = known
        return frozenset(known)
