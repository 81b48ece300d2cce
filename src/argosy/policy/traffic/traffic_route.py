"""Routing of model names: weights that select a pool, pools that take over, and conditions on requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import msgspec

from argosy.policy.traffic.sticky_hash import (
    TrafficSubject,
    choose_weighted,
    sticky_key,
)
from argosy.settings import ByOperator


class WeightedPool(msgspec.Struct, frozen=True, kw_only=True):
    """Pool with its weight relative to the other pools of a route."""

    pool: str
    weight: float = 1.0


class ServingChoice(NamedTuple):
    """Pool that serves a request in time, or the reason why none does."""

    pool: str | None
    skipped: tuple[str, ...]
    """Why each pool before it was passed over, such as `large has 14.0 s of queue, at most 5 s`."""


class TrafficRoute(msgspec.Struct, frozen=True, kw_only=True):
    """Declared route of a public model name.

    Raises:
        ValueError: The route has no pool with a positive weight, names a pool twice, or has a weight that is not a
            finite number of 0 or more.
    """

    model: str
    pools: tuple[WeightedPool, ...]
    fallback_pools: tuple[str, ...] = ()
    """Pools that answer, in this order, if the selected one cannot in time."""
    max_wait_s: float | None = None
    """Longest time in the queue before a fallback pool takes over. None means any time."""

    def __post_init__(self) -> None:
        names = [each.pool for each in self.pools]
        if len({*names}) < len(names):
            raise ValueError(f"route of {self.model}: a pool is named twice; give it one weight")
        if not all(0.0 <= each.weight < float("inf") for each in self.pools):
            raise ValueError(f"route of {self.model}: weights must be finite numbers of 0 or more")
        if not any(each.weight for each in self.pools):
            raise ValueError(f"route of {self.model}: give at least one pool a positive weight")

    @property
    def total_weight(self) -> float:
        """Sum of the weights of all pools."""
        return sum(each.weight for each in self.pools)

    def select_by_weight(self, subject: TrafficSubject) -> WeightedPool:
        """Select the pool for the sender of a request by weight alone."""
        pools = [each for each in self.pools if each.weight]
        shares = [(each.pool, each.weight / self.total_weight) for each in pools[:-1]]
        key = sticky_key(subject, ())
        name = choose_weighted(self.model, key, shares)
        return next((each for each in pools if each.pool == name), pools[-1])

    def select_serving_pool(
        self, pool: str, waits_s: Mapping[str, float | None], failed: Collection[str] = ()
    ) -> ServingChoice:
        """Select the first of the pool and its fallbacks that serves in time.

        Args:
            pool: The selected pool.
            waits_s: Expected time in the queue of each pool; None if it has no ready replica.
            failed: Pools that could not answer this request.
        """
        skipped: list[str] = []
        limit_s = self.max_wait_s
        for name in dict.fromkeys((pool, *self.fallback_pools)):
            wait_s = waits_s[name]
            if name in failed:
                skipped.append(f"{name} could not answer")
            elif wait_s is None:
                skipped.append(f"{name} has no ready replica")
            elif limit_s is not None and wait_s > limit_s:
                skipped.append(f"{name} has {wait_s:.1f} s of queue, at most {limit_s:g} s")
            else:
                return ServingChoice(name, tuple(skipped))
        return ServingChoice(None, tuple(skipped))


_DAY_S = 86_400
_DAY_MINUTES = 1_440
_EPOCH_WEEKDAY = 3
"""The epoch began on a Thursday; Monday is 0."""
_ALL_WEEK = tuple(range(7))


class DailyWindow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Minutes of the day on some days of the week, in a zone with a fixed offset. It may extend over midnight."""

    start_minute: ByOperator[int]
    """First minute, counted from midnight: 480 is 8:00."""
    end_minute: ByOperator[int]
    """First minute after the window. If it is not after `start_minute`, the window ends on the next day."""
    weekdays: ByOperator[tuple[int, ...]] = _ALL_WEEK
    """Days on which it starts; Monday is 0."""
    utc_offset_minutes: ByOperator[int] = 0
    """Minutes by which the zone is ahead of UTC."""

    def __post_init__(self) -> None:
        for minute in (self.start_minute, self.end_minute):
            if not 0 <= minute <= _DAY_MINUTES:
                raise ValueError("start_minute and end_minute must be between 0 and 1440")
        if not set(self.weekdays) <= set(_ALL_WEEK):
            raise ValueError("weekdays must be numbers from 0 (Monday) to 6 (Sunday)")

    def contains(self, now: float) -> bool:
        """Return whether the window is open at `now`, in seconds since the epoch."""
        days, second = divmod(int(now) + self.utc_offset_minutes * 60, _DAY_S)
        minute, today = second // 60, (days + _EPOCH_WEEKDAY) % 7
        if self.start_minute < self.end_minute:
            return today in self.weekdays and self.start_minute <= minute < self.end_minute
        if minute >= self.start_minute:
            return today in self.weekdays
        return minute < self.end_minute and (today - 1) % 7 in self.weekdays
