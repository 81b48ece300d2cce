"""Plan of a rollout: its strategy, its steps, and how long each may take."""

from __future__ import annotations

import enum
import math

import msgspec

from argosy.policy.rollout.gate_settings import GateSettings

PERCENT = 100.0
MIN_RELATIVE_LOAD = 0.5
"""Load of a candidate's replica, relative to a stable one, below which fewer of them are compared."""


class Strategy(enum.StrEnum):
    """How users get from the stable version to the candidate."""

    ROLLING = "rolling"
    """Traffic follows the replicas of the candidate, which are added one by one."""
    BLUE_GREEN = "blue_green"
    """All traffic changes at once, after the candidate has all its replicas."""
    CANARY = "canary"
    """The candidate gets shadow traffic, then growing shares."""
    A_B = "a_b"
    """Both versions serve a fixed share until a person ends the comparison."""


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


_CANARY_STEPS = (
    RolloutStep(share=0.1, is_shadow=True),
    RolloutStep(share=0.05),
    RolloutStep(share=0.25),
    RolloutStep(share=0.5),
)
_DEFAULT_STEPS = {Strategy.CANARY: _CANARY_STEPS, Strategy.A_B: (RolloutStep(share=0.5),)}


class RolloutPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Declared plan. After its last step all users get the candidate while the old replicas stay warm.

    Raises:
        ValueError: The plan contradicts itself.
    """

    strategy: Strategy = Strategy.CANARY
    steps: tuple[RolloutStep, ...] | None = None
    """Steps before that of all users. None for those of the strategy."""
    max_surge: int | None = None
    """None to start the candidate beside the stable version, which needs twice the replicas at the end. 0 to replace
    replicas in place, without spare machines: the stable version then has not enough replicas for all users, and a
    rollback has to restart them."""
    min_candidate_replicas: int = 2
    """Fewest replicas of the candidate, as far as each gets at least half the requests of a stable one, since an idle
    replica has other times. With one replica, its machine is compared as well as its version."""
    auto_promote: bool = True
    """Whether steps follow one another without a person, given enough evidence."""
    start_timeout_s: float = 1800.0
    """Longest time until the first replicas of the candidate are warm."""
    check_timeout_s: float = 600.0
    """Longest time for the pinned prompts."""
    min_step_s: float = 120.0
    max_step_s: float = 86_400.0
    """Time after which a step without enough evidence is paused."""
    soak_s: float = 600.0
    """Shortest time with all users before the old replicas are removed."""
    max_shadow_requests_per_s: float = 10.0
    """Copies per second of each gateway."""
    min_error_budget: float = 0.0
    """Remaining part of the error budget below which the rollout is paused."""
    gate: GateSettings = GateSettings()

    def __post_init__(self) -> None:
        if self.max_surge not in {None, 0}:
            raise ValueError(
                "max_surge must be 0 or absent: between both, too few old replicas would stay for a rollback"
            )
        if self.min_candidate_replicas < 1:
            raise ValueError("min_candidate_replicas must be at least 1")
        for name in ("start_timeout_s", "check_timeout_s", "max_step_s"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name} must be positive")
        if not 0.0 <= max(self.min_step_s, self.soak_s) <= self.max_step_s:
            raise ValueError("min_step_s and soak_s must be at most max_step_s")
        shares = [step.share for step in self.comparison_steps if not step.is_shadow]
        if shares != sorted(shares):
            raise ValueError("shares of the steps must not fall")
        if self.strategy in {Strategy.ROLLING, Strategy.BLUE_GREEN} and self.steps:
            raise ValueError(f"strategy {self.strategy} has no steps; remove them, or use canary")
        if self.strategy is Strategy.A_B and len(shares) != 1:
            raise ValueError("strategy a_b needs exactly one step with a share")

    @property
    def comparison_steps(self) -> tuple[RolloutStep, ...]:
        """Steps in which both versions have traffic."""
        return _DEFAULT_STEPS.get(self.strategy, ()) if self.steps is None else self.steps

    @property
    def num_gate_starts(self) -> int:
        """Number of starts for `RolloutGate.start`: one for each step, and one for all users."""
        return len(self.comparison_steps) + 1

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
            for step in self.comparison_steps
        ]
        return f"{self.strategy}: {', '.join([*shares, 'all users'])}"

    def describe_risks(self, needed: int) -> tuple[str, ...]:
        """Return what a person should know before the rollout starts, one sentence each."""
        risks = []
        if self.replaces_in_place:
            first = self.candidate_replicas(
                self.comparison_steps[0].share if self.comparison_steps else 1.0 / max(1, needed),
                needed,
            )
            capacity = PERCENT * (needed - first) / needed if needed else 0.0
            risks.append(
                f"max_surge is 0: at the first step {capacity:.0f} % of the replicas can serve all users after a"
                " rollback, until the others have restarted."
            )
        else:
            risks.append(f"Up to {2 * needed} replicas run at the same time.")
        if not self.comparison_steps and self.gate.max_miss_rate is None:
            risks.append(
                f"Strategy {self.strategy} has little or no traffic of both versions, and no objective is declared:"
                " it will be paused as inconclusive before the old replicas are removed."
            )
        return tuple(risks)
