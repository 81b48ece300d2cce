"""Giving way: which running streams pause while others wait.

A queue decides who is next, but not when. If one tenant's long streams hold every slot, all others wait until these
end. Therefore a stream that can be resumed exactly pauses for a request that has waited for `after_s` of its tier. It
does not if a slot is expected to become free within the same time.

**Who pauses.** Streams of the lowest tier pause first, if their tier is below that of the waiting request. Then follow
streams of the same tier. Their tenant must run at least as many streams per weight with one stream less as the waiting
tenant with one more. Each such pause brings the tenants closer to equal shares, so pausing ends at max-min fairness. Of
the tenant with the most streams per weight, the stream pauses that has the fewest tokens to compute again. No tenant
loses its last stream while that is not more than its share of the slots.

A replica may have room in its KV cache for fewer sequences than it has slots. While it reports that some wait, requests
that it has not begun to answer go back to the gateway's queue before streams pause, the one that was sent last first.
Otherwise a tenant whose prompts fill the cache would hold all slots with requests that do not run.

A request with several sequences counts with all the slots that it takes. At a native replica it does not pause, but
gives up one slot after the other, since the engine pauses single sequences. It gets none back before its attempt ends.
The engine uses each row that others leave free in any case.

**Batches.** A stream of a batch pauses for any waiting request of another tier, at once and without these bounds, since
no client waits for it.

**Bounds.** A stream runs for at least `min_slice_s` after its first token each time, and an unanswered request stays as
long at its replica. In one second, at most
`max_paused_share` of the slots are paused.

Streams that cannot be resumed exactly never pause. A tenant that holds `max_share` of the slots with such streams gets
no further slot while other tenants of its tier wait.
"""

from __future__ import annotations

import math

import msgspec

from argosy.policy.placement.replica import PlacementReplica
from argosy.policy.placement.request import PlacementRequest


class GivingWay(msgspec.Struct, frozen=True):
    """When streams of one pool give way."""

    after_s: tuple[float, ...] = (0.3, 1.0, 5.0, math.inf)
    """How long a request of each tier waits before streams pause for it."""
    min_slice_s: float = 2.0
    """How long a stream runs at least before it pauses, and between two pauses."""
    max_paused_share: float = 0.25
    """Part of the slots that may be paused within one second."""
    max_share: float = 0.9
    """Part of the slots beyond which streams that cannot pause let other tenants go first."""


class PauseBudget:
    """Limits the pauses per second to a part of the slots, and to one in a small pool."""

    __slots__ = ("_available", "_refilled_at")

    def __init__(self) -> None:
        self._available = 1.0
        self._refilled_at = 0.0

    def refill(self, per_second: float, now: float) -> int:
        """Add what the time since the last call grants, and return how many streams may pause now."""
        rate = max(1.0, per_second)
        self._available = min(rate, self._available + (now - self._refilled_at) * rate)
        self._refilled_at = now
        return int(self._available)

    def spend(self) -> None:
        """Count one pause."""
        self._available -= 1.0


class TenantStreams:
    """Requests of one tenant and tier that occupy slots."""

    __slots__ = ("fixed_slots", "is_held", "requests", "slots", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.requests: dict[PlacementRequest, bool] = {}
        """Each request, with whether it cannot be paused."""
        self.slots = 0
        """Slots that they take."""
        self.fixed_slots = 0
        """Slots that those take which cannot be paused."""
        self.is_held = False
        """Whether other tenants go first, because the tenant holds too many slots with these."""


def is_pausable_at(request: PlacementRequest, replica: PlacementReplica) -> bool:
    """Whether the request's stream from this replica can be resumed exactly."""
    return replica.resumes_exactly and request.uses_stream(replica)
