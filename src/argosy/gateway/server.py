"""Runs a gateway: opens its books, listens, looks after replicas and streams, and on SIGTERM drains and leaves."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import structlog
import uvloop

from argosy.gateway.accounting import AccountingService, AccountSync
from argosy.gateway.admin import build_admin_app
from argosy.gateway.app import GatewayApp
from argosy.gateway.auth import Authenticator, check_exposure
from argosy.gateway.config import GatewayConfig
from argosy.gateway.config_reloader import ConfigLoader, ConfigReloader
from argosy.gateway.cors import CorsPolicy
from argosy.gateway.filters import (
    IdempotencyFilter,
    LimitFilter,
    TelemetryFilter,
    UsageRecorder,
    open_idempotency_store,
    open_quota_backend,
)
from argosy.gateway.model_registry import ModelRegistry, build_model_entries
from argosy.gateway.operations import OperationsHandlers, list_replica_readings
from argosy.gateway.pool import (
    CoroutineFactory,
    ReplicaEndpoint,
    Resolver,
    resolve_host,
    run_with_restarts,
)
from argosy.gateway.proxy import CompletionHandlers, FastPath, load_fast_path
from argosy.gateway.request_context import RequestFilter
from argosy.gateway.request_trace import TraceStore
from argosy.http_server import CertificateWatcher, HttpServer, listen_url, listening_socket, tune_gc
from argosy.native import NativeUnavailableError
from argosy.process import handle_signals, raise_file_limit
from argosy.store import AccountSnapshot, StoreConfig
from argosy.telemetry import GatewayGauges, GatewayMetrics, configure_logging

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

T = TypeVar("T")


class GatewayServer:
    """One gateway from start to end. `on_ready` is called with its base URL.

    Raises ValueError, saying what to change, when the configuration cannot be meant.
    """

    def __init__(
        self,
        config: GatewayConfig,
        on_ready: Callable[[str], None],
        load_config: ConfigLoader | None = None,
        look_up: Resolver = resolve_host,
    ) -> None:
        """`reread` is asked for other models at `renew`; `look_up` for the addresses of names."""
        self._config = config
        self._on_ready = on_ready
        self._registry = ModelRegistry(build_model_entries(config), config.routes, look_up)
        self._models = self._registry.router
        self._authenticator = Authenticator(AccountSnapshot(), config.auth)
        self._cors = CorsPolicy(config.auth.allowed_origins)
        self._metrics = GatewayMetrics()
        self._traces = TraceStore(config.explain)
        self._certificates = None if config.tls is None else CertificateWatcher(config.tls)
        self._account_sync: AccountSync | None = None
        self._config_reloader: ConfigReloader | None = None
        if load_config is not None:
            self._config_reloader = ConfigReloader(
                config, load_config, self._registry, self._on_models_changed
            )
        self._stop_requested = asyncio.Event()
        self._force_stop = asyncio.Event()

    @property
    def replicas(self) -> list[ReplicaEndpoint]:
        """Those of all models."""
        return self._registry.replicas

    def stop(self) -> None:
        """Drain, then leave; called again, leave at once. Call it on the event loop's thread."""
        if self._stop_requested.is_set():
            self._force_stop.set()
        self._stop_requested.set()

    def reload(self) -> None:
        """Take in what the files of the certificates hold now, and the models of the settings."""
        if self._certificates is not None:
            self._certificates.reload()
        if self._config_reloader is not None:
            self._config_reloader.request_reload()

    def _on_models_changed(self) -> None:
        """There are other models: limits and prices of aliases may be for others now."""
        if self._account_sync is not None:
            self._account_sync.rebind_model_names()

    async def run(self, listen_socket: socket.socket | None = None) -> None:
        """Serve until told to stop, on `bound` if that is given.

        Raises ValueError or OSError, saying what to change, when it cannot.
        """
        async with contextlib.AsyncExitStack() as closing:
            closing.push_async_callback(self._registry.close)
            stages = await self._build_base_filters(closing)
            if self._config.store is not None:
                stages += await self._build_store_filters(self._config.store, closing)
                if self._stop_requested.is_set():
                    return
            if listen_socket is None:
                listen_socket = closing.enter_context(self._bind())
            fast_path = await self._start_fast_path()
            if fast_path is not None:
                closing.callback(fast_path.close)
            await self._serve(stages, listen_socket, fast_path)

    async def _build_base_filters(
        self, exit_stack: contextlib.AsyncExitStack
    ) -> list[RequestFilter]:
        """Those that need no store. Raises ValueError, saying what to change."""
        config = self._config.idempotency
        answers = open_idempotency_store(config, self._config.limits)
        await answers.start()
        exit_stack.push_async_callback(answers.close)
        recorder = TelemetryFilter(self._traces, self._metrics, time.monotonic)
        return [recorder, IdempotencyFilter(answers, config.max_response_bytes)]

    async def _build_store_filters(
        self, store: StoreConfig, exit_stack: contextlib.AsyncExitStack
    ) -> list[RequestFilter]:
        """Those that go by a store, which is open and kept from now on; none where we are to leave before.

        Raises ValueError or OSError, saying what to change.
        """
        books = await self._await_unless_stopped(AccountingService.open(store))
        if books is None:
            return []
        exit_stack.push_async_callback(books.close)
        limits = LimitFilter(open_quota_backend(self._config.limits))
        await limits.start()
        exit_stack.push_async_callback(limits.close)
        ledger = UsageRecorder(books.usage_log)
        self._account_sync = AccountSync(books, self._models, self._authenticator, limits, ledger)
        exit_stack.callback(self._account_sync.close)
        await self._await_unless_stopped(self._account_sync.start(books.snapshot))
        return [limits, ledger]

    async def _await_unless_stopped(self, startup: Coroutine[Any, Any, T]) -> T | None:
        """What it returns; None: we are to leave before it has ended. Raises as it does."""
        begun = asyncio.create_task(startup)
        leaving = asyncio.create_task(self._stop_requested.wait())
        try:
            await asyncio.wait({begun, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return await begun if begun.done() else None
        finally:
            begun.cancel()
            leaving.cancel()

    async def _serve(
        self, filters: list[RequestFilter], listen_socket: socket.socket, fast_path: FastPath | None
    ) -> None:
        keeping = self._account_sync
        serving = CompletionHandlers(self._models, self._config, filters, fast_path)
        front = GatewayApp(
            self._models,
            serving,
            OperationsHandlers(
                self._models, self._metrics, lambda: self._read_metrics(front, serving)
            ),
            authenticate=self._authenticator.authenticate,
            admin=build_admin_app(
                None if keeping is None else keeping.accounting.store,
                self._authenticator,
                self._explain_request,
                _ignore_change if keeping is None else keeping.accounting.notify_changed,
            ),
            cors=self._cors,
            metrics=self._metrics,
            config=self._config,
            limits=None if keeping is None else keeping.limits,
        )
        await self._registry.start()
        caring: list[CoroutineFactory] = [serving.monitor_streams]
        if keeping is not None:
            caring += [
                partial(keeping.accounting.poll_accounts, keeping.apply_snapshot),
                keeping.accounting.roll_up_usage,
            ]
        if self._config_reloader is not None:
            caring.append(self._config_reloader.run)
        if self._certificates is not None:
            caring.append(self._certificates.watch)
        each = 2 if fast_path is None else 4  # its own and a replica's, which the fast path has too
        await self._listen(front, listen_socket, caring, each)

    async def _listen(
        self,
        app: GatewayApp,
        listen_socket: socket.socket,
        background_tasks: list[CoroutineFactory],
        descriptors_per_client: int,
    ) -> None:
        """To clients that take so many descriptors `each`."""
        certificates = self._certificates
        listener = HttpServer(
            app,
            certificates,
            descriptors_per_client=descriptors_per_client,
            max_connection_age_s=self._config.max_connection_age_s,
            idle_timeout_s=self._config.connection_idle_timeout_s,
            dead_peer_timeout_s=2 * self._config.slow_reader_timeout_s,
        )
        listening = asyncio.create_task(listener.serve(sockets=[listen_socket]))
        leaving = asyncio.create_task(self._stop_requested.wait())
        tasks = [asyncio.create_task(run_with_restarts(care)) for care in background_tasks]
        url = listen_url(listen_socket, "http" if certificates is None else "https")
        log.info("ready", url=url, models=[model.name for model in self._config.models])
        self._on_ready(url)
        try:
            await asyncio.wait({listening, leaving}, return_when=asyncio.FIRST_COMPLETED)
            await self._drain(app, listener)
        finally:
            for task in (*tasks, leaving):
                task.cancel()
            listener.stop()
            await listening  # what did not end in time too, and is counted
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _start_fast_path(self) -> FastPath | None:
        if self._config.fast_path == "off":
            return None
        try:
            return FastPath(await asyncio.to_thread(load_fast_path))
        except NativeUnavailableError as error:
            log.info("fast_path_unavailable", reason=str(error))
            return None

    def _explain_request(self, request: str, organisation: str | None) -> dict[str, Any] | None:
        self._traces.evict_expired(time.monotonic())
        trace = self._traces.find(request, organisation)
        return None if trace is None else trace.to_dict()

    def _read_metrics(self, app: GatewayApp, generation: CompletionHandlers) -> GatewayGauges:
        keeping = self._account_sync
        return GatewayGauges(
            in_flight=app.in_flight,
            fast_path_streams=generation.fast_path_streams,
            queue_depths=generation.queued_requests,
            replicas=list_replica_readings(self._models.pools),
            usage_pending_records=0
            if keeping is None
            else keeping.accounting.usage_log.pending_records,
            usage_unpersisted_records=0
            if keeping is None
            else keeping.accounting.usage_log.unpersisted_records,
            store_up=None if keeping is None else keeping.accounting.is_fresh,
            quota_backend=None if keeping is None else keeping.limits.read_quota_status(),
        )

    async def _drain(self, app: GatewayApp, listener: HttpServer) -> None:
        """Let what runs end, for as long as it may."""
        log.info("draining", in_flight=app.in_flight)

        async def end() -> None:
            await listener.drain(self._config.drain_keepalive_s)
            await app.wait_until_idle()

        ended = asyncio.create_task(end())
        at_once = asyncio.create_task(self._force_stop.wait())
        await asyncio.wait(
            {ended, at_once},
            timeout=self._config.drain_deadline_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        ended.cancel()
        at_once.cancel()
        listener.force_exit = app.in_flight > 0

    def _bind(self) -> AbstractContextManager[socket.socket]:
        """Raises ValueError when anybody could come in who should not."""
        config, keeping = self._config, self._account_sync
        if config.uds is None:
            known = AccountSnapshot() if keeping is None else keeping.accounting.snapshot
            check_exposure(config.host, config.auth, known)
        return listening_socket(config.host, config.port, config.uds)


def _ignore_change() -> None:
    """Nobody has accounts that could change."""


def serve_gateway(
    config: GatewayConfig, on_ready: Callable[[str], None], load_config: ConfigLoader
) -> None:
    """Serve until SIGTERM or SIGINT, at SIGHUP the models that `reread` has then.

    Raises ValueError or OSError, saying what to change.
    """
    configure_logging(config.log_format, config.log_level)
    raise_file_limit()

    def ready(url: str) -> None:
        tune_gc()
        on_ready(url)

    async def run() -> None:
        server = GatewayServer(config, ready, load_config)
        with handle_signals(server.stop, server.reload):
            await server.run()

    uvloop.run(run())
