"""A gateway's part of a limit that many gateways share: what it was granted for a while, and what it owes.

The authority (Redis) counts what it grants. A grant may be used for `lease_s`, so the authority counts it for the
window and that time besides: in no interval of the window's length is more used than the limit. What
was not used is given back. A gateway counts its grants from when it asked, by its own clock; nobody compares
clocks. Of what a gateway says, all is said once: whoever carries an `Ask` repeats it until it is answered.

What is used without a grant (a stream goes on while more is asked for, as far as there was room lately; the authority
is down and the caller's project goes on) is lent: counted here, and told as owed with the next ask. While the authority
is down, a gateway lends until what it used itself is the limit divided by the gateways seen last, rounded up. So
whatever happens, no window holds more than twice the limit (and those fractions), and one in which the authority was
down throughout not more than the limit once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from argosy.policy.leased_quota import MAX_UNITS, LeasedQuota, LeaseGrant, LeaseRequest
from argosy.policy.quota_meters import (
    MIN_SEEDED_WINDOW_S,
    WINDOW_SLOTS,
    CalendarPeriod,
    SlidingWindow,
    calendar_bounds,
)

MAX_LEASE_S = 2.0
"""Most that a grant is good for; of a window, a tenth of it at most."""
MAX_OWED_SLOTS = 2 * WINDOW_SLOTS
MAX_SEED_AGE_S = 10.0
"""For so long the authority may be told what a ledger said: later that would lack what others have used since."""


def _ignore() -> None:
    """There is nobody to tell."""


@dataclass(slots=True)
class _ActiveGrant:
    slot: int
    remaining: int
    expires_at: float


class WindowLease(LeasedQuota):
    """Of a limit over a window or a period of the calendar."""

    def __init__(self, name: str, local_meter: SlidingWindow | CalendarPeriod) -> None:
        super().__init__(name, local_meter)
        self.on_report_due: Callable[[], None] = _ignore
        """Called when there is something to tell that nobody waits for."""
        self._window_s = local_meter.window_s if isinstance(local_meter, SlidingWindow) else 0.0
        self._lease_s = min(MAX_LEASE_S, self._window_s / 10 or MAX_LEASE_S)
        self._grants: deque[_ActiveGrant] = deque()
        self._granted_units = 0
        self._period_start, self._period_end = 0.0, (math.inf if self._window_s else -math.inf)
        self._overdraft, self._overdraft_at = 0, -math.inf
        self._spent_since_request = self._expected_spend = 0
        self._owed: dict[int, int] = {}
        """Own slot -> units used without a grant."""
        self._earliest_grant_slots: dict[int, int] = {}
        """Own slot -> the earliest slot of grants that were used in it."""
        self._returned: dict[int, int] = {}
        self._seeds: list[tuple[float, int]] | None = None
        self._seeds_expire_at = -math.inf
        self._seeds_requested = False
        """The authority has asked for them."""
        self._is_short = False
        """There was not enough: what nobody here could use of it may be what somebody elsewhere waits for."""
        self._renew_at = math.inf
        self._last_grant = LeaseGrant(0, 0, 0, 0.0, 0.0, known=True)
        self._last_grant_at = -math.inf
        self._units_in_transit = 0
        """Given back, less what was owed, with an ask that was not answered yet."""

    @property
    def name(self) -> str:
        """See `Shared`."""
        return self._name if self._window_s else f"{self._name}:{self._period_start:.0f}"

    @property
    def used(self) -> int:
        """See `Counter`: by all gateways, as far as is known."""
        return max(self._last_grant.used - self._granted_units, self._local_meter.used)

    @property
    def is_idle(self) -> bool:
        """See `Shared`."""
        news = self._returned or self._owed or self._has_requested_seeds
        return not (self._grants or self._needed or self._spent_since_request or news)

    def remaining(self, now: float) -> int:
        """See `Counter`."""
        self._expire_grants(now)
        self._local_meter.remaining(now)  # so that `used` is as of now
        return (
            self._granted_units + self._overdraft
            if now == self._overdraft_at
            else self._granted_units
        )

    def add(self, units: int, now: float) -> int:
        """See `Counter`; the slot is our own."""
        self._expire_grants(now)
        own = self._local_meter.add(units, now)
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
            self._owed[own] = self._owed.get(own, 0) + rest
            if len(self._owed) > MAX_OWED_SLOTS:
                del self._owed[next(iter(self._owed))]  # longer ago than a window
            self._overdraft = max(0, self._overdraft - rest)
            self.on_report_due()
        if slot is not None:
            self._earliest_grant_slots.setdefault(own, slot)
        return own

    def adjust(self, slot: int, units: int, now: float) -> bool:
        """See `Counter`. The authority is told the slot where it counts, or an earlier one: never a later one."""
        self._expire_grants(now)
        if not self._local_meter.adjust(slot, units, now):
            return False
        back, origin = -units, self._earliest_grant_slots.get(slot)
        if origin is None:  # all of it was lent
            untold = min(back, self._owed.get(slot, 0))
            if untold:
                self._owed[slot] -= untold
                back -= untold
            if not self._window_s:  # a period is one slot; of a window nobody knows where it counts
                origin = slot
        if back and origin is not None:
            self._returned[origin] = self._returned.get(origin, 0) + back
            self._exhausted_until = -math.inf  # there is this again
            self.on_report_due()
        return True

    def wait_s(self, units: int, now: float) -> float:
        """See `Counter`."""
        if units <= self.remaining(now):
            return 0.0
        if units > self.limit:
            return math.inf
        if not self._window_s:
            return self._period_end - now
        return max(0.0, self._last_grant.wait_s - (now - self._last_grant_at))

    def reset_s(self, now: float) -> float:
        """See `Counter`."""
        self._expire_grants(now)
        if not self._window_s:
            return self._period_end - now if self.used else 0.0
        return max(
            0.0,
            self._last_grant.reset_s - (now - self._last_grant_at),
            self._local_meter.reset_s(now),
        )

    def seed_points(self, now: float) -> tuple[float, ...]:
        """See `Counter`."""
        self._expire_grants(now)
        return self._local_meter.seed_points(now)

    def seed(self, used: Iterable[tuple[float, int]], now: float) -> None:
        """See `Counter`: the authority is told with the next ask; it listens to the first that tells.

        It is told no more when nothing was asked for long: it will say if nobody has told.
        """
        self.needs_seed = False
        self._seeds = [(at, units) for at, units in used if at > self._period_start]
        self._seeds_expire_at = now + MAX_SEED_AGE_S
        if self._seeds_requested:
            self.on_report_due()

    def is_due(self, now: float) -> bool:
        """See `Shared`."""
        self._expire_grants(now)
        return (
            now >= self._renew_at or self._has_requested_seeds or bool(self._returned or self._owed)
        )

    def can_overdraw(self, units: int, now: float) -> bool:
        """See `Shared`. What streams were lent since counts too: slow ones would never end otherwise."""
        if now >= self._last_grant_at + self._lease_s:
            return True
        since = self._units_in_transit + sum(self._returned.values()) - sum(self._owed.values())
        return units <= self._granted_units + self.limit - self._last_grant.used + since

    def overdraw(self, units: int, now: float) -> None:
        """See `Shared`."""
        self._overdraft, self._overdraft_at = units, now

    def build_request(self, now: float) -> LeaseRequest:
        """See `Shared`."""
        self._expire_grants(now)
        need = min(self._needed, MAX_UNITS)
        # What was needed before it was time to renew was too little: twice as much, until it lasts.
        pace = (
            2 * max(self._spent_since_request, self._expected_spend)
            if need
            else max(self._spent_since_request, self._expected_spend // 2)
        )
        self._expected_spend = min(pace, self.limit)
        idle = not self._spent_since_request and not need
        if idle or self._is_short:
            while self._grants:
                self._return_grant(self._grants.popleft())
        ahead = 0 if idle else max(0, max(self._expected_spend, need) - self._granted_units)
        seeds = self._seeds if now < self._seeds_expire_at else None
        width = self._window_s / WINDOW_SLOTS
        ask = LeaseRequest(
            kind="window" if self._window_s else "period",
            limit=min(self.limit, MAX_UNITS),
            seconds=self._window_s,
            lease_s=self._lease_s,
            keep_s=(self._window_s or self._period_end - now) + self._lease_s + width + 1.0,
            slot=int(self._period_start),
            need=need,
            ahead=min(ahead, MAX_UNITS),
            owed=tuple(self._owed_by_age(now)),
            back=tuple((slot, min(units, MAX_UNITS)) for slot, units in self._returned.items()),
            seeds=None if seeds is None else tuple((now - at, units) for at, units in seeds),
        )
        self._units_in_transit = sum(self._returned.values()) - sum(self._owed.values())
        self._needed = self._spent_since_request = 0
        self._is_short = False
        self._owed, self._returned, self._seeds = {}, {}, None
        self._renew_at = now + self._lease_s / 2 if self._grants else math.inf
        if self._window_s:
            oldest = int(now // width) - WINDOW_SLOTS
            self._earliest_grant_slots = {
                own: at for own, at in self._earliest_grant_slots.items() if own >= oldest
            }
        return ask

    def apply_grant(
        self, request: LeaseRequest, grant: LeaseGrant, requested_at: float, now: float
    ) -> None:
        """See `Shared`."""
        self._expire_grants(now)
        if request.slot != int(self._period_start):
            return  # of a period that is over
        if grant.granted:
            until = min(requested_at + self._lease_s, self._period_end)
            self._grants.append(_ActiveGrant(grant.slot, grant.granted, until))
            self._granted_units += grant.granted
            self._renew_at = min(self._renew_at, requested_at + self._lease_s / 2)
        self._last_grant, self._last_grant_at, self._units_in_transit = grant, now, 0
        if self._record_shortfall(request, grant, now):
            self._is_short, self._renew_at = True, now
        self._seeds_requested = not grant.known and not 0.0 < self._window_s <= MIN_SEEDED_WINDOW_S
        if self._seeds_requested and self._seeds is None:
            self.needs_seed = True

    @property
    def _has_requested_seeds(self) -> bool:
        return self._seeds_requested and self._seeds is not None

    def _owed_by_age(self, now: float) -> Iterator[tuple[float, int]]:
        """What is owed, as used at the latest at the end of the slot in which it was."""
        width = self._window_s / WINDOW_SLOTS
        for own, units in self._owed.items():
            yield max(0.0, now - (own + 1) * width) if width else 0.0, min(units, MAX_UNITS)

    def _expire_grants(self, now: float) -> None:
        if now >= self._period_end:
            self._start_period(now)
        while self._grants and now >= self._grants[0].expires_at:
            self._return_grant(self._grants.popleft())

    def _return_grant(self, grant: _ActiveGrant) -> None:
        self._returned[grant.slot] = self._returned.get(grant.slot, 0) + grant.remaining
        self._granted_units -= grant.remaining

    def _start_period(self, now: float) -> None:
        """A new period: nothing of the old one matters. Whoever sees it begin knows that nothing was used before."""
        seen = self._period_end > 0.0
        if isinstance(self._local_meter, CalendarPeriod):
            self._period_start, self._period_end = calendar_bounds(self._local_meter.calendar, now)
        seen = seen and now < self._period_start + self._lease_s
        self._grants.clear()
        self._granted_units = self._spent_since_request = self._expected_spend = 0
        self._owed, self._earliest_grant_slots, self._returned = {}, {}, {}
        self._seeds, self.needs_seed = ([], False) if seen else (None, True)
        self._seeds_expire_at, self._seeds_requested = now + MAX_SEED_AGE_S, False
        self._units_in_transit = 0
        self._last_grant = LeaseGrant(0, 0, 0, 0.0, 0.0, known=True)
