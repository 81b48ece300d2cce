"""Stored records of the rollouts of a pool."""

from __future__ import annotations

import enum

import msgspec

from argosy.policy.rollout.rollout_plan import RolloutPlan

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
    """They answer the pinned prompts. The candidate has no traffic before."""
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
    """A pinned prompt had another answer."""
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
