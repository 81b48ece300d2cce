"""Settings of service levels: thresholds for the autoscaler and rollouts, and objectives with an error budget."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from argosy.policy.objectives import Objective, Sli
from argosy.settings import ByOperator, SettingError
from argosy.store import Tier

MAX_OBJECTIVES = 200
"""Objectives of all kinds. Each has counters of its own."""
MIN_TARGET_PERCENT = 70.0
_SLIS: tuple[Sli, ...] = ("availability", "ttft", "itl", "latency")
Positive = Annotated[float, Meta(gt=0)]
SharePercent = Annotated[
    str, Meta(pattern=r"^[0-9]{1,2}(\.[0-9]{1,4})? ?%$(?!\n)", examples=["99.9%"])
]
"""Share below 100 %, such as `99.9%`."""
Days = Annotated[str, Meta(pattern=r"^([1-9]|[12][0-9]|3[0-5])d$(?!\n)", examples=["30d"])]
"""Number of days from `1d` to `35d`."""


class LatencyTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A time, and the share of requests or tokens that stays below it."""

    below_s: ByOperator[Positive]
    """Time in seconds."""
    share: ByOperator[SharePercent]
    """Share of the requests, or of the tokens for `itl`, from 70 %."""


class SloConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A service level objective, with an error budget for each of its targets.

    It is about all requests that its `model`, `tier` and `tenant` select.
    """

    name: ByOperator[
        Annotated[
            str,
            Meta(
                max_length=63, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$(?!\n)", examples=["chat"]
            ),
        ]
    ]
    """Name in metrics, alerts and the console. With several targets, each has the name of its kind behind it, as in
    `chat-ttft`."""
    model: ByOperator[Annotated[str, Meta(min_length=1, max_length=200)] | None] = None
    """Name of the model or adapter that answers, or that should have before a fallback. None means all models."""
    tier: ByOperator[Tier | None] = None
    """Tier of the requests. None means all tiers."""
    tenant: ByOperator[Annotated[str, Meta(min_length=1, max_length=200)] | None] = None
    """Id of the project, or of the organisation for users without one. None means all tenants."""
    availability: ByOperator[SharePercent | None] = None
    """Share of the requests that no error of the fleet ends, from 70 %. Errors that the caller or its own limit causes
    do not count."""
    ttft: ByOperator[LatencyTarget | None] = None
    """Time to the first token of streams."""
    itl: ByOperator[LatencyTarget | None] = None
    """Time between two tokens of streams."""
    latency: ByOperator[LatencyTarget | None] = None
    """Time of a whole request."""
    window: ByOperator[Days] = "30d"
    """Time over which the budget is counted."""

    def build_objectives(self) -> list[Objective]:
        """Return one objective for each target."""
        targets = {sli: getattr(self, sli) for sli in _SLIS if getattr(self, sli) is not None}
        return [
            Objective(
                name=self.name if len(targets) == 1 else f"{self.name}-{sli}",
                sli=sli,
                target=_parse_percent(target if isinstance(target, str) else target.share) / 100,
                below_s=None if isinstance(target, str) else target.below_s,
                window_s=int(self.window.removesuffix("d")) * 86_400.0,
                model=self.model,
                tier=self.tier,
                tenant=self.tenant,
            )
            for sli, target in targets.items()
        ]


class ObjectivesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Service levels that models are to meet."""

    ttft_p95_s: ByOperator[Positive | None] = None
    """Time to the first token that 95 % of the requests stay below, for the autoscaler and rollouts of a fleet."""
    itl_p95_s: ByOperator[Positive | None] = None
    """Time between two tokens that 95 % of the tokens stay below, for the autoscaler and rollouts of a fleet."""
    slos: ByOperator[tuple[SloConfig, ...]] = ()
    """Service level objectives with error budgets, of at most 200 targets. A budget that burns fast is an alert, and a
    rollout of the model pauses while less than its `min_error_budget` is left."""

    @property
    def has_latency(self) -> bool:
        """Whether it has thresholds for the autoscaler and rollouts."""
        return self.ttft_p95_s is not None or self.itl_p95_s is not None

    def build_objectives(self) -> list[Objective]:
        """Return one objective for each target of `slos`."""
        return [objective for slo in self.slos for objective in slo.build_objectives()]


def find_objective_problems(config: ObjectivesConfig) -> Iterator[SettingError]:
    """Yield an error for each objective that cannot be counted, or has the name of another one."""
    names: set[str] = set()
    for index, slo in enumerate(config.slos):
        path = ("objectives", "slos", index)
        objectives = slo.build_objectives()
        if not objectives:
            message = f"{slo.name} has no target. Add `availability`, `ttft`, `itl` or `latency`."
            yield SettingError(message, path)
        for objective in objectives:
            if objective.target * 100 < MIN_TARGET_PERCENT:
                message = f"a target of {slo.name} is below {MIN_TARGET_PERCENT:g}%. Raise it."
                yield SettingError(message, path)
            if objective.name in names:
                message = f"two objectives are named {objective.name}. Rename one."
                yield SettingError(message, path)
            names.add(objective.name)
    if len(names) > MAX_OBJECTIVES:
        message = f"{len(names)} objectives are more than {MAX_OBJECTIVES}. Remove some."
        yield SettingError(message, ("objectives", "slos"))


def _parse_percent(text: str) -> float:
    return float(re.sub(r"[ %]", "", text))
