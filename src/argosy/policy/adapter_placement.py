"""Placement of adapters: on which replicas of a pool an adapter is kept, by rendezvous hashing with a bound on load.

Each replica has a pseudo-random rank for each adapter, so that an adapter stays where it is while replicas come and go
(Thaler & Ravishankar 1998). A replica whose load exceeds the mean by `MAX_RELATIVE_LOAD` is passed over. A rare adapter
has one home, so that the memory of all replicas together holds as many adapters as possible. A frequent one has more.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Mapping

from argosy.policy.smoothing import decay_factor

MAX_RELATIVE_LOAD = 1.25
"""Load of a home relative to the mean of all replicas."""
HOT_REQUESTS_PER_MIN = 1.0
"""Rate from which an adapter has two homes, so that the loss of one costs no load."""
REQUESTS_PER_MIN_AND_HOME = 600.0
"""Rate from which it has a further one."""
RATE_HALF_LIFE_S = 60.0
MAX_COUNTED_ADAPTERS = 10_000
"""Adapters whose rates are kept, those of the latest requests."""
DEFAULT_ADAPTER_BYTES = 20_000_000
"""Assumed size of an adapter that no replica has reported: rank 16 of a small model."""
DEFAULT_LOAD_BYTES_PER_S = 400_000_000.0
"""Assumed rate of loading, before a replica has reported one."""


class AdapterRates:
    """Request rates of the adapters of one pool."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Decayed number of requests by adapter, with the time of the last one."""

    def record(self, adapter: str, now: float) -> None:
        """Record a request."""
        count = self._decayed(adapter, now) + 1.0
        self._counts[adapter] = count, now
        self._counts.move_to_end(adapter)
        if len(self._counts) > MAX_COUNTED_ADAPTERS:
            self._counts.popitem(last=False)

    def per_minute(self, adapter: str, now: float) -> float:
        """Return the smoothed rate of an adapter. A single request counts as less than `HOT_REQUESTS_PER_MIN`."""
        return self._decayed(adapter, now) * math.log(2) * 60.0 / RATE_HALF_LIFE_S

    def _decayed(self, adapter: str, now: float) -> float:
        count, at = self._counts.get(adapter, (0.0, now))
        return count * decay_factor(max(0.0, now - at) / RATE_HALF_LIFE_S)


def count_homes(requests_per_min: float, min_replicas: int = 0) -> int:
    """Return the number of replicas that keep an adapter with this rate of requests."""
    homes = 1 if requests_per_min < HOT_REQUESTS_PER_MIN else 2
    return max(homes + int(requests_per_min / REQUESTS_PER_MIN_AND_HOME), min_replicas)


def select_homes(adapter: str, loads: Mapping[str, float], count: int) -> list[str]:
    """Return the replicas that keep an adapter, in the order of their ranks.

    Args:
        adapter: Digest of the adapter.
        loads: Load of each replica by name, such as its requests in relation to its weight.
        count: Number of homes, if there are as many replicas within the bound on load.
    """
    if not loads:
        return []
    bound = math.ceil(MAX_RELATIVE_LOAD * (sum(loads.values()) + 1) / len(loads))
    ranked = sorted(loads, key=lambda name: _rank(adapter, name), reverse=True)
    return [name for name in ranked if loads[name] < bound][:count] or ranked[:1]


def estimate_load_s(size_bytes: int, bytes_per_s: float) -> float:
    """Return the seconds that loading an adapter takes. Unknown values are 0."""
    size, rate = size_bytes or DEFAULT_ADAPTER_BYTES, bytes_per_s or DEFAULT_LOAD_BYTES_PER_S
    return size / rate


def _rank(adapter: str, replica: str) -> bytes:
    return hashlib.blake2b(f"{adapter}\0{replica}".encode(), digest_size=8).digest()
