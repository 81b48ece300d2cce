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
from argosy.engine.execution.executor import StepHandle
from argosy.engine.execution.executor_loader import load_executor
from argosy.engine.scheduling import Scheduler, SchedulerLimits, StepPlan
from argosy.engine.scheduling.batching_policy import (
    BatchingPolicy,
    ContinuousBatching,
    DynamicBatching,
    StaticBatching,
)
from argosy.engine.serving.core_messages import (
    CoreReady,
    CoreStats,
    Delta,
    EngineRequest,
    KvChange,
    StepOutputs,
)
from argosy.engine.serving.engine_core.delta_builder import DeltaBuilder
from argosy.engine.serving.engine_core.phase_seconds import PhaseSeconds
from argosy.engine.serving.engine_core.speed_estimator import SpeedEstimator
from argosy.protocol import BLOCK_NAME_BYTES

log = structlog.get_logger(__name__)

MAX_CONSECUTIVE_FAILED_STEPS = 64
"""So many failed steps in a row mean that the worker itself is broken."""
QUEUE_REPORT_INTERVAL_S = 0.1
"""What waits is summed up so often, and when nothing does: that holds until the next step, whenever it comes."""
KV_REPORT_INTERVAL_S = 0.05
"""What decoding makes of blocks is told so often; what prompts make of them, with their first tokens."""
PREPARE_INTERVAL_STEPS = 32
"""While there is something to compute, what makes steps faster waits for so many of them."""


@dataclass(frozen=True, slots=True)
class _FailedLaunch:
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
        built = load_executor(config, progress)
        self._clock = clock
        self._request_timeout_s = config.request_timeout_s
        self.executor = built.executor
        limits = built.limits
        self.scheduler = Scheduler(
            SchedulerLimits(
                max_seqs=limits.max_seqs,
                max_step_tokens=limits.max_step_tokens,
                block_size=limits.block_size,
                num_blocks=limits.num_blocks,
                host_blocks=limits.host_blocks,
                max_prefill_fraction=config.max_prefill_fraction,
                watermark=config.watermark,
                prefix_cache=config.prefix_cache,
                ridge_tokens=built.ridge_tokens,
            ),
            _build_batching_policy(config),
        )
        self.info = CoreReady(
            max_model_len=limits.max_model_len,
            vocab_size=built.architecture.vocab_size,
            eos_token_ids=list(built.architecture.eos_token_ids),
            block_size=limits.block_size,
            num_blocks=limits.num_blocks,
            max_seqs=limits.max_seqs,
            kv_bytes_per_token=built.kv_bytes_per_token,
            parameters=built.architecture.num_parameters,
            load_s=built.load_s,
            backend=built.backend,
            fingerprint=built.fingerprint,
            model_digest=built.digest,
        )
        self._eos_token_ids = frozenset(built.architecture.eos_token_ids)
        self._delta_builder = DeltaBuilder(limits.block_size)
        self._pending_deltas: list[Delta] = []
        """Deltas that came up between steps."""
        self._max_steps_in_flight = built.max_steps_in_flight
        self._steps_in_flight: deque[tuple[StepPlan, StepHandle]] = deque()
        """Steps under way, the oldest first."""
        self._consecutive_failures = 0
        self._phase_seconds = PhaseSeconds()
        self._speed = SpeedEstimator()
        self._queued_tokens = 0
        self._queue_reported_at = float("-inf")
        self._kv_reported_at = float("-inf")
        self._kv_reported_starts = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        requests = self.scheduler.has_work or self._pending_deltas or self._steps_in_flight
        return bool(requests) or self.executor.pending_preparations > 0

    def add(self, request: EngineRequest) -> None:
        """Line up a request; one that the door should have refused is answered with an error delta."""
        params = request.params
        problem = self._rejection_reason(request)
        if problem is not None:
            self._pending_deltas.append(Delta(id=request.id, finish_reason="error", error=problem))
            return
        stops = frozenset(params.stop_token_ids)
        seq = self.scheduler.add(
            id=request.id,
            prompt=request.prompt,
            output=request.resumed_tokens,
            params=params,
            stop_token_ids=stops if params.ignore_eos else stops | self._eos_token_ids,
            now=self._clock(),
            cache_domain=request.cache_domain,
            tenant=request.tenant,
            tier=request.tier,
            weight=request.weight,
            timeout_s=self._request_timeout_s if request.timeout_s is None else request.timeout_s,
            parent_id=request.parent_id,
        )
        self._delta_builder.add_request(seq)

    def abort(self, request_ids: list[str]) -> None:
        """End these requests; their blocks are free at once. Those that have ended are passed over."""
        for request_id in request_ids:
            seq = self.scheduler.cancel(request_id)
            if seq is not None:
                self._pending_deltas.append(self._delta_builder.build_final_delta(seq, "cancelled"))

    def step(self) -> StepOutputs:
        """Run one engine step. Raises only when step after step fails: the worker is then broken."""
        now = self._clock()
        deltas, self._pending_deltas = self._pending_deltas, []
        deltas += [
            self._delta_builder.build_final_delta(seq, "timeout")
            for seq in self.scheduler.expire(now)
        ]
        plan = self.scheduler.schedule(now)
        if self.executor.pending_preparations and not (
            plan.total_tokens and plan.step % PREPARE_INTERVAL_STEPS
        ):
            self.executor.prepare_next()
        planned = self._clock()
        self._phase_seconds.plan += planned - now
        depth = self._max_steps_in_flight if plan.total_tokens else 0
        try:
            flight = self.executor.submit(plan)
        except Exception as error:  # noqa: BLE001 - whatever it was, it is this step's result
            flight, depth = _FailedLaunch(error), 0
        self._steps_in_flight.append((plan, flight))
        while len(self._steps_in_flight) > depth:
            deltas += self._collect_step()
        return StepOutputs(
            deltas, self._build_stats(plan, now, planned), self._build_kv_change(now)
        )

    def _rejection_reason(self, request: EngineRequest) -> str | None:
        """Why a request cannot be run at all."""
        total = len(request.prompt) + max(request.params.max_tokens, len(request.resumed_tokens))
        if request.id in self.scheduler.requests:
            return "the request id is in use"
        if not request.prompt:
            return "the prompt has no tokens"
        if total > self.info.max_model_len:
            return f"{total} tokens exceed the {self.info.max_model_len} that fit"
        return None

    def _collect_step(self) -> list[Delta]:
        """Wait for the oldest step under way and take in what it gave."""
        plan, flight = self._steps_in_flight.popleft()
        try:
            result = flight.result()
        except Exception as error:
            log.exception("step_failed", failures=self._consecutive_failures)
            return self._recover_from_failure(error)
        landed = self._clock()
        self._consecutive_failures = 0
        deltas = []
        for item in self.scheduler.commit(result):
            delta = self._delta_builder.build_delta(plan, result, item)
            if delta is not None:
                deltas.append(delta)
        self._phase_seconds.record_step(result.durations, self._clock() - landed)
        self._speed.record_step(plan, result.durations)
        return deltas

    def _recover_from_failure(self, error: Exception) -> list[Delta]:
        """A step raised: whoever was alone in it ends; everyone else starts over from their tokens."""
        self._consecutive_failures += 1
        if self._consecutive_failures > MAX_CONSECUTIVE_FAILED_STEPS:
            raise error
        if _is_out_of_memory(error):
            self.scheduler.halve_token_budget()
        self._steps_in_flight.clear()
        ended = self.scheduler.recover_failed_step()
        self.executor.reset()
        reason = "the engine failed on this request; the error is in the server's log"
        return [self._delta_builder.build_final_delta(seq, "error", error=reason) for seq in ended]

    def _build_kv_change(self, now: float) -> KvChange | None:
        """What to tell of the prefix cache now, before the last step of all that there is to do at the latest."""
        memory, begun = self.scheduler.kv_cache, self._delta_builder.requests_started
        early = (
            begun == self._kv_reported_starts and now - self._kv_reported_at < KV_REPORT_INTERVAL_S
        )
        if not memory.has_changes or (early and self.scheduler.has_work):
            return None
        self._kv_reported_at, self._kv_reported_starts = now, begun
        stored, removed = memory.drain_changes()
        return KvChange(_pack_block_names(stored), _pack_block_names(removed))

    def _build_stats(self, plan: StepPlan, begin: float, launched: float) -> CoreStats:
        scheduler, memory = self.scheduler, self.scheduler.kv_cache
        now = self._clock()
        if now - self._queue_reported_at >= QUEUE_REPORT_INTERVAL_S or not scheduler.has_work:
            self._queue_reported_at = now
            self._queued_tokens = scheduler.queued_tokens
        return CoreStats(
            step=plan.step,
            running=len(scheduler.running),
            waiting=scheduler.waiting,
            blocks_total=memory.pool.num_blocks,
            blocks_used=memory.pool.used_blocks,
            blocks_cached=memory.pool.cached_blocks,
            queued_tokens=self._queued_tokens,
            step_tokens=plan.total_tokens,
            step_s=now - begin,
            schedule_s=launched - begin,
            prompt_tokens_total=self._delta_builder.prompt_tokens_total,
            generated_tokens_total=self._delta_builder.generated_tokens_total,
            prefix_query_tokens_total=memory.query_tokens,
            prefix_hit_tokens_total=memory.hit_tokens,
            host_hit_tokens_total=memory.host_hit_tokens,
            preemptions_total=scheduler.preemptions,
            corrupt_blocks_total=memory.corrupt_blocks,
            phase_s_total=self._phase_seconds.to_dict(),
            prefill_tokens_per_s=self._speed.prefill_tokens_per_s,
            inter_token_s=self._speed.inter_token_s(len(scheduler.running) + 1),
        )


def _pack_block_names(keys: list[bytes]) -> bytes:
    return b"".join([key[:BLOCK_NAME_BYTES] for key in keys])


def _build_batching_policy(config: EngineConfig) -> BatchingPolicy:
    if config.batching == "static":
        return StaticBatching()
    if config.batching == "dynamic":
        return DynamicBatching(config.max_seqs, config.max_batch_wait_s)
    return ContinuousBatching()


def _is_out_of_memory(error: Exception) -> bool:
    """PyTorch words it as a RuntimeError on the CPU and has a class of its own on GPUs."""
    return isinstance(error, MemoryError) or "memory" in str(error).lower()
