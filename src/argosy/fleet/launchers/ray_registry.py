"""Registry of the replicas of a fleet on a Ray cluster: an actor that places, starts and ends them one by one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar
from weakref import WeakValueDictionary

import msgspec
import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.util.placement_group import remove_placement_group

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
from argosy.fleet.launchers.ray_replica_table import (
    RayRecord,
    RayReplica,
    ReplicaTable,
)
from argosy.policy.reconciliation import LaunchState

T = TypeVar("T")

PLACEMENT_TIMEOUT_S = 2.0
"""Time in which a node that has room by the latest report grants it."""
PLACEMENT_POLL_INTERVAL_S = 1.0
SUPERVISOR_START_TIMEOUT_S = 60.0
RETRY_INTERVAL_S = 0.5
MAX_KEPT_LOG_BYTES = 64 * 1024
"""Size of the end of a log that is kept of a removed replica."""


class ReplicaRegistry:
    """Async actor, of which each fleet has one. It carries out actions in the order of their epochs."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._table = ReplicaTable(namespace)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._placement_lock = asyncio.Lock()
        self._restored: asyncio.Task[None] | None = None

    async def call(self, request: bytes) -> bytes:
        """Handle a `RayRequest`, and return a `RayResponse`."""
        decoded = msgspec.json.decode(request, type=RayRequest)
        try:
            response = await self._handle(decoded)
        except StaleEpochError as error:
            response = RayResponse(
                id=decoded.id,
                error=str(error),
                is_stale_epoch=True,
                newer_epoch=error.newer_epoch,
            )
        except (LaunchError, OSError, RayError) as error:
            response = RayResponse(id=decoded.id, error=str(error))
        return msgspec.json.encode(response)

    async def _handle(self, request: RayRequest) -> RayResponse:
        if self._restored is None:
            self._restored = asyncio.create_task(self._restore())
        await self._restored
        match request.method:
            case "list":
                replicas = {
                    name: each.record.replica for name, each in self._table.replicas.items()
                }
                return RayResponse(id=request.id, version=self._table.version, replicas=replicas)
            case "wait":
                await self._table.wait_for_change(request.version)
                return RayResponse(id=request.id, version=self._table.version)
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
        return RayResponse(id=request.id, version=self._table.version)

    # --- actions ---------------------------------------------------------------------------------

    async def _start(self, spec: LaunchSpec, epoch: int) -> None:
        async with self._action(spec.name, epoch):
            replica = self._table.replicas.get(spec.name)
            if replica is not None and replica.supervisor is not None:
                if replica.state is LaunchState.EXITED:
                    await self._start_process(replica, spec)
            elif replica is None or replica.state is LaunchState.EXITED:
                await self._place(spec, replica)

    async def _drain(self, name: str, epoch: int) -> None:
        async with self._action(name, epoch):
            replica = self._table.replicas.get(name)
            if replica is None:
                return
            if replica.supervisor is None:
                await self._cancel_placement(replica)
            elif replica.state is not LaunchState.EXITED:
                await self._ask(replica.supervisor.drain.remote(epoch))
                if replica.state is LaunchState.RUNNING:
                    self._table.change(replica, state=LaunchState.DRAINING)

    async def _stop(self, name: str, epoch: int) -> None:
        async with self._action(name, epoch):
            replica = self._table.replicas.get(name)
            if replica is None:
                return
            if replica.supervisor is None:
                await self._cancel_placement(replica)
                return
            attempt = replica.record.replica.attempt
            with contextlib.suppress(LaunchError):  # a lost supervisor has no process
                await self._ask(replica.supervisor.stop.remote(epoch))
        while replica.record.replica.attempt == attempt and replica.state is not LaunchState.EXITED:
            await self._table.wait_for_change(self._table.version)

    async def _remove(self, name: str, epoch: int) -> None:
        async with self._action(name, epoch):
            replica = self._table.replicas.get(name)
            if replica is None:
                return
            if replica.state in {LaunchState.RUNNING, LaunchState.DRAINING}:
                raise LaunchError(f"replica {name} is running; stop it before removing it")
            if replica.supervisor is not None:
                with contextlib.suppress(LaunchError):  # lost, and its log with it
                    log = await self._ask(replica.supervisor.read_log.remote(MAX_KEPT_LOG_BYTES))
                    self._table.keep_log(name, log)
                    await self._ask(replica.supervisor.close.remote())
            await self._release(replica)
            self._table.remove(name)

    async def _read_log(self, name: str, max_bytes: int) -> bytes:
        replica = self._table.replicas.get(name)
        if replica is not None and replica.supervisor is not None:
            log: bytes = await self._ask(replica.supervisor.read_log.remote(max_bytes))
            return log
        return self._table.kept_log(name)[-max_bytes:]

    @contextlib.asynccontextmanager
    async def _action(self, name: str, epoch: int) -> AsyncIterator[None]:
        """Exclude other actions on a replica, and those of an earlier leader.

        Raises:
            StaleEpochError: The epoch is outdated.
        """
        async with self._lock(name):
            self._table.check_epoch(epoch)
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
            if isinstance(error.cause, (LaunchError, StaleEpochError)):
                raise error.cause from None
            raise LaunchError(f"its supervisor failed: {error.cause!r}") from error
        except RayError as error:
            raise LaunchError(_first_line(error)) from error

    # --- placement -------------------------------------------------------------------------------

    async def _place(self, spec: LaunchSpec, previous: RayReplica | None) -> None:
        """Start a replica on a new node, or let it wait for one.

        Raises:
            LaunchError: It cannot be started there. It is as it was before.
        """
        past_attempts = 0 if previous is None else previous.record.replica.attempt
        waiting = LaunchedReplica(
            **spec.identity,
            state=LaunchState.PROVISIONING,
            attempt=past_attempts + 1,
        )
        replica = RayReplica(RayRecord(replica=waiting, past_attempts=past_attempts))
        self._table.put(replica)
        try:
            async with self._placement_lock:
                is_placed = await self._reserve(replica, spec)
            if is_placed:
                await self._launch(replica, spec)
            else:
                replica.task = asyncio.create_task(self._launch_when_placed(replica, spec))
        except BaseException as error:
            await self._release(replica)
            self._table.remove(spec.name)
            if previous is not None:
                self._table.put(previous)
            if isinstance(error, RayError):
                raise LaunchError(f"replica {spec.name} cannot be placed: {error}") from error
            raise

    async def _reserve(self, replica: RayReplica, spec: LaunchSpec) -> bool:
        """Reserve resources on the best node. Returns whether they are granted at once.

        If no node has room, any suitable one may grant them later. Ray's autoscaler sees such a request.
        """
        nodes = await asyncio.to_thread(ray_cluster.list_nodes)
        placed = [
            PlacedReplica(each.record.replica.pool, each.record.node_id)
            for each in self._table.replicas.values()
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
            await asyncio.to_thread(remove_placement_group, group)
        reason = explain_wait(spec.resources, nodes.values())
        replica.group = await asyncio.to_thread(
            ray_cluster.create_group, spec.name, spec.resources, label_selector(spec.resources)
        )
        self._table.change(replica, reason=reason)
        return False

    async def _launch_when_placed(self, replica: RayReplica, spec: LaunchSpec) -> None:
        """Wait until Ray has placed the replica, then start it."""
        group = replica.group
        while group is not None and not await asyncio.to_thread(
            group.wait, PLACEMENT_POLL_INTERVAL_S
        ):
            nodes = await asyncio.to_thread(ray_cluster.list_nodes)
            self._table.change(replica, reason=explain_wait(spec.resources, nodes.values()))
        async with self._lock(spec.name):
            if group is None or replica.group is not group:
                return  # cancelled meanwhile
            try:
                replica.record.node_id = await asyncio.to_thread(ray_cluster.node_of_group, group)
                await self._launch(replica, spec)
            except (LaunchError, OSError, RayError) as error:
                await self._release(replica)
                self._table.record_exit(replica, str(error))

    async def _launch(self, replica: RayReplica, spec: LaunchSpec) -> None:
        """Create the supervisor of a placed replica, and start its process.

        Raises:
            LaunchError: It cannot be started there.
        """
        node = (await asyncio.to_thread(ray_cluster.list_nodes)).get(replica.record.node_id)
        if node is None or replica.group is None:
            raise LaunchError("its node left the cluster")
        self._table.change(replica, reason="", node=_describe(node), zone=node.zone)
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

    async def _start_process(self, replica: RayReplica, spec: LaunchSpec) -> None:
        """Start the process of a replica that has a supervisor, and read its status."""
        supervisor = replica.supervisor
        assert supervisor is not None  # noqa: S101 - the caller has checked it
        await self._ask(supervisor.start.remote(msgspec.json.encode(spec), self._table.epoch))
        status = await self._ask(supervisor.wait_for_status.remote(b""))
        started = _decode_status(status)
        if replica.state is LaunchState.PROVISIONING and started is not None:
            # A supervisor counts the attempts on its node, also those of earlier supervisors.
            replica.record.past_attempts = replica.record.replica.attempt - started.attempt
        self._on_status(replica, status)

    async def _cancel_placement(self, replica: RayReplica) -> None:
        """End the wait for a node. A replica that never ran is forgotten."""
        if replica.state is LaunchState.EXITED:
            return
        await self._release(replica)
        if replica.record.past_attempts:
            self._table.change(replica, attempt=replica.record.past_attempts)
            self._table.record_exit(replica, "it was stopped while it waited for a node")
        else:
            self._table.remove(replica.record.replica.name)

    async def _release(self, replica: RayReplica) -> None:
        """Release what a replica has reserved, and end its supervisor."""
        task, replica.task = replica.task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        supervisor, replica.supervisor = replica.supervisor, None
        group, replica.group = replica.group, None
        if supervisor is not None:
            await asyncio.to_thread(ray.kill, supervisor)
        if group is not None:
            await asyncio.to_thread(remove_placement_group, group)

    # --- watch -----------------------------------------------------------------------------------

    async def _watch(self, replica: RayReplica) -> None:
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

    def _on_status(self, replica: RayReplica, status: bytes) -> None:
        seen = _decode_status(status)
        if seen is not None:
            self._table.record_status(replica, seen)

    async def _on_supervisor_lost(self, replica: RayReplica, error: RayError) -> None:
        """Record the end of a replica whose supervisor has ended, for example with its node."""
        nodes = await asyncio.to_thread(ray_cluster.list_nodes)
        known = replica.record.replica
        if replica.record.node_id in nodes:
            reason = f"its supervisor ended: {_first_line(error)}"
        else:
            reason = f"its node {known.node} left the cluster"
        async with self._lock(known.name):
            if replica.supervisor is None or self._table.replicas.get(known.name) is not replica:
                return  # removed meanwhile
            await self._release(replica)
            self._table.record_exit(replica, reason)

    # --- records ---------------------------------------------------------------------------------

    async def _restore(self) -> None:
        """Continue where an earlier registry of this fleet ended."""
        await asyncio.to_thread(self._table.load)
        for name, replica in list(self._table.replicas.items()):
            replica.group = await asyncio.to_thread(ray_cluster.find_group, name)
            replica.supervisor = await asyncio.to_thread(ray_cluster.find_supervisor, name)
            if replica.state is LaunchState.PROVISIONING:
                # Its settings, which may contain secrets, are not kept. The controller starts it again.
                await self._release(replica)
                self._table.remove(name)
            elif replica.supervisor is not None:
                replica.task = asyncio.create_task(self._watch(replica))
            elif replica.state is not LaunchState.EXITED:
                await self._release(replica)
                reason = (
                    f"it was lost while its node {replica.record.replica.node} or the registry was"
                )
                self._table.record_exit(replica, reason)


def _describe(node: RayNode) -> str:
    return node.hostname if node.hostname == node.address else f"{node.hostname} ({node.address})"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _decode_status(status: bytes) -> LaunchedReplica | None:
    """Return the replica of `wait_for_status`, or None if it was never started."""
    return msgspec.json.decode(status, type=LaunchedReplica | None)
