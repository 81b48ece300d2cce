"""An in-process gateway on a free port, with request filters of the test's choice."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import httpx2
import msgspec

from argosy.deployment import (
    ExplainConfig,
    GatewayConfig,
    GivingWayConfig,
    ModelConfig,
    QueueConfig,
    ReplicaConfig,
    Timeouts,
)
from argosy.gateway.admin import AdminScope, build_admin_routes
from argosy.gateway.app import GatewayApp
from argosy.gateway.auth import Authenticator
from argosy.gateway.cors import CorsPolicy
from argosy.gateway.dialects import BackgroundResponses, ResponseState
from argosy.gateway.filters import TelemetryFilter
from argosy.gateway.kv_events import TextBlockMaps, subscribe
from argosy.gateway.model_registry import ModelRouter, ReplicaAdmin, build_model_entries
from argosy.gateway.model_registry.model_entries import build_model_router
from argosy.gateway.operations import OperationsHandlers
from argosy.gateway.pool import Prober, ReplicaEndpoint
from argosy.gateway.proxy import CompletionHandlers, FastPath, load_fast_path
from argosy.gateway.request_context import RequestContext, RequestFilter
from argosy.gateway.request_trace import TraceStore
from argosy.gateway.routes import build_routes
from argosy.http_server import HttpServer, bind_tcp, listen_url
from argosy.policy import PROBE_TIMEOUT_S, AttemptOutcome
from argosy.protocol import ApiError, EarlyStopReason
from argosy.series import SeriesRecorder
from argosy.store import AccountSnapshot
from argosy.telemetry import GatewayGauges, GatewayMetrics
from tests.support.waiting import until

FAST_TIMEOUTS = Timeouts(
    first_token_timeout_s=5.0, stream_idle_timeout_s=5.0, failover_timeout_s=0.5
)


def open_breaker(replica: ReplicaEndpoint) -> None:
    """Open the replica's circuit breaker, so that it is due for a probe."""
    while replica.health.breaker.is_closed:
        replica.health.breaker.record_outcome(AttemptOutcome.FAILURE, 0.0)


@dataclass
class RecordingFilter:
    """Request filter that keeps its requests, and ends a response after `max_tokens` tokens."""

    max_tokens: int | None = None
    rejection: ApiError | None = None
    """Error that rejects every request."""
    is_session_tenant: bool = False
    """Whether the session of a request names its tenant."""
    started: list[RequestContext] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    """Output tokens at each call of `on_tokens`."""
    completed: list[RequestContext] = field(default_factory=list)
    completions: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    """Released for each completed request."""

    async def on_request(self, context: RequestContext) -> bool:
        context.response_headers.append((b"x-watched", b"yes"))
        if self.rejection is not None:
            raise self.rejection
        self.started.append(context)
        if self.is_session_tenant:
            context.principal = msgspec.structs.replace(
                context.principal, project=context.fields.session_id
            )
        if self.max_tokens is not None:
            context.covered_output_tokens = self.max_tokens - 1
        return True

    def on_tokens(
        self, context: RequestContext, chunk_times: Sequence[float]
    ) -> EarlyStopReason | None:
        del chunk_times
        limit, output_tokens = self.max_tokens, context.delivered.output_tokens
        self.token_counts.append(output_tokens)
        return "budget" if limit is not None and output_tokens >= limit else None

    async def on_fallback(self, context: RequestContext) -> None:
        pass

    def on_complete(self, context: RequestContext) -> None:
        self.completed.append(context)
        self.completions.release()


@dataclass(frozen=True)
class GatewayHarness:
    """A running gateway: its parts, and a client."""

    client: httpx2.AsyncClient
    traces: TraceStore
    metrics: GatewayMetrics
    series: SeriesRecorder
    handlers: CompletionHandlers
    probers: list[Prober]
    models: ModelRouter
    wait_until_idle: Callable[[], Awaitable[None]]

    @property
    def replicas(self) -> Sequence[ReplicaEndpoint]:
        """The replicas of all models."""
        return [replica for pool in self.models.pools for replica in pool.replicas.values()]

    async def probe(self) -> None:
        """Check the health of all replicas."""
        for prober in self.probers:
            await prober.probe()

    async def wait_for_queued(self, count: int) -> None:
        """Wait until `count` requests are queued."""
        await until(lambda: self.handlers.queued_requests["big"] == count)


async def probe_with_retry(prober: Prober) -> None:
    """Probe a replica, twice if the machine was too busy for the first probe."""
    started_at = time.monotonic()
    await prober.probe()
    if time.monotonic() - started_at >= PROBE_TIMEOUT_S:
        await prober.probe()


async def explain_nothing(identifier: str, organisation: str | None, project: str | None) -> None:
    """Find no explanation of a request."""


@contextlib.asynccontextmanager
async def run_gateway(
    filters: Sequence[RequestFilter],
    *replica_configs: ReplicaConfig,
    timeouts: Timeouts = FAST_TIMEOUTS,
    queue: QueueConfig = QueueConfig(),  # noqa: B008 - immutable
    slow_reader_timeout_s: float = 30.0,
    early_stream_start_s: float = 2.0,
    hedge_after_s: float | None = None,
    giving_way: GivingWayConfig = GivingWayConfig(),  # noqa: B008 - immutable
    unknown_fields: Literal["ignore", "refuse"] = "ignore",
    log_content: bool = False,
) -> AsyncIterator[GatewayHarness]:
    """Run a gateway with the model "big" on these replicas. A telemetry filter precedes `filters`."""
    config = GatewayConfig(
        models=[
            ModelConfig(
                name="big",
                routing="round-robin",
                hedge_after_s=hedge_after_s,
                giving_way=giving_way,
                replicas=list(replica_configs),
            )
        ],
        timeouts=timeouts,
        queue=queue,
        slow_reader_timeout_s=slow_reader_timeout_s,
        early_stream_start_s=early_stream_start_s,
        unknown_fields=unknown_fields,
        log_content=log_content,
    )
    models, metrics = build_model_router(build_model_entries(config)), GatewayMetrics()
    traces = TraceStore(ExplainConfig())
    fast_path = FastPath(load_fast_path())
    series = SeriesRecorder()
    telemetry = TelemetryFilter(traces, metrics, time.monotonic, series)
    handlers = CompletionHandlers(models, config, [telemetry, *filters], fast_path)
    operations = OperationsHandlers(models, metrics, GatewayGauges, "g", is_accepting=lambda: True)
    authenticator = Authenticator(AccountSnapshot(), config.auth)
    state = ResponseState(None)
    routes = build_routes(
        models,
        handlers,
        operations,
        state,
        BackgroundResponses(state, handlers.chat_completions, handlers.memory),
        refuse_unknown_fields=unknown_fields == "refuse",
    )
    replica_admin = ReplicaAdmin(models, None)
    admin_scope = AdminScope(
        None, replica_admin, handlers.previewer, config, authenticator, explain_nothing
    )
    app = GatewayApp(
        [*routes, *build_admin_routes(admin_scope, authenticator)],
        authenticate=authenticator.authenticate,
        sessions=None,
        cors=CorsPolicy(config.auth.allowed_origins),
        metrics=metrics,
        config=config,
    )
    replicas = [replica for pool in models.pools for replica in pool.replicas.values()]
    probers = [Prober(replica) for replica in replicas]
    for prober in probers:
        await probe_with_retry(prober)
    listener, server = bind_tcp("127.0.0.1", 0), HttpServer(app)
    block_maps = TextBlockMaps()
    tasks = [
        asyncio.create_task(server.serve(sockets=[listener])),
        asyncio.create_task(handlers.monitor_streams()),
        *(asyncio.create_task(subscribe(replica, block_maps)) for replica in replicas),
    ]
    try:
        async with httpx2.AsyncClient(base_url=listen_url(listener), timeout=30) as client:
            yield GatewayHarness(
                client, traces, metrics, series, handlers, probers, models, app.wait_until_idle
            )
        await app.wait_until_idle()
        assert all(replica.load.in_flight == 0 for replica in replicas)
    finally:
        server.stop()
        await tasks[0]
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for replica in replicas:
            replica.upstream.close()
        assert not len(fast_path)
        fast_path.close()
