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

from argosy.gateway.config import GatewayConfig, ModelConfig, Timeouts, headers_of
from argosy.gateway.front import Front
from argosy.gateway.probing import Prober
from argosy.gateway.replicas import Pool, Replica
from argosy.gateway.serving import Serving
from argosy.gateway.upstream import Upstream
from argosy.gateway.upstream_tls import client_context
from argosy.policy import CHOOSERS
from argosy.protocol import parse_endpoint
from argosy.telemetry import configure_logs
from argosy.web import Certificates, Listener, bind, bind_unix, url_of

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
        self._certificates = None if config.tls is None else Certificates(config.tls)
        self._listener = Listener(self.front, self._certificates)
        self._leave = asyncio.Event()

    def stop(self) -> None:
        """Drain, then leave. Call it on the event loop's thread."""
        self._leave.set()

    async def run(self) -> None:
        """Serve until told to stop. Raises OSError when the address is taken."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread
                loop.add_signal_handler(number, self.stop)
        probers = [Prober(replica) for replica in self.replicas]
        await asyncio.gather(*(prober.probe() for prober in probers))
        bound = self._bind()
        listening = asyncio.create_task(self._listener.serve(sockets=[bound]))
        caring = [asyncio.create_task(prober.run()) for prober in probers]
        caring.append(asyncio.create_task(self._serving.tend()))
        if self._certificates is not None:
            caring.append(asyncio.create_task(self._certificates.watch()))
        url = url_of(bound, "http" if self._certificates is None else "https")
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
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_deadline_s):
                await self.front.idle.wait()
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
        await GatewayServer(config, on_ready).run()

    uvloop.run(run())


def _pool(model: ModelConfig, timeouts: Timeouts) -> Pool:
    replicas = []
    for wanted in model.replicas:
        endpoint = parse_endpoint(wanted.url)
        upstream = Upstream(
            endpoint,
            headers=headers_of(wanted),
            connect_timeout_s=timeouts.connect_s,
            tls=client_context(wanted.tls) if endpoint.tls else None,
            server_name=wanted.tls.server_name,
        )
        replica = Replica(
            wanted.url,
            wanted.kind,
            wanted.model or model.name,
            upstream,
            most=wanted.max_requests,
            carry=wanted.carry,
            stream_usage=wanted.stream_usage,
        )
        replicas.append(replica)
    return Pool(model.name, replicas, CHOOSERS[model.routing]())
