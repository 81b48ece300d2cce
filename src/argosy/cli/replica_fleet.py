"""Replicas of `argosy serve`: the smallest fleet, with a controller in this process, which it ends with."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from argosy.cli.serve_pools import ServedModel, ServePool, declare_fleet
from argosy.deployment import FleetConfig, FleetControl, dump_fleet, pool_digests, stop_everything
from argosy.fleet.launch_spec import build_launch_spec
from argosy.fleet.launchers import LaunchedReplica, LocalProcessLauncher
from argosy.policy.reconciliation import (
    LaunchState,
    ObservedFleet,
    ObservedReplica,
    Reconciliation,
    ReplicaPhase,
)

if TYPE_CHECKING:
    from argosy.gateway import ReplicaLogs
    from argosy.store import Store

FLEET = "serve"
FIRST_GENERATION = 1
FIRST_EPOCH = 1
"""Epoch of the only controller, and of the starts before it leads."""
MAX_LOG_BYTES = 1024 * 1024
"""Size at which a log is rotated. It is only for the console; the terminal has the whole output."""
LEASE_S = 1e9
"""Duration of the controller's lease. No other controller has access to its store."""


class FleetFailedError(RuntimeError):
    """Raised if no replica of a model is left that can be started. The message contains the reason."""


class ReplicaFleet:
    """Fleet whose declaration and records are in the memory of this process. Not thread-safe.

    Args:
        pools: Pools to run.
        folder: Private folder for the state of the replicas.

    Raises:
        LaunchError: The folder cannot be used.
        ValueError: A setting is invalid; the message says what to change.
    """

    def __init__(self, pools: Sequence[ServePool], folder: Path) -> None:
        self._declaration = declare_fleet(pools)
        self._models = {pool.config.name: pool.model for pool in pools}
        self._launcher = LocalProcessLauncher(
            folder,
            die_with_launcher=True,
            forwards_output=True,
            max_log_bytes=MAX_LOG_BYTES,
            has_credentials=True,
        )
        self._store: Store | None = None
        self.logs: ReplicaLogs | None = None
        """Logs of the replicas. None until `start`."""

    async def start(self) -> None:
        """Start all replicas. They load while this process imports the controller and the gateway.

        Raises:
            LaunchError: A replica cannot be started.
        """
        specs = [
            build_launch_spec(self._declaration, pool, FIRST_GENERATION, ordinal)
            for pool in self._declaration.pools
            for ordinal in range(pool.initial_replicas)
        ]
        await asyncio.gather(*(self._launcher.start(spec, FIRST_EPOCH) for spec in specs))

        from argosy.gateway import ReplicaLogs
        from argosy.store import open_memory_store

        self._store = open_memory_store()
        self.logs = ReplicaLogs(FLEET, self._store.replica_logs)

    def open_control(self) -> FleetControl:
        """Return the fleet as the gateway's admin API shows it. Requires `start`."""
        assert self._store is not None  # noqa: S101 - `start` opened it
        return FleetControl(FLEET, self._store.fleets, is_embedded=True)

    async def keep(self) -> None:
        """Keep the replicas as declared, until `drain` has ended all of them or until cancelled.

        Raises:
            FleetFailedError: No replica of a model is left that can be started.
        """
        from argosy.fleet.control import Controller, FleetContext, process_holder

        assert self._store is not None and self.logs is not None  # noqa: S101, PT018 - `start` opened them
        self._apply(self._declaration)
        context = FleetContext(
            store=self._store,
            store_url="",
            fleet=FLEET,
            create_launcher=lambda _name: self._launcher,
            folder=Path(),  # for gateways, of which this controller runs none
            list_watched_logs=self.logs.list_watched,
            on_reconciled=self._check_failures,
        )
        await Controller(context, process_holder(), LEASE_S).run(until_empty=True)

    def drain(self) -> None:
        """Declare that nothing shall run. `keep` then drains the replicas, and returns."""
        self._apply(stop_everything(self._declaration))
        self._launcher.changed.set()  # wakes the controller

    async def list_replicas(self) -> Mapping[ServedModel, Sequence[LaunchedReplica]]:
        """Return the replicas of each model, in the order of the pools."""
        replicas: dict[ServedModel, list[LaunchedReplica]] = {
            model: [] for model in self._models.values()
        }
        for replica in (await self._launcher.list_replicas()).values():
            replicas[self._models[replica.pool]].append(replica)
        return replicas

    async def close(self) -> None:
        """Kill the replicas that are left. `keep` must have ended."""
        await self._launcher.close()
        if self._store is not None:
            self._store.close()

    def _apply(self, declaration: FleetConfig) -> None:
        if self._store is not None:
            self._store.fleets.apply(
                FLEET,
                dump_fleet(declaration, "json").encode(),
                pool_digests(declaration),
                author="argosy serve",
            )

    def _check_failures(self, observed: ObservedFleet, result: Reconciliation) -> None:
        """Raise FleetFailedError if all replicas of a model have exited, and are not started again soon."""
        by_model = defaultdict[ServedModel, list[ObservedReplica]](list)
        for replica in observed.replicas:
            by_model[self._models[replica.pool]].append(replica)
        for replicas in by_model.values():
            if all(
                replica.state in {None, LaunchState.EXITED}
                and result.phases[replica.name].phase is ReplicaPhase.FAILED
                for replica in replicas
            ):
                errors = [replica.start_error for replica in replicas if replica.start_error]
                unknown = "every replica exited before it was ready; see the log"
                raise FleetFailedError(errors[0] if errors else unknown)
