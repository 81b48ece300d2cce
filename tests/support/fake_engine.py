"""A scripted engine with the face of `EngineClient`: real tokens, no model, every step under control."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from argosy.engine.serving.core_messages import (
    CoreReady,
    CoreStats,
    Delta,
    EngineFinishReason,
    EngineRequest,
    TokenLogprob,
)
from argosy.engine.serving.engine_core.delta_stream import DeltaStream
from argosy.engine.serving.engine_core.engine_client import EngineFailedError
from argosy.engine.serving.engine_core.kv_cache_view import KvCacheView
from argosy.engine.serving.text.tokenizer import Tokenizer

State = Literal["starting", "ready", "restarting", "failed", "stopped"]

SEATS = 8
"""Requests that it says that it runs at once; in truth it runs all."""


@dataclass(slots=True)
class Script:
    """What the engine does with one request."""

    tokens: list[int]
    """The whole output, a resumed part included; cut at `max_tokens`."""
    finish: EngineFinishReason = "stop"
    error: str | None = None
    stop_token: int | None = None
    pause_after: int | None = None
    """Wait for `FakeEngine.go_on` after this many tokens."""
    crash: Exception | None = None
    """Raised instead of a delta after the tokens."""


def _set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(slots=True)
class FakeEngine:
    """Answers each request as `script` says, one token a step."""

    tokenizer: Tokenizer
    script: Callable[[EngineRequest], Script]
    state: State = "starting"
    max_model_len: int = 512
    digest: str = ""
    """Of the model, as the core would tell it."""
    requests: list[EngineRequest] = field(default_factory=list)
    live: set[str] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a request has come."""
    paused: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a request waits."""
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    """Notified when a request ends."""
    stats: CoreStats = field(default_factory=CoreStats)
    kv_cache_view: KvCacheView = field(default_factory=KvCacheView)
    on_step: Callable[[CoreStats], None] | None = None
    may_start: asyncio.Event = field(default_factory=_set)
    refusal: Exception | None = None
    """Raised by `generate`."""
    cached: int = 3
    """Tokens of each prompt that it finds, as far as it has so many."""
    ending: asyncio.Task[None] | None = None
    """Keeps the last of those who tell that a request was aborted."""

    @property
    def info(self) -> CoreReady:
        return CoreReady(
            max_model_len=self.max_model_len,
            vocab_size=self.tokenizer.vocab_size,
            eos_token_ids=self.tokenizer.eos_token_ids,
            block_size=16,
            num_blocks=1024,
            max_seqs=SEATS,
            kv_bytes_per_token=1,
            parameters=1,
            load_s=0.0,
            backend="fake",
            fingerprint="",
            model_digest=self.digest,
        )

    async def start(self, on_step: Callable[[CoreStats], None] | None = None) -> CoreReady:
        self.on_step = on_step
        await self.may_start.wait()
        if self.state == "failed":
            raise EngineFailedError("the model is broken; get another one")
        self.state = "ready"
        return self.info

    async def close(self) -> None:
        self.state = "stopped"

    def generate(self, request: EngineRequest) -> FakeDeltaStream:
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        self.live.add(request.id)
        self.asked.set()
        return FakeDeltaStream(self, request, self.script(request))

    async def nothing_runs(self) -> None:
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
        self._listener: Callable[[], None] = _nothing
        self._at = len(request.resumed_tokens)
        self._giving = asyncio.create_task(self._give())

    def set_listener(self, listener: Callable[[], None]) -> None:
        self._listener = listener
        self._stream.set_listener(listener)

    def drain(self) -> Delta | None:
        delta = self._stream.drain()
        if delta is None and self._crash is not None:
            raise self._crash
        return delta

    def close(self) -> None:
        self._listener = _nothing
        self._stream.close()

    async def _give(self) -> None:
        given = 0
        while not self._stream.is_ended:
            if self._script.pause_after == given:
                self._engine.paused.set()
                await self._engine.go_on.wait()
            await asyncio.sleep(0)
            if self._stream.is_ended:
                return
            delta = self._next(first=given == 0)
            if delta is None:
                self._crash = self._script.crash
                self._listener()
                return
            given += 1
            if delta.finish_reason is not None:
                await self._end()
            self._stream.add_delta(delta)

    def _next(self, *, first: bool) -> Delta | None:
        """What the next step gives; None: it crashes."""
        engine, request, script = self._engine, self._request, self._script
        output = script.tokens[: request.params.max_tokens]
        if script.crash is not None and self._at >= len(output):
            return None
        tokens = output[self._at : self._at + 1]
        self._at += 1
        finish: EngineFinishReason | None = None
        if self._at >= len(output) and script.crash is None:
            cut = len(output) < len(script.tokens)
            finish = "length" if cut else script.finish
        stats = engine.stats
        engine.stats = CoreStats(
            step=stats.step + 1,
            running=min(len(engine.live), SEATS),
            waiting=max(0, len(engine.live) - SEATS),
            blocks_total=1024,
            blocks_used=len(engine.live),
            step_tokens=1,
            generated_tokens_total=stats.generated_tokens_total + 1,
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
        )

    def _aborted(self, _: DeltaStream) -> None:
        self._engine.aborted.append(self._request.id)
        self._engine.ending = asyncio.create_task(self._end())

    async def _end(self) -> None:
        self._engine.live.discard(self._request.id)
        async with self._engine.changed:
            self._engine.changed.notify_all()

    def _logprobs(self, tokens: list[int], most: int | None) -> list[TokenLogprob]:
        if most is None:
            return []
        return [
            TokenLogprob(
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


def _nothing() -> None:
    """Nobody listens."""


def says(tokenizer: Tokenizer, text: str) -> Script:
    """The script of an answer that is `text` and ends by itself."""
    eos = tokenizer.eos_token_ids[0]
    return Script([*tokenizer.encode(text, add_special_tokens=False), eos], stop_token=eos)


def always(script: Script) -> Callable[[EngineRequest], Script]:
    """The same script for every request."""
    return lambda _: script
