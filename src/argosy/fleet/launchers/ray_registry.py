"""Registry of the replicas of a fleet on a Ray cluster: an actor that places, starts and ends them one by one."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar
from weakref import WeakValueDictionary

import msgspec
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup

from argosy.fleet.launchers import ray_cluster
from argosy.fleet.launchers.launcher import (
    LaunchedReplica,
    LaunchError,
    LaunchSpec,
    StaleEpochError,
)
from argosy.fleet.launchers.ray_messages import RayRequest, RayResponse
from argosy.fleet.launchers.ray_placement import (
    PlacedReplica,
    RayNode,
    explain_wait,
    label_selector,
    node_selector,
    rank_nodes,
)
from argosy.fleet.launchers.ray_supervisor import decode_status
from argosy.policy.reconciliation import LaunchState

T = TypeVar("T")

PLACEMENT_TIMEOUT_S = 2.0
"""Time in which a node that has room by the latest report grants it."""
PLACEMENT_POLL_INTERVAL_S = 1.0
SUPERVISOR_START_TIMEOUT_S = 60.0
RETRY_INTERVAL_S = 0.5
CHANGE_TIMEOUT_S = 30.0
"""Longest time to wait for a change before the launcher asks again."""
MAX_KEPT_LOGS = 100
MAX_KEPT_LOG_BYTES = 64 * 1024
"""Size of the end of a log that is kept of a removed replica."""
_EPOCH_KEY = "epoch"
_REPLICA_KEY = "replica/"


class ReplicaRecord(msgspec.Struct, kw_only=True):
    """State of a replica as it is kept outside of the registry. Contains no secrets."""

    replica: LaunchedReplica
    past_attempts: int = 0
    """Attempts that its supervisor does not count, since they were on other nodes."""
    node_id: str = ""


class _Replica:
    """A replica, and what this registry holds to control it."""

    def __init__(self, record: ReplicaRecord) -> None:
        self.record = record
        self.group: PlacementGroup | None = None
        self.supervisor: ActorHandle | None = None
        self.task: asyncio.Task[None] | None = None
        """Waits for its placement, or for changes of its process."""

    @property
    def state(self) -> LaunchState:
        return self.record.replica.state


class ReplicaRegistry:
    """Async actor, of which each fleet has one. It carries out actions in the order of their epochs.

    Args:
        namespace: Ray namespace of the fleet.
    """

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._store = ray_cluster.RecordStore(namespace)
        self._replicas: dict[str, _Replica] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._placement_lock = asyncio.Lock()
        self._epoch = 0
        self._logs: OrderedDict[str, bytes] = OrderedDict()
        """Ends of the logs of removed replicas."""
        self._version = time.time_ns()  # unlike that of an earlier registry
        self._changed = asyncio.Event()
        self._restored: asyncio.Task[None] | None = None

    async def call(self, request: bytes) -> bytes:
        """Handle a `RayRequest`, and return a `RayResponse`."""
        decoded = msgspec.json.decode(request, type=RayRequest)
        try:
            response = await self._handle(decoded)
        except StaleEpochError as error:
            response = RayResponse(id=decoded.id, error=str(error), is_stale_epoch=True)
        except (LaunchError, OSError, RayError) as error:
            response = RayResponse(id=decoded.id, error=str(error))
        return msgspec.json.encode(response)

    async def _handle(self, request: RayRequest) -> RayResponse:
        if self._restored is None:
            self._restored = asyncio.create_task(self._restore())
        await self._restored
        match request.method:
            case "list":
                replicas = {name: each.record.replica for name, each in self._replicas.items()}
                return RayResponse(id=request.id, version=self._version, replicas=replicas)
            case "wait":
                await self._wait_for_change(request.version)
                return RayResponse(id=request.id, version=self._version)
            case "read_log":
                log = await self._read_log(request.name, request.max_bytes)
                return RayResponse(id=request.id, log=log)
            case "start" if request.spec is not None:
                await self._start(request.spec, request.epoch)
            case "drain":
                await self._drain(request.name, request.epoch)
            case "stop":
                await self._stop(request.name, request.epoch)
            case "remove":
                await self._remove(request.name, request.epoch)
        return RayResponse(id=request.id, version=self._version)

    # --- actions ---------------------------------------------------------------------------------

    async def _start(self, spec: LaunchSpec, epoch: int) -> None:
        async with self._action(spec.name, epoch):
            replica = self._replicas.get(spec.name)
            if replica is not None and replica.supervisor is not None:
                if replica.state is LaunchState.EXITED:
                    await self._start_process(replica, spec)
            elif replica is None or replica.state is LaunchState.EXITED:
                await self._place(spec, replica)

    async def _drain(self, name: str, epoch: int) -> None:
        async with self._action(name, epoch):
            replica = self._replicas.get(name)
            if replica is None:
                return
            if replica.supervisor is None:
                await self._cancel_placement(replica)
            elif replica.state is not LaunchState.EXITED:
                await self._ask(replica.supervisor.drain.remote(epoch))
                self._change(replica, state=LaunchState.DRAINING)

    async def _stop(self, name: str, epoch: int) -> None:
        async with self._action(name, epoch):
            replica = self._replicas.get(name)
            if replica is None:
                return
            if replica.supervisor is None:
                await self._cancel_placement(replica)
                return
            attempt = replica.record.replica.attempt
            with contextlib.suppress(LaunchError):  # a lost supervisor has no process
                await self._ask(replica.supervisor.stop.remote(epoch))
        while replica.record.replica.attempt == attempt and replica.state is not LaunchState.EXITED:
            await self._wait_for_change(self._version)

    async def _remove(self, name: str, epoch: int) -> None:
        async with self._action(name, epoch):
            replica = self._replicas.get(name)
            if replica is None:
                return
            if replica.state in {LaunchState.RUNNING, LaunchState.DRAINING}:
                raise LaunchError(f"replica {name} is running; stop it before removing it")
            if replica.supervisor is not None:
                with contextlib.suppress(LaunchError):  # lost, and its log with it
                    log = await self._ask(replica.supervisor.read_log.remote(MAX_KEPT_LOG_BYTES))
                    self._keep_log(name, log)
                    await self._ask(replica.supervisor.close.remote())
            await self._release(replica)
            self._forget(name)

    async def _read_log(self, name: str, max_bytes: int) -> bytes:
        replica = self._replicas.get(name)
        if replica is not None and replica.supervisor is not None:
            log: bytes = await self._ask(replica.supervisor.read_log.remote(max_bytes))
            return log
        return self._logs.get(name, b"")[-max_bytes:]

    @contextlib.asynccontextmanager
    async def _action(self, name: str, epoch: int) -> AsyncIterator[None]:
        """Exclude other actions on a replica, and those of an earlier leader.

        Raises:
            StaleEpochError: The epoch is outdated.
        """
        async with self._lock(name):
            if epoch < self._epoch:
                raise StaleEpochError(
                    f"epoch {epoch} is outdated; a controller with epoch {self._epoch} has taken over"
                )
            if epoch > self._epoch:
                self._epoch = epoch
                await asyncio.to_thread(self._store.write, _EPOCH_KEY, b"%d" % epoch)
            yield

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    async def _ask(self, call: Awaitable[T]) -> T:
        """Wait for a supervisor's answer.

        Raises:
            LaunchError: It refuses, or does not exist any more.
        """
        try:
            return await call
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:
            raise LaunchError(_first_line(error)) from error

    # --- placement -------------------------------------------------------------------------------

    async def _place(self, spec: LaunchSpec, previous: _Replica | None) -> None:
        """Start a replica on a new node, or let it wait for one.

        Raises:
            LaunchError: It cannot be started there. It is as it was before.
        """
        past_attempts = 0 if previous is None else previous.record.replica.attempt
        waiting = LaunchedReplica(
            name=spec.name,
            pool=spec.pool,
            generation=spec.generation,
            ordinal=spec.ordinal,
            state=LaunchState.PROVISIONING,
            attempt=past_attempts + 1,
        )
        replica = _Replica(ReplicaRecord(replica=waiting, past_attempts=past_attempts))
        self._replicas[spec.name] = replica
        self._write(replica)
        try:
            async with self._placement_lock:
                is_placed = await self._reserve(replica, spec)
            if is_placed:
                await self._launch(replica, spec)
            else:
                replica.task = asyncio.create_task(self._launch_when_placed(replica, spec))
        except BaseException as error:
            await self._release(replica)
            self._forget(spec.name)
            if previous is not None:
                self._replicas[spec.name] = previous
                self._write(previous)
            if isinstance(error, RayError):
                raise LaunchError(f"replica {spec.name} cannot be placed: {error}") from error
            raise

    async def _reserve(self, replica: _Replica, spec: LaunchSpec) -> bool:
        """Reserve resources on the best node. Returns whether they are granted at once.

        If no node has room, any suitable one may grant them later. Ray's autoscaler sees such a request.
        """
        nodes = await asyncio.to_thread(ray_cluster.list_nodes)
        placed = [
            PlacedReplica(each.record.replica.pool, each.record.node_id)
            for each in self._replicas.values()
            if each.record.node_id and each.state is not LaunchState.EXITED
        ]
        for node in rank_nodes(spec.resources, spec.pool, nodes.values(), placed):
            group = await asyncio.to_thread(
                ray_cluster.create_group, spec.name, spec.resources, node_selector(node)
            )
            replica.group = group
            if await asyncio.to_thread(group.wait, PLACEMENT_TIMEOUT_S):
                replica.record.node_id = node.node_id
                return True
            await asyncio.to_thread(ray_cluster.remove_group, group)
        reason = explain_wait(spec.resources, nodes.values())
        replica.group = await asyncio.to_thread(
            ray_cluster.create_group, spec.name, spec.resources, label_selector(spec.resources)
        )
        self._change(replica, reason=reason)
        return False

    async def _launch_when_placed(self, replica: _Replica, spec: LaunchSpec) -> None:
        """Wait until Ray has placed the replica, then start it."""
        group = replica.group
        while group is not None and not await asyncio.to_thread(
            group.wait, PLACEMENT_POLL_INTERVAL_S
        ):
            nodes = await asyncio.to_thread(ray_cluster.list_nodes)
            self._change(replica, reason=explain_wait(spec.resources, nodes.values()))
        async with self._lock(spec.name):
            if group is None or replica.group is not group:
                return  # cancelled meanwhile
            try:
                replica.record.node_id = await asyncio.to_thread(ray_cluster.node_of_group, group)
                await self._launch(replica, spec)
            except (LaunchError, OSError, RayError) as error:
                await self._release(replica)
                self._record_exit(replica, str(error))

    async def _launch(self, replica: _Replica, spec: LaunchSpec) -> None:
        """Create the supervisor of a placed replica, and start its process.

        Raises:
            LaunchError: It cannot be started there.
        """
        node = (await asyncio.to_thread(ray_cluster.list_nodes)).get(replica.record.node_id)
        if node is None or replica.group is None:
            raise LaunchError("its node left the cluster")
        self._change(replica, reason="", node=_describe(node), zone=node.zone)
        replica.supervisor = await asyncio.to_thread(
            ray_cluster.create_supervisor,
            self._namespace,
            spec.name,
            spec.resources,
            replica.group,
            node,
        )
        try:
            async with asyncio.timeout(SUPERVISOR_START_TIMEOUT_S):
                await self._start_process(replica, spec)
        except TimeoutError as error:
            raise LaunchError(
                f"Ray started no worker process on node {_describe(node)} within {SUPERVISOR_START_TIMEOUT_S:g} s; "
                "read the logs of its raylet"
            ) from error
        replica.task = asyncio.create_task(self._watch(replica))

    async def _start_process(self, replica: _Replica, spec: LaunchSpec) -> None:
        """Start the process of a replica that has a supervisor, and read its status."""
        supervisor = replica.supervisor
        assert supervisor is not None  # noqa: S101 - the caller has checked it
        await self._ask(supervisor.start.remote(msgspec.json.encode(spec), self._epoch))
        status = await self._ask(supervisor.wait_for_status.remote(b""))
        started = decode_status(status)
        if replica.state is LaunchState.PROVISIONING and started is not None:
            # A supervisor counts the attempts on its node, also those of earlier supervisors.
            replica.record.past_attempts = replica.record.replica.attempt - started.attempt
        self._on_status(replica, status)

    async def _cancel_placement(self, replica: _Replica) -> None:
        """End the wait for a node. A replica that never ran is forgotten."""
        if replica.state is LaunchState.EXITED:
            return
        await self._release(replica)
        if replica.record.past_attempts:
            self._change(replica, attempt=replica.record.past_attempts)
            self._record_exit(replica, "it was stopped while it waited for a node")
        else:
            self._forget(replica.record.replica.name)

    async def _release(self, replica: _Replica) -> None:
        """Release what a replica has reserved, and end its supervisor."""
        task, replica.task = replica.task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        supervisor, replica.supervisor = replica.supervisor, None
        group, replica.group = replica.group, None
        if supervisor is not None:
            await asyncio.to_thread(ray_cluster.kill_supervisor, supervisor)
        if group is not None:
            await asyncio.to_thread(ray_cluster.remove_group, group)

    # --- watch -----------------------------------------------------------------------------------

    async def _watch(self, replica: _Replica) -> None:
        """Follow the status of a process until its supervisor ends."""
        status = b""
        while replica.supervisor is not None:
            try:
                status = await replica.supervisor.wait_for_status.remote(status)
                self._on_status(replica, status)
            except ActorUnavailableError:
                await asyncio.sleep(RETRY_INTERVAL_S)
            except RayError as error:
                await self._on_supervisor_lost(replica, error)
                return

    def _on_status(self, replica: _Replica, status: bytes) -> None:
        seen = decode_status(status)
        if seen is None:
            return
        known = replica.record.replica
        attempt = replica.record.past_attempts + seen.attempt
        # Answers may overtake each other. No attempt returns to an earlier state.
        if (attempt, _ORDER.index(seen.state)) >= (known.attempt, _ORDER.index(known.state)):
            self._update(
                replica,
                msgspec.structs.replace(seen, attempt=attempt, node=known.node, zone=known.zone),
            )

    async def _on_supervisor_lost(self, replica: _Replica, error: RayError) -> None:
        """Record the end of a replica whose supervisor has ended, for example with its node."""
        nodes = await asyncio.to_thread(ray_cluster.list_nodes)
        known = replica.record.replica
        if replica.record.node_id in nodes:
            reason = f"its supervisor ended: {_first_line(error)}"
        else:
            reason = f"its node {known.node} left the cluster"
        async with self._lock(known.name):
            if replica.supervisor is None or self._replicas.get(known.name) is not replica:
                return  # removed meanwhile
            await self._release(replica)
            self._record_exit(replica, reason)

    # --- records ---------------------------------------------------------------------------------

    async def _restore(self) -> None:
        """Continue where an earlier registry of this fleet ended."""
        records = await asyncio.to_thread(self._store.read_all)
        self._epoch = int(records.get(_EPOCH_KEY, b"0"))
        for key, value in records.items():
            if not key.startswith(_REPLICA_KEY):
                continue
            replica = _Replica(msgspec.json.decode(value, type=ReplicaRecord))
            name = replica.record.replica.name
            replica.group = await asyncio.to_thread(ray_cluster.find_group, name)
            replica.supervisor = await asyncio.to_thread(ray_cluster.find_supervisor, name)
            self._replicas[name] = replica
            if replica.state is LaunchState.PROVISIONING:
                # Its settings, which may contain secrets, are not kept. The controller starts it again.
                await self._release(replica)
                self._forget(name)
            elif replica.supervisor is not None:
                replica.task = asyncio.create_task(self._watch(replica))
            elif replica.state is not LaunchState.EXITED:
                await self._release(replica)
                reason = (
                    f"it was lost while its node {replica.record.replica.node} or the registry was"
                )
                self._record_exit(replica, reason)

    def _record_exit(self, replica: _Replica, reason: str) -> None:
        if replica.state is not LaunchState.EXITED:
            self._change(replica, state=LaunchState.EXITED, reason=reason, exited_at=time.time())

    def _change(self, replica: _Replica, **fields: object) -> None:
        self._update(replica, msgspec.structs.replace(replica.record.replica, **fields))

    def _update(self, replica: _Replica, state: LaunchedReplica) -> None:
        """Keep the state of a replica, and report the change to launchers."""
        if state == replica.record.replica:
            return
        is_progress = _without_progress(state) == _without_progress(replica.record.replica)
        replica.record.replica = state
        if not is_progress:
            self._write(replica)
        self._report_change()

    def _write(self, replica: _Replica) -> None:
        key = _REPLICA_KEY + replica.record.replica.name
        self._store.write(key, msgspec.json.encode(replica.record))

    def _forget(self, name: str) -> None:
        self._replicas.pop(name, None)
        self._store.delete(_REPLICA_KEY + name)
        self._report_change()

    def _keep_log(self, name: str, log: bytes) -> None:
        self._logs.pop(name, None)
        self._logs[name] = log
        while len(self._logs) > MAX_KEPT_LOGS:
            self._logs.popitem(last=False)

    def _report_change(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_for_change(self, version: int) -> None:
        """Wait until the version is not this one, or some time has passed."""
        if version == self._version:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHANGE_TIMEOUT_S):
                    await self._changed.wait()


_ORDER = (
    LaunchState.PROVISIONING,
    LaunchState.RUNNING,
    LaunchState.DRAINING,
    LaunchState.EXITED,
)
"""States in the order of the life of an attempt."""


def _without_progress(replica: LaunchedReplica) -> LaunchedReplica:
    return msgspec.structs.replace(replica, activity="", progress=0.0)


def _describe(node: RayNode) -> str:
    return node.hostname if node.hostname == node.address else f"{node.hostname} ({node.address})"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
