"""Declaration of a pool's rollouts, and the plan that follows from it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from argosy.deployment.declaration.pinned_prompt import PinnedPrompt
from argosy.policy.rollout import (
    GateSettings,
    Metric,
    MetricRule,
    RolloutPlan,
    RolloutStep,
    Strategy,
)

MetricName = Literal["errors", "refusals", "ttft", "tpot", "short_output", "long_output"]
Seconds = Annotated[float, Meta(gt=0, le=31_536_000)]
Ratio = Annotated[float, Meta(ge=1, le=1000)]
StepShare = (
    Annotated[float, Meta(ge=0, lt=1)]
    | Annotated[str, Meta(pattern=r"^[0-9]{1,2}(\.[0-9]{1,6})?%$")]
)
"""Share of the users or requests, such as `25%` or 0.25."""
DEFAULT_SHADOW_SHARE = 0.1
OBJECTIVE_MISS_RATE = 0.05
"""Part of the requests that may miss objectives for 95 % of them."""


class MetricConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one metric, as ratios of the rates of bad events of the new and the stable version."""

    tolerance: Ratio | None = None
    """Largest ratio that is no regression."""
    margin: Ratio | None = None
    """The next step needs evidence that the ratio is below it."""
    tight_margin: Ratio | None = None
    """The same from a share of 25 %."""


class GateConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Comparison of the new with the stable version."""

    max_false_rollbacks: Annotated[float, Meta(gt=0, lt=1)] = 0.01
    """Largest probability that a version that is no worse is rolled back."""
    max_false_promotions: Annotated[float, Meta(gt=0, lt=1)] = 0.05
    """Largest probability at each step that a version that is worse by a margin goes on."""
    max_miss_rate: Annotated[float, Meta(gt=0, lt=1)] | None = None
    """Share of the requests that may fail or miss `objectives` of the fleet. 0.05 if it has any."""
    max_silence_s: Seconds = 75.0
    """Age of the latest measurement from which it counts as missing, so that the rollout waits."""
    metrics: dict[MetricName, MetricConfig] = {}
    """Other limits than the defaults, by metric."""
    ignored_metrics: tuple[MetricName, ...] = ()
    """Metrics that may change, such as `long_output` for a version that answers at greater length."""

    def settings(self, *, has_objectives: bool) -> GateSettings:
        """Return the settings of the gate.

        Args:
            has_objectives: Whether the fleet declares objectives for 95 % of the requests.

        Raises:
            ValueError: They contradict each other.
        """
        rules: dict[Metric, MetricRule] = {}
        for metric, rule in GateSettings().rules.items():
            if metric.value in self.ignored_metrics:
                continue
            limits = self.metrics.get(metric.value, MetricConfig())
            declared = {
                name: value
                for name, value in msgspec.structs.asdict(limits).items()
                if value is not None
            }
            rules[metric] = MetricRule(**(msgspec.structs.asdict(rule) | declared))
        max_miss_rate = self.max_miss_rate
        if max_miss_rate is None and has_objectives:
            max_miss_rate = OBJECTIVE_MISS_RATE
        return GateSettings(
            max_false_rollbacks=self.max_false_rollbacks,
            max_false_promotions=self.max_false_promotions,
            rules=rules,
            max_miss_rate=max_miss_rate,
            max_silence_s=self.max_silence_s,
        )


class RolloutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the users of a pool get to a new version of its replicas.

    A running rollout keeps the settings with which it started.
    """

    strategy: Literal["canary", "rolling", "blue_green", "a_b"] = "canary"
    """How users get there. With `canary` the new version gets growing shares of them. With `rolling` it gets as many
    as its replicas can serve, which are added one by one. With `blue_green` it gets all at once. With `a_b` it gets a
    fixed share until a person ends the comparison."""
    steps: Annotated[tuple[StepShare, ...], Meta(min_length=1, max_length=20)] | None = None
    """Shares of the users, such as `[5%, 25%, 50%]`, which is the default of `canary`. That of `a_b` is `[50%]`. All
    users follow by themselves."""
    shadow: StepShare | None = None
    """Share of the requests that are copied to the new version before it serves any user. The copies are compared and
    not billed. 10 % for `canary`, and none for the others. 0 for none."""
    max_shadow_requests_per_s: Annotated[float, Meta(gt=0, le=10_000)] = 10.0
    """Copies per second of each gateway."""
    max_surge: Literal[0] | None = None
    """0 to replace replicas in place, if there are no machines for both versions. A rollback then has to restart the
    old replicas. By default the old ones stay until the end."""
    min_candidate_replicas: Annotated[int, Meta(ge=1, le=10_000)] = 2
    """Fewest replicas of the new version, as far as each gets at least half the requests of an old one. With one, its
    machine is compared as well."""
    auto_promote: bool = True
    """Go to the next step without a person when there is enough evidence."""
    start_timeout_s: Seconds = 1800.0
    """Longest time until the first replicas are warm."""
    check_timeout_s: Seconds = 600.0
    """Longest time for the pinned prompts."""
    min_step_s: Annotated[float, Meta(ge=0, le=31_536_000)] = 120.0
    """Shortest time of a step. It lasts at least two of the longest requests."""
    max_step_s: Seconds = 86_400.0
    """Time after which a step without enough evidence is paused."""
    soak_s: Annotated[float, Meta(ge=0, le=31_536_000)] = 600.0
    """Shortest time for which the old replicas stay after all users have the new version."""
    min_error_budget: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of the error budget below which the rollout is paused."""
    gate: GateConfig = GateConfig()
    """Comparison of both versions."""
    prompts: tuple[PinnedPrompt, ...] | None = None
    """Requests that the new version must answer before it gets traffic. None for three built-in ones, `[]` for no
    check."""

    def build_plan(self, *, has_objectives: bool) -> RolloutPlan:
        """Return the plan.

        Args:
            has_objectives: Whether the fleet declares objectives for 95 % of the requests.

        Raises:
            ValueError: The settings contradict each other.
        """
        return RolloutPlan(
            strategy=Strategy(self.strategy),
            steps=self._build_steps(),
            max_surge=self.max_surge,
            min_candidate_replicas=self.min_candidate_replicas,
            auto_promote=self.auto_promote,
            start_timeout_s=self.start_timeout_s,
            check_timeout_s=self.check_timeout_s,
            min_step_s=self.min_step_s,
            max_step_s=self.max_step_s,
            soak_s=self.soak_s,
            max_shadow_requests_per_s=self.max_shadow_requests_per_s,
            min_error_budget=self.min_error_budget,
            gate=self.gate.settings(has_objectives=has_objectives),
        )

    def _build_steps(self) -> tuple[RolloutStep, ...] | None:
        shares = None if self.steps is None else [_share(each) for each in self.steps]
        if shares is None:
            defaults = RolloutPlan(strategy=Strategy(self.strategy)).comparison_steps
            shares = [step.share for step in defaults if not step.is_shadow]
        shadow = 0.0 if self.shadow is None else _share(self.shadow)
        if self.shadow is None and self.strategy == "canary":
            shadow = DEFAULT_SHADOW_SHARE
        copies = [RolloutStep(share=shadow, is_shadow=True)] if shadow else []
        return (*copies, *(RolloutStep(share=each) for each in shares))


def _share(share: float | str) -> float:
    return float(share.removesuffix("%")) / 100.0 if isinstance(share, str) else share
