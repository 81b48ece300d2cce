"""State of the replica: engine, loaded model, running requests, and lifecycle from starting to drained."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import msgspec

from argosy.engine.engine_config import LOADING_WEIGHTS, WARMING_UP
from argosy.engine.serving.api_server.adapter_registry import (
    AdapterLease,
    AdapterRegistry,
    ServedAdapter,
)
from argosy.engine.serving.api_server.replica_server_config import ReplicaServerConfig
from argosy.engine.serving.core_messages import CoreReady
from argosy.engine.serving.engine_core.engine_client import EngineClient
from argosy.engine.serving.pooling import PoolingProcessor
from argosy.engine.serving.preprocessing.request_processor import RequestProcessor
from argosy.engine.serving.preprocessing.text_processing import TextProcessing
from argosy.protocol import (
    ApiError,
    ArithmeticIdentity,
    LoadPhase,
    LoadResponse,
    StartupProgress,
    TaskName,
)
from argosy.telemetry import ReplicaMetrics
from argosy.version import VERSION

ReplicaLifecycle = Literal[
    "starting", "ready", "sleeping", "waking", "restarting", "draining", "failed", "stopped"
]

_PHASES: dict[str, LoadPhase] = {LOADING_WEIGHTS: "loading", WARMING_UP: "warming"}
"""Phase by start-up activity. Other activities are preparations."""
T = TypeVar("T")
WAKE_TAGS = frozenset({"weights", "kv_cache"})
"""Parts of a sleeping model that can be woken up, by their names in vLLM."""
MAX_THREADS = 32
"""Maximum number of requests in preparation. Most of the time their threads wait for a render process."""


class RunningRequest(Protocol):
    """Request that the engine computes."""

    tier: int

    def fail(self, error: ApiError) -> None:
        """End the request with an error."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Request processor, text processing and limits of the model, available once it is loaded."""

    processor: RequestProcessor
    text_processing: TextProcessing
    ready: CoreReady
    created_at: int
    """Unix time in seconds at which serving began."""
    pooling: PoolingProcessor | None = None
    """Service of a model that computes vectors. None for one that generates."""

    @property
    def tasks(self) -> tuple[TaskName, ...]:
        """Tasks of the model."""
        return ("generate",) if self.pooling is None else self.pooling.info.tasks


class ReplicaState:
    """State of one model behind one engine. Not thread-safe: use it from one event loop."""

    def __init__(
        self,
        config: ReplicaServerConfig,
        model_names: tuple[str, ...],
        engine: EngineClient,
        model_revision: str = "",
        model_digest: str = "",
    ) -> None:
        self.config = config
        self.model_revision = model_revision
        self.model_digest = model_digest
        self.model_names = model_names
        self.engine = engine
        self.metrics = ReplicaMetrics(model_names[0])
        self.preparation_threads = PreparationThreads()
        self.adapters: AdapterRegistry | None = None
        """Adapters beside the model; None if there may be none, and before the model is loaded."""
        self.adapter_memory_bytes = 0
        self.http_requests_in_flight = 0
        """HTTP requests in progress, of any kind."""
        self.is_stopping = False
        """Whether the replica shuts down, so that a drain cannot be undone."""
        self._generation_requests = 0
        self._model: LoadedModel | None = None
        self._draining = False
        self._senders: dict[RunningRequest, str] = {}
        """Id of the gateway that sent each running request. Empty for direct clients."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._drain_timer: asyncio.TimerHandle | None = None
        self._identified: tuple[CoreReady, ArithmeticIdentity, str] | None = None
        """Arithmetic identity with its id, and the core that reported it."""

    # --- lifecycle -------------------------------------------------------------------------------

    @property
    def state(self) -> ReplicaLifecycle:
        """Lifecycle state. The replica accepts requests only if it is `ready`."""
        if self._draining:
            return "draining"
        if self._model is None and self.engine.state == "ready":
            return "starting"
        return self.engine.state

    @property
    def phase(self) -> LoadPhase:
        """Phase for the load report, finer than `state` while the model loads."""
        progress, state = self.engine.load_progress, self.state
        if state != "starting" or progress is None:
            return state
        return _PHASES.get(progress.activity, "starting")

    @property
    def arithmetic(self) -> ArithmeticIdentity | None:
        """Arithmetic identity of the current core, or None if it is unknown."""
        return self._identify()[0]

    @property
    def arithmetic_id(self) -> str:
        """Id of `arithmetic`, or an empty text if it is unknown."""
        return self._identify()[1]

    def _identify(self) -> tuple[ArithmeticIdentity | None, str]:
        if self._model is None:
            return None, ""
        info = self.engine.info
        if info.arithmetic is None:
            return None, ""
        if self._identified is None or self._identified[0] is not info:
            arithmetic = msgspec.structs.replace(
                info.arithmetic, tokenization=self._model.processor.tokenization_digest
            )
            self._identified = info, arithmetic, arithmetic.id
        _, arithmetic, arithmetic_id = self._identified
        return arithmetic, arithmetic_id

    def on_model_loaded(
        self,
        processor: RequestProcessor,
        text_processing: TextProcessing,
        ready: CoreReady,
        pooling_processor: PoolingProcessor | None = None,
    ) -> None:
        """Store the loaded model and begin to accept requests."""
        self._model = LoadedModel(
            processor, text_processing, ready, int(time.time()), pooling_processor
        )
        self.metrics.set_kv_layout(ready.block_size, ready.num_blocks)

    def require_loaded(self) -> LoadedModel:
        """Return the model, also while draining.

        Raises:
            ApiError: 503 if the model is not loaded yet.
        """
        if self._model is None:
            raise self.unavailable_error()
        return self._model

    def require_ready(self) -> LoadedModel:
        """Return the model for a new request.

        Raises:
            ApiError: 503 if the replica accepts no requests.
        """
        if self._model is None or self.state != "ready":
            raise self.unavailable_error()
        return self._model

    def check_model(self, name: str | None) -> str:
        """Check that this replica serves the model `name`, and return it. A request without one is for its model.

        Raises:
            ApiError: 404 if it does not.
        """
        name = name or self.model_names[0]
        if name not in self.model_names:
            raise self._unknown_model_error(name)
        return name

    def find_adapter(self, name: str | None) -> ServedAdapter | None:
        """Return the adapter that serves a model's name or digest, or None for the model itself.

        Call it in a thread, because an unknown digest is looked for on disk.

        Raises:
            ApiError: 404 if neither the model nor an adapter has the name.
        """
        if not name or name in self.model_names:
            return None
        adapter = None if self.adapters is None else self.adapters.find(name)
        if adapter is None:
            raise self._unknown_model_error(name)
        return adapter

    def acquire_adapter(self, name: str | None, lease: AdapterLease) -> ServedAdapter | None:
        """Return the adapter for a request as `find_adapter` does, which keeps its version until the lease ends."""
        if not name or name in self.model_names:
            return None
        adapter = None if self.adapters is None else lease.acquire(self.adapters, name)
        if adapter is None:
            raise self._unknown_model_error(name)
        return adapter

    def _unknown_model_error(self, name: str) -> ApiError:
        names = ", ".join(self.model_names)
        message = f"The model {name[:200]!r} is not served here. Use {names}."
        return ApiError(404, "model_not_found", message, param="model")

    def unavailable_error(self) -> ApiError:
        """Return the error for a request that the replica cannot accept in its current state."""
        state = self.state
        code = "draining" if state == "draining" else "engine_unavailable"
        remedy = {
            "starting": "the model is being loaded; try again shortly",
            "restarting": "the engine is being restarted; try again shortly",
            "sleeping": "wake it up with POST /wake_up, or use another replica",
            "waking": "its memory is being allocated; try again shortly",
            "draining": "running requests finish, new ones are rejected; use another replica",
        }.get(state, "restart it")
        message = f"This replica is {state}: {remedy}."
        retry_after_s = None if state in {"failed", "stopped"} else self.config.retry_after_s
        return ApiError(503, code, message, retry_after_s=retry_after_s)

    def drain(self, deadline_s: float | None) -> None:
        """Reject new requests and end running ones after `deadline_s`. None lets them finish."""
        self._draining = True
        # open KV event streams would keep the replica from draining
        self.engine.kv_cache_view.close()
        if self._drain_timer is not None:
            self._drain_timer.cancel()
            self._drain_timer = None
        if deadline_s is not None:
            loop = asyncio.get_running_loop()
            self._drain_timer = loop.call_later(deadline_s, self.abort_all)

    def undrain(self) -> None:
        """Accept requests again after `drain`.

        Raises:
            ApiError: 503 if the replica drains because it shuts down.
        """
        if self.is_stopping:
            raise self.unavailable_error()
        self._draining = False
        if self._drain_timer is not None:
            self._drain_timer.cancel()
            self._drain_timer = None

    @property
    def is_sleeping(self) -> bool:
        """Whether the model sleeps or wakes up.

        Raises:
            ApiError: 503 if no model is loaded.
        """
        if self._model is None or self.engine.state not in ("ready", "sleeping", "waking"):
            raise self.unavailable_error()
        return self.engine.state != "ready"

    async def sleep(self, level: int, deadline_s: float | None) -> None:
        """Free memory when the running requests have ended, which end after `deadline_s`. None lets them finish.

        Returns when the replica sleeps. New requests are rejected until `wake_up`.

        Raises:
            ApiError: 503 if the replica cannot sleep, or was woken up meanwhile.
        """
        timer = None
        if deadline_s is not None:
            timer = asyncio.get_running_loop().call_later(deadline_s, self.abort_all)
        try:
            if not await self.engine.set_sleep_level(max(level, self.engine.sleep_level)):
                raise self.unavailable_error()
        finally:
            if timer is not None:
                timer.cancel()

    async def wake_up(self, tags: Collection[str]) -> None:
        """Allocate what the tags of vLLM name, or everything without tags. Returns when that is done.

        Raises:
            ApiError: 400 if a tag does not exist, or `kv_cache` is to be allocated before the weights, 503 if the
                replica cannot wake up, or was put to sleep meanwhile.
        """
        unknown = [tag for tag in tags if tag not in WAKE_TAGS]
        if unknown or (self.engine.sleep_level > 1 and tags and "weights" not in tags):
            remedy = "Use weights or kv_cache" if unknown else "Wake up the weights before it"
            message = f"The tags {', '.join(tags)} cannot be woken up. {remedy}."
            raise ApiError(400, "invalid_value", message, param="tags")
        level = 0 if not tags or "kv_cache" in tags else min(1, self.engine.sleep_level)
        if not await self.engine.set_sleep_level(level):
            raise self.unavailable_error()

    def abort_all(self) -> None:
        """End every running request with the error code `draining`."""
        message = "The replica stops or falls asleep, and its deadline has passed. Send the request again."
        for request in list(self._senders):
            request.fail(
                ApiError(503, "draining", message, retry_after_s=self.config.retry_after_s)
            )

    async def wait_drained(self) -> None:
        """Wait until no HTTP request is in progress."""
        await self._idle.wait()

    # --- running requests ------------------------------------------------------------------------

    def on_request_start(self) -> None:
        """Record that an HTTP request arrived."""
        self.http_requests_in_flight += 1
        self._idle.clear()

    def on_request_end(self) -> None:
        """Record that an HTTP request ended, completely or by a disconnect."""
        self.http_requests_in_flight -= 1
        if not self.http_requests_in_flight:
            self._idle.set()

    @contextlib.contextmanager
    def track_generation(self) -> Iterator[None]:
        """Count one more generation request as load while the returned context is open."""
        self._generation_requests += 1
        try:
            yield
        finally:
            self._generation_requests -= 1

    def on_generation_start(self, request: RunningRequest, gateway: str) -> None:
        """Record a running request and the gateway that sent it. The gateway id is empty for direct clients."""
        self._senders[request] = gateway

    def on_generation_end(self, request: RunningRequest) -> None:
        """Record that a request ended."""
        self._senders.pop(request, None)

    def load_report(self, gateway: str) -> LoadResponse:
        """Return the load report for one gateway."""
        stats, progress = self.engine.stats, self.engine.load_progress
        ready = self._model.ready if self._model else None
        return LoadResponse(
            server_load=self._generation_requests,
            state=self.state,
            models=list(self.model_names),
            running=stats.running,
            waiting=stats.waiting,
            queued_tokens=stats.queued_tokens,
            max_seqs=ready.max_seqs if ready else 0,
            max_model_len=ready.max_model_len if ready else 0,
            block_size=ready.block_size if ready else 0,
            kv_blocks_total=stats.blocks_total or (ready.num_blocks if ready else 0),
            kv_blocks_used=stats.blocks_used,
            kv_blocks_cached=stats.blocks_cached,
            kv_capacity_tokens=ready.kv_capacity_tokens if ready else 0,
            step=stats.step,
            step_s=stats.step_s,
            prefill_tokens_per_s=stats.prefill_tokens_per_s,
            decode_s=stats.inter_token_s or (ready.step_s if ready else 0.0),
            usage=self.engine.usage if ready else None,
            other_gateways=self._other_gateways(gateway),
            phase=self.phase,
            startup=None
            if progress is None
            else StartupProgress(activity=progress.activity, fraction=progress.fraction),
            build=f"argosy {VERSION}",
            model_revision=self.model_revision,
            model_digest=self.model_digest if ready else "",
            arithmetic_id=self.arithmetic_id,
            arithmetic=self.arithmetic,
            accelerator=ready.accelerator if ready else "",
            model=ready.model if ready else None,
            zone=self.config.zone,
            labels=self.config.labels,
            exact=ready.is_exact if ready else True,
            preemptions_total=stats.preemptions_total,
            phase_s_total=stats.phase_s_total,
            generation_tokens_total=stats.generation_tokens_total,
            draft_tokens_total=sum(stats.draft_tokens_total.values()),
            accepted_draft_tokens_total=sum(stats.accepted_draft_tokens_total.values()),
            draft_saved_s_total=stats.draft_gain_s_total - stats.draft_cost_s_total,
            sleep_level=self.engine.sleep_level,
            wake_s=self.engine.wake_s,
            awake_bytes=ready.awake_bytes if ready else 0,
            adapter_memory_bytes=self.adapter_memory_bytes,
            adapters=[] if self.adapters is None else self.adapters.report(),
            adapter_load_bytes_per_s=stats.adapter_load_bytes_per_s,
            no_drafts_reason=ready.no_drafts_reason if ready else "",
            core_exits=self.engine.core_exits,
            last_core_exit=self.engine.last_core_exit,
        )

    def update_lora_metrics(self) -> None:
        """Update the names of the adapters in use."""
        if self.adapters is not None:
            running, waiting = self.engine.find_adapters_in_flight()
            name_of = self.adapters.name_of
            self.metrics.set_lora_requests(
                map(name_of, running), map(name_of, waiting), self.require_loaded().ready.max_seqs
            )

    def _other_gateways(self, gateway: str) -> list[dict[int, int]]:
        tiers_by_gateway: dict[str, Counter[int]] = {}
        for request, sender in self._senders.items():
            if sender != gateway:
                tiers_by_gateway.setdefault(sender, Counter())[request.tier] += 1
        return list(tiers_by_gateway.values())


class PreparationThreads:
    """Pool of threads. Its threads start on demand."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="prepare")

    async def run(self, function: Callable[[], T]) -> T:
        """Run `function` in a thread, with the context of the caller, and return its result."""
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: context.run(function))

    def close(self) -> None:
        """End the threads that are idle, and the others when they become idle."""
        self._executor.shutdown(wait=False, cancel_futures=True)
