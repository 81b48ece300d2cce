"""The engine loop: requests in, step after step, deltas out; a step that fails costs one request.

A step is planned, launched and committed. Up to `inflight` steps are under way while the next one is
planned: the host's work then hides behind the device's, and a stop is seen one step late, when a token
too many was sampled already; the scheduler drops it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import structlog

from argosy.engine.engine_config import EngineConfig
from argosy.engine.execution.executor import Flight
from argosy.engine.execution.executor_loader import build
from argosy.engine.scheduling import Limits, Plan, Scheduler
from argosy.engine.scheduling.batching_policy import Batching, Continuous, Dynamic, Static
from argosy.engine.serving.core_messages import (
    Delta,
    EngineRequest,
    KvChange,
    Outputs,
    Ready,
    Stats,
)
from argosy.engine.serving.engine_core.delta_builder import Deltas
from argosy.engine.serving.engine_core.phase_seconds import PhaseSeconds
from argosy.engine.serving.engine_core.speed_estimator import Speed
from argosy.protocol import NAME_BYTES

log = structlog.get_logger(__name__)

MAX_FAILED_STEPS = 64
"""So many failed steps in a row mean that the worker itself is broken."""
QUEUE_REPORT_S = 0.1
"""What waits is summed up so often, and when nothing does: that holds until the next step, whenever it comes."""
KV_REPORT_S = 0.05
"""What decoding makes of blocks is told so often; what prompts make of them, with their first tokens."""
PREPARE_EVERY = 32
"""While there is something to compute, what makes steps faster waits for so many of them."""


@dataclass(frozen=True, slots=True)
class _Crashed:
    """A step that could not even be launched; those before it are landed first."""

    error: Exception

    def result(self) -> NoReturn:
        """See `Flight`."""
        raise self.error


class EngineCore:
    """One model, its scheduler and its executor. Single-threaded, no input or output of its own."""

    def __init__(
        self,
        config: EngineConfig,
        clock: Callable[[], float],
        progress: Callable[[str, float], None],
    ) -> None:
        built = build(config, progress)
        self._clock = clock
        self._request_timeout_s = config.request_timeout_s
        self.executor = built.executor
        limits = built.limits
        self.scheduler = Scheduler(
            Limits(
                max_seqs=limits.max_seqs,
                max_step_tokens=limits.max_step_tokens,
                block_size=limits.block_size,
                num_blocks=limits.num_blocks,
                host_blocks=limits.host_blocks,
                prefill_share=config.prefill_share,
                watermark=config.watermark,
                prefix_cache=config.prefix_cache,
                ridge_tokens=built.ridge_tokens,
            ),
            _batching(config),
        )
        self.ready = Ready(
            max_model_len=limits.max_model_len,
            vocab_size=built.spec.vocab_size,
            eos_token_ids=list(built.spec.eos_token_ids),
            block_size=limits.block_size,
            num_blocks=limits.num_blocks,
            max_seqs=limits.max_seqs,
            kv_bytes_per_token=built.kv_bytes_per_token,
            parameters=built.spec.parameters,
            load_s=built.load_s,
            backend=built.backend,
            fingerprint=built.fingerprint,
            digest=built.digest,
        )
        self._eos = frozenset(built.spec.eos_token_ids)
        self._deltas = Deltas(limits.block_size)
        self._news: list[Delta] = []
        """Deltas that came up between steps."""
        self._inflight = built.inflight
        self._flights: deque[tuple[Plan, Flight]] = deque()
        """Steps under way, the oldest first."""
        self._failures = 0
        self._spent = PhaseSeconds()
        self._speed = Speed()
        self._queued_tokens = 0
        self._queued_at = float("-inf")
        self._kv_told_at = float("-inf")
        self._kv_told_begun = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        requests = self.scheduler.has_work or self._news or self._flights
        return bool(requests) or self.executor.unprepared > 0

    def add(self, request: EngineRequest) -> None:
        """Line up a request; one that the door should have refused is answered with an error delta."""
        params = request.params
        problem = self._problem(request)
        if problem is not None:
            self._news.append(Delta(id=request.id, finish="error", error=problem))
            return
        stops = frozenset(params.stop_token_ids)
        seq = self.scheduler.add(
            id=request.id,
            prompt=request.prompt,
            output=request.output,
            params=params,
            stops=stops if params.ignore_eos else stops | self._eos,
            now=self._clock(),
            domain=request.domain,
            tenant=request.tenant,
            tier=request.tier,
            weight=request.weight,
            timeout_s=self._request_timeout_s if request.timeout_s is None else request.timeout_s,
            lead=request.lead,
        )
        self._deltas.enter(seq)

    def abort(self, ids: list[str]) -> None:
        """End these requests; their blocks are free at once. Those that have ended are passed over."""
        for request_id in ids:
            seq = self.scheduler.cancel(request_id)
            if seq is not None:
                self._news.append(self._deltas.last(seq, "cancelled"))

    def step(self) -> Outputs:
        """Run one engine step. Raises only when step after step fails: the worker is then broken."""
        now = self._clock()
        deltas, self._news = self._news, []
        deltas += [self._deltas.last(seq, "timeout") for seq in self.scheduler.expire(now)]
        plan = self.scheduler.schedule(now)
        if self.executor.unprepared and not (plan.tokens and plan.step % PREPARE_EVERY):
            self.executor.prepare()
        planned = self._clock()
        self._spent.plan += planned - now
        depth = self._inflight if plan.tokens else 0
        try:
            flight = self.executor.launch(plan)
        except Exception as error:  # noqa: BLE001 - whatever it was, it is this step's result
            flight, depth = _Crashed(error), 0
        self._flights.append((plan, flight))
        while len(self._flights) > depth:
            deltas += self._land()
        return Outputs(deltas, self._stats(plan, now, planned), self._kv_change(now))

    def _problem(self, request: EngineRequest) -> str | None:
        """Why a request cannot be run at all."""
        total = len(request.prompt) + max(request.params.max_tokens, len(request.output))
        if request.id in self.scheduler.requests:
            return "the request id is in use"
        if not request.prompt:
            return "the prompt has no tokens"
        if total > self.ready.max_model_len:
            return f"{total} tokens exceed the {self.ready.max_model_len} that fit"
        return None

    def _land(self) -> list[Delta]:
        """Wait for the oldest step under way and take in what it gave."""
        plan, flight = self._flights.popleft()
        try:
            result = flight.result()
        except Exception as error:
            log.exception("step_failed", failures=self._failures)
            return self._recover(error)
        landed = self._clock()
        self._failures = 0
        deltas = []
        for item in self.scheduler.commit(result):
            delta = self._deltas.of(plan, result, item)
            if delta is not None:
                deltas.append(delta)
        self._spent.add(result.durations, self._clock() - landed)
        self._speed.add(plan, result.durations)
        return deltas

    def _recover(self, error: Exception) -> list[Delta]:
        """A step raised: whoever was alone in it ends; everyone else starts over from their tokens."""
        self._failures += 1
        if self._failures > MAX_FAILED_STEPS:
            raise error
        if _out_of_memory(error):
            self.scheduler.shrink()
        self._flights.clear()
        ended = self.scheduler.fail()
        self.executor.reset()
        reason = "the engine failed on this request; the error is in the server's log"
        return [self._deltas.last(seq, "error", error=reason) for seq in ended]

    def _kv_change(self, now: float) -> KvChange | None:
        """What to tell of the prefix cache now, before the last step of all that there is to do at the latest."""
        memory, begun = self.scheduler.memory, self._deltas.begun
        early = begun == self._kv_told_begun and now - self._kv_told_at < KV_REPORT_S
        if not memory.changed or (early and self.scheduler.has_work):
            return None
        self._kv_told_at, self._kv_told_begun = now, begun
        stored, removed = memory.changes()
        return KvChange(_names(stored), _names(removed))

    def _stats(self, plan: Plan, begin: float, launched: float) -> Stats:
        scheduler, memory = self.scheduler, self.scheduler.memory
        now = self._clock()
        if now - self._queued_at >= QUEUE_REPORT_S or not scheduler.has_work:
            self._queued_at = now
            self._queued_tokens = scheduler.queued_tokens
        return Stats(
            step=plan.step,
            running=len(scheduler.running),
            waiting=scheduler.waiting,
            blocks_total=memory.pool.num_blocks,
            blocks_used=memory.pool.used,
            blocks_cached=memory.pool.cached,
            queued_tokens=self._queued_tokens,
            step_tokens=plan.tokens,
            step_s=now - begin,
            schedule_s=launched - begin,
            prompt_tokens_total=self._deltas.prompt_tokens,
            generated_tokens_total=self._deltas.generated_tokens,
            prefix_query_tokens_total=memory.query_tokens,
            prefix_hit_tokens_total=memory.hit_tokens,
            host_hit_tokens_total=memory.host_hit_tokens,
            preemptions_total=scheduler.preemptions,
            corrupt_blocks_total=memory.corrupt_blocks,
            phase_s_total=self._spent.totals(),
            prefill_tokens_per_s=self._speed.prefill_tokens_per_s,
            decode_s=self._speed.decode_s(len(scheduler.running) + 1),
        )


def _names(keys: list[bytes]) -> bytes:
    return b"".join([key[:NAME_BYTES] for key in keys])


def _batching(config: EngineConfig) -> Batching:
    if config.batching == "static":
        return Static()
    if config.batching == "dynamic":
        return Dynamic(config.max_seqs, config.batch_wait_s)
    return Continuous()


def _out_of_memory(error: Exception) -> bool:
    """PyTorch words it as a RuntimeError on the CPU and has a class of its own on GPUs."""
    return isinstance(error, MemoryError) or "memory" in str(error).lower()
