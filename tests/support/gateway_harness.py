"""A gateway's front and serving on a free port, with stages of the test's choice."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import httpx2

from argosy.gateway.admin import build_admin_app
from argosy.gateway.app import GatewayApp
from argosy.gateway.auth import Authenticator
from argosy.gateway.config import (
    GatewayConfig,
    ModelConfig,
    QueueConfig,
    ReplicaConfig,
    Timeouts,
)
from argosy.gateway.cors import CorsPolicy
from argosy.gateway.filters.telemetry_filter import TelemetryFilter
from argosy.gateway.kv_events import TextBlockMaps, subscribe
from argosy.gateway.model_registry.model_entries import build_model_entries, build_model_router
from argosy.gateway.model_registry.model_router import ModelRouter
from argosy.gateway.operations import OperationsHandlers
from argosy.gateway.pool.prober import PROBE_TIMEOUT_S, Prober
from argosy.gateway.pool.replica_endpoint import ReplicaEndpoint
from argosy.gateway.proxy.fast_path import FastPath, load_fast_path
from argosy.gateway.proxy.handlers import CompletionHandlers
from argosy.gateway.request_context import (
    UNLIMITED_TOKENS,
    FastPathBudget,
    FilterState,
    RequestContext,
    RequestFilter,
)
from argosy.gateway.request_trace import ExplainConfig, TraceStore
from argosy.http_server import HttpServer, bind_tcp, listen_url
from argosy.policy import AttemptOutcome
from argosy.protocol import ApiError
from argosy.store import AccountSnapshot
from argosy.telemetry import GatewayGauges, GatewayMetrics
from tests.support.waiting import until

QUICK = Timeouts(first_token_timeout_s=5.0, stream_idle_timeout_s=5.0, failover_timeout_s=0.5)


def opened(replica: ReplicaEndpoint) -> None:
    """It has just failed often, and is to be tried again now."""
    while replica.breaker.is_closed:
        replica.breaker.record_outcome(AttemptOutcome.FAILURE, 0.0)


@dataclass
class Watching:
    """A stage that keeps what it was told; it stops an answer after `most` tokens."""

    most: int | None = None
    refuses: ApiError | None = None
    counter: int | None = None
    """Address of a word that counts, too."""
    entered: list[RequestContext] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """Output tokens, each time that there were more."""
    left: list[RequestContext] = field(default_factory=list)
    gone: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    """Released for each journey that has ended."""

    async def on_request(self, context: RequestContext) -> FilterState:
        context.response_headers.append((b"x-watched", b"yes"))
        if self.refuses is not None:
            raise self.refuses
        self.entered.append(context)
        return Watched(self, context)


@dataclass(frozen=True)
class Watched:
    """A request's visit there."""

    stage: Watching
    context: RequestContext

    def fast_path_budget(self) -> FastPathBudget:
        most = UNLIMITED_TOKENS if self.stage.most is None else self.stage.most - 1
        return FastPathBudget(most, self.stage.counter)

    def on_tokens(self, chunk_times: Sequence[float]) -> str | None:
        del chunk_times
        stage, output = self.stage, self.context.delivered.output_tokens
        stage.counts.append(output)
        return "budget" if stage.most is not None and output >= stage.most else None

    def on_complete(self) -> None:
        self.stage.left.append(self.context)
        self.stage.gone.release()


@dataclass(frozen=True)
class Running:
    """A client of the front, and what the front keeps."""

    client: httpx2.AsyncClient
    traces: TraceStore
    metrics: GatewayMetrics
    serving: CompletionHandlers
    probers: list[Prober]
    models: ModelRouter
    idle: Callable[[], Awaitable[None]]
    """Waits until no request is being answered."""

    @property
    def replicas(self) -> list[ReplicaEndpoint]:
        """Behind all models."""
        return [replica for pool in self.models.pools for replica in pool.replicas.values()]

    async def probe(self) -> None:
        """Ask the replicas how they are."""
        for prober in self.probers:
            await prober.probe()

    async def queued(self, count: int) -> None:
        """Wait until so many requests wait for a replica."""
        await until(lambda: self.serving.queued_requests["big"] == count)


async def met(prober: Prober) -> None:
    """Probe once more where the machine was too busy for the first time."""
    began = time.monotonic()
    await prober.probe()
    if time.monotonic() - began >= PROBE_TIMEOUT_S:
        await prober.probe()


@contextlib.asynccontextmanager
async def front(
    stages: Sequence[RequestFilter],
    *behind: ReplicaConfig,
    timeouts: Timeouts = QUICK,
    queue: QueueConfig = QueueConfig(),  # noqa: B008 - immutable
    slow_reader_timeout_s: float = 30.0,
    hedge_after_s: float | None = None,
) -> AsyncIterator[Running]:
    """The model "big" on these replicas; a recorder is the first stage."""
    config = GatewayConfig(
        models=[
            ModelConfig(
                name="big",
                routing="round-robin",
                hedge_after_s=hedge_after_s,
                replicas=list(behind),
            )
        ],
        timeouts=timeouts,
        queue=queue,
        slow_reader_timeout_s=slow_reader_timeout_s,
    )
    models, metrics = build_model_router(build_model_entries(config)), GatewayMetrics()
    traces = TraceStore(ExplainConfig())
    fast_path = FastPath(load_fast_path())
    recorder = TelemetryFilter(traces, metrics, time.monotonic)
    serving = CompletionHandlers(models, config, [recorder, *stages], fast_path)
    operating = OperationsHandlers(models, metrics, GatewayGauges)
    identity = Authenticator(AccountSnapshot(), config.auth)
    app = GatewayApp(
        models,
        serving,
        operating,
        authenticate=identity.authenticate,
        admin=build_admin_app(None, identity, lambda *_: None, lambda: None),
        cors=CorsPolicy(config.auth.allowed_origins),
        metrics=metrics,
        config=config,
    )
    replicas = [replica for pool in models.pools for replica in pool.replicas.values()]
    probers = [Prober(replica) for replica in replicas]
    for prober in probers:
        await met(prober)
    bound, listener = bind_tcp("127.0.0.1", 0), HttpServer(app)
    texts = TextBlockMaps()
    tasks = [
        asyncio.create_task(listener.serve(sockets=[bound])),
        asyncio.create_task(serving.monitor_streams()),
        *(asyncio.create_task(subscribe(replica, texts)) for replica in replicas),
    ]
    try:
        async with httpx2.AsyncClient(base_url=listen_url(bound), timeout=30) as client:
            yield Running(client, traces, metrics, serving, probers, models, app.wait_until_idle)
        await app.wait_until_idle()
        assert all(replica.load.in_flight == 0 for replica in replicas)
    finally:
        listener.stop()
        await tasks[0]
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for replica in replicas:
            replica.upstream.close()
        assert not len(fast_path)
        fast_path.close()
