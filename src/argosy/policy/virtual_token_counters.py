"""Weighted fair shares of service between tenants, by virtual token counters.

Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): the waiting tenant with the
least service per weight goes first, and a tenant that comes back from idleness starts level with
the others instead of cashing in its absence. Between two tenants that both have requests waiting,
service per weight then differs by at most twice the larger of (input price x longest input) and
(output price x tokens that can be in flight).
"""

from __future__ import annotations

INPUT_PRICE = 1.0
OUTPUT_PRICE = 2.0
"""An output token occupies a whole step's slot, an input token shares one: it weighs more."""


def service(computed: float, output: float) -> float:
    """What so many tokens count for: those of prompts that were not found in a cache, and those of answers."""
    return INPUT_PRICE * computed + OUTPUT_PRICE * output


class Account:
    """What one tenant has been served, in weighted tokens."""

    __slots__ = ("active", "served", "tenant", "weight")

    def __init__(self, tenant: str, weight: float, served: float) -> None:
        self.tenant = tenant
        self.weight = weight
        self.served = served
        self.active = 0
        """Requests of this tenant that wait or run."""


class TenantShares:
    """The accounts of all tenants. A tenant is backlogged between `enter` and the matching `leave`."""

    def __init__(self, max_idle: int = 10_000) -> None:
        self._accounts: dict[str, Account] = {}
        self._busy: dict[str, Account] = {}
        self._level = 0.0
        """What the tenant that was busy last had been served: where the next busy time begins."""
        self._max_idle = max_idle

    def enter(self, tenant: str, weight: float) -> Account:
        """One more request of `tenant`; its weight (> 0) is the one last given."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = Account(tenant, weight, 0.0)
        if account.active == 0:
            level = min((other.served for other in self._busy.values()), default=self._level)
            account.served = max(account.served, level)
            self._busy[tenant] = account
        account.weight = weight
        account.active += 1
        return account

    def leave(self, account: Account) -> None:
        """A request of this tenant has ended."""
        account.active -= 1
        if account.active == 0:
            del self._busy[account.tenant]
            self._level = account.served
        if len(self._accounts) > self._max_idle:
            self._forget_idle()

    def _forget_idle(self) -> None:
        """Keep the idle accounts that still carry debt, largest first; the others would be lifted anyway."""
        idle = sorted((a for a in self._accounts.values() if not a.active), key=lambda a: a.served)
        for account in idle[: max(0, len(idle) - self._max_idle // 2)]:
            del self._accounts[account.tenant]
