"""A gateway's front and serving on a free port, with stages of the test's choice."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import httpx2
from tests.waiting import until

from argosy.gateway.admin import build_admin
from argosy.gateway.app import Front
from argosy.gateway.auth import Identity
from argosy.gateway.config import (
    GatewayConfig,
    ModelConfig,
    QueueConfig,
    ReplicaConfig,
    Timeouts,
)
from argosy.gateway.cors import Origins
from argosy.gateway.filters.telemetry_filter import Recorder
from argosy.gateway.kv_events import TextsOf, follow
from argosy.gateway.model_registry.model_entries import build_models, read_models
from argosy.gateway.model_registry.model_router import Models
from argosy.gateway.operations import Operating
from argosy.gateway.pool.prober import PROBE_TIMEOUT_S, Prober
from argosy.gateway.pool.replica_endpoint import Replica
from argosy.gateway.proxy.fast_path import FastPath, load_fast_path
from argosy.gateway.proxy.handlers import Serving
from argosy.gateway.request_context import ANY, Alone, Journey, Stage, Visit
from argosy.gateway.request_trace import ExplainConfig, Traces
from argosy.http_server import Listener, bind, url_of
from argosy.policy import Outcome
from argosy.protocol import ApiError
from argosy.store import Directory
from argosy.telemetry import GatewayMetrics, GatewayReading

QUICK = Timeouts(first_token_s=5.0, between_tokens_s=5.0, recovery_s=0.5)


def opened(replica: Replica) -> None:
    """It has just failed often, and is to be tried again now."""
    while replica.breaker.closed:
        replica.breaker.record(Outcome.FAILURE, 0.0)


@dataclass
class Watching:
    """A stage that keeps what it was told; it stops an answer after `most` tokens."""

    most: int | None = None
    refuses: ApiError | None = None
    counter: int | None = None
    """Address of a word that counts, too."""
    entered: list[Journey] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """Output tokens, each time that there were more."""
    left: list[Journey] = field(default_factory=list)
    gone: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    """Released for each journey that has ended."""

    async def enter(self, journey: Journey) -> Visit:
        journey.headers.append((b"x-watched", b"yes"))
        if self.refuses is not None:
            raise self.refuses
        self.entered.append(journey)
        return Watched(self, journey)


@dataclass(frozen=True)
class Watched:
    """A request's visit there."""

    stage: Watching
    journey: Journey

    def alone(self) -> Alone:
        most = ANY if self.stage.most is None else self.stage.most - 1
        return Alone(most, self.stage.counter)

    def counted(self, times: Sequence[float]) -> str | None:
        del times
        stage, output = self.stage, self.journey.delivered.output_tokens
        stage.counts.append(output)
        return "budget" if stage.most is not None and output >= stage.most else None

    def leave(self) -> None:
        self.stage.left.append(self.journey)
        self.stage.gone.release()


@dataclass(frozen=True)
class Running:
    """A client of the front, and what the front keeps."""

    client: httpx2.AsyncClient
    traces: Traces
    metrics: GatewayMetrics
    serving: Serving
    probers: list[Prober]
    models: Models
    idle: Callable[[], Awaitable[None]]
    """Waits until no request is being answered."""

    @property
    def replicas(self) -> list[Replica]:
        """Behind all models."""
        return [replica for pool in self.models.pools for replica in pool.replicas.values()]

    async def probe(self) -> None:
        """Ask the replicas how they are."""
        for prober in self.probers:
            await prober.probe()

    async def queued(self, count: int) -> None:
        """Wait until so many requests wait for a replica."""
        await until(lambda: self.serving.queued["big"] == count)


async def met(prober: Prober) -> None:
    """Probe once more where the machine was too busy for the first time."""
    began = time.monotonic()
    await prober.probe()
    if time.monotonic() - began >= PROBE_TIMEOUT_S:
        await prober.probe()


@contextlib.asynccontextmanager
async def front(
    stages: Sequence[Stage],
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
    models, metrics = build_models(read_models(config)), GatewayMetrics()
    traces = Traces(ExplainConfig())
    fast_path = FastPath(load_fast_path())
    recorder = Recorder(traces, metrics, time.monotonic)
    serving = Serving(models, config, [recorder, *stages], fast_path)
    operating = Operating(models, metrics, GatewayReading)
    identity = Identity(Directory(), config.auth)
    app = Front(
        models,
        serving,
        operating,
        identify=identity.identify,
        admin=build_admin(None, identity, lambda *_: None, lambda: None),
        origins=Origins(config.auth.allowed_origins),
        metrics=metrics,
        config=config,
    )
    replicas = [replica for pool in models.pools for replica in pool.replicas.values()]
    probers = [Prober(replica) for replica in replicas]
    for prober in probers:
        await met(prober)
    bound, listener = bind("127.0.0.1", 0), Listener(app)
    texts = TextsOf()
    tasks = [
        asyncio.create_task(listener.serve(sockets=[bound])),
        asyncio.create_task(serving.tend()),
        *(asyncio.create_task(follow(replica, texts)) for replica in replicas),
    ]
    try:
        async with httpx2.AsyncClient(base_url=url_of(bound), timeout=30) as client:
            yield Running(client, traces, metrics, serving, probers, models, app.idle)
        await app.idle()
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
