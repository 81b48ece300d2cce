"""The gateway and its replicas as one: the gateway in this process, each replica in one of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec
import uvloop

from argosy.cli.auth_bootstrap import Doorkeeping, Opening
from argosy.cli.startup_display import Display
from argosy.engine import EngineConfig, ServerConfig, locate
from argosy.fleet import LocalLauncher, Place, ReplicaSpec, Supervisor, runtime_folder
from argosy.process import aside, heeding, raise_file_limit
from argosy.telemetry import configure_logs

if TYPE_CHECKING:
    from argosy.gateway import GatewayConfig, GatewayServer

RECOVERY_S = 120.0
"""How long a request waits for a replica that died to be back: there may be no other."""


class Whole:
    """One model on this machine, until SIGTERM, SIGINT, or the end of its terminal."""

    def __init__(
        self,
        server: ServerConfig,
        engine: EngineConfig,
        places: Sequence[Place],
        door: Doorkeeping,
        shown: Display,
    ) -> None:
        self._server = server
        self._engine = engine
        self._names = server.names_of(engine.model)
        self._replicas = {f"replica-{number}": place for number, place in enumerate(places)}
        self._door = door
        self._shown = shown
        self._opening: Opening | None = None
        self._gateway: GatewayServer | None = None
        self._leave = asyncio.Event()
        self._at_once = asyncio.Event()
        self.served = False
        """Whether requests have been taken."""

    def serve(self) -> None:
        """Serve until told to stop. Raises ValueError, OSError or FleetFailedError, saying what to change."""
        raise_file_limit()
        configure_logs(self._server.log_format, self._server.log_level)
        # Fetched once, not by each replica.
        path = locate(self._engine.model, self._engine.revision)
        with runtime_folder() as folder:
            uvloop.run(self._run(folder, path))

    def stop(self) -> None:
        """Drain, then leave; called again, leave at once. Call it on the event loop's thread."""
        if self._leave.is_set():
            self._at_once.set()
        elif self.served:
            self._shown.leaving(self._server.drain_deadline_s)
        self._leave.set()
        if self._gateway is not None:
            self._gateway.stop()

    def _renew(self) -> None:
        if self._gateway is not None:  # else its certificates are still to be read
            self._gateway.renew()

    async def _run(self, folder: Path, model: Path) -> None:
        launcher = LocalLauncher(folder, self._shown.progress)
        supervisor = Supervisor(launcher, self._specs(model))
        with heeding(self.stop, None if self._server.tls is None else self._renew):
            try:
                await asyncio.gather(*supervisor.reconcile())  # they get ready during our imports
                await self._serve(launcher, supervisor)
            finally:
                await self._end(supervisor)

    async def _serve(self, launcher: LocalLauncher, supervisor: Supervisor) -> None:
        from argosy.gateway import GatewayServer
        from argosy.http_server import listening_socket

        server = self._server
        keeping = asyncio.create_task(supervisor.run())
        try:
            gateway = GatewayServer(self._config(launcher), self._ready)
            with listening_socket(server.host, server.port, server.uds) as bound:
                # Who connects now waits for the first replica.
                if not await self._open() or not await self._first_replica(supervisor, keeping):
                    return
                self._gateway = gateway
                answering = asyncio.create_task(gateway.run(bound))
                await asyncio.wait({answering, keeping}, return_when=asyncio.FIRST_COMPLETED)
                gateway.stop()
                if keeping.done():
                    gateway.stop()  # at once: nobody is left to answer what runs
                await answering
            if keeping.done():
                await keeping
        finally:
            keeping.cancel()

    async def _open(self) -> bool:
        """Prepare the store, and show the key that was made; False: we are to leave. Raises ValueError.

        Neither waits for the model, which may take long to load, or not be there at all.
        """
        opening = asyncio.create_task(aside(self._door.prepare))
        leaving = asyncio.create_task(self._leave.wait())
        try:
            await asyncio.wait({opening, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                return False
            self._opening = await opening
        finally:
            opening.cancel()
            leaving.cancel()
        if self._opening.first_key is not None:
            self._shown.first_key(self._opening.first_key)
        return True

    async def _first_replica(self, supervisor: Supervisor, keeping: asyncio.Task[None]) -> bool:
        """Wait for it; False: we are to leave. Raises FleetFailedError when there will be none."""
        serving = asyncio.create_task(supervisor.serving.wait())
        leaving = asyncio.create_task(self._leave.wait())
        try:
            await asyncio.wait({serving, leaving, keeping}, return_when=asyncio.FIRST_COMPLETED)
            if keeping.done():
                await keeping
            return not leaving.done()
        finally:
            serving.cancel()
            leaving.cancel()

    async def _end(self, supervisor: Supervisor) -> None:
        """Nothing runs any more on the replicas: let them go, or end them when told again."""
        draining = asyncio.create_task(supervisor.drain())
        at_once = asyncio.create_task(self._at_once.wait())
        await asyncio.wait({draining, at_once}, return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
        at_once.cancel()
        await supervisor.stop()
        with contextlib.suppress(asyncio.CancelledError):
            await draining

    def _ready(self, url: str) -> None:
        from argosy.http_server import calm_collector

        calm_collector()
        self.served = True
        assert self._opening is not None  # noqa: S101 - the gateway was started after it
        self._shown.ready(url, self._names[0], keyed=self._opening.keyed)

    # --- settings --------------------------------------------------------------------------------

    def _specs(self, model: Path) -> list[ReplicaSpec]:
        server = msgspec.structs.replace(self._server, served_model_names=self._names)
        engine = msgspec.structs.replace(self._engine, model=str(model), revision=None)
        return [
            ReplicaSpec(
                name=name,
                server=server,
                engine=msgspec.structs.replace(engine, neighbours=place.neighbours),
                gpu=place.gpu,
            )
            for name, place in self._replicas.items()
        ]

    def _config(self, launcher: LocalLauncher) -> GatewayConfig:
        from argosy.gateway import (
            GatewayConfig,
            ModelConfig,
            QueueConfig,
            ReplicaConfig,
            Timeouts,
        )
        from argosy.store import StoreConfig

        server, (name, *aliases) = self._server, self._names
        return GatewayConfig(
            models=[
                ModelConfig(
                    name=name,
                    aliases=tuple(aliases),
                    replicas=[
                        ReplicaConfig(
                            name=replica,
                            url=f"unix:{quote(str(launcher.socket(replica)))}",
                            kind="argosy",
                        )
                        for replica in self._replicas
                    ],
                )
            ],
            uds=server.uds,
            tls=server.tls,
            store=StoreConfig(url=self._door.url),
            auth=self._door.config,
            timeouts=Timeouts(recovery_s=RECOVERY_S),
            queue=QueueConfig(wait_s=self._engine.request_timeout_s),
            drain_deadline_s=server.drain_deadline_s,
        )
