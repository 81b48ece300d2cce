"""Drives an `EngineCore` the way the server does, without a process between."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from argosy.engine.engine_config import EngineConfig
from argosy.engine.serving.core_messages import Delta, EngineRequest, TokenLogprob
from argosy.engine.serving.engine_core.core import EngineCore

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class Answer:
    """All that one request was given."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None
    cached_tokens: int | None = None

    def take(self, delta: Delta) -> None:
        assert self.finish is None, "a delta after the last one"
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.finish = delta.finish_reason
        self.error = delta.error
        if delta.cached_tokens is not None:
            assert self.cached_tokens is None
            self.cached_tokens = delta.cached_tokens


class Clock:
    """Time that passes by a millisecond whenever someone looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def core_of(model: Path, **options: object) -> EngineCore:
    """A core without warm-up on one thread."""
    settings = {"model": str(model), "threads": 1, "warmup": False, "num_blocks": 512} | options
    return EngineCore(EngineConfig(**settings), Clock(), lambda _what, _done: None)  # type: ignore[arg-type]


def run(core: EngineCore, requests: list[EngineRequest], most: int = 10_000) -> dict[str, Answer]:
    """Serve these requests to their ends; checks that each ends once and that no block leaks."""
    answers = {request.id: Answer() for request in requests}
    for request in requests:
        core.add(request)
    for _ in range(most):
        if not core.has_work:
            break
        for delta in core.step().deltas:
            answers[delta.id].take(delta)
        core.scheduler.check_invariants()
    assert all(answer.finish for answer in answers.values())
    memory = core.scheduler.kv_cache
    assert memory.available_blocks == memory.pool.num_blocks, "blocks leaked"
    return answers
