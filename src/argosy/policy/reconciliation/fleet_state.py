"""Desired and observed state of a fleet: what the applied declaration asks for, and the replicas that exist."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from argosy.policy.replica_status import ReplicaStatus

_REPLICA_NAME = re.compile("(.+)-([0-9]{1,9})-([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """When replicas count as hung, and when those that exit are started again. Times are in seconds."""

    hang_timeout_s: float = 10.0
    """Silence after a response from which a replica counts as hung."""
    start_timeout_s: float = 120.0
    """Silence after the start from which a replica counts as hung."""
    step_timeout_s: float = 60.0
    """Time without a step of an engine that has requests, from which a replica counts as hung."""
    max_failed_starts: int = 5
    """Consecutive failed starts after which the replica is given up."""
    give_up_retry_interval_s: float = 60.0
    """Interval at which a given-up replica that was once ready is started again, since the cause may pass."""
    healthy_after_s: float = 10.0
    """Time ready after which a run counts as healthy and ends the series of short runs."""
    base_backoff_s: float = 0.25
    """Wait after the second consecutive short run, doubled for each further one; there is none after the first."""
    max_backoff_s: float = 5.0


class DesiredPool(msgspec.Struct, frozen=True, kw_only=True):
    """Desired state of one pool.

    Raises:
        ValueError: A number is negative, or none of its replicas could ever be replaced.
    """

    name: str
    launcher: str
    """Name of the launcher that runs new replicas."""
    generation: int
    """Number of the version of the replica settings. Replicas of other generations are replaced, unless the fleet has
    a `DesiredPool` for them too."""
    replicas: int
    """Number of replicas in the rotation."""
    spares: int = 0
    """Number of further replicas that are started and warm, but outside the rotation."""
    max_surge: int = 1
    """Number of replicas that may exist beyond `replicas` and `spares` during a replacement. If it is 0, an old replica
    leaves before a new one is started."""
    max_unavailable: int = 0
    """Number of replicas by which the rotation may be short because of the controller's own actions. For hung
    replicas it is at least 1, because these are restarted in place."""
    restart_limits: RestartLimits = RestartLimits()
    requires_warm_up: bool = False
    """Whether a replica enters the rotation, or becomes a spare, only after its warm-up."""
    serves_model: bool = True
    """Whether its replicas serve a model behind gateways. Otherwise they are the gateways, each ordinal of which has an
    address of its own. A gateway then replaces the one with its ordinal, and lower ordinals are kept."""
    surplus_reason: str = ""
    """Why replicas beyond the desired number leave; empty for the number itself."""

    def __post_init__(self) -> None:
        for field in ("replicas", "spares", "max_surge", "max_unavailable"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} of pool {self.name} must be 0 or more")
        if self.replicas and not self.spares + self.max_surge + self.max_unavailable:
            raise ValueError(
                f"No replica of pool {self.name} could be replaced; set max_surge or max_unavailable to at least 1"
            )


class DesiredFleet(msgspec.Struct, frozen=True, kw_only=True):
    """Desired state of a fleet. Replicas of pools that it does not contain are drained and removed."""

    pools: tuple[DesiredPool, ...] = ()
    """Pools. Several of one name are versions of one pool that serve beside each other. Each has the replicas of its
    generation, and the first one replaces those of generations that no other one has."""
    cores: Mapping[str, int] = {}
    """CPU cores of the machine of each launcher that has only one. They bound how many replicas start at once there."""


MAX_PAST_RUNS = 16
"""Number of past runs of a replica that the controller keeps. The longest back-off is reached before."""


class LaunchState(enum.StrEnum):
    """State of a replica in its environment, according to its launcher."""

    PROVISIONING = "provisioning"
    """Accepted, but not yet running, for the reason that the launcher states."""
    RUNNING = "running"
    DRAINING = "draining"
    """Running, and asked to exit when its requests have ended."""
    EXITED = "exited"


class WarmUpState(enum.StrEnum):
    """Progress of the requests that are sent to a replica before it enters the rotation."""

    NOT_STARTED = "not_started"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class ReplicaRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run of a replica that has ended, or an attempt to launch it that failed. Times are seconds since the epoch."""

    attempt: int
    started_at: float
    ready_at: float | None = None
    """When it first served; None if it never did, or if its warm-up failed."""
    exited_at: float
    reason: str = ""
    """Why it ended, such as `it exited with status 3`."""
    was_refused: bool = False
    """Whether its launcher refused to start it, so that it never ran."""


class ReplicaMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a replica in the store, since a controller that was restarted cannot observe it.

    All but the past runs applies to the latest attempt. Times are seconds since the epoch.
    """

    name: str
    """By `replica_name`."""
    pool: str
    generation: int
    ordinal: int
    launcher: str
    """Name of the launcher that runs it."""
    attempt: int = 0
    """Number of times that it was started."""
    started_at: float = 0.0
    """When the latest attempt started."""
    ready_at: float | None = None
    """When this attempt first served, by the first health check that succeeded."""
    warm_up: WarmUpState = WarmUpState.NOT_STARTED
    """Warm-up of this attempt. One that was running when its controller ended has not started."""
    warm_up_error: str = ""
    stop_reason: str = ""
    """Why the controller killed this attempt; empty if it did not."""
    in_rotation: bool = False
    """Whether the latest version of the pools that was published for the gateways contains it."""
    past_runs: tuple[ReplicaRun, ...] = ()
    """Up to `MAX_PAST_RUNS` earlier runs, oldest first. See `Start.ended_run`."""


class ObservedReplica(ReplicaMemory, frozen=True, kw_only=True):
    """A replica that a launcher, the published rotation or the history of runs contains.

    Each field names who supplies it: the launcher's listing, the controller's health checks, or the gateways.
    """

    state: LaunchState | None = None
    """Launcher. None if it does not list the replica."""
    reason: str = ""
    """Launcher: why the replica waits, or why it exited."""
    exited_at: float | None = None
    """Launcher."""
    start_error: str = ""
    """Launcher: message of a replica that cannot start, such as a missing model. It is not restarted soon."""
    activity: str = ""
    """Launcher or health check: activity of its start, such as `loading weights, 40 %`."""
    last_response_at: float | None = None
    """Health check: when it last answered any HTTP request. One before `started_at` does not count."""
    last_step_at: float | None = None
    """Health check: when its engine's step counter last advanced, or when it last had no request. None if the engine
    reports no counter."""
    is_serving: bool = False
    """Health check: whether its `/ready` answers 200 at present."""
    serving_problem: str = ""
    """Health check: why `/ready` does not answer 200, if it is a fault of the settings; empty otherwise."""
    reported_state: str = ""
    """Health check: state of its load report, such as `restarting`; empty without one."""
    core_exit: str = ""
    """Health check: why its engine core ended last; empty if it never did."""
    core_exited_at: float | None = None
    """Health check: when it was first seen that the core had ended."""
    gateway_status: ReplicaStatus | None = None
    """Gateways: the worst status at one of them that can be reached; None if none of them knows the replica."""
    gateway_reason: str = ""
    """Gateways: why it has this status."""
    is_routed: bool = False
    """Gateways: whether all that can be reached route to it. True if the fleet has no gateway, but not if none of them
    can be reached, because these may still route by an older version."""
    is_routed_by_any: bool = False
    """Gateways: whether at least one that can be reached routes to it."""


class ObservedFleet(msgspec.Struct, frozen=True, kw_only=True):
    """The observed state of a fleet at one moment."""

    replicas: tuple[ObservedReplica, ...] = ()
    """All replicas that a launcher lists, that are published for the gateways, or that have a history. Those of a
    launcher that cannot list its replicas are the ones of its last listing."""
    observing_since: float = 0.0
    """Time since which the controller observes without a gap. See `continue_observation`."""
    unavailable_launchers: Mapping[str, str] = {}
    """Launchers that cannot list their replicas, and why. What they run is unknown, so nothing is done to it."""


def replica_name(pool: str, generation: int, ordinal: int) -> str:
    """Return the name of a replica, so that two controllers that start the same replica start it once."""
    return f"{pool}-{generation}-{ordinal}"


def parse_replica_name(name: str) -> tuple[str, int, int] | None:
    """Return pool, generation and ordinal of a replica's name; None if it is not one."""
    match = _REPLICA_NAME.fullmatch(name)
    return None if match is None else (match[1], int(match[2]), int(match[3]))


def continue_observation(
    observing_since: float, last_observed_at: float, now: float, max_gap_s: float
) -> float:
    """Return the new `ObservedFleet.observing_since` for an observation at `now`.

    After a gap, for example because the controller was suspended, the silence of a replica is no evidence against it.

    Args:
        observing_since: The value of the last observation.
        last_observed_at: Time of the last observation.
        now: Time of this observation.
        max_gap_s: Longest time between two observations without a gap; at most half of the shortest hang timeout.
    """
    return observing_since if 0.0 <= now - last_observed_at <= max_gap_s else now
