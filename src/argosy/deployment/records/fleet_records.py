"""Records of replicas that a controller keeps in the store, for the next controller and for `argosy status`."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from argosy.deployment.declaration.capacity import MachineCapacity
from argosy.policy.autoscaling import AutoscalerState, CapacityState
from argosy.policy.reconciliation import ProblemKind, ReplicaMemory, ReplicaPhase, WarmUpState

OBSERVED_NAME = "observed"
REPLICA_PREFIX = "replica/"
PENDING_PREFIX = "pending/"
START_TIMES_PREFIX = "start-times/"
SCALING_PREFIX = "autoscaling/"
ROLLOUT_GATE_PREFIX = "rollout-gate/"
ROLLOUT_BASELINE_PREFIX = "rollout-baseline/"
ROLLOUT_STATUS_PREFIX = "rollout-status/"
SCALING_DECISION = "scaling_decision"
"""Kind of the events of autoscalers, whose outcome is the arithmetic of the decision as JSON."""
_ROLLOUT_PREFIXES = (ROLLOUT_GATE_PREFIX, ROLLOUT_BASELINE_PREFIX, ROLLOUT_STATUS_PREFIX)
MAX_START_TIMES = 9

T = TypeVar("T")


class ReplicaRecord(ReplicaMemory, frozen=True, kw_only=True):
    """A replica as its controller knows it, also for operators. Times are seconds since the epoch."""

    phase: ReplicaPhase = ReplicaPhase.PENDING
    reason: str = ""
    """Why it is in this phase."""
    problem: ProblemKind | None = None
    """Cause that keeps it from serving, other than its first start or a decision of the controller."""
    phase_since: float = 0.0
    url: str = ""
    node: str = ""
    zone: str = ""
    running: int = 0
    """Requests that it runs, by its latest report."""
    cached_tokens: int = 0
    """Tokens in its prefix cache, by its latest report."""
    version: str = ""
    """Version of Argosy that its process runs, as it states; empty for other engines, and before its first answer."""

    def for_attempt(self, attempt: int, started_at: float) -> ReplicaRecord:
        """Return the record for an attempt: what belongs to an earlier one is forgotten.

        The number alone does not identify it, because a launcher that has lost its folder begins with 1 again.
        """
        is_known_start = not self.started_at or started_at == self.started_at
        if attempt == self.attempt and is_known_start:
            return self
        return msgspec.structs.replace(
            self,
            attempt=attempt,
            ready_at=None,
            warm_up=WarmUpState.NOT_STARTED,
            warm_up_error="",
            stop_reason="",
            version="",
        )


class ScalingRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Memory of the autoscaler of one pool."""

    pool: str
    target: int
    """Number of replicas that it decided on."""
    state: AutoscalerState = msgspec.field(default_factory=AutoscalerState)
    capacity: CapacityState = msgspec.field(default_factory=CapacityState)
    has_metrics: bool = True
    """Whether the last decision rests on metrics."""


class ObservedRevision(msgspec.Struct, frozen=True, kw_only=True):
    """Epoch of the leader that wrote the records last, and the revision that it carries out."""

    epoch: int
    revision: int
    machine: MachineCapacity | None = None
    """Capacity of the leader's machine, with which changes are compared; None from versions that do not record it."""
    version: str = ""
    """Version of Argosy that the leader runs; empty from versions that do not record it."""


class FleetRecords:
    """Records of one fleet in memory, and what of them the store does not have yet."""

    def __init__(self) -> None:
        self._saved: dict[str, bytes] = {}
        self.observed: ObservedRevision | None = None
        """Origin of the records. None before the first observation."""
        self.replicas: dict[str, ReplicaRecord] = {}
        """Record of each replica, by name."""
        self.pending: dict[str, ReplicaRecord] = {}
        """Replicas of which nothing exists yet, by name. Only shown to operators, and not read again."""
        self.start_times: dict[str, tuple[float, ...]] = {}
        """Latest seconds from start to ready, by source of the model."""
        self.scaling: dict[str, ScalingRecord] = {}
        """Memory of the autoscaler of each pool that has one, by name."""
        self.rollouts: dict[str, bytes] = {}
        """Encoded evidence and status of the rollouts, by the full name of the record."""

    def load(self, records: Mapping[str, bytes]) -> None:
        """Continue with the records in the store. Those that cannot be decoded are dropped."""
        self._saved = dict(records)
        self.replicas = decode_kind(records, REPLICA_PREFIX, ReplicaRecord)
        self.start_times = decode_kind(records, START_TIMES_PREFIX, tuple[float, ...])
        self.observed = decode_kind(records, OBSERVED_NAME, ObservedRevision).get("")
        self.scaling = decode_kind(records, SCALING_PREFIX, ScalingRecord)
        self.rollouts = {
            name: record for name, record in records.items() if name.startswith(_ROLLOUT_PREFIXES)
        }

    def changes(self) -> dict[str, bytes | None]:
        """Return what the store does not have yet, as `FleetStore.save_records` takes it."""
        kinds: dict[str, Mapping[str, object]] = {
            REPLICA_PREFIX: self.replicas,
            PENDING_PREFIX: self.pending,
            START_TIMES_PREFIX: self.start_times,
            SCALING_PREFIX: self.scaling,
            OBSERVED_NAME: {} if self.observed is None else {"": self.observed},
        }
        current = self.rollouts | {
            f"{prefix}{name}": msgspec.json.encode(record)
            for prefix, records in kinds.items()
            for name, record in records.items()
        }
        changed: dict[str, bytes | None] = {
            name: record for name, record in current.items() if self._saved.get(name) != record
        }
        return changed | dict.fromkeys(self._saved.keys() - current.keys())

    def on_saved(self, changes: Mapping[str, bytes | None]) -> None:
        """Record that the store has these changes."""
        for name, record in changes.items():
            if record is None:
                self._saved.pop(name, None)
            else:
                self._saved[name] = record

    def add_start_time(self, source: str, seconds: float) -> None:
        """Record how long a replica of a model took from its start until it served."""
        times = (*self.start_times.get(source, ()), round(seconds, 3))
        self.start_times[source] = times[-MAX_START_TIMES:]

    def expected_start_s(self, source: str) -> float | None:
        """Return how long a start of a model takes, or None before the first."""
        times = self.start_times.get(source)
        return statistics.median(times) if times else None


def decode_replicas(records: Mapping[str, bytes]) -> dict[str, ReplicaRecord]:
    """Return the replicas by name, also those of which nothing exists yet. Skips those of other versions."""
    replicas = decode_kind(records, REPLICA_PREFIX, ReplicaRecord)
    return replicas | decode_kind(records, PENDING_PREFIX, ReplicaRecord)


def decode_kind(records: Mapping[str, bytes], prefix: str, kind: type[T]) -> dict[str, T]:
    """Return the records of one kind, by their names without the prefix. Skips those of other versions."""
    decoded: dict[str, T] = {}
    for name, encoded in records.items():
        if name.startswith(prefix):
            with contextlib.suppress(msgspec.MsgspecError):
                decoded[name.removeprefix(prefix)] = msgspec.json.decode(encoded, type=kind)
    return decoded
