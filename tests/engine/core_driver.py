"""Driver of an `EngineCore` that acts as the server does, in the same process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from argosy.engine.engine_config import EngineConfig
from argosy.engine.engine_request import EngineRequest
from argosy.engine.scheduling import Logprob
from argosy.engine.serving.core_messages import Delta
from argosy.engine.serving.engine_core.core import EngineCore


@dataclass
class RequestOutput:
    """Accumulated deltas of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None
    error_code: str | None = None
    cached_tokens: int | None = None
    draft_saved_s: float = field(default=0.0, compare=False)

    def add(self, delta: Delta) -> None:
        assert self.finish is None, "delta after the last one"
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.finish = delta.finish_reason
        self.error = delta.error
        self.error_code = delta.error_code
        self.draft_saved_s += delta.draft_saved_s
        if delta.cached_tokens is not None:
            assert self.cached_tokens is None
            self.cached_tokens = delta.cached_tokens


class TickingClock:
    """Clock that advances by a millisecond at each call."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def create_core(model: Path, **options: object) -> EngineCore:
    """Create a core with one thread and without warm-up."""
    settings = {"model": str(model), "threads": 1, "warmup": False, "num_blocks": 512} | options
    return EngineCore(EngineConfig(**settings), TickingClock(), lambda _activity, _fraction: None)  # type: ignore[arg-type]


def run_requests(
    core: EngineCore, requests: list[EngineRequest], max_steps: int = 10_000
) -> dict[str, RequestOutput]:
    """Run requests to their ends. Checks that each finishes once and that no block leaks."""
    outputs = {request.id: RequestOutput() for request in requests}
    for request in requests:
        core.add(request)
    for _ in range(max_steps):
        if not core.has_work:
            break
        for delta in core.step().deltas:
            outputs[delta.id].add(delta)
        core.scheduler.check_invariants()
    assert all(output.finish for output in outputs.values())
    kv_cache = core.scheduler.kv_cache
    assert kv_cache.pool.available_blocks == kv_cache.pool.num_blocks, "blocks leaked"
    return outputs
