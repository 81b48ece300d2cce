"""Weighted fair sharing of service between tenants by virtual token counters (Sheng et al., OSDI 2024).

In "Fairness in Serving Large Language Models", the waiting tenant with the least service per weight is served first.
A tenant that returns from idleness starts level with the active tenants and gets no credit for its absence. Between two
tenants with waiting requests, service per weight then differs by at most twice the larger of two products. The first is
input token weight x longest input, the second is output token weight x tokens that can be in flight.
"""

from __future__ import annotations

INPUT_TOKEN_WEIGHT = 1.0
OUTPUT_TOKEN_WEIGHT = 2.0
"""Output tokens weigh more, because each occupies a batch slot for a whole step while input tokens share a step."""


def weighted_tokens(input_tokens: float, output_tokens: float) -> float:
    """Return the service in weighted tokens; `input_tokens` excludes tokens found in a cache."""
    return INPUT_TOKEN_WEIGHT * input_tokens + OUTPUT_TOKEN_WEIGHT * output_tokens


class TenantCounter:
    """Service that one tenant has received, in weighted tokens."""

    __slots__ = ("active_requests", "served_tokens", "tenant", "weight")

    def __init__(self, tenant: str, weight: float, served_tokens: float) -> None:
        self.tenant = tenant
        self.weight = weight
        self.served_tokens = served_tokens
        self.active_requests = 0
        """Waiting and running requests of the tenant."""


class VirtualTokenCounters:
    """Counters of all tenants. A tenant is backlogged between `add_request` and the matching `remove_request`."""

    def __init__(self, max_idle_tenants: int = 10_000) -> None:
        self._counters: dict[str, TenantCounter] = {}
        self._backlogged: dict[str, TenantCounter] = {}
        self._idle_level = 0.0
        """Service of the tenant that became idle last, at which the next busy period starts."""
        self._max_idle_tenants = max_idle_tenants

    def add_request(self, tenant: str, weight: float) -> TenantCounter:
        """Add a request of `tenant`; the tenant's weight (> 0) becomes `weight`."""
        counter = self._counters.get(tenant)
        if counter is None:
            counter = self._counters[tenant] = TenantCounter(tenant, weight, 0.0)
        if counter.active_requests == 0:
            level = min(
                (backlogged.served_tokens for backlogged in self._backlogged.values()),
                default=self._idle_level,
            )
            counter.served_tokens = max(counter.served_tokens, level)
            self._backlogged[tenant] = counter
        counter.weight = weight
        counter.active_requests += 1
        return counter

    def remove_request(self, counter: TenantCounter) -> None:
        """Remove an ended request of a tenant."""
        counter.active_requests -= 1
        if counter.active_requests == 0:
            del self._backlogged[counter.tenant]
            self._idle_level = counter.served_tokens
        if len(self._counters) > self._max_idle_tenants:
            self._evict_idle()

    def _evict_idle(self) -> None:
        """Drop the idle counters with the least service, which the next busy period would raise anyway."""
        idle = sorted(
            (counter for counter in self._counters.values() if not counter.active_requests),
            key=lambda counter: counter.served_tokens,
        )
        for counter in idle[: max(0, len(idle) - self._max_idle_tenants // 2)]:
            del self._counters[counter.tenant]
