"""Gateway and replicas of `argosy serve`: the gateway runs in this process, each replica in its own process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec
import uvloop

from argosy.cli.auth_bootstrap import AuthBootstrap, AuthSetup
from argosy.cli.startup_display import StartupDisplay
from argosy.engine import EngineConfig, ReplicaServerConfig, resolve_model_path
from argosy.fleet import DeviceAssignment, LocalLauncher, ReplicaSpec, Supervisor, runtime_folder
from argosy.process import handle_signals, raise_file_limit, run_in_daemon_thread
from argosy.telemetry import configure_logging

if TYPE_CHECKING:
    from argosy.gateway import GatewayConfig, GatewayServer

FAILOVER_TIMEOUT_S = 120.0
"""How long a request waits for a dead replica to restart. The fleet may have no other replica."""


class LocalFleet:
    """Fleet of one model on this machine, with embedding models beside it.

    Runs until SIGTERM, SIGINT, or the end of its terminal.
    """

    def __init__(
        self,
        server: ReplicaServerConfig,
        engine: EngineConfig,
        assignments: Sequence[DeviceAssignment],
        auth_bootstrap: AuthBootstrap,
        display: StartupDisplay,
        *,
        log_content: bool,
        embedding_models: Mapping[str, str],
    ) -> None:
        """Create the fleet. `embedding_models` has the path or hub name of each by its public name."""
        self._server = server
        self._engine = engine
        self._served_names = server.model_names_for(engine.model)
        self._assignments = {
            f"replica-{number}": assignment for number, assignment in enumerate(assignments)
        }
        self._auth_bootstrap = auth_bootstrap
        self._display = display
        self._log_content = log_content
        self._embedding_models = {
            f"embedding-{number}": (name, model)
            for number, (name, model) in enumerate(embedding_models.items())
        }
        """Name and path of each embedding model by its only replica."""
        self._auth_setup: AuthSetup | None = None
        self._gateway: GatewayServer | None = None
        self._stop_requested = asyncio.Event()
        self._force_stop = asyncio.Event()
        self.has_served = False
        """Whether the gateway has been ready."""

    def serve(self) -> None:
        """Serve until `stop` is called.

        Raises:
            ValueError: A setting is wrong; the message contains the remedy.
            OSError: The address cannot be bound, or a file cannot be read.
            FleetFailedError: No replica can start.
        """
        raise_file_limit()
        configure_logging(self._server.log_format, self._server.log_level)
        # Downloaded once here, not by each replica.
        path = resolve_model_path(self._engine.model, self._engine.revision)
        self._embedding_models = {
            replica: (name, str(resolve_model_path(model, None)))
            for replica, (name, model) in self._embedding_models.items()
        }
        with runtime_folder() as folder:
            uvloop.run(self._run(folder, path))

    def stop(self) -> None:
        """Drain, then stop. A second call stops at once. Call it on the event loop's thread."""
        if self._stop_requested.is_set():
            self._force_stop.set()
        elif self.has_served:
            self._display.show_draining(self._server.drain_deadline_s)
        self._stop_requested.set()
        if self._gateway is not None:
            self._gateway.stop()

    def _reload_certificates(self) -> None:
        if self._gateway is not None:  # otherwise the gateway has not read its certificates yet
            self._gateway.reload()

    async def _run(self, folder: Path, model: Path) -> None:
        launcher = LocalLauncher(folder, self._display.update_progress)
        # Each model has its own, since the fleet fails if one of them has no replica left.
        supervisors = [
            Supervisor(launcher, self._build_replica_specs(model)),
            *(Supervisor(launcher, [spec]) for spec in self._build_embedding_specs()),
        ]
        with handle_signals(
            self.stop, None if self._server.tls is None else self._reload_certificates
        ):
            try:
                starting = [action for each in supervisors for action in each.reconcile()]
                await asyncio.gather(*starting)  # replicas start during the imports
                await self._run_gateway(launcher, supervisors)
            finally:
                await self._drain_replicas(supervisors)

    async def _run_gateway(
        self, launcher: LocalLauncher, supervisors: Sequence[Supervisor]
    ) -> None:
        from argosy.gateway import GatewayServer
        from argosy.http_server import listening_socket

        server = self._server
        supervisor_task = asyncio.create_task(_run_all(each.run() for each in supervisors))
        try:
            gateway = GatewayServer(self._build_gateway_config(launcher), self._on_gateway_ready)
            with listening_socket(server.host, server.port, server.uds) as listen_socket:
                # Clients that connect now wait for the first replica.
                if not await self._prepare_auth() or not await self._wait_for_replicas(
                    supervisors, supervisor_task
                ):
                    return
                self._gateway = gateway
                gateway_task = asyncio.create_task(gateway.run(listen_socket))
                await asyncio.wait(
                    {gateway_task, supervisor_task}, return_when=asyncio.FIRST_COMPLETED
                )
                gateway.stop()
                if supervisor_task.done():
                    gateway.stop()  # the second call skips the drain, since no replica is left
                await gateway_task
            if supervisor_task.done():
                await supervisor_task
        finally:
            supervisor_task.cancel()

    async def _prepare_auth(self) -> bool:
        """Prepare the store and show the key that was created.

        Runs while the model loads, which may take long or fail.

        Returns:
            False if `stop` was called meanwhile.

        Raises:
            ValueError: The store cannot be used; the message contains the remedy.
        """
        store_task = asyncio.create_task(run_in_daemon_thread(self._auth_bootstrap.prepare_store))
        stop_task = asyncio.create_task(self._stop_requested.wait())
        try:
            await asyncio.wait({store_task, stop_task}, return_when=asyncio.FIRST_COMPLETED)
            if not store_task.done():
                return False
            self._auth_setup = await store_task
        finally:
            store_task.cancel()
            stop_task.cancel()
        if self._auth_setup.first_key is not None:
            self._display.show_first_key(self._auth_setup.first_key)
        return True

    async def _wait_for_replicas(
        self, supervisors: Sequence[Supervisor], supervisor_task: asyncio.Task[None]
    ) -> bool:
        """Wait until each model has a replica that is ready.

        Returns:
            False if `stop` was called meanwhile.

        Raises:
            FleetFailedError: No replica can start.
        """
        ready_task = asyncio.create_task(_run_all(each.any_ready.wait() for each in supervisors))
        stop_task = asyncio.create_task(self._stop_requested.wait())
        try:
            await asyncio.wait(
                {ready_task, stop_task, supervisor_task}, return_when=asyncio.FIRST_COMPLETED
            )
            if supervisor_task.done():
                await supervisor_task
            return not stop_task.done()
        finally:
            ready_task.cancel()
            stop_task.cancel()

    async def _drain_replicas(self, supervisors: Sequence[Supervisor]) -> None:
        """Drain the idle replicas, then stop them. A forced stop skips the drain."""
        drain_task = asyncio.create_task(_run_all(each.drain() for each in supervisors))
        force_stop_task = asyncio.create_task(self._force_stop.wait())
        await asyncio.wait({drain_task, force_stop_task}, return_when=asyncio.FIRST_COMPLETED)
        drain_task.cancel()
        force_stop_task.cancel()
        await asyncio.gather(*(each.stop() for each in supervisors))
        with contextlib.suppress(asyncio.CancelledError):
            await drain_task

    def _on_gateway_ready(self, url: str) -> None:
        from argosy.http_server import tune_gc

        tune_gc()
        self.has_served = True
        assert self._auth_setup is not None  # noqa: S101 - set before the gateway starts
        self._display.show_ready(
            url,
            self._served_names[0],
            embedding_models=[name for name, _ in self._embedding_models.values()],
            key_required=self._auth_setup.key_required,
            tls=self._server.tls,
            store_url=self._auth_bootstrap.configured_store_url,
        )

    # --- settings --------------------------------------------------------------------------------

    def _build_replica_specs(self, model: Path) -> list[ReplicaSpec]:
        server = msgspec.structs.replace(self._server, served_model_names=self._served_names)
        engine = msgspec.structs.replace(self._engine, model=str(model), revision=None)
        return [
            ReplicaSpec(
                name=name,
                server=server,
                engine=msgspec.structs.replace(
                    engine, colocated_replicas=assignment.colocated_replicas
                ),
                gpu=assignment.gpu,
            )
            for name, assignment in self._assignments.items()
        ]

    def _build_embedding_specs(self) -> list[ReplicaSpec]:
        """Build the replicas of the embedding models, which run on the CPU with default settings."""
        engine = self._engine
        return [
            ReplicaSpec(
                name=replica,
                server=msgspec.structs.replace(
                    self._server,
                    served_model_names=(name,),
                    chat_template=None,
                    tool_format="auto",
                ),
                engine=EngineConfig(
                    model=path,
                    device="cpu",
                    threads=engine.threads,
                    pack_cache_bytes=engine.pack_cache_bytes,
                    request_timeout_s=engine.request_timeout_s,
                    colocated_replicas=len(self._assignments) + len(self._embedding_models) - 1,
                ),
                gpu=None,
            )
            for replica, (name, path) in self._embedding_models.items()
        ]

    def _build_gateway_config(self, launcher: LocalLauncher) -> GatewayConfig:
        from argosy.gateway import (
            GatewayConfig,
            ModelConfig,
            QueueConfig,
            ReplicaConfig,
            Timeouts,
        )
        from argosy.store import StoreConfig

        def replica_config(replica: str) -> ReplicaConfig:
            url = f"unix:{quote(str(launcher.socket_path(replica)))}"
            return ReplicaConfig(name=replica, url=url, kind="argosy")

        server, (name, *aliases) = self._server, self._served_names
        return GatewayConfig(
            models=[
                ModelConfig(
                    name=name,
                    aliases=tuple(aliases),
                    replicas=list(map(replica_config, self._assignments)),
                ),
                *(
                    ModelConfig(name=embedding_name, replicas=[replica_config(replica)])
                    for replica, (embedding_name, _) in self._embedding_models.items()
                ),
            ],
            uds=server.uds,
            tls=server.tls,
            store=StoreConfig(url=self._auth_bootstrap.store_url),
            auth=self._auth_bootstrap.auth_config,
            timeouts=Timeouts(failover_timeout_s=FAILOVER_TIMEOUT_S),
            queue=QueueConfig()
            if self._engine.request_timeout_s is None
            else QueueConfig(timeout_s=self._engine.request_timeout_s),
            drain_deadline_s=server.drain_deadline_s,
            log_content=self._log_content,
        )


async def _run_all(coroutines: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Run coroutines until all have ended, or one has failed."""
    tasks = list(map(asyncio.create_task, coroutines))
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
