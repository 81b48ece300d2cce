"""Runs a gateway: opens the store, listens, supervises background tasks, and drains on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog
import uvloop

from argosy.alerting import AlertAdmin
from argosy.deployment import REQUEST_SETTINGS, FleetControl, GatewayConfig, ObjectiveReader
from argosy.gateway.accounting import AccountingService, AccountSync
from argosy.gateway.adapter_keeper import AdapterKeeper
from argosy.gateway.adapter_rollouts import AdapterRollouts
from argosy.gateway.admin import AdminCallLimiter, AdminScope, build_admin_routes
from argosy.gateway.app import GatewayApp
from argosy.gateway.auth import Authenticator, check_exposure, describe_key_command
from argosy.gateway.backup_scheduler import BackupScheduler
from argosy.gateway.batches import (
    BATCH_PATHS,
    BatchDispatcher,
    BatchUpkeep,
    build_batch_routes,
)
from argosy.gateway.cache_admin import CacheAdmin
from argosy.gateway.config_reloader import ConfigLoader, ConfigReloader
from argosy.gateway.console import (
    BrowserGuard,
    Console,
    ConsoleEvents,
    ConsoleSessions,
    OidcSignIn,
)
from argosy.gateway.cors import CorsPolicy
from argosy.gateway.dialects import BackgroundResponses, ResponseState
from argosy.gateway.event_loop import CoroutineFactory, LoopMonitor, run_with_restarts
from argosy.gateway.filters import (
    ContentFilter,
    IdempotencyFilter,
    LimitFilter,
    TelemetryFilter,
    TruncationFilter,
    UsageRecorder,
    read_redis_password,
)
from argosy.gateway.fleet_pools import FleetPools, FleetPoolsHandler, load_fleet_pools
from argosy.gateway.gateway_alerts import build_alerting
from argosy.gateway.gateway_part import GatewayPart, do_nothing
from argosy.gateway.http_route import HttpRoute
from argosy.gateway.lessons import Lesson
from argosy.gateway.model_registry import ModelRegistry, ReplicaAdmin, build_model_entries
from argosy.gateway.objective_recorder import ObjectiveRecorder
from argosy.gateway.operations import OperationsHandlers, list_replica_readings
from argosy.gateway.peer_gateways import PeerGateways, advertised_url
from argosy.gateway.pool import (
    ReplicaEndpoint,
    Resolver,
    resolve_host,
)
from argosy.gateway.prefix_doctor import PrefixDoctor
from argosy.gateway.proxy import (
    CompletionHandlers,
    FastPath,
    ResponseCache,
    RoutingPreviewer,
    TrafficSampler,
    load_fast_path,
)
from argosy.gateway.quality_jobs import QualityJobs
from argosy.gateway.replica_logs import ReplicaLogs
from argosy.gateway.request_context import RequestFilter
from argosy.gateway.request_explainer import RequestExplainer, new_gateway_id
from argosy.gateway.request_trace import TraceStore
from argosy.gateway.residency_manager import ResidencyManager
from argosy.gateway.routes import add_openapi_route, build_routes
from argosy.gateway.series_collector import SeriesCollector
from argosy.gateway.series_queries import SeriesQueries
from argosy.gateway.tracing import SpanExporter
from argosy.gateway.version_comparison import AdapterMeter, LocalGate, OutcomeMeter, RouteWatcher
from argosy.http_server import (
    CertificateWatcher,
    HttpServer,
    SocketHandover,
    bind_unix,
    listen_url,
    listening_sockets,
    tune_gc,
)
from argosy.native import NativeUnavailableError
from argosy.policy.detection import CellMinute
from argosy.process import handle_signals, raise_file_limit
from argosy.store import (
    AccountSnapshot,
    IdempotencyStore,
    QuotaBackend,
    Store,
    StoreConfig,
    create_idempotency_store,
    create_quota_backend,
    default_store_url,
)
from argosy.telemetry import GatewayGauges, GatewayMetrics, configure_logging

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

T = TypeVar("T")


class GatewayServer:
    """A gateway process, from startup to the end of its drain."""

    def __init__(
        self,
        config: GatewayConfig,
        on_ready: Callable[[str], None],
        load_config: ConfigLoader | None = None,
        resolver: Resolver = resolve_host,
        *,
        fleet_control: FleetControl | None = None,
        replica_logs: ReplicaLogs | None = None,
        lessons: Sequence[Lesson] = (),
        control_socket: Path | None = None,
    ) -> None:
        """Build the parts that need no I/O.

        Args:
            config: The settings.
            on_ready: Called with the base URL once the gateway listens.
            load_config: Reads the settings again for `reload`. None disables it.
            resolver: Resolves host names to addresses.
            fleet_control: Control of the fleet whose controller runs in this process.
            replica_logs: Logs of the replicas of that fleet. Those of another fleet are in its store.
            lessons: Lessons of the console.
            control_socket: Path at which the controller reaches this gateway and no other on the same address. The
                gateway then listens on its address once it knows the models of its fleet.

        Raises:
            ValueError: The settings are invalid. The message says what to change.
        """
        self._control_socket = control_socket
        pools = None if config.fleet is None else load_fleet_pools(config)
        if pools is not None and pools.version:
            config = msgspec.structs.replace(
                config,
                models=list(pools.models),
                **{name: getattr(pools, name) for name in REQUEST_SETTINGS},
                objectives=pools.objectives,
            )
        self._config = config
        self._on_ready = on_ready
        self._fleet_control = fleet_control
        self._replica_logs = replica_logs
        self._lessons = lessons
        versions = () if pools is None else pools.versions
        self._registry = ModelRegistry(
            build_model_entries(config, versions), config.rules, resolver
        )
        if pools is not None:
            self._registry.follow_routes(pools.followed_routes)
        self._models = self._registry.router
        self._authenticator = Authenticator(
            AccountSnapshot(), config.auth, key_command=describe_key_command(config.store)
        )
        self._cors = CorsPolicy(config.auth.allowed_origins)
        self._metrics = GatewayMetrics()
        self._traces = TraceStore(config.explain)
        self._gateway_id = new_gateway_id()
        self._loop_monitor = LoopMonitor()
        self._truncation = TruncationFilter()
        self._series = SeriesCollector(config, self._models) if config.series.enabled else None
        self._cells_read_until = 0
        """Start of the last minute of which this process has watched the traffic."""
        self._exporter: SpanExporter | None = None
        if config.tracing is not None:
            self._exporter = SpanExporter(config.tracing, self._gateway_id, self._metrics)
        self._prefix_doctor = PrefixDoctor(config.explain.prefix_sample_ratio)
        self._parts: list[GatewayPart] = [GatewayPart(tasks=[self._prefix_doctor.run])]
        """Optional parts that the gateway has, in the order in which they were added."""
        self._objectives = ObjectiveRecorder(self._gateway_id, self._metrics)
        self._objectives.apply(config.objectives)
        self._objective_reader: ObjectiveReader | None = None
        self._http_server: HttpServer | None = None
        self._account_sync: AccountSync | None = None
        self._outcomes: OutcomeMeter | None = None
        self._certificates: CertificateWatcher | None = None
        self._fleet_pools: FleetPoolsHandler | None = None
        self._add_settings_parts(pools, load_config)
        self._is_accepting = False
        """Whether clients' connections are accepted."""
        self._stop_requested = asyncio.Event()
        self._force_stop = asyncio.Event()

    def _add_settings_parts(
        self, pools: FleetPools | None, load_config: ConfigLoader | None
    ) -> None:
        """Add the parts that follow files or the controller: certificates, and models by one of two ways."""
        config = self._config
        if config.tls is not None:
            certificates = self._certificates = CertificateWatcher(config.tls)
            self._parts.append(GatewayPart(reload=certificates.reload, tasks=[certificates.watch]))
        if pools is not None:
            handler = FleetPoolsHandler(
                config, pools, self._registry, self._objectives, self._on_models_changed
            )
            self._fleet_pools = handler
            self._parts.append(
                GatewayPart(
                    read_gauges=lambda: {
                        "desired_replicas": handler.desired_replicas,
                        "serving_replicas": handler.serving_replicas,
                    }
                )
            )
        elif load_config is not None:
            reloader = ConfigReloader(
                config, load_config, self._registry, self._objectives, self._on_models_changed
            )
            self._parts.append(GatewayPart(reload=reloader.request_reload, tasks=[reloader.run]))

    @property
    def replicas(self) -> list[ReplicaEndpoint]:
        """The replicas of all models."""
        return self._registry.replicas

    def stop(self) -> None:
        """Drain and then stop. A second call stops at once. Call it on the event loop's thread."""
        if self._stop_requested.is_set():
            self._force_stop.set()
        self._stop_requested.set()

    def reload(self) -> None:
        """Reload the TLS certificates, and the models and routes of the settings."""
        for part in self._parts:
            part.reload()

    def _on_models_changed(self) -> None:
        """Re-resolve aliases after a reload. A limit or price of an alias may now apply to a different model.

        The versions to measure may have changed as well.
        """
        for part in self._parts:
            part.on_models_changed()

    async def run(self, listen_sockets: Sequence[socket.socket] | None = None) -> None:
        """Serve until `stop` is called.

        Args:
            listen_sockets: Bound sockets to listen on. Default to the addresses in the settings.

        Raises:
            ValueError: The settings are invalid. The message says what to change.
            OSError: A file, the store or the address cannot be opened.
        """
        async with contextlib.AsyncExitStack() as exit_stack:
            exit_stack.push_async_callback(self._registry.close)
            if self._series is not None:
                exit_stack.push_async_callback(self._series.close)
            if self._exporter is not None:
                exit_stack.push_async_callback(self._exporter.close)
                self._parts.append(GatewayPart(tasks=[self._exporter.run]))
            config = self._config
            redis = config.limits.redis, read_redis_password(config.limits)
            idempotency_store = create_idempotency_store(config.idempotency, *redis)
            await idempotency_store.start()
            exit_stack.push_async_callback(idempotency_store.close)
            series = None if self._series is None else self._series.recorder
            filters: list[RequestFilter] = [
                TelemetryFilter(
                    *(self._traces, self._metrics, time.monotonic, series),
                    *(self._exporter, self._prefix_doctor),
                    objectives=self._objectives,
                ),
                IdempotencyFilter(idempotency_store, config.idempotency.max_response_bytes),
            ]
            if config.store is not None:
                quota_backend = create_quota_backend(*redis)
                filters += await self._build_store_filters(config.store, quota_backend, exit_stack)
                if self._stop_requested.is_set():
                    return
            filters += [ContentFilter(self._metrics), self._truncation]
            cache_store = create_idempotency_store(config.response_cache, *redis, "cache")
            await cache_store.start()
            exit_stack.push_async_callback(cache_store.close)
            cache = ResponseCache(
                cache_store, self._metrics, config.response_cache.max_response_bytes
            )
            if listen_sockets is None:
                listen_sockets = exit_stack.enter_context(self._bind())
            fast_path = await self._start_fast_path()
            if fast_path is not None:
                exit_stack.callback(fast_path.close)
            await self._serve(filters, cache, idempotency_store, listen_sockets, fast_path)

    async def _build_store_filters(
        self,
        store: StoreConfig,
        quota_backend: QuotaBackend,
        exit_stack: contextlib.AsyncExitStack,
    ) -> list[RequestFilter]:
        """Open the store and build the filters that need it. Returns no filters if `stop` is called meanwhile.

        Raises:
            ValueError: The store's settings or content are invalid. The message says what to change.
            OSError: The usage log cannot be opened.
        """
        accounting = await self._await_unless_stopped(AccountingService.open(store))
        if accounting is None:
            return []
        exit_stack.push_async_callback(accounting.close)
        objective_store = accounting.store.objective_hours, self._config.fleet or ""
        exit_stack.push_async_callback(self._objectives.close, *objective_store)
        self._objective_reader = ObjectiveReader(*objective_store)
        limits = LimitFilter(quota_backend)
        self._models.read_budget_used = limits.read_budget_used
        await limits.start()
        exit_stack.push_async_callback(limits.close)
        self._account_sync = AccountSync(accounting, self._models, self._authenticator, limits)
        exit_stack.callback(self._account_sync.close)
        await self._await_unless_stopped(self._account_sync.start(accounting.snapshot))
        self._parts.append(
            GatewayPart(
                on_models_changed=self._account_sync.rebind_model_names,
                read_gauges=self._account_sync.read_gauges,
                tasks=[
                    partial(accounting.poll_accounts, self._account_sync.apply_snapshot),
                    accounting.roll_up_usage,
                    partial(self._objectives.run, *objective_store),
                ],
            )
        )
        return [limits, UsageRecorder(accounting.usage_log)]

    async def _await_unless_stopped(self, startup: Coroutine[Any, Any, T]) -> T | None:
        """Await a coroutine. Cancels it and returns None if `stop` is called first."""
        startup_task = asyncio.create_task(startup)
        stop_task = asyncio.create_task(self._stop_requested.wait())
        try:
            await asyncio.wait({startup_task, stop_task}, return_when=asyncio.FIRST_COMPLETED)
            return await startup_task if startup_task.done() else None
        finally:
            startup_task.cancel()
            stop_task.cancel()

    async def _serve(
        self,
        filters: list[RequestFilter],
        cache: ResponseCache,
        idempotency_store: IdempotencyStore,
        listen_sockets: Sequence[socket.socket],
        fast_path: FastPath | None,
    ) -> None:
        """Build the application, and serve it with its background tasks."""
        config, account_sync = self._config, self._account_sync
        store = None if account_sync is None else account_sync.accounting.store
        peers = None
        if store is not None:
            scheme = "http" if config.tls is None else "https"
            url = advertised_url(listen_sockets[0], scheme, config.advertise_url)
            peers = PeerGateways(self._gateway_id, store, url, config.tls)
        response_state = (
            ResponseState(None)
            if account_sync is None or config.store is None
            else ResponseState(
                *(store, config.store.keep_responses_days, idempotency_store, account_sync.limits),
                self._models,
                config.store.max_file_bytes,
            )
        )
        if store is not None and self._fleet_pools is not None:
            self._parts.append(self._build_fleet_part(store, self._fleet_pools))
            self._replica_logs = ReplicaLogs(config.fleet or "", store.replica_logs)
        generation = CompletionHandlers(
            *(self._models, config, filters, fast_path),
            outcomes=self._outcomes,
            cache=cache,
            adapter_meter=self._add_adapter_parts(),
        )
        self._truncation.call_model = generation.call_for_summary
        self._add_quality_jobs(generation)
        residency = ResidencyManager(
            lambda: self._models.pools, generation.read_demand, config.model_memory_bytes
        )
        self._parts.append(GatewayPart(tasks=[residency.run]))
        background = BackgroundResponses(
            response_state, generation.chat_completions, generation.memory
        )
        alert_part, alert_admin = build_alerting(
            *(config, self._gateway_id, store, self._models, self._read_new_cells),
            fleet_control=self._fleet_control,
            objective_reader=self._objective_reader,
            objectives=self._objectives,
        )
        self._parts.append(alert_part)
        app = self._build_app(generation, response_state, background, store, peers, alert_admin)
        if store is not None and config.store is not None:
            backups = BackupScheduler(
                store.fleets,
                config.store.url or default_store_url(),
                config.store.blobs,
                config.backup,
                self._gateway_id,
            )
            self._parts.append(GatewayPart(tasks=[backups.run], read_gauges=backups.read_gauges))
            upkeep = [response_state.maintain_forever, background.watch_forever]
            self._parts.append(GatewayPart(tasks=upkeep, read_gauges=response_state.read_gauges))
        await self._registry.start()
        for part in self._parts:
            if part.start is not None:
                await part.start()
        tasks = [generation.monitor_streams, self._loop_monitor.run]
        tasks += [task for part in self._parts for task in part.tasks]
        # Client and replica socket. The fast path duplicates both.
        descriptors_per_client = 2 if fast_path is None else 4
        await self._listen(app, background, listen_sockets, tasks, descriptors_per_client)

    def _read_cells(self, after: int) -> list[CellMinute]:
        return [] if self._series is None else self._series.recorder.cells.read(after)

    async def _read_new_cells(self) -> list[CellMinute]:
        minutes = self._read_cells(self._cells_read_until)
        self._cells_read_until = max(
            (each.start for each in minutes), default=self._cells_read_until
        )
        return minutes

    def _add_quality_jobs(self, generation: CompletionHandlers) -> None:
        """Add the part that grades samples and runs golden sets, which needs a store."""
        if self._account_sync is None:
            return
        jobs = QualityJobs(
            *(self._config, self._account_sync.accounting, generation, self._metrics),
            None if self._series is None else self._series.recorder,
        )
        generation.answer_sampler = jobs.sampler
        self._parts.append(GatewayPart(tasks=[jobs.sampler.run, jobs.run_schedule]))

    def _add_adapter_parts(self) -> AdapterMeter | None:
        """Add the parts that load adapters and roll their versions out. Returns their meter, which needs a store."""
        keeper = AdapterKeeper(self._models)
        self._parts.append(GatewayPart(tasks=[keeper.run]))
        if self._account_sync is None:
            return None
        accounting = self._account_sync.accounting
        meter = AdapterMeter(self._gateway_id, self._metrics)
        rollouts = AdapterRollouts(
            accounting.store.adapters,
            self._models,
            meter,
            keeper,
            on_changed=accounting.notify_changed,
            on_rolled_back=lambda model: self._metrics.rollbacks.add((model,)),
        )
        self._parts.append(GatewayPart(tasks=[rollouts.run]))
        return meter

    def _build_app(
        self,
        generation: CompletionHandlers,
        response_state: ResponseState,
        background: BackgroundResponses,
        store: Store | None,
        peers: PeerGateways | None,
        alert_admin: AlertAdmin,
    ) -> GatewayApp:
        """Build the application and the route table, and add the parts that have routes."""
        config, fleet_pools = self._config, self._fleet_pools

        def read_metrics() -> GatewayGauges:
            return self._read_metrics(app, generation)

        routes = self._build_api_routes(generation, response_state, background, read_metrics)
        console = self._build_console(store, read_metrics) if config.console.enabled else None
        if console is not None:
            self._parts.append(GatewayPart(on_drain=console.events.close))
            routes = console.build_routes(routes)
        series_queries = None
        if self._series is not None:
            series_queries = SeriesQueries(self._series, self._gateway_id, peers)
            run_series = partial(
                self._series.run,
                lambda: generation.queued_requests,
                generation.count_by_tenant,
                lambda: {} if fleet_pools is None else fleet_pools.desired_replicas_by_model,
            )
            sampler = TrafficSampler(self._series.recorder.cells.add_signals)
            generation.traffic_sampler = sampler
            self._parts.append(GatewayPart(tasks=[run_series, sampler.run]))
        if peers is not None:
            self._parts.append(GatewayPart(start=peers.register, tasks=[peers.keep_registered]))
            routes += self._build_peer_routes(peers, generation, series_queries)
        caches = None
        if generation.cache is not None and generation.semantic_cache is not None:
            caches = CacheAdmin(generation.cache, generation.semantic_cache, peers)
            if peers is not None:
                routes.append(caches.build_route(peers.secret))
        routes += self._build_admin(
            peers, series_queries, generation.previewer, caches, alert_admin
        )
        app = GatewayApp(
            add_openapi_route(routes),
            authenticate=self._authenticator.authenticate,
            sessions=None if console is None else console.sessions,
            cors=self._cors,
            metrics=self._metrics,
            config=config,
            gateway_id=self._gateway_id,
        )
        return app

    def _build_api_routes(
        self,
        generation: CompletionHandlers,
        response_state: ResponseState,
        background: BackgroundResponses,
        read_metrics: Callable[[], GatewayGauges],
    ) -> list[HttpRoute]:
        """Build the routes of the APIs for models and of the endpoints for operators, and add the parts of batches."""
        config, account_sync = self._config, self._account_sync
        routes = build_routes(
            self._models,
            generation,
            OperationsHandlers(
                self._models,
                self._metrics,
                read_metrics,
                self._gateway_id,
                is_accepting=lambda: self._is_accepting,
            ),
            response_state,
            background,
            None if account_sync is None else account_sync.limits,
            refuse_unknown_fields=config.unknown_fields == "refuse",
        )
        if account_sync is not None:
            self._add_batch_parts(account_sync, routes, generation)
        return [*routes, *build_batch_routes(response_state, self._models)]

    def _add_batch_parts(
        self,
        account_sync: AccountSync,
        routes: Sequence[HttpRoute],
        generation: CompletionHandlers,
    ) -> None:
        """Add the parts that run lines of batches, as requests to these routes, and end batches."""
        store, limits = account_sync.accounting.store, account_sync.limits
        dispatcher = BatchDispatcher(
            *(store, self._gateway_id, self._models, generation),
            {
                each.path: each
                for each in routes
                if each.method == "POST" and each.path in BATCH_PATHS
            },
            self._config,
            find_principal=self._authenticator.find_principal,
            find_current_key=limits.find_current_key,
            metrics=self._metrics,
        )
        upkeep = BatchUpkeep(store, self._gateway_id, self._metrics, dispatcher.find_model_error)
        self._parts.append(
            GatewayPart(
                tasks=[dispatcher.run, upkeep.run, upkeep.watch_holders],
                read_gauges=dispatcher.read_gauges,
                on_drain=dispatcher.drain,
            )
        )

    def _build_peer_routes(
        self,
        peers: PeerGateways,
        generation: CompletionHandlers,
        series_queries: SeriesQueries | None,
    ) -> list[HttpRoute]:
        """Build the routes for requests of the controller and of other gateways, which are signed."""
        secret, routes = peers.secret, [peers.build_route(self._find_trace)]
        if self._fleet_pools is not None and self._outcomes is not None:
            logs = self._replica_logs
            routes += self._fleet_pools.build_routes(
                secret,
                generation.read_demand,
                self._outcomes.build_report,
                self._read_cells,
                tuple if logs is None else logs.list_watched,
            )
        if series_queries is not None:
            routes.append(series_queries.build_route(secret))
        return routes

    def _build_admin(
        self,
        peers: PeerGateways | None,
        series_queries: SeriesQueries | None,
        previewer: RoutingPreviewer,
        caches: CacheAdmin | None,
        alert_admin: AlertAdmin,
    ) -> list[HttpRoute]:
        accounting = None if self._account_sync is None else self._account_sync.accounting
        store = None if accounting is None else accounting.store
        fleet, fleet_control = self._config.fleet, self._fleet_control
        if store is not None and fleet is not None:
            fleet_control = FleetControl(fleet, store.fleets)
        explainer = RequestExplainer(
            self._gateway_id, self._find_trace, peers, None if store is None else store.ledger
        )
        admin_scope = AdminScope(
            store,
            ReplicaAdmin(self._models, store),
            previewer,
            self._config,
            self._authenticator,
            explainer.explain,
            AdminCallLimiter(self._loop_monitor),
            cache_admin=caches,
            prefix_doctor=self._prefix_doctor,
            fleet_control=fleet_control,
            series_queries=series_queries,
            objectives=lambda: self._objectives.objectives,
            objective_reader=self._objective_reader,
            fleet_logs=self._replica_logs,
            alert_admin=alert_admin,
            lessons=self._lessons,
        )
        on_changed = do_nothing if accounting is None else accounting.notify_changed
        return build_admin_routes(admin_scope, self._authenticator, on_changed)

    def _build_console(
        self, store: Store | None, read_metrics: Callable[[], GatewayGauges]
    ) -> Console:
        config, authenticator = self._config, self._authenticator
        guard = BrowserGuard(
            config.console,
            config.host,
            has_tls=config.tls is not None,
            is_trusted_proxy=authenticator.is_trusted_proxy,
        )
        sessions = ConsoleSessions(
            None if store is None else store.console_sessions, authenticator, guard
        )
        events = ConsoleEvents(sessions, read_metrics, lambda: self._models.all_pools)
        oidc, trusted, sign_in = config.console.oidc, config.auth.jwt, None
        if oidc is not None and trusted is not None and trusted.issuer is not None:
            sign_in = OidcSignIn(oidc, trusted.issuer, authenticator, sessions)
        return Console(guard, sessions, events, describe_key_command(self._config.store), sign_in)

    def _build_fleet_part(self, store: Store, fleet_pools: FleetPoolsHandler) -> GatewayPart:
        """Build the part that follows the routes of the fleet and measures versions."""
        fleet = self._config.fleet or ""
        watcher = RouteWatcher(store.fleets, fleet, fleet_pools.follow_routes)
        gate = LocalGate(
            store.fleets,
            fleet,
            is_controller_silent=lambda: fleet_pools.is_controller_silent,
            read_routes=lambda: self._registry.routes,
            follow_routes=fleet_pools.follow_routes,
            on_rolled_back=lambda model: self._metrics.rollbacks.add((model,)),
        )
        outcomes = self._outcomes = OutcomeMeter(self._gateway_id, gate.on_batch, self._metrics)
        outcomes.apply(fleet_pools.versions)
        return GatewayPart(
            on_models_changed=lambda: outcomes.apply(fleet_pools.versions),
            tasks=[watcher.watch, outcomes.run, gate.run],
        )

    async def _listen(
        self,
        app: GatewayApp,
        background: BackgroundResponses,
        listen_sockets: Sequence[socket.socket],
        background_tasks: list[CoroutineFactory],
        descriptors_per_client: int,
    ) -> None:
        """Serve HTTP until `stop` is called, then drain. Background tasks run meanwhile."""
        certificates = self._certificates
        server = self._http_server = HttpServer(
            app,
            certificates,
            descriptors_per_client=descriptors_per_client,
            max_connections_per_address=self._config.max_connections_per_address,
            is_trusted_proxy=self._authenticator.is_trusted_proxy,
            on_connection_refused=lambda: self._metrics.connection_refusals.add(()),
            on_connection_evicted=lambda reason: self._metrics.connection_evictions.add((reason,)),
            max_connection_age_s=self._config.max_connection_age_s,
            idle_timeout_s=self._config.connection_idle_timeout_s,
            dead_peer_timeout_s=2 * self._config.slow_reader_timeout_s,
        )
        control = self._control_socket
        private_sockets = [] if control is None else [bind_unix(control)]
        server_task = asyncio.create_task(server.serve([], private_sockets))
        stop_task = asyncio.create_task(self._stop_requested.wait())
        tasks = [asyncio.create_task(run_with_restarts(factory)) for factory in background_tasks]
        try:
            await self._accept_clients(server, listen_sockets, {server_task, stop_task})
            await asyncio.wait({server_task, stop_task}, return_when=asyncio.FIRST_COMPLETED)
            await self._drain(app, background, server)
        finally:
            for task in (*tasks, stop_task):
                task.cancel()
            server.stop()
            await server_task  # also requests that were aborted, so that they are counted
            await background.close()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept_clients(
        self,
        server: HttpServer,
        listen_sockets: Sequence[socket.socket],
        ends: AbstractSet[asyncio.Task[Any]],
    ) -> None:
        """Accept clients once the models are known, unless one of the tasks ends before.

        A gateway of a fleet that nothing was published to would answer that the model does not exist.
        """
        fleet_pools, config = self._fleet_pools, self._config
        if self._control_socket is not None and fleet_pools is not None:
            published = asyncio.create_task(fleet_pools.wait_until_published())
            await asyncio.wait({published, *ends}, return_when=asyncio.FIRST_COMPLETED)
            published.cancel()
        if any(task.done() for task in ends):
            return
        server.accept_on(listen_sockets)
        self._is_accepting = True
        if config.handover is not None:
            try:
                offer = SocketHandover(Path(config.handover), listen_sockets)
                self._parts.append(GatewayPart(on_drain=offer.close))
            except OSError as error:
                log.warning("handover_unavailable", path=config.handover, reason=str(error))
        url = listen_url(listen_sockets[0], "http" if self._certificates is None else "https")
        log.info(
            "ready",
            url=url,
            models=[model.name for model in config.models],
            gateway=self._gateway_id,
        )
        self._on_ready(url)

    async def _start_fast_path(self) -> FastPath | None:
        if self._config.fast_path == "off":
            return None
        try:
            return FastPath(await asyncio.to_thread(load_fast_path))
        except NativeUnavailableError as error:
            log.info("fast_path_unavailable", reason=str(error))
            return None

    def _find_trace(self, identifier: str, owner: str | None) -> dict[str, Any] | None:
        """Return the explanation that this gateway has of a request (see `peer_gateways.FindTrace`)."""
        self._traces.evict_expired(time.monotonic())
        trace = self._traces.find(identifier, owner)
        if trace is None or owner not in {
            None,
            trace.principal.organisation,
            trace.principal.project,
        }:
            return None
        return trace.to_dict() | {"gateway": self._gateway_id, "source": "trace"}

    def _read_metrics(self, app: GatewayApp, generation: CompletionHandlers) -> GatewayGauges:
        gauges = GatewayGauges(
            in_flight=app.in_flight,
            connections=0 if self._http_server is None else self._http_server.connection_count,
            fast_path_streams=generation.fast_path_streams,
            event_loop_lag_s=self._loop_monitor.lag_s,
            queue_depths=generation.queued_requests,
            replicas=list_replica_readings(self._models.all_pools),
            arithmetics={
                pool.model: max(len(each.group_by_arithmetic()) for each in pool.all_versions)
                for pool in self._models.pools
            },
            routes={route.pool: route.version for route in self._registry.routes.values()},
        )
        for part in self._parts:
            gauges = dataclasses.replace(gauges, **part.read_gauges())
        return gauges

    async def _drain(
        self, app: GatewayApp, background: BackgroundResponses, server: HttpServer
    ) -> None:
        """Let running requests end, for at most `drain_deadline_s` or until `stop` is called again."""
        log.info("draining", in_flight=app.in_flight)
        for part in self._parts:
            part.on_drain()

        async def drain() -> None:
            await server.drain(self._config.drain_keepalive_s)
            await app.wait_until_idle()
            await background.wait_until_idle()

        drain_task = asyncio.create_task(drain())
        force_stop_task = asyncio.create_task(self._force_stop.wait())
        await asyncio.wait(
            {drain_task, force_stop_task},
            timeout=self._config.drain_deadline_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        drain_task.cancel()
        force_stop_task.cancel()
        server.force_exit = app.in_flight > 0

    def _bind(self) -> AbstractContextManager[Sequence[socket.socket]]:
        """Open the listening sockets of the settings.

        Raises:
            ValueError: The address would expose the gateway without authentication.
        """
        config, account_sync = self._config, self._account_sync
        if config.uds is None:
            snapshot = (
                AccountSnapshot() if account_sync is None else account_sync.accounting.snapshot
            )
            check_exposure(config.host, config.auth, snapshot)
        handover = None if config.handover is None else Path(config.handover)
        return listening_sockets(config.host, config.port, config.uds, handover)


def serve_gateway(
    config: GatewayConfig,
    on_ready: Callable[[str], None],
    load_config: ConfigLoader,
    lessons: Sequence[Lesson] = (),
    control_socket: Path | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, and reload the settings on SIGHUP.

    Raises:
        ValueError: The settings are invalid. The message says what to change.
        OSError: A file, the store or the address cannot be opened.
    """
    configure_logging(config.log_format, config.log_level)
    raise_file_limit()

    def ready(url: str) -> None:
        tune_gc()
        on_ready(url)

    async def run() -> None:
        server = GatewayServer(
            config, ready, load_config, lessons=lessons, control_socket=control_socket
        )
        with handle_signals(server.stop, server.reload):
            await server.run()

    uvloop.run(run())
