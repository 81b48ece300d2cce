"""Runs a gateway: opens its books, listens, looks after replicas and streams, and on SIGTERM drains and leaves."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import structlog
import uvloop

from argosy.gateway.books import Books
from argosy.gateway.config import GatewayConfig
from argosy.gateway.explain import Traces
from argosy.gateway.front import Front
from argosy.gateway.identity import Identity
from argosy.gateway.journey import Stage
from argosy.gateway.ledger import Ledger
from argosy.gateway.limits import Limits, shared_state
from argosy.gateway.operating import Operating, read_replicas
from argosy.gateway.pools import build_models
from argosy.gateway.probing import Prober
from argosy.gateway.recorder import Recorder
from argosy.gateway.serving import Serving
from argosy.store import Directory, StoreError
from argosy.telemetry import GatewayMetrics, GatewayReading, configure_logs
from argosy.web import Listener, bind, bind_unix, url_of

YOUNG = 20_000
"""Objects that are made before the collector looks through them; Python's own default is 700."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class GatewayServer:
    """One gateway from start to end. `on_ready` is called with its base URL.

    Raises ValueError, saying what to change, when the configuration cannot be meant.
    """

    def __init__(self, config: GatewayConfig, on_ready: Callable[[str], None]) -> None:
        self._config = config
        self._on_ready = on_ready
        self._models = build_models(config)
        self.replicas = [one for pool in self._models.pools for one in pool.replicas.values()]
        self._metrics = GatewayMetrics()
        self._traces = Traces(config.explain)
        self._leave = asyncio.Event()
        self._at_once = asyncio.Event()

    def stop(self) -> None:
        """Drain, then leave; called again, leave at once. Call it on the event loop's thread."""
        if self._leave.is_set():
            self._at_once.set()
        self._leave.set()

    async def run(self, bound: socket.socket | None = None) -> None:
        """Serve until told to stop, on `bound` if that is given.

        Raises ValueError or OSError, saying what to change, when it cannot.
        """
        store = self._config.store
        books = None if store is None else await Books.open(store)
        try:
            await self._run(books, bound)
        finally:
            for replica in self.replicas:
                replica.upstream.close()
            if books is not None:
                await books.close()

    async def _run(self, books: Books | None, bound: socket.socket | None) -> None:
        directory = Directory() if books is None else books.directory
        identity = Identity(directory, self._config.auth)
        limits = Limits(shared_state(self._config.limits))
        stages: list[Stage] = [Recorder(self._traces, self._metrics, time.monotonic), limits]
        caring: list[Coroutine[Any, Any, None]] = []
        if books is not None:
            ledger = Ledger(books.spool)
            stages.append(ledger)

            def update(directory: Directory) -> None:
                identity.update(directory)
                limits.update(directory)
                ledger.update(directory)

            update(directory)
            await _seed(limits, books)
            caring += [books.keep_fresh(update), books.forget(), _keep_seeded(limits, books)]
        serving = Serving(self._models, self._config, stages)
        front = Front(
            self._models,
            serving,
            Operating(self._models, self._metrics, lambda: self._read(front, serving, books)),
            identify=identity.identify,
            metrics=self._metrics,
            config=self._config,
        )
        probers = [Prober(replica) for replica in self.replicas]
        await asyncio.gather(limits.start(), *(prober.probe() for prober in probers))
        caring += [serving.tend(), *(prober.run() for prober in probers)]
        try:
            await self._listen(front, bound or self._bind(), caring)
        finally:
            await limits.close()

    async def _listen(
        self, front: Front, bound: socket.socket, caring: list[Coroutine[Any, Any, None]]
    ) -> None:
        listener = Listener(front)
        listening = asyncio.create_task(listener.serve(sockets=[bound]))
        leaving = asyncio.create_task(self._leave.wait())
        tasks = [asyncio.create_task(care) for care in caring]
        url = url_of(bound)
        log.info("ready", url=url, models=[model.name for model in self._config.models])
        self._on_ready(url)
        try:
            await asyncio.wait({listening, leaving}, return_when=asyncio.FIRST_COMPLETED)
            await self._drain(front, listener)
        finally:
            for task in (*tasks, leaving):
                task.cancel()
            listener.should_exit = True
            await listening
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._config.uds is not None:
                Path(self._config.uds).unlink(missing_ok=True)

    def _read(self, front: Front, serving: Serving, books: Books | None) -> GatewayReading:
        return GatewayReading(
            in_flight=front.in_flight,
            queued=serving.queued,
            replicas=read_replicas(self._models.pools),
            backlog=0 if books is None else books.spool.waiting,
        )

    async def _drain(self, front: Front, listener: Listener) -> None:
        """Let what runs end, for as long as it may."""
        log.info("draining", in_flight=front.in_flight)
        for server in listener.servers:
            server.close()
        idle = asyncio.create_task(front.idle.wait())
        at_once = asyncio.create_task(self._at_once.wait())
        await asyncio.wait(
            {idle, at_once},
            timeout=self._config.drain_deadline_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        idle.cancel()
        at_once.cancel()
        listener.force_exit = not front.idle.is_set()

    def _bind(self) -> socket.socket:
        if self._config.uds is not None:
            return bind_unix(Path(self._config.uds))
        return bind(self._config.host, self._config.port)


async def _keep_seeded(limits: Limits, books: Books) -> None:
    """Tell limits that are new what was used of them, for as long as the gateway runs."""
    while True:
        await asyncio.sleep(1.0)
        await _seed(limits, books)


async def _seed(limits: Limits, books: Books) -> None:
    try:
        await limits.seed(books.store.usage.spent)
    except StoreError as error:
        log.warning("limits_not_seeded", reason=str(error))


def calm_collector() -> None:
    """Leave what has been made so far to itself, and look for cycles less often: requests leave hardly any."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 20, 100)


def serve_gateway(config: GatewayConfig, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. Raises ValueError or OSError, saying what to change."""
    configure_logs(config.log_format, config.log_level)

    def ready(url: str) -> None:
        calm_collector()
        on_ready(url)

    async def run() -> None:
        server = GatewayServer(config, ready)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread
                loop.add_signal_handler(number, server.stop)
        await server.run()

    uvloop.run(run())
