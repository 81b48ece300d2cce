"""Feature flags as they are declared and as operators have switched them, and their variants for requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from argosy.deployment import DeclaredFlag
from argosy.gateway.principal import TIERS, Principal
from argosy.policy.traffic import FeatureFlag, FlagDecision, FlagError, FlagRules, TrafficSubject
from argosy.store import AccountSnapshot, Flag

MAX_USER_CHARS = 1000
"""Length of a user's name from which on the rest is not compared by flags."""


class FeatureFlags:
    """Flags of a gateway, and the names of tenants that their rules may compare. Immutable.

    Attributes:
        declared: The flags of the settings by name.
        switched: What operators decided about them.
        problems: Why a decision does not fit its flag, which then stays as declared.
    """

    def __init__(
        self, declared: Iterable[DeclaredFlag] = (), snapshot: AccountSnapshot | None = None
    ) -> None:
        snapshot = snapshot or AccountSnapshot()
        self.declared = dict(declared)
        self.switched = {each.id: each for each in snapshot.flags if each.id in self.declared}
        self.problems: dict[str, str] = {}
        self._rules: dict[str, FlagRules] = {}
        for name, flag in self.declared.items():
            try:
                self._rules[name] = FlagRules(name, apply_switch(flag, self.switched.get(name)))
            except FlagError as error:
                self.problems[name] = str(error)
                self._rules[name] = FlagRules(name, flag)
        self._names = {}
        if self.declared:
            self._names = {each.id: each.name for each in snapshot.organisations}
            self._names |= {
                each.id: f"{self._names.get(each.organisation, '')}/{each.name}"
                for each in snapshot.projects
            }

    def __iter__(self) -> Iterator[FlagRules]:
        """Yield the flags as they are evaluated."""
        return iter(self._rules.values())

    def select(self, name: str, principal: Principal, subject: TrafficSubject) -> FlagDecision:
        """Select the variant of a flag for a request."""
        return self._rules[name].select(self._describe(principal, subject))

    def test(self, name: str, variant: str | None) -> FlagTest:
        """Return the condition that a flag has a variant, or one whose value is `true` for None."""
        return FlagTest(self, self._rules[name], variant)

    def describe_decisions(
        self, principal: Principal, subject: TrafficSubject
    ) -> list[dict[str, Any]]:
        """Return the variants of all flags for a request, as explanations show them."""
        return [
            {"flag": name, **self.select(name, principal, subject)._asdict()}
            for name in self._rules
        ]

    def _describe(self, principal: Principal, subject: TrafficSubject) -> Mapping[str, str]:
        """Return the values of `FLAG_VARIABLES` for a request."""
        user = subject.user[:MAX_USER_CHARS]
        return {
            "organisation": self._names.get(principal.organisation, ""),
            "project": self._names.get(principal.project, ""),
            "organisation_id": principal.organisation,
            "project_id": principal.project,
            "user": user,
            "key": principal.key,
            "tier": TIERS[principal.tier],
            "targetingKey": f"{subject.tenant}/{user}" if user else principal.key,
        }


class FlagTest(NamedTuple):
    """Condition that a flag has a variant for a request."""

    flags: FeatureFlags
    rules: FlagRules
    variant: str | None

    def holds(self, principal: Principal, subject: TrafficSubject) -> bool:
        """Return whether it holds for a request."""
        decision = self.flags.select(self.rules.name, principal, subject)
        if self.variant is None:
            return self.rules.is_on(decision.variant)
        return decision.variant == self.variant


def apply_switch(flag: FeatureFlag, switch: Flag | None) -> FeatureFlag:
    """Return a flag with the parts that an operator has decided."""
    if switch is None:
        return flag
    decided: dict[str, Any] = {"state": switch.state, "default_variant": switch.default_variant}
    if switch.targeting is not None:
        decided["targeting"] = msgspec.json.decode(switch.targeting, type=dict[str, Any])
    given = {name: value for name, value in decided.items() if value is not None}
    return msgspec.structs.replace(flag, **given)
