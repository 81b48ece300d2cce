"""Addresses of a host name, kept for a while when DNS answers omit them."""

from __future__ import annotations

import math
from collections.abc import Collection

MISSING_GRACE_S = 15.0
"""Seconds after which an address is dropped if DNS answers omit it but contain others."""
EMPTY_ANSWER_GRACE_S = 60.0
"""Seconds after which an address is dropped if DNS answers are empty.

An empty answer is more often a fault of the resolver than the end of the whole fleet.
"""


class ResolvedAddresses:
    """Current addresses of one host name."""

    def __init__(self) -> None:
        self._missing_since: dict[str, float] = {}
        """Time since which each address is missing; infinite if the last answer contained it."""

    def update(self, resolved: Collection[str], now: float) -> frozenset[str]:
        """Apply a DNS answer and return the addresses in use."""
        grace_s = MISSING_GRACE_S if resolved else EMPTY_ANSWER_GRACE_S
        known = dict.fromkeys(resolved, math.inf)
        for address in self._missing_since.keys() - known.keys():
            since = min(self._missing_since[address], now)
            if now - since < grace_s:
                known[address] = since
        self._missing_since = known
        return frozenset(known)
