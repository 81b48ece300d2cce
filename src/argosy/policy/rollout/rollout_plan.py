"""Plan of a rollout: its strategy, its steps, and how long each may take."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from argosy.policy.rollout.gate_record import GateSettings

Seconds = Annotated[float, Meta(gt=0, le=31_536_000)]
Strategy = Literal["canary", "rolling", "blue_green", "a_b"]
PERCENT = 100.0
MIN_RELATIVE_LOAD = 0.5
"""Load of a candidate's replica, relative to a stable one, below which fewer of them are compared."""


class RolloutStep(msgspec.Struct, frozen=True, kw_only=True):
    """Step with traffic of both versions.

    Raises:
        ValueError: The share is not between 0 and 1, excluding both.
    """

    share: float
    """Part of the users that get the candidate, or of the requests that are copied to it."""
    is_shadow: bool = False
    """Whether the candidate gets copies only. Its answers are compared and discarded."""

    def __post_init__(self) -> None:
        if not 0.0 < self.share < 1.0:
            raise ValueError(
                "share of a step must be between 0 and 1; the step of all users follows by itself"
            )


CANARY_STEPS = (
    RolloutStep(share=0.1, is_shadow=True),
    RolloutStep(share=0.05),
    RolloutStep(share=0.25),
    RolloutStep(share=0.5),
)


class RolloutSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a rollout that its plan takes from the declaration as they are."""

    strategy: Strategy = "canary"
    """How users get there. With `canary` the new version gets growing shares of them. With `rolling` it gets as many
    as its replicas can serve, which are added one by one. With `blue_green` it gets all at once. With `a_b` it gets a
    fixed share until a person ends the comparison."""
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


class RolloutPlan(RolloutSettings, frozen=True, kw_only=True):
    """Plan of a rollout. After its last step all users get the candidate while the old replicas stay warm.

    Raises:
        ValueError: The plan contradicts itself.
    """

    steps: tuple[RolloutStep, ...] = CANARY_STEPS
    """Steps in which both versions have traffic, before that of all users."""
    gate: GateSettings = GateSettings()

    def __post_init__(self) -> None:
        if self.min_candidate_replicas < 1:
            raise ValueError("min_candidate_replicas must be at least 1")
        for name in ("start_timeout_s", "check_timeout_s", "max_step_s"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name} must be positive")
        if not 0.0 <= max(self.min_step_s, self.soak_s) <= self.max_step_s:
            raise ValueError("min_step_s and soak_s must be at most max_step_s")
        shares = [step.share for step in self.steps if not step.is_shadow]
        if shares != sorted(shares):
            raise ValueError("shares of the steps must not fall")
        if self.strategy in {"rolling", "blue_green"} and self.steps:
            raise ValueError(f"strategy {self.strategy} has no steps; remove them, or use canary")
        if self.strategy == "a_b" and len(shares) != 1:
            raise ValueError("strategy a_b needs exactly one step with a share")

    @property
    def num_gate_starts(self) -> int:
        """Number of starts for `RolloutGate.start`: one for each step, and one for all users."""
        return len(self.steps) + 1

    @property
    def replaces_in_place(self) -> bool:
        """Whether replicas of the candidate take the places of stable ones."""
        return self.max_surge == 0

    def candidate_replicas(self, share: float, needed: int) -> int:
        """Return the replicas of the candidate for a share of the traffic.

        Args:
            share: Share of the candidate.
            needed: Replicas that the whole demand needs.
        """
        minimum = 1 if self.replaces_in_place else self.min_candidate_replicas
        if share < 1.0:
            equally_loaded = share * needed / (1.0 - share)
            minimum = min(minimum, max(1, int(equally_loaded / MIN_RELATIVE_LOAD)))
        return min(needed, max(minimum, math.ceil(share * needed - 1e-9)))

    def describe_steps(self) -> str:
        """Return the steps in words, such as `canary: copies of 10 % of the requests, 25 % of the users, all users`."""
        shares = [
            f"copies of {PERCENT * step.share:g} % of the requests"
            if step.is_shadow
            else f"{PERCENT * step.share:g} % of the users"
            for step in self.steps
        ]
        return f"{self.strategy}: {', '.join([*shares, 'all users'])}"

    def describe_risks(self, needed: int) -> tuple[str, ...]:
        """Return what a person should know before the rollout starts, one sentence each."""
        risks = []
        if self.replaces_in_place:
            first = self.candidate_replicas(
                self.steps[0].share if self.steps else 1.0 / max(1, needed),
                needed,
            )
            capacity = PERCENT * (needed - first) / needed if needed else 0.0
            risks.append(
                f"max_surge is 0: at the first step {capacity:.0f} % of the replicas can serve all users after a"
                " rollback, until the others have restarted."
            )
        else:
            risks.append(f"Up to {2 * needed} replicas run at the same time.")
        if not self.steps and self.gate.max_miss_rate is None:
            risks.append(
                f"Strategy {self.strategy} has little or no traffic of both versions, and no objective is declared:"
                " it will be paused as inconclusive before the old replicas are removed."
            )
        return tuple(risks)
