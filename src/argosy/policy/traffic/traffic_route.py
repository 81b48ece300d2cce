"""Traffic route of a public model name: rules and weights that select a pool, and pools that take over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from argosy.policy.traffic.conditions import RequestConditions
from argosy.policy.traffic.shadow import ShadowCopy
from argosy.policy.traffic.sticky_hash import TrafficSubject, choose_weighted, sticky_key


class WeightedPool(msgspec.Struct, frozen=True, kw_only=True):
    """Pool with its weight relative to the other pools of a route."""

    pool: str
    weight: float = 1.0


class TrafficRule(msgspec.Struct, frozen=True, kw_only=True):
    """Rule that sends the requests that meet its conditions to one pool, or to the candidate version of any pool."""

    name: str
    conditions: RequestConditions
    pool: str | None = None
    """The pool. None to select one by weight."""
    prefers_candidate: bool = False
    """Whether the candidate version answers while the pool has one, for example for testers. Such requests are not
    assigned at random, so the gate of the rollout must not count them."""


class PoolChoice(NamedTuple):
    """Pool for a request, and why."""

    pool: str
    rule: str = ""
    """Name of the rule that selected it; empty if the weights did."""
    prefers_candidate: bool = False


class ServingChoice(NamedTuple):
    """Pool that serves a request in time, or the reason why none does."""

    pool: str | None
    skipped: tuple[str, ...]
    """Why each pool before it was passed over, such as `pool large: 14.0 s of queue, at most 5 s`."""

    @property
    def is_degraded(self) -> bool:
        """Whether a declared fallback answers. The response names its model."""
        return self.pool is not None and bool(self.skipped)

    @property
    def refusal(self) -> str:
        """Message of the refusal if no pool serves in time; empty otherwise."""
        if self.pool is not None:
            return ""
        return f"No pool can serve this request in time ({'; '.join(self.skipped)}). Retry later."


class TrafficRoute(msgspec.Struct, frozen=True, kw_only=True):
    """Declared route of a public model name. The first rule whose conditions hold decides, otherwise the weights.

    Raises:
        ValueError: The route has no pool with a positive weight, names a pool twice, or has a weight that is not a
            finite number of 0 or more.
    """

    model: str
    pools: tuple[WeightedPool, ...]
    salt: str = ""
    """Salt of the assignment to pools. Defaults to the model's name."""
    rules: tuple[TrafficRule, ...] = ()
    fallback_pools: tuple[str, ...] = ()
    """Pools that answer, in this order, if the selected one cannot in time."""
    shadow: ShadowCopy | None = None
    """Copies of requests that are sent to another pool and compared."""

    def __post_init__(self) -> None:
        names = [each.pool for each in self.pools]
        if len({*names}) < len(names):
            raise ValueError(f"route of {self.model}: a pool is named twice; give it one weight")
        if not all(0.0 <= each.weight < float("inf") for each in self.pools):
            raise ValueError(f"route of {self.model}: weights must be finite numbers of 0 or more")
        if not any(each.weight for each in self.pools):
            raise ValueError(f"route of {self.model}: give at least one pool a positive weight")

    def select_pool(
        self, subject: TrafficSubject, headers: Mapping[str, str], now: float
    ) -> PoolChoice:
        """Select the pool of a request.

        Args:
            subject: Sender of the request.
            headers: Headers of the request, by lower-case name.
            now: Seconds since the epoch.
        """
        for rule in self.rules:
            if rule.conditions.hold(subject, headers, now):
                pool = self._weighted_pool(subject) if rule.pool is None else rule.pool
                return PoolChoice(pool, rule.name, rule.prefers_candidate)
        return PoolChoice(self._weighted_pool(subject))

    def _weighted_pool(self, subject: TrafficSubject) -> str:
        pools = [each for each in self.pools if each.weight]
        total = sum(each.weight for each in pools)
        shares = [(each.pool, each.weight / total) for each in pools[:-1]]
        key = sticky_key(subject, ())
        return choose_weighted(self.salt or self.model, key, shares) or pools[-1].pool

    def select_serving_pool(
        self, pool: str, waits_s: Mapping[str, float], max_wait_s: float
    ) -> ServingChoice:
        """Select the first of the pool and its fallbacks that serves in time.

        Args:
            pool: The selected pool.
            waits_s: Expected time to the first token of each pool that has a ready replica.
            max_wait_s: Longest time that the request can wait.
        """
        skipped: list[str] = []
        for name in dict.fromkeys((pool, *self.fallback_pools)):
            wait_s = waits_s.get(name)
            if wait_s is not None and wait_s <= max_wait_s:
                return ServingChoice(name, tuple(skipped))
            state = "no ready replica" if wait_s is None else f"{wait_s:.1f} s of queue"
            skipped.append(f"pool {name}: {state}, at most {max_wait_s:g} s")
        return ServingChoice(None, tuple(skipped))
