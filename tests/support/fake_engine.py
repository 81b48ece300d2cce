"""Scripted engine with the interface of `EngineClient`: real tokens, no model, steps controlled by the test.

Never compared with `EngineClient`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from argosy.engine import AdapterSource, EngineFailedError, EngineRequest
from argosy.engine.pooling import PoolingInfo
from argosy.engine.scheduling import Logprob
from argosy.engine.serving.core_messages import (
    CoreReady,
    Delta,
    EngineFinishReason,
    LoadProgress,
)
from argosy.engine.serving.engine_core.in_flight_requests import DeltaStream
from argosy.engine.serving.engine_core.kv_cache_view import KvCacheView
from argosy.engine.serving.text import Tokenizer
from argosy.protocol import ArithmeticIdentity, ModelDescription, ResourceUsage
from argosy.telemetry import CoreStats, SleepStats

State = Literal["starting", "ready", "sleeping", "waking", "restarting", "failed", "stopped"]

MAX_SEQS = 8
"""Concurrency that the engine reports. It runs all requests at once."""


@dataclass(slots=True)
class Script:
    """Scripted output and fault of one request."""

    tokens: list[int]
    """The complete output, including a resumed part. `max_tokens` truncates it."""
    finish: EngineFinishReason = "stop"
    error: str | None = None
    stop_token: int | None = None
    pause_after: int | None = None
    """Wait for `FakeEngine.may_continue` after this many tokens."""
    crash: Exception | None = None
    """Exception raised after the tokens instead of a delta."""
    pooled: bytes = b""
    """Vector of a model that pools, whose output has no tokens."""


def arithmetic(**parts: str) -> ArithmeticIdentity:
    """Return an arithmetic identity. Identities are equal if their `parts` are."""
    names = (
        *("weights", "dtype", "quantization", "kv_dtype"),
        *("kernels", "instruction_set", "rope"),
    )
    return ArithmeticIdentity(**dict.fromkeys(names, "same") | parts)


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


FAKE_MODEL = ModelDescription(
    family="Qwen3",
    parameters=1_720_000_000,
    size_bytes=3_400_000_000,
    format="safetensors",
    quantization="bfloat16",
)


@dataclass(slots=True)
class FakeEngine:
    """Engine that generates the tokens of `script`, one token per step."""

    tokenizer: Tokenizer
    script: Callable[[EngineRequest], Script]
    state: State = "starting"
    max_model_len: int = 512
    arithmetic: ArithmeticIdentity | None = None
    """Arithmetic identity that the core reports."""
    pooling: PoolingInfo | None = None
    """Properties of a model that pools; None for one that generates."""
    load_progress: LoadProgress | None = None
    core_exits: int = 0
    last_core_exit: str = ""
    usage = ResourceUsage()
    sleep_level: int = 0
    awake_bytes: int = 0
    may_wake: asyncio.Event = field(default_factory=_set_event)
    wake_s = 0.0
    sleep_stats = SleepStats()
    memory_bound_bytes = 0
    requests: list[EngineRequest] = field(default_factory=list)
    live: set[str] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)
    request_received: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a request arrives."""
    paused: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a request pauses."""
    may_continue: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    """Notified when a request ends."""
    stats: CoreStats = field(default_factory=CoreStats)
    kv_cache_view: KvCacheView = field(default_factory=KvCacheView)
    on_step: Callable[[CoreStats], None] | None = None
    may_start: asyncio.Event = field(default_factory=_set_event)
    resident_adapters: dict[str, int] = field(default_factory=dict)
    adapter_failures: dict[str, Exception] = field(default_factory=dict)
    """Raised by `load_adapter`, by the name of the adapter's folder."""
    rejection: Exception | None = None
    """Raised by `generate`."""
    cached: int = 3
    """Number of prompt tokens reported as cached, at most the prompt's length."""
    abort_task: asyncio.Task[None] | None = None
    """Reference to the last abort notification, which keeps the task alive."""

    @property
    def info(self) -> CoreReady:
        return CoreReady(
            max_model_len=self.max_model_len,
            vocab_size=self.tokenizer.vocab_size,
            eos_token_ids=self.tokenizer.eos_token_ids,
            block_size=16,
            num_blocks=1024,
            max_seqs=MAX_SEQS,
            kv_capacity_tokens=1024 * 16,
            load_s=0.0,
            backend="fake",
            fingerprint="",
            accelerator="fake accelerator",
            arithmetic=self.arithmetic,
            pooling=self.pooling,
            model=FAKE_MODEL,
            awake_bytes=self.awake_bytes,
        )

    async def start(self, on_step: Callable[[CoreStats], None] | None = None) -> CoreReady:
        self.on_step = on_step
        await self.may_start.wait()
        if self.state == "failed":
            raise EngineFailedError("the model is broken; get another one")
        self.state = "ready"
        return self.info

    async def set_sleep_level(self, level: int) -> bool:
        self.state = "sleeping" if level else "waking"
        await self.wait_idle()
        if not level:
            await self.may_wake.wait()
        self.sleep_level = level
        self.state = "sleeping" if level else "ready"
        return True

    async def close(self) -> None:
        self.state = "stopped"

    def generate(self, request: EngineRequest) -> FakeDeltaStream:
        if self.rejection is not None:
            raise self.rejection
        self.requests.append(request)
        self.live.add(request.id)
        self.request_received.set()
        return FakeDeltaStream(self, request, self.script(request))

    async def load_adapter(self, source: AdapterSource, *, is_pinned: bool = False) -> None:
        await asyncio.sleep(0)
        if (failure := self.adapter_failures.get(Path(source.folder).name)) is not None:
            raise failure
        self.resident_adapters[source.digest] = source.size_bytes + is_pinned

    def unload_adapter(self, digest: str) -> None:
        self.resident_adapters.pop(digest, None)

    def find_adapters_in_flight(self) -> tuple[set[str], set[str]]:
        in_flight = {r.adapter.digest for r in self.requests if r.id in self.live and r.adapter}
        return in_flight, set()

    async def wait_idle(self) -> None:
        """Wait until every request has ended."""
        async with self.changed:
            await self.changed.wait_for(lambda: not self.live)


class FakeDeltaStream:
    """The deltas of one request."""

    def __init__(self, engine: FakeEngine, request: EngineRequest, script: Script) -> None:
        self._engine = engine
        self._request = request
        self._script = script
        self._stream = DeltaStream(request, request.id, 0.0, self._aborted)
        self._crash: Exception | None = None
        self._listener: Callable[[], None] = _ignore
        self._position = len(request.resumed_tokens)
        self._task = asyncio.create_task(self._produce())

    def set_listener(self, listener: Callable[[], None]) -> None:
        self._listener = listener
        self._stream.set_listener(listener)

    def drain(self) -> Delta | None:
        delta = self._stream.drain()
        if delta is None and self._crash is not None:
            raise self._crash
        return delta

    def close(self) -> None:
        self._listener = _ignore
        self._stream.close()

    async def _produce(self) -> None:
        produced = 0
        while not self._stream.is_ended:
            if self._script.pause_after == produced:
                self._engine.paused.set()
                await self._engine.may_continue.wait()
            await asyncio.sleep(0)
            if self._stream.is_ended:
                return
            delta = self._next_delta(first=produced == 0)
            if delta is None:
                self._crash = self._script.crash
                self._listener()
                return
            produced += 1
            if delta.finish_reason is not None:
                await self._end()
            self._stream.add_delta(delta)

    def _next_delta(self, *, first: bool) -> Delta | None:
        """Return the delta of the next step, or None if the script crashes."""
        engine, request, script = self._engine, self._request, self._script
        output = script.tokens[: request.params.max_tokens]
        if script.crash is not None and self._position >= len(output):
            return None
        tokens = output[self._position : self._position + 1]
        self._position += 1
        finish: EngineFinishReason | None = None
        if self._position >= len(output) and script.crash is None:
            cut = len(output) < len(script.tokens)
            finish = "length" if cut else script.finish
        stats = engine.stats
        engine.stats = CoreStats(
            step=stats.step + 1,
            running=min(len(engine.live), MAX_SEQS),
            waiting=max(0, len(engine.live) - MAX_SEQS),
            blocks_total=1024,
            blocks_used=len(engine.live),
            step_tokens=1,
            generation_tokens_total=stats.generation_tokens_total + 1,
        )
        if engine.on_step is not None:
            engine.on_step(engine.stats)
        return Delta(
            id=request.id,
            tokens=tokens,
            logprobs=self._logprobs(tokens, request.params.logprobs),
            prompt_logprobs=self._logprobs(request.prompt[1:], request.params.prompt_logprobs)
            if first
            else [],
            finish_reason=finish,
            stop_token=script.stop_token if finish == "stop" else None,
            error=script.error,
            cached_tokens=min(engine.cached, len(request.prompt)) if first else None,
            queue_s=0.001 if first else None,
            pooled=b"" if finish is None else script.pooled,
        )

    def _aborted(self, _: DeltaStream) -> None:
        self._engine.aborted.append(self._request.id)
        self._engine.abort_task = asyncio.create_task(self._end())

    async def _end(self) -> None:
        self._engine.live.discard(self._request.id)
        async with self._engine.changed:
            self._engine.changed.notify_all()

    def _logprobs(self, tokens: list[int], most: int | None) -> list[Logprob]:
        if most is None:
            return []
        return [
            Logprob(
                token,
                -0.5,
                1,
                [
                    (other % self._engine.tokenizer.vocab_size, -0.5 - step)
                    for step, other in enumerate(range(token, token + most))
                ],
            )
            for token in tokens
        ]


def _ignore() -> None:
    """Ignore a notification."""


def reply_script(tokenizer: Tokenizer, text: str) -> Script:
    """Return a script that generates `text` and then stops."""
    eos = tokenizer.eos_token_ids[0]
    return Script([*tokenizer.encode(text, add_special_tokens=False), eos], stop_token=eos)


def constant_script(script: Script) -> Callable[[EngineRequest], Script]:
    """Return a script function that uses one script for every request."""
    return lambda _: script
