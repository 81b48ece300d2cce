"""Weighted fair shares of service between tenants, by virtual token counters.

Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): the waiting tenant with the
least service per weight goes first, and a tenant that comes back from idleness starts level with
the others instead of cashing in its absence. Between two tenants that both have requests waiting,
service per weight then differs by at most twice the larger of (input price x longest input) and
(output price x tokens that can be in flight).
"""

from __future__ import annotations

INPUT_TOKEN_WEIGHT = 1.0
OUTPUT_TOKEN_WEIGHT = 2.0
"""An output token occupies a whole step's slot, an input token shares one: it weighs more."""


def weighted_tokens(input_tokens: float, output_tokens: float) -> float:
    """What so many tokens count for: those of prompts that were not found in a cache, and those of answers."""
    return INPUT_TOKEN_WEIGHT * input_tokens + OUTPUT_TOKEN_WEIGHT * output_tokens


class TenantCounter:
    """What one tenant has been served, in weighted tokens."""

    __slots__ = ("active_requests", "served_tokens", "tenant", "weight")

    def __init__(self, tenant: str, weight: float, served_tokens: float) -> None:
        self.tenant = tenant
        self.weight = weight
        self.served_tokens = served_tokens
        self.active_requests = 0
        """Requests of this tenant that wait or run."""


class VirtualTokenCounters:
    """The accounts of all tenants. A tenant is backlogged between `enter` and the matching `leave`."""

    def __init__(self, max_idle_tenants: int = 10_000) -> None:
        self._counters: dict[str, TenantCounter] = {}
        self._backlogged: dict[str, TenantCounter] = {}
        self._idle_level = 0.0
        """What the tenant that was busy last had been served: where the next busy time begins."""
        self._max_idle_tenants = max_idle_tenants

    def add_request(self, tenant: str, weight: float) -> TenantCounter:
        """One more request of `tenant`; its weight (> 0) is the one last given."""
        account = self._counters.get(tenant)
        if account is None:
            account = self._counters[tenant] = TenantCounter(tenant, weight, 0.0)
        if account.active_requests == 0:
            level = min(
                (other.served_tokens for other in self._backlogged.values()),
                default=self._idle_level,
            )
            account.served_tokens = max(account.served_tokens, level)
            self._backlogged[tenant] = account
        account.weight = weight
        account.active_requests += 1
        return account

    def remove_request(self, counter: TenantCounter) -> None:
        """A request of this tenant has ended."""
        counter.active_requests -= 1
        if counter.active_requests == 0:
            del self._backlogged[counter.tenant]
            self._idle_level = counter.served_tokens
        if len(self._counters) > self._max_idle_tenants:
            self._evict_idle()

    def _evict_idle(self) -> None:
        """Keep the idle accounts that still carry debt, largest first; the others would be lifted anyway."""
        idle = sorted(
            (a for a in self._counters.values() if not a.active_requests),
            key=lambda a: a.served_tokens,
        )
        for account in idle[: max(0, len(idle) - self._max_idle_tenants // 2)]:
            del self._counters[account.tenant]
