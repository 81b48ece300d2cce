"""States of the replicas of a fleet on a Ray cluster, which outlive the registry that keeps them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict

import msgspec
from ray.actor import ActorHandle
from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_list,
    _internal_kv_put,
)
from ray.util.placement_group import PlacementGroup

from argosy.fleet.launchers.launcher import MAX_KEPT_LOGS, LaunchedReplica, refuse_stale_epoch
from argosy.policy.reconciliation import LaunchState

CHANGE_TIMEOUT_S = 30.0
"""Longest time to wait for a change before the launcher asks again."""
KV_NAMESPACE = "argosy"
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

    Epoch and states are also kept in Ray's global control service, which outlives the registry, but not the head node.
    A write there takes about a millisecond.
    """

    def __init__(self, namespace: str) -> None:
        self._prefix = f"{namespace}/"
        self.replicas: dict[str, RayReplica] = {}
        self.epoch = 0
        """Highest epoch of an action."""
        self.version = time.time_ns()  # unlike that of an earlier registry
        """Number that changes whenever a state changes."""
        self._logs: OrderedDict[str, bytes] = OrderedDict()
        self._changed = asyncio.Event()

    def load(self) -> None:
        """Read what an earlier registry of the fleet has kept."""
        for key in _internal_kv_list(self._prefix, namespace=KV_NAMESPACE):
            value = _internal_kv_get(key, namespace=KV_NAMESPACE)
            name = key.decode().removeprefix(self._prefix)
            if value is not None and name == _EPOCH_KEY:
                self.epoch = int(value)
            elif value is not None and name.startswith(_REPLICA_KEY):
                replica = RayReplica(msgspec.json.decode(value, type=RayRecord))
                self.replicas[replica.name] = replica

    def check_epoch(self, epoch: int) -> None:
        """Raise StaleEpochError if an epoch is outdated, and keep it if it is the highest."""
        refuse_stale_epoch(epoch, self.epoch)
        if epoch > self.epoch:
            self._keep(_EPOCH_KEY, b"%d" % epoch)
            self.epoch = epoch

    def put(self, replica: RayReplica) -> None:
        """Add a replica, in place of another one of its name."""
        self.replicas[replica.name] = replica
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
        self.replicas.pop(name, None)
        _internal_kv_del(self._prefix + _REPLICA_KEY + name, namespace=KV_NAMESPACE)
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
        if version == self.version:
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
        self._keep(_REPLICA_KEY + replica.name, msgspec.json.encode(replica.record))

    def _keep(self, key: str, value: bytes) -> None:
        _internal_kv_put(self._prefix + key, value, namespace=KV_NAMESPACE)

    def _report_change(self) -> None:
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()


def _without_progress(replica: LaunchedReplica) -> LaunchedReplica:
    return msgspec.structs.replace(replica, activity="", progress=0.0)
