"""Plan of a rollout, with its strategy and its steps, and the stored records of the rollouts of a pool."""

from __future__ import annotations

import enum
import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from argosy.policy.rollout.gate_record import GateSettings
from argosy.settings import ByOperator

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

    strategy: ByOperator[Strategy] = "canary"
    """How users get there. With `canary` the new version gets growing shares of them. With `rolling` it gets as many
    as its replicas can serve, which are added one by one. With `blue_green` it gets all at once. With `a_b` it gets a
    fixed share until a person ends the comparison."""
    max_shadow_requests_per_s: ByOperator[Annotated[float, Meta(gt=0, le=10_000)]] = 10.0
    """Copies per second of each gateway."""
    max_surge: ByOperator[Literal[0] | None] = None
    """0 to replace replicas in place, if there are no machines for both versions. A rollback then has to restart the
    old replicas. By default the old ones stay until the end."""
    min_candidate_replicas: ByOperator[Annotated[int, Meta(ge=1, le=10_000)]] = 2
    """Fewest replicas of the new version, as far as each gets at least half the requests of an old one. With one, its
    machine is compared as well."""
    auto_promote: ByOperator[bool] = True
    """Go to the next step without a person when there is enough evidence."""
    start_timeout_s: ByOperator[Seconds] = 1800.0
    """Longest time until the first replicas are warm."""
    check_timeout_s: ByOperator[Seconds] = 600.0
    """Longest time for the pinned prompts and the golden sets."""
    min_step_s: ByOperator[Annotated[float, Meta(ge=0, le=31_536_000)]] = 120.0
    """Shortest time of a step. It lasts at least two of the longest requests."""
    max_step_s: ByOperator[Seconds] = 86_400.0
    """Time after which a step without enough evidence is paused."""
    soak_s: ByOperator[Annotated[float, Meta(ge=0, le=31_536_000)]] = 600.0
    """Shortest time for which the old replicas stay after all users have the new version."""
    min_error_budget: ByOperator[Annotated[float, Meta(ge=0, le=1)]] = 0.0
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
        if not max(self.min_step_s, self.soak_s) <= self.max_step_s:
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


MAX_TRANSITIONS = 64
"""Transitions that a record keeps."""
MAX_VERDICTS = 256
"""Versions that were rolled back and that a pool remembers."""


class RolloutState(enum.StrEnum):
    """State of a rollout."""

    PLANNED = "planned"
    STARTING = "starting"
    """The first replicas of the candidate start."""
    WARMING = "warming"
    """They answer their warm-up requests."""
    CHECKING = "checking"
    """They answer the pinned prompts and the golden sets. The candidate has no traffic before."""
    STEP = "step"
    """Both versions have traffic, or the candidate has shadow traffic."""
    SOAKING = "soaking"
    """All users get the candidate, as far as it has replicas. The old replicas stay warm."""
    PAUSED = "paused"
    INCONCLUSIVE = "inconclusive"
    """Paused, because the evidence has not sufficed within the longest time of a step."""
    RETIRING = "retiring"
    """The old replicas are removed. There is no way back any more."""
    DONE = "done"
    ROLLING_BACK = "rolling_back"
    """The route serves the stable version. Not all gateways follow it yet."""
    ROLLED_BACK = "rolled_back"
    """All gateways follow the route."""
    CLEANING = "cleaning"
    """The replicas of the candidate are removed."""
    ABORTED = "aborted"


TERMINAL_STATES = frozenset({RolloutState.DONE, RolloutState.ABORTED})
PAUSED_STATES = frozenset({RolloutState.PAUSED, RolloutState.INCONCLUSIVE})
TRAFFIC_STATES = frozenset({RolloutState.STEP, RolloutState.SOAKING})
ROLLBACK_STATES = frozenset(
    {RolloutState.ROLLING_BACK, RolloutState.ROLLED_BACK, RolloutState.CLEANING}
)


class RollbackCause(enum.StrEnum):
    """Cause of a rollback."""

    GATE = "gate"
    """The candidate is worse than the stable version."""
    CHECK = "check"
    """A pinned prompt had another answer, or the answers to a golden set are worse."""
    FAILURE = "failure"
    """Its replicas do not start or do not stay up."""
    ROUTE = "route"
    """Another process rolled the route back."""
    COMMAND = "command"
    SUPERSEDED = "superseded"
    """Another version was declared."""
    REVERTED = "reverted"
    """The stable version was declared again."""


BAD_VERSION_CAUSES = frozenset(
    {RollbackCause.GATE, RollbackCause.CHECK, RollbackCause.FAILURE, RollbackCause.ROUTE}
)
"""Causes after which the candidate must not serve, even if no stable replica is ready."""


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """Change of state."""

    at: float
    state: RolloutState
    step: int
    reason: str


class RolloutRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of one rollout. Times are seconds since the epoch."""

    id: str
    stable: str
    """Digest of the version to which a rollback leads."""
    candidate: str
    plan: RolloutPlan
    salt: str
    per_session_tenants: tuple[str, ...] = ()
    effective_users: float = 0.0
    """Number of equally heavy users on the candidate's side at the first share; 0 if it is not known."""
    state: RolloutState = RolloutState.PLANNED
    state_since: float
    step: int = 0
    """Position among the comparison steps; their number while soaking."""
    settled_at: float | None = None
    """Since when all gateways follow the route with the whole share of the step."""
    resume_state: RolloutState | None = None
    """State that a paused rollout returns to."""
    reason: str = ""
    """Why it is in its state."""
    cause: RollbackCause | None = None
    """Set from the rollback on."""
    is_forced: bool = False
    """Whether a person decided to go on in spite of the gate, which then only reports."""
    started_at: float
    transitions: tuple[Transition, ...] = ()

    @property
    def active_state(self) -> RolloutState:
        """State without a pause."""
        return self.resume_state if self.resume_state is not None else self.state

    @property
    def has_ended(self) -> bool:
        """Whether it is done or aborted."""
        return self.state in TERMINAL_STATES

    @property
    def is_endless(self) -> bool:
        """Whether only a person ends the current step."""
        return self.plan.strategy == "a_b" and self.state is RolloutState.STEP

    @property
    def can_roll_back(self) -> bool:
        """Whether a rollback is possible and has not begun."""
        return (
            not self.has_ended
            and self.state not in ROLLBACK_STATES
            and self.state is not RolloutState.RETIRING
        )


class DigestVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """A version that was rolled back. It is not tried again until a person permits it."""

    digest: str
    rollout: str
    cause: RollbackCause
    reason: str
    at: float


class PoolRollouts(msgspec.Struct, frozen=True, kw_only=True):
    """All that is stored about the rollouts of a pool. Store it with compare-and-set on `version`."""

    schema: int = 1
    """Version of the fields. Later versions only add fields with defaults."""
    pool: str
    version: int = 0
    current: RolloutRecord | None = None
    """The rollout that runs, or the last one."""
    verdicts: tuple[DigestVerdict, ...] = ()

    @property
    def running(self) -> RolloutRecord | None:
        """The current rollout unless it has ended."""
        current = self.current
        return None if current is None or current.has_ended else current

    def verdict_on(self, digest: str) -> DigestVerdict | None:
        """Return why a version is not tried again; None if it may be."""
        return next((each for each in self.verdicts if each.digest == digest), None)
