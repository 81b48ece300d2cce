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

from argosy.policy.leased_quota import LARGEST, Ask, Grant, Shared
from argosy.policy.quota_meters import SHORT_S, SLOTS, Period, Window, period

LEASE_S = 2.0
"""Most that a grant is good for; of a window, a tenth of it at most."""
MOST_OWED = 2 * SLOTS
FRESH_S = 10.0
"""For so long the authority may be told what a ledger said: later that would lack what others have used since."""


def _nothing() -> None:
    """There is nobody to tell."""


@dataclass(slots=True)
class _Granted:
    slot: int
    left: int
    until: float


class Lease(Shared):
    """Of a limit over a window or a period of the calendar."""

    def __init__(self, name: str, own: Window | Period) -> None:
        super().__init__(name, own)
        self.on_news: Callable[[], None] = _nothing
        """Called when there is something to tell that nobody waits for."""
        self._seconds = own.seconds if isinstance(own, Window) else 0.0
        self._lease_s = min(LEASE_S, self._seconds / 10 or LEASE_S)
        self._grants: deque[_Granted] = deque()
        self._left = 0
        self._starts, self._ends = 0.0, (math.inf if self._seconds else -math.inf)
        self._credit, self._credit_at = 0, -math.inf
        self._spent = self._pace = 0
        self._owed: dict[int, int] = {}
        """Own slot -> units used without a grant."""
        self._origins: dict[int, int] = {}
        """Own slot -> the earliest slot of grants that were used in it."""
        self._back: dict[int, int] = {}
        self._seeds: list[tuple[float, int]] | None = None
        self._seeds_until = -math.inf
        self._sought = False
        """The authority has asked for them."""
        self._short = False
        """There was not enough: what nobody here could use of it may be what somebody elsewhere waits for."""
        self._renew_at = math.inf
        self._told = Grant(0, 0, 0, 0.0, 0.0, known=True)
        self._told_at = -math.inf
        self._on_its_way = 0
        """Given back, less what was owed, with an ask that was not answered yet."""

    @property
    def name(self) -> str:
        """See `Shared`."""
        return self._name if self._seconds else f"{self._name}:{self._starts:.0f}"

    @property
    def used(self) -> int:
        """See `Counter`: by all gateways, as far as is known."""
        return max(self._told.used - self._left, self._own.used)

    @property
    def idle(self) -> bool:
        """See `Shared`."""
        news = self._back or self._owed or self._to_seed
        return not (self._grants or self._need or self._spent or news)

    def room(self, now: float) -> int:
        """See `Counter`."""
        self._expire(now)
        self._own.room(now)  # so that `used` is as of now
        return self._left + self._credit if now == self._credit_at else self._left

    def add(self, units: int, now: float) -> int:
        """See `Counter`; the slot is our own."""
        self._expire(now)
        own = self._own.add(units, now)
        rest, slot = units, None
        while rest and self._grants:
            grant = self._grants[0]
            taken = min(grant.left, rest)
            grant.left -= taken
            rest -= taken
            slot = grant.slot if slot is None else slot
            if not grant.left:
                self._grants.popleft()
        self._left -= units - rest
        self._spent += units
        if rest:
            self._owed[own] = self._owed.get(own, 0) + rest
            if len(self._owed) > MOST_OWED:
                del self._owed[next(iter(self._owed))]  # longer ago than a window
            self._credit = max(0, self._credit - rest)
            self.on_news()
        if slot is not None:
            self._origins.setdefault(own, slot)
        return own

    def correct(self, slot: int, units: int, now: float) -> bool:
        """See `Counter`. The authority is told the slot where it counts, or an earlier one: never a later one."""
        self._expire(now)
        if not self._own.correct(slot, units, now):
            return False
        back, origin = -units, self._origins.get(slot)
        if origin is None:  # all of it was lent
            untold = min(back, self._owed.get(slot, 0))
            if untold:
                self._owed[slot] -= untold
                back -= untold
            if not self._seconds:  # a period is one slot; of a window nobody knows where it counts
                origin = slot
        if back and origin is not None:
            self._back[origin] = self._back.get(origin, 0) + back
            self._dry_until = -math.inf  # there is this again
            self.on_news()
        return True

    def wait_s(self, units: int, now: float) -> float:
        """See `Counter`."""
        if units <= self.room(now):
            return 0.0
        if units > self.limit:
            return math.inf
        if not self._seconds:
            return self._ends - now
        return max(0.0, self._told.wait_s - (now - self._told_at))

    def reset_s(self, now: float) -> float:
        """See `Counter`."""
        self._expire(now)
        if not self._seconds:
            return self._ends - now if self.used else 0.0
        return max(0.0, self._told.reset_s - (now - self._told_at), self._own.reset_s(now))

    def since(self, now: float) -> tuple[float, ...]:
        """See `Counter`."""
        self._expire(now)
        return self._own.since(now)

    def recall(self, used: Iterable[tuple[float, int]], now: float) -> None:
        """See `Counter`: the authority is told with the next ask; it listens to the first that tells.

        It is told no more when nothing was asked for long: it will say if nobody has told.
        """
        self.unknown = False
        self._seeds = [(at, units) for at, units in used if at > self._starts]
        self._seeds_until = now + FRESH_S
        if self._sought:
            self.on_news()

    def due(self, now: float) -> bool:
        """See `Shared`."""
        self._expire(now)
        return now >= self._renew_at or self._to_seed or bool(self._back or self._owed)

    def lends(self, units: int, now: float) -> bool:
        """See `Shared`. What streams were lent since counts too: slow ones would never end otherwise."""
        if now >= self._told_at + self._lease_s:
            return True
        since = self._on_its_way + sum(self._back.values()) - sum(self._owed.values())
        return units <= self._left + self.limit - self._told.used + since

    def lend(self, units: int, now: float) -> None:
        """See `Shared`."""
        self._credit, self._credit_at = units, now

    def ask(self, now: float) -> Ask:
        """See `Shared`."""
        self._expire(now)
        need = min(self._need, LARGEST)
        # What was needed before it was time to renew was too little: twice as much, until it lasts.
        pace = 2 * max(self._spent, self._pace) if need else max(self._spent, self._pace // 2)
        self._pace = min(pace, self.limit)
        idle = not self._spent and not need
        if idle or self._short:
            while self._grants:
                self._return(self._grants.popleft())
        ahead = 0 if idle else max(0, max(self._pace, need) - self._left)
        seeds = self._seeds if now < self._seeds_until else None
        width = self._seconds / SLOTS
        ask = Ask(
            kind="window" if self._seconds else "period",
            limit=min(self.limit, LARGEST),
            seconds=self._seconds,
            lease_s=self._lease_s,
            keep_s=(self._seconds or self._ends - now) + self._lease_s + width + 1.0,
            slot=int(self._starts),
            need=need,
            ahead=min(ahead, LARGEST),
            owed=tuple(self._aged(now)),
            back=tuple((slot, min(units, LARGEST)) for slot, units in self._back.items()),
            seeds=None if seeds is None else tuple((now - at, units) for at, units in seeds),
        )
        self._on_its_way = sum(self._back.values()) - sum(self._owed.values())
        self._need = self._spent = 0
        self._short = False
        self._owed, self._back, self._seeds = {}, {}, None
        self._renew_at = now + self._lease_s / 2 if self._grants else math.inf
        if self._seconds:
            oldest = int(now // width) - SLOTS
            self._origins = {own: at for own, at in self._origins.items() if own >= oldest}
        return ask

    def answer(self, ask: Ask, grant: Grant, asked_at: float, now: float) -> None:
        """See `Shared`."""
        self._expire(now)
        if ask.slot != int(self._starts):
            return  # of a period that is over
        if grant.granted:
            until = min(asked_at + self._lease_s, self._ends)
            self._grants.append(_Granted(grant.slot, grant.granted, until))
            self._left += grant.granted
            self._renew_at = min(self._renew_at, asked_at + self._lease_s / 2)
        self._told, self._told_at, self._on_its_way = grant, now, 0
        if self._falls_short(ask, grant, now):
            self._short, self._renew_at = True, now
        self._sought = not grant.known and not 0.0 < self._seconds <= SHORT_S
        if self._sought and self._seeds is None:
            self.unknown = True

    @property
    def _to_seed(self) -> bool:
        return self._sought and self._seeds is not None

    def _aged(self, now: float) -> Iterator[tuple[float, int]]:
        """What is owed, as used at the latest at the end of the slot in which it was."""
        width = self._seconds / SLOTS
        for own, units in self._owed.items():
            yield max(0.0, now - (own + 1) * width) if width else 0.0, min(units, LARGEST)

    def _expire(self, now: float) -> None:
        if now >= self._ends:
            self._turn(now)
        while self._grants and now >= self._grants[0].until:
            self._return(self._grants.popleft())

    def _return(self, grant: _Granted) -> None:
        self._back[grant.slot] = self._back.get(grant.slot, 0) + grant.left
        self._left -= grant.left

    def _turn(self, now: float) -> None:
        """A new period: nothing of the old one matters. Whoever sees it begin knows that nothing was used before."""
        seen = self._ends > 0.0
        if isinstance(self._own, Period):
            self._starts, self._ends = period(self._own.calendar, now)
        seen = seen and now < self._starts + self._lease_s
        self._grants.clear()
        self._left = self._spent = self._pace = 0
        self._owed, self._origins, self._back = {}, {}, {}
        self._seeds, self.unknown = ([], False) if seen else (None, True)
        self._seeds_until, self._sought = now + FRESH_S, False
        self._on_its_way = 0
        self._told = Grant(0, 0, 0, 0.0, 0.0, known=True)
