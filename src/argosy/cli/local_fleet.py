"""Gateway and replicas of `argosy serve`: the gateway runs in this process, each replica in its own process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import uvloop

from argosy.cli.auth_bootstrap import AuthBootstrap, AuthSetup
from argosy.cli.replica_fleet import ReplicaFleet
from argosy.cli.serve_pools import ServedModel, plan_pools
from argosy.cli.startup_display import StartupDisplay
from argosy.engine import EngineConfig, ReplicaServerConfig, resolve_model_path
from argosy.fleet import ReplicaGroup, runtime_folder
from argosy.fleet.launchers import LaunchedReplica
from argosy.policy.reconciliation import LaunchState
from argosy.process import handle_signals, raise_file_limit, run_in_daemon_thread
from argosy.settings import convert_settings, parse_size
from argosy.telemetry import configure_logging

if TYPE_CHECKING:
    from argosy.deployment import AlertingConfig, GatewayConfig, SleepConfig
    from argosy.gateway import GatewayServer

FAILOVER_TIMEOUT_S = 120.0
"""How long a request waits for a dead replica to restart. The fleet may have no other replica."""
START_POLL_INTERVAL_S = 0.1


@dataclass(kw_only=True)
class LocalFleet:
    """Fleet of one model on this machine, with further models beside it.

    Runs until SIGTERM, SIGINT, or the end of its terminal.
    """

    server: ReplicaServerConfig
    """Settings of the gateway's address and of the replicas."""
    engine: EngineConfig
    """Settings of the model."""
    groups: Sequence[ReplicaGroup]
    """Groups of the model's replicas."""
    auth_bootstrap: AuthBootstrap
    display: StartupDisplay
    options: Mapping[str, Any]
    """Options on the command line, by name."""
    log_content: bool
    """Whether explanations contain prompts and outputs."""
    otlp_traces_endpoint: str | None
    """Receiver of traces; None exports none."""
    alert_webhook: str | None
    """Webhook that is notified of alerts; None notifies none."""
    embedding_models: Mapping[str, str]
    """Path or hub name of each embedding model by its public name."""
    added_models: Mapping[str, str]
    """Path or hub name of each further model by its public name."""
    sleep: SleepConfig | None
    """When models sleep; None if they never do."""
    model_memory: str | None
    """Memory for all models together; None sets no limit."""
    has_served: bool = False
    """Whether the gateway has been ready."""
    _auth_setup: AuthSetup | None = None
    _gateway: GatewayServer | None = None
    _stop_requested: asyncio.Event = field(default_factory=asyncio.Event)
    _force_stop: asyncio.Event = field(default_factory=asyncio.Event)

    def serve(self) -> None:
        """Serve until `stop` is called.

        Raises:
            ValueError: A setting is wrong; the message contains the remedy.
            OSError: The address cannot be bound, or a file cannot be read.
            LaunchError: A replica cannot be started.
            FleetFailedError: No replica of a model is left that can be started.
        """
        raise_file_limit()
        configure_logging(self.server.log_format, self.server.log_level)
        # Downloaded once here, not by each replica.
        path = resolve_model_path(self.engine.model, self.engine.revision)
        model = ServedModel(self.server.model_names_for(self.engine.model), str(path))
        embedding_models = [
            ServedModel((name,), str(resolve_model_path(source, None)))
            for name, source in self.embedding_models.items()
        ]
        added_models = [
            ServedModel((name,), str(resolve_model_path(source, None)))
            for name, source in self.added_models.items()
        ]
        with runtime_folder() as folder:
            pools = plan_pools(
                model,
                embedding_models,
                self.groups,
                self.server.drain_deadline_s,
                self.options,
                {"TMPDIR": str(folder)},  # so that no file of a killed replica is left
                added_models=added_models,
            )
            uvloop.run(self._run(ReplicaFleet(pools, folder / "launcher")))

    def stop(self) -> None:
        """Drain, then stop. A second call stops at once. Call it on the event loop's thread."""
        if self._stop_requested.is_set():
            self._force_stop.set()
        elif self.has_served:
            self.display.show_draining(self.server.drain_deadline_s)
        self._stop_requested.set()
        if self._gateway is not None:
            self._gateway.stop()

    def _reload_certificates(self) -> None:
        if self._gateway is not None:  # otherwise the gateway has not read its certificates yet
            self._gateway.reload()

    async def _run(self, fleet: ReplicaFleet) -> None:
        from argosy.http_server import listening_sockets

        server = self.server
        with (
            handle_signals(self.stop, None if server.tls is None else self._reload_certificates),
            # Opened before the replicas start, so that an address in use fails at once. Clients that connect now wait
            # for the first replica.
            listening_sockets(server.host, server.port, server.uds) as listen_sockets,
        ):
            try:
                await fleet.start()
                keep_task = asyncio.create_task(fleet.keep())
                try:
                    await self._run_gateway(fleet, keep_task, listen_sockets)
                    if self.has_served:
                        await self._drain_replicas(fleet, keep_task)
                finally:
                    keep_task.cancel()
                    await asyncio.gather(keep_task, return_exceptions=True)
            finally:
                await fleet.close()

    async def _run_gateway(
        self,
        fleet: ReplicaFleet,
        keep_task: asyncio.Task[None],
        listen_sockets: Sequence[socket.socket],
    ) -> None:
        from argosy.gateway import GatewayServer
        from argosy.lessons import LESSONS

        config = self._build_gateway_config(await fleet.list_replicas())
        gateway = GatewayServer(
            config,
            self._on_gateway_ready,
            fleet_control=fleet.open_control(),
            replica_logs=fleet.logs,
            lessons=LESSONS,
        )
        if not await self._prepare_auth() or not await self._wait_for_replicas(fleet, keep_task):
            return
        await self._check_memory(fleet)
        self._gateway = gateway
        gateway_task = asyncio.create_task(gateway.run(listen_sockets))
        await asyncio.wait({gateway_task, keep_task}, return_when=asyncio.FIRST_COMPLETED)
        gateway.stop()
        if keep_task.done():
            gateway.stop()  # the second call skips the drain, since no replica is left
        await gateway_task
        if keep_task.done():
            await keep_task

    async def _prepare_auth(self) -> bool:
        """Prepare the store and show the key that was created, while the model loads, which may take long or fail.

        Returns False if `stop` was called meanwhile. Raises ValueError if the store cannot be used.
        """
        store_task = asyncio.create_task(run_in_daemon_thread(self.auth_bootstrap.prepare_store))
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
            self.display.show_first_key(self._auth_setup.first_key)
        return True

    async def _wait_for_replicas(self, fleet: ReplicaFleet, keep_task: asyncio.Task[None]) -> bool:
        """Show the progress until each model has a replica that is ready.

        Returns False if `stop` was called meanwhile. Raises FleetFailedError like `serve`.
        """
        stop_task = asyncio.create_task(self._stop_requested.wait())
        try:
            while not stop_task.done():
                replicas_by_model = (await fleet.list_replicas()).values()
                if all(any(map(_is_ready, replicas)) for replicas in replicas_by_model):
                    return True
                self._show_progress([each for replicas in replicas_by_model for each in replicas])
                await asyncio.wait(
                    {stop_task, keep_task},
                    timeout=START_POLL_INTERVAL_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if keep_task.done():
                    await keep_task
            return False
        finally:
            stop_task.cancel()

    async def _check_memory(self, fleet: ReplicaFleet) -> None:
        """Raise ValueError if a model needs more memory than all models together may have."""
        from argosy.fleet.control import fetch_awake_bytes

        if self.model_memory is None:
            return
        for model, replicas in (await fleet.list_replicas()).items():
            sizes = [await fetch_awake_bytes(each.url or "") for each in replicas]
            if sum(sizes) > parse_size(self.model_memory):
                raise ValueError(
                    f"{model.names[0]} needs {sum(sizes) / 2**20:,.0f} MiB while it is awake, more than --model-memory "
                    f"{self.model_memory}; raise it, or lower --kv-memory"
                )

    def _show_progress(self, replicas: Sequence[LaunchedReplica]) -> None:
        loading = [replica for replica in replicas if replica.activity and not _is_ready(replica)]
        if loading:
            furthest = max(loading, key=lambda replica: replica.progress)
            self.display.update(description=furthest.activity, completed=furthest.progress)

    async def _drain_replicas(self, fleet: ReplicaFleet, keep_task: asyncio.Task[None]) -> None:
        """Drain the idle replicas. A forced stop does not wait for them."""
        fleet.drain()
        force_stop_task = asyncio.create_task(self._force_stop.wait())
        await asyncio.wait({keep_task, force_stop_task}, return_when=asyncio.FIRST_COMPLETED)
        force_stop_task.cancel()

    def _on_gateway_ready(self, url: str) -> None:
        from argosy.http_server import tune_gc

        tune_gc()
        self.has_served = True
        assert self._auth_setup is not None  # noqa: S101 - set before the gateway starts
        self.display.show_ready(
            url,
            self.server.model_names_for(self.engine.model)[0],
            embedding_models=list(self.embedding_models),
            added_models=list(self.added_models),
            key_required=self._auth_setup.key_required,
            tls=self.server.tls,
            store_url=self.auth_bootstrap.configured_store_url,
            has_console=self.auth_bootstrap.console and self.server.uds is None,
        )

    def _build_gateway_config(
        self, launched: Mapping[ServedModel, Sequence[LaunchedReplica]]
    ) -> GatewayConfig:
        """Build the gateway's settings. It also lists replicas that restart, so that requests wait for them."""
        from argosy.deployment import (
            GatewayConfig,
            ModelConfig,
            ObjectivesConfig,
            QueueConfig,
            ReplicaConfig,
            SloConfig,
            Timeouts,
            TracingConfig,
        )
        from argosy.store import StoreConfig

        server = self.server
        return GatewayConfig(
            models=[
                ModelConfig(
                    name=model.names[0],
                    aliases=model.names[1:],
                    sleep=self.sleep,
                    replicas=[
                        ReplicaConfig(name=replica.name, url=replica.url or "", kind="argosy")
                        for replica in replicas
                    ],
                )
                for model, replicas in launched.items()
            ],
            host=server.host,
            port=server.port,
            uds=server.uds,
            tls=server.tls,
            store=StoreConfig(url=self.auth_bootstrap.store_url),
            auth=self.auth_bootstrap.auth_config,
            console=self.auth_bootstrap.console_config,
            timeouts=Timeouts(failover_timeout_s=FAILOVER_TIMEOUT_S),
            queue=QueueConfig()
            if self.engine.request_timeout_s is None
            else QueueConfig(timeout_s=self.engine.request_timeout_s),
            model_memory=self.model_memory,
            drain_deadline_s=server.drain_deadline_s,
            log_content=self.log_content,
            objectives=ObjectivesConfig(slos=(SloConfig(name="answers", availability="99%"),)),
            tracing=None
            if self.otlp_traces_endpoint is None
            else TracingConfig(endpoint=self.otlp_traces_endpoint),
            alerting=_build_alerting(self.alert_webhook),
        )


def _build_alerting(webhook: str | None) -> AlertingConfig:
    """Return the settings of alerts. Raises ValueError if the URL cannot be used."""
    from argosy.deployment import AlertingConfig

    if webhook is None:
        return AlertingConfig()
    receivers = [{"name": "webhook", "webhook": {"url": webhook}}]
    return convert_settings({"receivers": receivers}, AlertingConfig, ("--alert-webhook",))


def _is_ready(replica: LaunchedReplica) -> bool:
    return replica.has_reported_ready and replica.state is LaunchState.RUNNING
