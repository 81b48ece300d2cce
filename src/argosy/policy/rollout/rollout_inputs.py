"""Inputs of a rollout: the commands of people, of which one is followed, and the observed state of the pool."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import msgspec

from argosy.policy.traffic import PoolRoute


class CommandKind(enum.StrEnum):
    """Command of `argosy rollout`."""

    ABORT = "abort"
    PROMOTE = "promote"
    PAUSE = "pause"
    RESUME = "resume"
    """Continue a paused rollout, or permit another attempt with a version that was rolled back."""


_RANK = {kind: rank for rank, kind in enumerate(CommandKind)}


class RolloutCommand(msgspec.Struct, frozen=True, kw_only=True):
    """Command of one person.

    Raises:
        ValueError: It is forced without a reason.
    """

    kind: CommandKind
    by: str
    reason: str = ""
    force: bool = False
    """Whether to go on without evidence, or with a spent error budget."""
    rollout: str = ""
    """Id of the rollout that it was given for. It does nothing to a later one. Empty for the current one."""

    def __post_init__(self) -> None:
        if self.force and not self.reason.strip():
            raise ValueError("a forced command needs a reason; add one")


def order_commands(commands: Sequence[RolloutCommand]) -> list[RolloutCommand]:
    """Return commands in the order in which they count: abort, then promote, then the latest pause or resume."""
    latest: dict[int, RolloutCommand] = {}
    for command in commands:
        rank = min(_RANK[command.kind], _RANK[CommandKind.PAUSE])
        latest[rank] = command
    return [latest[rank] for rank in sorted(latest)]


class CheckStatus(enum.StrEnum):
    """Result of the pinned prompts and golden sets of a version."""

    PENDING = "pending"
    PASSED = "passed"
    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"
    """A golden set has not enough evidence."""


class VersionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas of one version."""

    existing: int = 0
    """Replicas that a launcher lists, whatever their state."""
    serving: int = 0
    """Replicas that answer their health check."""
    ready: int = 0
    """Replicas that are warm and can get requests."""
    check: CheckStatus = CheckStatus.PENDING
    check_reason: str = ""
    failure: str = ""
    """Why the version does not start or stay up, from the first replica that its restart limits give up."""


class RolloutObservation(msgspec.Struct, frozen=True, kw_only=True):
    """Observation at one moment. With the defaults, which stand for what is not known, nothing moves forward."""

    route: PoolRoute | None
    """Stored route of the pool; None before its first deployment."""
    routed_version: int = 0
    """Smallest version of the route that a reachable gateway follows."""
    needed: int
    """Replicas that the whole demand needs, as the autoscaler or the declaration says."""
    versions: Mapping[str, VersionStatus] = {}
    """Replicas of each version, by its digest."""
    longest_request_s: float = 0.0
    """Duration of the longest normal request. A step lasts at least two of them."""
    error_budget: float | None = None
    """Remaining part of the error budget, from 1 to below 0; None if no objective is declared."""

    @property
    def followed_route(self) -> PoolRoute | None:
        """The stored route if every reachable gateway follows it; otherwise None."""
        route = self.route
        return route if route is not None and self.routed_version >= route.version else None

    def status(self, digest: str) -> VersionStatus:
        """Return the replicas of a version, none if it is not known."""
        return self.versions.get(digest) or VersionStatus()
