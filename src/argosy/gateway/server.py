"""Runs a gateway: builds its pools, listens, looks after replicas and streams, and on SIGTERM drains and leaves."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import structlog
import uvloop

from argosy.gateway.config import GatewayConfig, ModelConfig, Timeouts, key_of
from argosy.gateway.front import Front
from argosy.gateway.probing import Prober
from argosy.gateway.replicas import Pool, Replica
from argosy.gateway.serving import Serving
from argosy.gateway.upstream import Upstream, parse_endpoint
from argosy.policy import CHOOSERS
from argosy.telemetry import configure_logs
from argosy.web import Listener, bind, bind_unix, url_of

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class GatewayServer:
    """One gateway from start to end. `on_ready` is called with its base URL."""

    def __init__(self, config: GatewayConfig, on_ready: Callable[[str], None]) -> None:
        self._config = config
        self._on_ready = on_ready
        pools = [_pool(model, config.timeouts) for model in config.models]
        named = {
            name: pool
            for model, pool in zip(config.models, pools, strict=True)
            for name in (model.name, *model.aliases)
        }
        self.replicas = [replica for pool in pools for replica in pool.replicas.values()]
        self._serving = Serving(named, config)
        self.front = Front(named, self._serving, config)
        self._listener = Listener(self.front)
        self._leave = asyncio.Event()
        self._at_once = asyncio.Event()

    def stop(self) -> None:
        """Drain, then leave; called again, leave at once. Call it on the event loop's thread."""
        if self._leave.is_set():
            self._at_once.set()
        self._leave.set()

    async def run(self, bound: socket.socket | None = None) -> None:
        """Serve until told to stop, on `bound` if that is given. Raises OSError when the address is taken."""
        probers = [Prober(replica) for replica in self.replicas]
        await asyncio.gather(*(prober.probe() for prober in probers))
        bound = bound or self._bind()
        listening = asyncio.create_task(self._listener.serve(sockets=[bound]))
        caring = [asyncio.create_task(prober.run()) for prober in probers]
        caring.append(asyncio.create_task(self._serving.tend()))
        url = url_of(bound)
        log.info("ready", url=url, models=[model.name for model in self._config.models])
        self._on_ready(url)
        leaving = asyncio.create_task(self._leave.wait())
        try:
            await asyncio.wait({listening, leaving}, return_when=asyncio.FIRST_COMPLETED)
            await self._drain()
        finally:
            for task in (*caring, leaving):
                task.cancel()
            self._listener.should_exit = True
            await listening
            for replica in self.replicas:
                replica.upstream.close()
            self._unlink()

    async def _drain(self) -> None:
        """Let what runs end, for as long as it may."""
        log.info("draining", in_flight=self.front.in_flight)
        for server in self._listener.servers:
            server.close()
        idle = asyncio.create_task(self.front.idle.wait())
        at_once = asyncio.create_task(self._at_once.wait())
        await asyncio.wait(
            {idle, at_once},
            timeout=self._config.drain_deadline_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        idle.cancel()
        at_once.cancel()
        self._listener.force_exit = not self.front.idle.is_set()

    def _unlink(self) -> None:
        if self._config.uds is not None:
            Path(self._config.uds).unlink(missing_ok=True)

    def _bind(self) -> socket.socket:
        if self._config.uds is not None:
            return bind_unix(Path(self._config.uds))
        return bind(self._config.host, self._config.port)


def serve_gateway(config: GatewayConfig, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. Raises ValueError or OSError, saying what to change."""
    configure_logs(config.log_format, config.log_level)

    async def run() -> None:
        server = GatewayServer(config, on_ready)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread
                loop.add_signal_handler(number, server.stop)
        await server.run()

    uvloop.run(run())


def _pool(model: ModelConfig, timeouts: Timeouts) -> Pool:
    replicas = []
    for wanted in model.replicas:
        key = key_of(wanted)
        headers = () if key is None else ((b"authorization", b"Bearer " + key.encode()),)
        upstream = Upstream(
            parse_endpoint(wanted.url), headers=headers, connect_timeout_s=timeouts.connect_s
        )
        name = wanted.model or model.name
        replicas.append(Replica(wanted.url, wanted.kind, name, upstream, most=wanted.max_requests))
    return Pool(model.name, replicas, CHOOSERS[model.routing]())
