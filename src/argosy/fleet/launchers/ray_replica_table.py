"""States of the replicas of a fleet on a Ray cluster, which outlive the registry that keeps them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Mapping

import msgspec
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup

from argosy.fleet.launchers.launcher import LaunchedReplica, refuse_stale_epoch
from argosy.fleet.launchers.ray_cluster import RecordStore
from argosy.policy.reconciliation import LaunchState

CHANGE_TIMEOUT_S = 30.0
"""Longest time to wait for a change before the launcher asks again."""
MAX_KEPT_LOGS = 100
_EPOCH_KEY = "epoch"
_REPLICA_KEY = "replica/"
_ORDER = (
    LaunchState.PROVISIONING,
    LaunchState.RUNNING,
    LaunchState.DRAINING,
    LaunchState.EXITED,
)
"""States in the order of the life of an attempt."""


class RayRecord(msgspec.Struct, kw_only=True):
    """State of a replica as it is kept outside of the registry. Contains no secrets."""

    replica: LaunchedReplica
    past_attempts: int = 0
    """Attempts that its supervisor does not count, since they were on other nodes."""
    node_id: str = ""


class RayReplica:
    """A replica, and what the registry holds to control it."""

    def __init__(self, record: RayRecord) -> None:
        self.record = record
        self.group: PlacementGroup | None = None
        self.supervisor: ActorHandle | None = None
        self.task: asyncio.Task[None] | None = None
        """Waits for its placement, or for changes of its process."""

    @property
    def name(self) -> str:
        """Name of the replica."""
        return self.record.replica.name

    @property
    def state(self) -> LaunchState:
        """State of its latest attempt."""
        return self.record.replica.state


class ReplicaTable:
    """Replicas by name, the highest epoch, and ends of the logs of removed replicas. Belongs to one event loop.

    Epoch and states are also kept in Ray's global control service. A write there takes about a millisecond.

    Args:
        store: Records of the fleet.
    """

    def __init__(self, store: RecordStore) -> None:
        self._store = store
        self._replicas: dict[str, RayReplica] = {}
        self._epoch = 0
        self._logs: OrderedDict[str, bytes] = OrderedDict()
        self._version = time.time_ns()  # unlike that of an earlier registry
        self._changed = asyncio.Event()

    @property
    def replicas(self) -> Mapping[str, RayReplica]:
        """All replicas by name."""
        return self._replicas

    @property
    def epoch(self) -> int:
        """Highest epoch of an action."""
        return self._epoch

    @property
    def version(self) -> int:
        """Number that changes whenever a state changes."""
        return self._version

    def load(self) -> None:
        """Read what an earlier registry of the fleet has kept."""
        records = self._store.read_all()
        self._epoch = int(records.get(_EPOCH_KEY, b"0"))
        for key, value in records.items():
            if key.startswith(_REPLICA_KEY):
                replica = RayReplica(msgspec.json.decode(value, type=RayRecord))
                self._replicas[replica.name] = replica

    def check_epoch(self, epoch: int) -> None:
        """Raise StaleEpochError if an epoch is outdated, and keep it if it is the highest."""
        refuse_stale_epoch(epoch, self._epoch)
        if epoch > self._epoch:
            self._store.write(_EPOCH_KEY, b"%d" % epoch)
            self._epoch = epoch

    def put(self, replica: RayReplica) -> None:
        """Add a replica, in place of another one of its name."""
        self._replicas[replica.name] = replica
        self._write(replica)
        self._report_change()

    def change(self, replica: RayReplica, **fields: object) -> None:
        """Change the state of a replica."""
        self._update(replica, msgspec.structs.replace(replica.record.replica, **fields))

    def record_status(self, replica: RayReplica, status: LaunchedReplica) -> None:
        """Take in a status that a supervisor reports. Reports may overtake each other."""
        known = replica.record.replica
        attempt = replica.record.past_attempts + status.attempt
        # No attempt returns to an earlier state.
        if (attempt, _ORDER.index(status.state)) >= (known.attempt, _ORDER.index(known.state)):
            self._update(
                replica,
                msgspec.structs.replace(status, attempt=attempt, node=known.node, zone=known.zone),
            )

    def record_exit(self, replica: RayReplica, reason: str) -> None:
        """Record that a replica ended without a report of its supervisor."""
        if replica.state is not LaunchState.EXITED:
            self.change(replica, state=LaunchState.EXITED, reason=reason, exited_at=time.time())

    def remove(self, name: str) -> None:
        """Forget a replica."""
        self._replicas.pop(name, None)
        self._store.delete(_REPLICA_KEY + name)
        self._report_change()

    def keep_log(self, name: str, log: bytes) -> None:
        """Keep the end of the log of a replica that is removed."""
        self._logs.pop(name, None)
        self._logs[name] = log
        while len(self._logs) > MAX_KEPT_LOGS:
            self._logs.popitem(last=False)

    def kept_log(self, name: str) -> bytes:
        """Return the end of the log of a removed replica, or nothing."""
        return self._logs.get(name, b"")

    async def wait_for_change(self, version: int) -> None:
        """Wait until the version is not this one, or some time has passed."""
        if version == self._version:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHANGE_TIMEOUT_S):
                    await self._changed.wait()

    def _update(self, replica: RayReplica, state: LaunchedReplica) -> None:
        if state == replica.record.replica:
            return
        is_progress = _without_progress(state) == _without_progress(replica.record.replica)
        replica.record.replica = state
        if not is_progress:
            self._write(replica)
        self._report_change()

    def _write(self, replica: RayReplica) -> None:
        self._store.write(_REPLICA_KEY + replica.name, msgspec.json.encode(replica.record))

    def _report_change(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()


def _without_progress(replica: LaunchedReplica) -> LaunchedReplica:
    return msgspec.structs.replace(replica, activity="", progress=0.0)
