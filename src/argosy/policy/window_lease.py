"""Lease on a limit over a sliding window or calendar period that several gateways share.

The authority (Redis) counts the units that it grants. A grant is valid for `lease_s`. The authority therefore counts it
for the window and that time besides, so no interval of the window's length exceeds the limit. Unused units are
returned. A gateway measures the validity from the time of its request by its own clock, so clocks need no
synchronization. Each unit is reported exactly once, because the caller repeats a `LeaseRequest` until it is answered.

Units used without a grant are lent, which means that they are counted locally and reported as owed in the next request.
There are two cases. A running stream continues while more units are requested, if there was room recently. While the
authority is down, requests continue in the failure mode `open`. During an outage a gateway lends until its own usage
reaches the limit divided by the number of gateways seen last, rounded up. As a result no window exceeds twice the
limit (plus rounding), and a window in which the authority was down throughout does not exceed the limit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from argosy.policy.leased_quota import MAX_UNITS, LeasedQuota, LeaseGrant, LeaseRequest
from argosy.policy.quota_meters import (
    MIN_SEEDED_WINDOW_S,
    NO_OFFSET,
    WINDOW_SLOTS,
    CalendarPeriod,
    SlidingWindow,
)

MAX_LEASE_S = 2.0
"""Longest validity of a grant; for a sliding window at most a tenth of the window."""
MAX_OWED_SLOTS = 2 * WINDOW_SLOTS
MAX_SEED_AGE_S = 10.0
"""Age up to which ledger sums are reported; older sums would lack what other gateways have used since."""


def _ignore() -> None:
    """Do nothing; default callback."""


@dataclass(slots=True)
class _ActiveGrant:
    """Granted units that this gateway has not used yet."""

    slot: int
    remaining: int
    expires_at: float


class WindowLease(LeasedQuota):
    """Leased meter for a limit over a sliding window or a calendar period."""

    def __init__(self, name: str, local_meter: SlidingWindow | CalendarPeriod) -> None:
        super().__init__(name, local_meter)
        self.on_report_due: Callable[[], None] = _ignore
        """Called when there is usage to report, although no request waits for units."""
        self._window_s = local_meter.window_s if isinstance(local_meter, SlidingWindow) else 0.0
        self._lease_s = min(MAX_LEASE_S, self._window_s / 10 or MAX_LEASE_S)
        self._grants: deque[_ActiveGrant] = deque()
        self._granted_units = 0
        self._period_start, self._period_end = 0.0, (math.inf if self._window_s else -math.inf)
        """Bounds of the period by the wall clock."""
        self._clock = local_meter.clock if isinstance(local_meter, CalendarPeriod) else NO_OFFSET
        self._overdraft, self._overdraft_at = 0, -math.inf
        self._spent_since_request = self._expected_spend = 0
        self._owed: dict[int, int] = {}
        """Units used without a grant, by slot of the local meter."""
        self._earliest_grant_slots: dict[int, int] = {}
        """Earliest slot at the authority whose grants were used, by slot of the local meter."""
        self._returned: dict[int, int] = {}
        """Unused units to return, by slot at the authority."""
        self._seeds: list[tuple[float, int]] | None = None
        self._seeds_expire_at = -math.inf
        self._seeds_requested = False
        """Whether the authority lacks the usage from before the limit was metered."""
        self._is_short = False
        """Whether the last grant was too small; its units are returned at once, as another gateway may need them."""
        self._renew_at = math.inf
        self._last_grant = LeaseGrant(0, 0, 0, 0.0, 0.0, known=True)
        self._last_grant_at = -math.inf
        self._reports_held = False
        """Whether the authority frees what this gateway holds if it dies: for budgets of days and months."""
        self._reported_held = 0
        self._units_in_transit = 0
        """Units returned minus units owed in the request that is not answered yet."""

    @property
    def name(self) -> str:
        return self._name if self._window_s else f"{self._name}:{self._period_start:.0f}"

    @property
    def used(self) -> int:
        """Units in use by all gateways, as of the last grant."""
        return max(self._last_grant.used - self._granted_units, self._local_meter.used)

    @property
    def is_idle(self) -> bool:
        unreported = self._returned or self._owed or self._has_requested_seeds
        is_used = self._grants or self._needed or self._spent_since_request or self._reported_held
        return not (is_used or unreported)

    def remaining(self, now: float) -> int:
        self._expire_grants(now)
        self._local_meter.remaining(now)  # updates `used`
        return (
            self._granted_units + self._overdraft
            if now == self._overdraft_at
            else self._granted_units
        )

    def add(self, units: int, now: float) -> int:
        """Count `units` and return their slot in the local meter."""
        self._expire_grants(now)
        local_slot = self._local_meter.add(units, now)
        rest, slot = units, None
        while rest and self._grants:
            grant = self._grants[0]
            taken = min(grant.remaining, rest)
            grant.remaining -= taken
            rest -= taken
            slot = grant.slot if slot is None else slot
            if not grant.remaining:
                self._grants.popleft()
        self._granted_units -= units - rest
        self._spent_since_request += units
        if rest:
            self._owed[local_slot] = self._owed.get(local_slot, 0) + rest
            if len(self._owed) > MAX_OWED_SLOTS:
                del self._owed[next(iter(self._owed))]  # older than the window
            self._overdraft = max(0, self._overdraft - rest)
            self.on_report_due()
        if slot is not None:
            self._earliest_grant_slots.setdefault(local_slot, slot)
        return local_slot

    def adjust(self, slot: int, units: int, now: float) -> bool:
        """Change the count of a local slot.

        Units are returned to the slot where the authority counts them or to an earlier one, never to a later one.
        """
        self._expire_grants(now)
        if not self._local_meter.adjust(slot, units, now):
            return False
        returned, origin = -units, self._earliest_grant_slots.get(slot)
        if origin is None:  # all units of the slot were lent
            unreported = min(returned, self._owed.get(slot, 0))
            if unreported:
                self._owed[slot] -= unreported
                returned -= unreported
            # A period has one slot, while the slot of a window at the authority is unknown.
            if not self._window_s:
                origin = slot
        if returned and origin is not None:
            self._returned[origin] = self._returned.get(origin, 0) + returned
            self._exhausted_until = -math.inf  # these units are free again
            self.on_report_due()
        return True

    def return_unused(self) -> None:
        self._return_grants()
        if self._returned:
            self.on_report_due()

    def wait_s(self, units: int, now: float) -> float:
        if units <= self.remaining(now):
            return 0.0
        if units > self.limit:
            return math.inf
        if not self._window_s:
            return self._period_end - self._wall_time(now)
        return max(0.0, self._last_grant.wait_s - (now - self._last_grant_at))

    def reset_s(self, now: float) -> float:
        self._expire_grants(now)
        if not self._window_s:
            return self._period_end - self._wall_time(now) if self.used else 0.0
        return max(
            0.0,
            self._last_grant.reset_s - (now - self._last_grant_at),
            self._local_meter.reset_s(now),
        )

    def seed_points(self, now: float) -> tuple[float, ...]:
        self._expire_grants(now)
        return self._local_meter.seed_points(now)

    def seed(self, used: Iterable[tuple[float, int]], now: float) -> None:
        """Report the usage from before the limit was metered with the next request.

        The authority uses the first report of any gateway. A report older than `MAX_SEED_AGE_S` is not sent; the
        authority requests another one if it still has none.
        """
        self.needs_seed = False
        self._seeds = [
            (at, units) for at, units in used if self._wall_time(at) > self._period_start
        ]
        self._seeds_expire_at = now + MAX_SEED_AGE_S
        if self._seeds_requested:
            self.on_report_due()

    def request_units(self, units: int, free_units: int = MAX_UNITS) -> None:
        super().request_units(units, free_units)
        self._reports_held = self._reports_held or (units > free_units and not self._window_s)

    def is_due(self, now: float) -> bool:
        self._expire_grants(now)
        if self._reports_held and self._held_units != self._reported_held:
            return True
        return (
            now >= self._renew_at or self._has_requested_seeds or bool(self._returned or self._owed)
        )

    def can_overdraw(self, units: int, now: float) -> bool:
        """Return whether `units` are probably free according to the last grant and the units lent since.

        Without the units lent since then, slow streams could continue without end.
        """
        if now >= self._last_grant_at + self._lease_s:
            return True
        net_returned = (
            self._units_in_transit + sum(self._returned.values()) - sum(self._owed.values())
        )
        return units <= self._granted_units + self.limit - self._last_grant.used + net_returned

    def overdraw(self, units: int, now: float) -> None:
        self._overdraft, self._overdraft_at = units, now

    def build_request(self, now: float) -> LeaseRequest:
        self._expire_grants(now)
        need = min(self._needed, MAX_UNITS)
        # Units that are needed before the renewal is due show that the last grant was too small, so double it.
        expected_spend = (
            2 * max(self._spent_since_request, self._expected_spend)
            if need
            else max(self._spent_since_request, self._expected_spend // 2)
        )
        self._expected_spend = min(expected_spend, self.limit)
        idle = not self._spent_since_request and not need
        if idle or self._is_short:
            self._return_grants()
        ahead = 0 if idle else max(0, max(self._expected_spend, need) - self._granted_units)
        overdraft, overdraft_above = self._largest_request
        seeds = self._seeds if now < self._seeds_expire_at else None
        slot_s = self._window_s / WINDOW_SLOTS
        request = LeaseRequest(
            kind="window" if self._window_s else "period",
            limit=min(self.limit, MAX_UNITS),
            seconds=self._window_s,
            lease_s=self._lease_s,
            keep_s=(self._window_s or self._period_end - self._wall_time(now))
            + self._lease_s
            + slot_s
            + 1.0,
            slot=int(self._period_start),
            need=need,
            ahead=min(ahead, MAX_UNITS),
            overdraft=min(overdraft, MAX_UNITS),
            overdraft_above=overdraft_above,
            held=self._held_units if self._reports_held else None,
            was_held=self._reported_held,
            owed=tuple(self._owed_by_age(now)),
            back=tuple((slot, min(units, MAX_UNITS)) for slot, units in self._returned.items()),
            seeds=None if seeds is None else tuple((now - at, units) for at, units in seeds),
        )
        self._units_in_transit = sum(self._returned.values()) - sum(self._owed.values())
        self._needed = self._spent_since_request = 0
        self._largest_request = 0, 0
        self._is_short = False
        self._owed, self._returned, self._seeds = {}, {}, None
        self._renew_at = now + self._lease_s / 2 if self._grants else math.inf
        if self._window_s:
            oldest = int(now // slot_s) - WINDOW_SLOTS
            self._earliest_grant_slots = {
                local_slot: slot
                for local_slot, slot in self._earliest_grant_slots.items()
                if local_slot >= oldest
            }
        return request

    def apply_grant(
        self, request: LeaseRequest, grant: LeaseGrant, requested_at: float, now: float
    ) -> None:
        self._expire_grants(now)
        if request.slot != int(self._period_start):
            return  # the request belongs to a period that has ended
        if request.held is not None:
            self._reported_held = request.held + grant.granted
        if grant.granted:
            period_end = self._period_end + self._clock.offset_s
            expires_at = min(requested_at + self._lease_s, period_end)
            self._grants.append(_ActiveGrant(grant.slot, grant.granted, expires_at))
            self._granted_units += grant.granted
            self._renew_at = min(self._renew_at, requested_at + self._lease_s / 2)
        self._last_grant, self._last_grant_at, self._units_in_transit = grant, now, 0
        if self._record_shortfall(request, grant, now):
            self._is_short, self._renew_at = True, now
        self._seeds_requested = not grant.known and not 0.0 < self._window_s <= MIN_SEEDED_WINDOW_S
        if self._seeds_requested and self._seeds is None:
            self.needs_seed = True

    @property
    def _held_units(self) -> int:
        return max(0, self.held) + self._granted_units

    @property
    def _has_requested_seeds(self) -> bool:
        return self._seeds_requested and self._seeds is not None

    def _owed_by_age(self, now: float) -> Iterator[tuple[float, int]]:
        """Yield the age and units of each owed amount; the age is that of the end of its slot."""
        slot_s = self._window_s / WINDOW_SLOTS
        for local_slot, units in self._owed.items():
            yield (
                max(0.0, now - (local_slot + 1) * slot_s) if slot_s else 0.0,
                min(units, MAX_UNITS),
            )

    def _wall_time(self, now: float) -> float:
        return now - self._clock.offset_s

    def _expire_grants(self, now: float) -> None:
        if not self._period_start <= now - self._clock.offset_s < self._period_end:
            self._start_period(now)
        while self._grants and now >= self._grants[0].expires_at:
            self._return_grant(self._grants.popleft())

    def _return_grant(self, grant: _ActiveGrant) -> None:
        self._returned[grant.slot] = self._returned.get(grant.slot, 0) + grant.remaining
        self._granted_units -= grant.remaining

    def _return_grants(self) -> None:
        while self._grants:
            self._return_grant(self._grants.popleft())

    def _start_period(self, now: float) -> None:
        """Start a new period and discard the state of the old one.

        A gateway that was running at the start of the period knows that nothing was used before. If the wall clock was
        set back, the earlier period owes what this gateway used in the later one.
        """
        previous_start, previous_used = self._period_start, self._local_meter.used
        saw_start = self._period_end > 0.0
        self._local_meter.remaining(now)
        if isinstance(self._local_meter, CalendarPeriod):
            self._period_start, self._period_end = (
                self._local_meter.period_start,
                self._local_meter.period_end,
            )
        saw_start = saw_start and self._wall_time(now) < self._period_start + self._lease_s
        is_set_back = self._period_start < previous_start
        self._grants.clear()
        self._granted_units = self._spent_since_request = self._expected_spend = 0
        self._owed, self._earliest_grant_slots, self._returned = {}, {}, {}
        if is_set_back and previous_used:
            self._owed[int(self._period_start)] = previous_used
            self.on_report_due()
        self._seeds, self.needs_seed = ([], False) if saw_start else (None, True)
        self._seeds_expire_at, self._seeds_requested = now + MAX_SEED_AGE_S, False
        self._units_in_transit = self._reported_held = 0
        self._last_grant = LeaseGrant(0, 0, 0, 0.0, 0.0, known=True)
