"""The replica's state: its engine, its door, what runs, and the way from starting over ready to drained."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from argosy.engine.serving.api_server.generation import Generation, Generator
from argosy.engine.serving.api_server.replica_server_config import ServerConfig
from argosy.engine.serving.core_messages import Ready, Stats
from argosy.engine.serving.engine_core.kv_cache_view import KvLedger
from argosy.engine.serving.preprocessing.request_processor import Door
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.protocol import ApiError, Load
from argosy.telemetry import Metrics

Lifecycle = Literal["starting", "ready", "restarting", "draining", "failed", "stopped"]


class Engine(Generator, Protocol):
    """What the server needs of the engine's client."""

    @property
    def state(self) -> Literal["starting", "ready", "restarting", "failed", "stopped"]:
        """Where the core stands."""

    @property
    def info(self) -> Ready:
        """What the core said when it became ready."""

    @property
    def stats(self) -> Stats:
        """The core's state after its last step."""

    @property
    def kv(self) -> KvLedger:
        """What requests would find in the prefix cache."""

    async def start(self, on_step: Callable[[Stats], None] | None = None) -> Ready:
        """Start and wait until it serves, telling of each step; raises when it cannot."""
        ...

    async def close(self) -> None:
        """Stop it."""


@dataclass(frozen=True, slots=True)
class Service:
    """What there is once the model is loaded."""

    door: Door
    tokenizer: Tokenizer
    ready: Ready
    created: int
    """Unix time in seconds at which serving began."""


class Replica:
    """One model behind one engine; belongs to one event loop."""

    def __init__(self, config: ServerConfig, names: tuple[str, ...], engine: Engine) -> None:
        self.config = config
        self.names = names
        self.engine = engine
        self.metrics = Metrics(names[0])
        self.in_flight = 0
        """HTTP requests being answered, of any kind."""
        self._working = 0
        self._service: Service | None = None
        self._draining = False
        self._running: dict[Generation, str] = {}
        """Who sent each: see `generation_begins`."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._deadline: asyncio.TimerHandle | None = None

    # --- lifecycle -------------------------------------------------------------------------------

    @property
    def state(self) -> Lifecycle:
        """Where the replica stands; it takes requests only when "ready"."""
        if self._draining:
            return "draining"
        if self._service is None and self.engine.state == "ready":
            return "starting"
        return self.engine.state

    def open(self, door: Door, tokenizer: Tokenizer, ready: Ready) -> None:
        """The model is loaded: take requests."""
        self._service = Service(door, tokenizer, ready, int(time.time()))
        self.metrics.kv_layout(ready.block_size, ready.num_blocks)

    def loaded(self) -> Service:
        """The service, also while draining. Raises ApiError 503 before the model is loaded."""
        if self._service is None:
            raise self.unavailable()
        return self._service

    def service(self) -> Service:
        """The service, for new work. Raises ApiError 503 when none is taken now."""
        if self._service is None or self.state != "ready":
            raise self.unavailable()
        return self._service

    def check_model(self, name: str) -> None:
        """Raises ApiError 404 when `name` is not served here."""
        if name not in self.names:
            message = f"The model {name[:200]!r} is not served here. Use {', '.join(self.names)}."
            raise ApiError(404, "model_not_found", message, param="model")

    def unavailable(self) -> ApiError:
        """Why no new work is taken now."""
        state = self.state
        code = "draining" if state == "draining" else "engine_unavailable"
        remedy = {
            "starting": "the model is being loaded; try again shortly",
            "restarting": "the engine is being restarted; try again shortly",
            "draining": "it finishes what runs and takes nothing new; ask another replica",
        }.get(state, "start it again")
        message = f"This replica is {state}: {remedy}."
        retry_after_s = None if state in {"failed", "stopped"} else self.config.retry_after_s
        return ApiError(503, code, message, retry_after_s=retry_after_s)

    def drain(self, deadline_s: float | None) -> None:
        """Take nothing new; end what still runs after `deadline_s` (None: let it finish)."""
        self._draining = True
        self.engine.kv.close()  # nobody routes by it any more, and whoever reads it would keep us from ending
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if deadline_s is not None:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(deadline_s, self.end_all)

    def end_all(self) -> None:
        """End every running request with the error code `draining`."""
        message = "The replica is going away and its deadline has passed. Send the request again."
        for generation in list(self._running):
            generation.fail(
                ApiError(503, "draining", message, retry_after_s=self.config.retry_after_s)
            )

    async def drained(self) -> None:
        """Wait until no HTTP request is being answered."""
        await self._idle.wait()

    # --- what runs -------------------------------------------------------------------------------

    def request_begins(self) -> None:
        """An HTTP request came."""
        self.in_flight += 1
        self._idle.clear()

    def request_ends(self) -> None:
        """Its answer is complete, or nobody waits for it."""
        self.in_flight -= 1
        if not self.in_flight:
            self._idle.set()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """While inside, one more request for generation counts as load."""
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1

    def generation_begins(self, generation: Generation, gateway: str) -> None:
        """A request goes to the engine, sent by this gateway; empty: by none."""
        self._running[generation] = gateway

    def generation_ends(self, generation: Generation) -> None:
        """It has ended, in whatever way."""
        self._running.pop(generation, None)

    def load(self, gateway: str) -> Load:
        """What this gateway needs to know."""
        stats = self.engine.stats
        ready = self._service.ready if self._service else None
        return Load(
            server_load=self._working,
            state=self.state,
            models=list(self.names),
            running=stats.running,
            waiting=stats.waiting,
            queued_tokens=stats.queued_tokens,
            max_seqs=ready.max_seqs if ready else 0,
            max_model_len=ready.max_model_len if ready else 0,
            block_size=ready.block_size if ready else 0,
            kv_blocks_total=stats.blocks_total or (ready.num_blocks if ready else 0),
            kv_blocks_used=stats.blocks_used,
            kv_blocks_cached=stats.blocks_cached,
            step=stats.step,
            step_s=stats.step_s,
            prefill_tokens_per_s=stats.prefill_tokens_per_s,
            decode_s=stats.decode_s,
            others=self._others(gateway),
        )

    def _others(self, gateway: str) -> list[dict[int, int]]:
        others: dict[str, Counter[int]] = {}
        for generation, sender in self._running.items():
            if sender != gateway:
                others.setdefault(sender, Counter())[generation.tier] += 1
        return list(others.values())
