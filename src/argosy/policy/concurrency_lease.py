"""Lease on a concurrency limit that several gateways share."""

from __future__ import annotations

import math
from collections.abc import Iterable

from argosy.policy.leased_quota import MAX_UNITS, LeasedQuota, LeaseGrant, LeaseRequest
from argosy.policy.quota_meters import ConcurrencyMeter


class ConcurrencyLease(LeasedQuota):
    """Slots that the authority keeps for this gateway. The authority drops gateways silent for `alive_s`."""

    def __init__(self, name: str, local_meter: ConcurrencyMeter, alive_s: float) -> None:
        super().__init__(name, local_meter)
        self._alive_s = alive_s
        self._granted_slots = 0
        self._granted_until = -math.inf
        self._overdraft_at = -math.inf
        self._was_used = False
        self._last_grant_at = -math.inf
        self._used_by_others = 0

    @property
    def used(self) -> int:
        """Slots in use by all gateways, as of the last grant."""
        return self._used_by_others + self._local_meter.used

    @property
    def is_idle(self) -> bool:
        return not (self._granted_slots or self._local_meter.used or self._needed or self._was_used)

    def remaining(self, now: float) -> int:
        if now == self._overdraft_at:
            return 1
        return self._granted_slots - self._local_meter.used if now < self._granted_until else 0

    def add(self, units: int, now: float) -> int:
        self._was_used = True
        self._overdraft_at = -math.inf
        return self._local_meter.add(units, now)

    def adjust(self, slot: int, units: int, now: float) -> bool:
        return self._local_meter.adjust(slot, units, now)

    def wait_s(self, units: int, now: float) -> float:
        return self._local_meter.wait_s(units, now)

    def reset_s(self, now: float) -> float:
        return self._local_meter.reset_s(now)

    def seed_points(self, now: float) -> tuple[float, ...]:
        return self._local_meter.seed_points(now)

    def seed(self, used: Iterable[tuple[float, int]], now: float) -> None:
        """Do nothing, because earlier requests have ended."""

    def is_due(self, now: float) -> bool:
        """Return whether to send a request, which happens five times per `alive_s` to keep the slots."""
        return now >= self._last_grant_at + self._alive_s / 5

    def overdraw(self, units: int, now: float) -> None:  # noqa: ARG002 - a request takes one slot
        self._overdraft_at = now

    def build_request(self, now: float) -> LeaseRequest:
        """Build the next request. Slots that it does not keep are no longer used, whatever the answer is."""
        used = self._local_meter.used
        spare = used // 4 + 1 if self._was_used or self._needed or used else 0
        granted = self._granted_slots if now < self._granted_until else 0
        self._granted_slots = min(granted, used + spare)
        kept = max(used, self._granted_slots)
        request = LeaseRequest(
            kind="slots",
            limit=min(self.limit, MAX_UNITS),
            keep_s=self._alive_s * 2,
            need=min(self._needed, MAX_UNITS),
            ahead=used + spare - kept,
            kept=kept,
        )
        self._needed, self._was_used = 0, False
        return request

    def apply_grant(
        self, request: LeaseRequest, grant: LeaseGrant, requested_at: float, now: float
    ) -> None:
        """Apply an answer.

        If all gateways together exceed the limit, each gives up the excess as far as it has unused slots.
        """
        self._granted_slots = request.kept + grant.granted
        self._used_by_others = grant.used - self._granted_slots
        excess = max(0, grant.used - self.limit)
        self._granted_slots = max(0, self._granted_slots - excess)
        self._granted_until = requested_at + self._alive_s
        self._last_grant_at = now
        self._record_shortfall(request, grant, now)
