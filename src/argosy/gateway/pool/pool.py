"""Pool of the replicas of one version of a model, with the decisions of operators and the history of its replicas."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Literal, NamedTuple

import msgspec
import structlog

from argosy.deployment import SleepConfig
from argosy.gateway.pool.replica_endpoint import ReplicaEndpoint, ignore_change
from argosy.policy import Hedging, ReplicaStatus, RoutingPolicyName, StatusChange
from argosy.policy.placement import GivingWay, PlacementPool
from argosy.policy.traffic import PoolRoute, TrafficRoute
from argosy.protocol import ModelDescription, differing_parts
from argosy.store import ReplicaSetting

MIN_ETA_S = 5.0
"""Shortest time that is announced, also when a start takes longer than expected."""
MAX_PROGRESS = 0.99
"""Progress of a start that takes longer than expected."""
VERSION_LABEL_LENGTH = 12
UNSERVED_INTERVAL_S = 5.0
"""Time within which only the first request without a replica is recorded, so that reports of each second contain it."""
MAX_STATUS_CHANGES = 500
"""Status changes that each pool keeps."""
_FAILED_STATUSES = frozenset({ReplicaStatus.EJECTED, ReplicaStatus.UNREACHABLE})

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class ModelStartup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """State of a model without replicas, as its controller publishes it. Times are seconds since the epoch.

    It changes only with the state, so that the progress costs no messages between controller and gateways.
    """

    state: Literal["stopped", "starting", "failing"]
    """`stopped` until a request arrives. `failing` while no replica starts."""
    expected_s: float | None = None
    """How long the start takes by what earlier ones took; None before the first."""
    started_at: float | None = None
    """When the first replica was started; None while it waits for a machine."""
    problem: str = ""
    """Why the start fails, for clients: the rest of a sentence about the model. Empty if they learn no reason."""

    @property
    def is_failing(self) -> bool:
        """Whether requests should not wait, because no replica starts at the moment."""
        return self.state == "failing"

    def eta_s(self, wall_now: float) -> float | None:
        """Return the expected seconds until the model serves; None if no start was measured yet."""
        if self.expected_s is None:
            return None
        return max(MIN_ETA_S, self.expected_s - self._elapsed_s(wall_now))

    def progress(self, wall_now: float) -> float | None:
        """Return the part of the start that is over, from 0 to 1; None if no start was measured yet."""
        if not self.expected_s:
            return None
        return min(MAX_PROGRESS, self._elapsed_s(wall_now) / self.expected_s)

    def describe(self, wall_now: float) -> dict[str, str | float | None]:
        """Return the fields by which clients learn how long they have to wait."""
        eta_s, progress = self.eta_s(wall_now), self.progress(wall_now)
        return {
            "state": self.state,
            "progress": None if progress is None else round(progress, 2),
            "eta_s": None if eta_s is None else math.ceil(eta_s),
        }

    def _elapsed_s(self, wall_now: float) -> float:
        return 0.0 if self.started_at is None else max(0.0, wall_now - self.started_at)


class PoolVersions(NamedTuple):
    """Versions of a model whose changes are rollouts, and the route that divides its requests among them."""

    route: PoolRoute
    pools: Mapping[str, Pool]
    """Pool of each version by digest."""


class Pool(PlacementPool[ReplicaEndpoint]):
    """Replicas of one version of a public model. Not thread-safe: use it from one event loop."""

    def __init__(
        self,
        model: str,
        replicas: list[ReplicaEndpoint],
        routing_policy: RoutingPolicyName = "least-cost",
        hedging: Hedging | None = None,
        giving_way: GivingWay | None = None,
        version: str = "",
    ) -> None:
        super().__init__(model, replicas, routing_policy, hedging, giving_way)
        self.version = version
        """Digest of the version; empty if changes of the model are no rollouts."""
        self.versions: PoolVersions | None = None
        """All versions of the model, at the pool of the stable one. None at the others, and without rollouts."""
        self.status_changes = deque[StatusChange](maxlen=MAX_STATUS_CHANGES)
        """Recent status changes of the replicas."""
        self.unserved_at = -math.inf
        """When a request last needed a replica of the stopped pool, but was not queued for it."""
        self._settings: Mapping[str, ReplicaSetting] = {}
        """Operators' decisions by replica name, also for replicas that are not in the pool at the moment."""
        self._logged_arithmetics: set[str] = set()
        """Arithmetic identities that the last warning named."""
        self.active_requests = 0
        """Number of requests for this pool, queued or running."""
        self.traffic: TrafficRoute | None = None
        """Pools that answer in place of this one; None if it always answers."""
        self.startup: ModelStartup | None = None
        """How far the start of the first replica is, if the fleet scales the pool to zero and it has no replica."""
        self.sleep: SleepConfig | None = None
        """When the model sleeps; None if it never does."""
        self.keep_alive_s: float | None = None
        """Time without requests after which it sleeps, if an operator's request has set one in place of `sleep`'s."""
        self._on_capacity_change: Callable[[], None] = ignore_change
        for replica in replicas:
            self._observe(replica)

    @property
    def version_label(self) -> str:
        """Beginning of the version's digest, for people; empty without rollouts."""
        return self.version[:VERSION_LABEL_LENGTH]

    @property
    def all_versions(self) -> Collection[Pool]:
        """The pools of all versions of the model, of which this is the stable one."""
        return (self,) if self.versions is None else self.versions.pools.values()

    @property
    def is_answered_by_others(self) -> bool:
        """Whether only other pools are selected for requests, so that this one needs no replicas."""
        return self.traffic is not None and all(
            each.pool != self.model for each in self.traffic.pools
        )

    @property
    def max_model_len(self) -> int | None:
        """Largest context length of the replicas in tokens; None if no replica reported one."""
        lengths = [r.max_model_len for r in self.replicas.values() if r.max_model_len is not None]
        return max(lengths, default=None)

    @property
    def model_digest(self) -> str | None:
        """Digest of the model, if all replicas have verified the same one."""
        digests = {replica.model_digest for replica in self.replicas.values()}
        return digests.pop() or None if len(digests) == 1 else None

    @property
    def description(self) -> ModelDescription | None:
        """The model as one of the replicas describes it; None if none does."""
        reports = [replica.report for replica in self.replicas.values()]
        return next((report.model for report in reports if report and report.model), None)

    @property
    def tasks(self) -> frozenset[str] | None:
        """Tasks of the model, like `generate` or `embed`; None if a replica does not report them."""
        tasks = [replica.tasks for replica in self.replicas.values()]
        known = [each for each in tasks if each is not None]
        return frozenset[str]().union(*known) if known and len(known) == len(tasks) else None

    @property
    def queued_requests(self) -> int:
        """Number of requests that do not run at a replica."""
        in_flight = sum(replica.load.in_flight for replica in self.replicas.values())
        return max(0, self.active_requests - in_flight)

    def has_failed(self, now: float) -> bool:
        """Whether all replicas have failed. Full, starting and drained ones have not."""
        statuses = {replica.health.status(now) for replica in self.replicas.values()}
        return bool(statuses) and statuses <= _FAILED_STATUSES

    def expected_wait_s(self, tier: int, now: float) -> float | None:
        """Estimate how long a new request of this tier would be queued; None if no replica is ready or wakes up."""
        return self.estimate_wait_s(self.queued_requests, tier, now)

    def may_recover(self, now: float) -> bool:
        """Whether requests wait, as in placement, but not if the model's problem ends by itself only with a change."""
        return not (self.startup is not None and self.startup.problem) and super().may_recover(now)

    def record_unserved(self, now: float) -> None:
        """Record a request that is answered without this pool, because it has no replica. It is demand nevertheless."""
        if self.is_starting and now - self.unserved_at > UNSERVED_INTERVAL_S:
            self.unserved_at = now

    def set_startup(self, startup: ModelStartup | None, now: float) -> None:
        """Set how far the start of the first replica is. Requests wait for it, unless it fails."""
        self.startup = startup
        self.set_starting(is_starting=startup is not None and not startup.is_failing, now=now)

    def set_capacity_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` after changes that are no part of an attempt and may give a replica more free slots."""
        self._on_capacity_change = listener
        for replica in self.replicas.values():
            replica.on_capacity_change = listener

    def set_takeover(self, takeover: Pool | None, *, is_withdrawn: bool) -> None:
        """Let the pool of the stable version serve what this one cannot, or all that does not run yet."""
        has_changed = is_withdrawn and not self.is_withdrawn
        self.takeover, self.is_withdrawn = takeover, is_withdrawn
        if has_changed:
            self._on_capacity_change()

    def add(self, replica: ReplicaEndpoint) -> None:
        """Add a replica, in place of one with its name. The replica gets requests once a probe finds it ready."""
        replica.health.on_report_required()
        self._observe(replica)
        replica.apply_setting(self._settings.get(replica.name), time.monotonic(), time.time())
        super().add(replica)

    def _observe(self, replica: ReplicaEndpoint) -> None:
        replica.on_capacity_change = self._on_capacity_change
        replica.on_arithmetic_change = self._log_mixed_arithmetic
        replica.health.on_status_change = self._on_status_change

    def apply_settings(
        self, settings: Mapping[str, ReplicaSetting], now: float, wall_now: float
    ) -> None:
        """Apply the operators' decisions, by replica name. They replace all earlier ones."""
        self._settings = settings
        for replica in self.replicas.values():
            replica.apply_setting(settings.get(replica.name), now, wall_now)

    def apply_setting(self, setting: ReplicaSetting, now: float, wall_now: float) -> None:
        """Apply one operator's decision, beside the earlier ones about other replicas."""
        self.apply_settings({**self._settings, setting.replica: setting}, now, wall_now)

    def group_by_arithmetic(self) -> dict[str, list[ReplicaEndpoint]]:
        """Return the replicas by arithmetic identity. A stream is resumed only within its group.

        Replicas whose identity is unknown are left out.
        """
        groups: dict[str, list[ReplicaEndpoint]] = {}
        for replica in self.replicas.values():
            if replica.arithmetic_id:
                groups.setdefault(replica.arithmetic_id, []).append(replica)
        return groups

    def _on_status_change(self, change: StatusChange) -> None:
        self.status_changes.append(change)
        log.info(
            "replica_status_changed",
            replica=change.replica,
            status=change.status.value,
            previous=change.previous.value,
            reason=change.reason,
        )

    def _log_mixed_arithmetic(self) -> None:
        """Warn if the replicas have several arithmetic identities, once for each set of identities."""
        groups = self.group_by_arithmetic()
        if len(groups) > 1 and groups.keys() != self._logged_arithmetics:
            reports = [group[0].report for group in groups.values()]
            known = [report.arithmetic for report in reports if report and report.arithmetic]
            log.warning(
                "pool_arithmetic_mixed",
                model=self.model,
                replicas={name: [each.name for each in group] for name, group in groups.items()},
                differs=differing_parts(known),
                remedy="start all replicas with the same settings, version and hardware, or serve them as two models",
            )
        self._logged_arithmetics = set(groups)
