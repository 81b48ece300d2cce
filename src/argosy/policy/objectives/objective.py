"""A service level objective: which requests it is about, what a good one is, and how many have to be good."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

Sli = Literal["availability", "ttft", "itl", "latency"]
"""Measured quantity: answers without an error of the fleet, time to the first token, time between two tokens, or time
of the whole request."""


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    """Share of the requests (or tokens) that has to be good within a window of time."""

    name: str
    sli: Sli
    target: float
    """Share that has to be good, below 1."""
    below_s: float | None = None
    """Time that a good request or token stays below. None for availability."""
    window_s: float = 30 * 86_400.0
    """Time over which the budget is counted."""
    model: str | None = None
    tier: str | None = None
    tenant: str | None = None

    @property
    def id(self) -> str:
        """Name with a digest of what is counted. Counts of another definition are not comparable."""
        counted = msgspec.json.encode([self.sli, self.below_s, self.model, self.tier, self.tenant])
        return f"{self.name}@{hashlib.sha256(counted).hexdigest()[:12]}"

    @property
    def budget_share(self) -> float:
        """Share that may miss."""
        return 1.0 - self.target

    @property
    def target_percent(self) -> float:
        """Share that has to be good, in percent without errors of rounding."""
        return round(self.target * 100, 6)

    @property
    def description(self) -> str:
        """Target and scope in words."""
        share = f"{self.target_percent:g} %"
        limit = f"{(self.below_s or 0.0) * 1000:g} ms"
        target = {
            "availability": f"{share} of the requests end without an error of the fleet",
            "ttft": f"{share} of the streams have their first token within {limit}",
            "itl": f"{share} of the tokens follow the one before within {limit}",
            "latency": f"{share} of the requests end within {limit}",
        }[self.sli]
        scope = [f"{key} {value}" for key, value in self.labels.items() if key != "objective"]
        return f"{target} ({', '.join(scope)})" if scope else target

    @property
    def labels(self) -> dict[str, str]:
        """Its name and scope, as labels of alerts."""
        parts = {"model": self.model, "tier": self.tier, "tenant": self.tenant}
        return {"objective": self.name} | {key: value for key, value in parts.items() if value}

    def matches(self, model: str, tier: str, tenant: str) -> bool:
        """Return whether it is about the requests of a tenant for a model in a tier."""
        return (
            self.model in {None, model}
            and self.tier in {None, tier}
            and self.tenant in {None, tenant}
        )
