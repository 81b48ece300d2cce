"""The engine loop: accepts requests, runs steps and returns deltas. A failed step costs at most one request.

A step is planned, launched and committed. Up to `max_steps_in_flight` steps run on the device while the host plans the
next one, which hides the host's work. A stop is therefore seen one step late, and the scheduler drops the extra token.
"""

from __future__ import annotations

import gc
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from math import inf

import structlog

from argosy.engine.engine_config import EngineConfig, SpeculativeConfig
from argosy.engine.engine_request import AdapterSource, EngineRequest
from argosy.engine.execution.architectures.draft_head import is_eagle_head
from argosy.engine.execution.checkpoint_formats.checkpoint import resolve_model_path
from argosy.engine.execution.drafting import create_drafters
from argosy.engine.execution.executor.output_stage import StepHandle
from argosy.engine.execution.loading.executor_loader import LoadedExecutor, load_executor
from argosy.engine.grammar import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarTokenizer,
    build_grammar_tokenizer,
    end_token_ids,
)
from argosy.engine.scheduling import (
    NO_DRAFTS,
    Scheduler,
    Sequence,
    SequenceFailure,
    StepPlan,
    StepResult,
)
from argosy.engine.scheduling.batching_policy import (
    BatchingPolicy,
    ContinuousBatching,
    DynamicBatching,
    StaticBatching,
)
from argosy.engine.serving.core_messages import (
    CoreReady,
    Delta,
    KvChange,
    SleepChanged,
    StepOutputs,
)
from argosy.engine.serving.engine_core.adapter_cache import AdapterCache, AdapterFailedError
from argosy.engine.serving.engine_core.delta_builder import DeltaBuilder
from argosy.engine.serving.engine_core.held_requests import HeldRequest, HeldRequests
from argosy.engine.serving.engine_core.out_of_memory import is_out_of_memory
from argosy.engine.serving.engine_core.speculation import Speculation
from argosy.engine.serving.engine_core.step_log import StepLog
from argosy.engine.serving.engine_core.step_stats import (
    ConstraintStats,
    SpeedEstimator,
)
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.policy import TenantCounter
from argosy.process import private_memory_bytes, return_free_memory
from argosy.protocol import BLOCK_NAME_BYTES
from argosy.telemetry import CoreStats

log = structlog.get_logger(__name__)

MAX_CONSECUTIVE_FAILED_STEPS = 64
"""After this many consecutive failed steps the worker itself is considered broken."""
QUEUE_REPORT_INTERVAL_S = 0.1
"""Minimum seconds between two counts of queued tokens. An idle scheduler is always counted."""
KV_REPORT_INTERVAL_S = 0.05
"""Minimum seconds between KV reports while decoding. A request's first delta triggers a report at once."""
HELD_WAIT_S = 0.001
"""Maximum wait for a grammar or an adapter in a step that has nothing else to do."""
OUT_OF_MEMORY = SequenceFailure(
    "there is not enough memory to compute one token of it; free some memory, or lower --kv-memory or max_tokens"
)
TOO_MUCH_MEMORY = SequenceFailure(
    "it and other requests of its tenant have the grammars that take most of the engine's memory; "
    "send fewer different grammars at a time, or simpler ones",
    "grammar_failed",
)


class EngineCore:
    """Model with its scheduler and executor. Single-threaded, without I/O of its own but for the step log."""

    def __init__(
        self,
        config: EngineConfig,
        clock: Callable[[], float],
        progress: Callable[[str, float], None],
    ) -> None:
        self._grammars = GrammarCompiler(
            lambda: _load_grammar_tokenizer(config, self.info.vocab_size)
        )
        _check_draft_tokenizer(config)
        loaded = load_executor(config, progress, self._grammars.find)
        if config.enable_lora and loaded.pooling is not None:
            raise ValueError("a model that computes vectors has no adapters; remove enable_lora")
        self._config = config
        self._clock = clock
        self._request_timeout_s = (
            inf if config.request_timeout_s is None else config.request_timeout_s
        )
        self.executor = loaded.executor
        self._sleep_handler = loaded.sleep_handler
        self._progress = progress
        self._device = loaded.device
        self.scheduler = Scheduler(loaded.limits, _build_batching_policy(config))
        self.info = describe_core(config, loaded)
        self._eos_token_ids = loaded.architecture.eos_token_ids
        self._held = HeldRequests()
        self._adapters = AdapterCache(self.executor, config.adapter_memory_bytes)
        self._grammars_in_use: dict[str, CompiledGrammar] = {}
        """Grammars of the queued and running requests by request id, which keeps them available."""
        self._constraint_stats = ConstraintStats()
        self._delta_builder = DeltaBuilder(loaded.limits.block_size)
        self._pending_deltas: list[Delta] = []
        """Deltas that arose between steps."""
        self.speculation: Speculation | None = None
        if not loaded.no_drafts_reason:
            speculative = config.speculative_config or SpeculativeConfig()
            self.speculation = Speculation(
                create_drafters(
                    config.draft_methods,
                    self.executor.find_forced_tokens,
                    min_lookup_match=speculative.prompt_lookup_min,
                ),
                vocab_size=self.info.vocab_size,
                ridge_tokens=loaded.limits.ridge_tokens,
                clock=clock,
                draft_model=loaded.draft_model,
                max_draft_tokens=speculative.num_speculative_tokens,
            )
        self._max_steps_in_flight = loaded.max_steps_in_flight
        self._steps_in_flight: deque[tuple[StepPlan, StepHandle | Future[StepResult]]] = deque()
        """Launched steps that are not committed yet, oldest first."""
        self._consecutive_failures = 0
        self._out_of_memory_steps = 0
        self._phase_s = dict.fromkeys(("plan", "launch", "compute", "sample", "commit"), 0.0)
        """Seconds of each phase since the start. Phases overlap while several steps are in flight."""
        self._speed = SpeedEstimator()
        self._step_log = None if config.step_log is None else StepLog(config.step_log)
        self._queued_tokens = 0
        self._queue_reported_at = float("-inf")
        self._kv_reported_at = float("-inf")
        self._kv_reported_starts = 0
        if config.warmup and loaded.pooling is None:
            self._grammars.warm_up()

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(
            self.scheduler.has_work
            or self._held
            or self._pending_deltas
            or self._steps_in_flight
            or (self._adapters.is_busy and not self._sleep_handler.level)
        )

    def add(self, request: EngineRequest) -> None:
        """Queue a request, after its grammar is compiled and its adapter loaded.

        A request that cannot run gets a final delta with finish reason `error`.
        """
        problem = self._rejection_reason(request)
        if problem is not None:
            self._pending_deltas.append(Delta(id=request.id, finish_reason="error", error=problem))
            return
        now = self._clock()
        grammar, adapter_slot = None, None
        if request.params.grammar:
            grammar = self._grammars.submit(request.params.grammar)
        if request.adapter is not None:
            adapter_slot = self._adapters.acquire(request.id, request.adapter, now)
        if grammar is None and adapter_slot is None:
            self._queue_request(request, now)
            return
        self._held.add(
            HeldRequest(request, now, now + self._timeout_s(request), grammar, adapter_slot)
        )
        self._queue_ready_requests()

    def load_adapter(self, source: AdapterSource, *, is_pinned: bool) -> None:
        """Load an adapter before its first request. The outputs of a later step have the result.

        A pinned one is not evicted until it is unloaded.
        """
        self._adapters.preload(source, is_pinned=is_pinned, now=self._clock())

    def unload_adapter(self, digest: str) -> None:
        """Free the memory of an adapter as soon as no request uses it."""
        self._adapters.unload(digest)

    def _queue_request(
        self, request: EngineRequest, arrived_at: float, adapter_slot: int = 0
    ) -> None:
        seq = self.scheduler.add(
            request,
            now=arrived_at,
            timeout_s=self._timeout_s(request),
            stop_token_ids=end_token_ids(request.params, self._eos_token_ids)
            if request.pooling is None
            else frozenset(),
            adapter_slot=adapter_slot,
        )
        self._delta_builder.add_request(seq)

    def _queue_ready_requests(self) -> None:
        """Queue the held requests that wait for nothing more. End those whose grammar or adapter failed."""
        for held in self._held.pop_ready():
            request_id, slot = held.request.id, 0
            try:
                if held.adapter_slot is not None:
                    slot = held.adapter_slot.result()
                if held.grammar is not None:
                    self._grammars_in_use[request_id] = held.grammar.result()
            except AdapterFailedError as error:
                failure = SequenceFailure(str(error), error.code)
            except Exception as error:  # noqa: BLE001 - whatever happens, only this request ends
                if not isinstance(error, ValueError):
                    log.error("grammar_compilation_failed", request=request_id, error=repr(error))  # noqa: TRY400 - its own traceback says nothing
                failure = SequenceFailure(
                    f"the grammar cannot be compiled: {error}", "grammar_failed"
                )
            else:
                self._queue_request(held.request, held.arrived_at, slot)
                continue
            self._pending_deltas.append(
                Delta(
                    id=request_id,
                    finish_reason="error",
                    error=failure.message,
                    error_code=failure.code,
                )
            )

    def abort(self, request_ids: list[str]) -> None:
        """End requests and free their blocks at once. Ids of requests that have ended are ignored."""
        for request_id in request_ids:
            if self._held.cancel(request_id):
                self._pending_deltas.append(Delta(id=request_id, finish_reason="cancelled"))
            seq = self.scheduler.cancel(request_id)
            if seq is not None:
                self._pending_deltas.append(self._delta_builder.build_full_delta(seq, "cancelled"))

    def reset_prefix_cache(self) -> bool:
        """Remove all prompts from the prefix cache. Return False, without an effect, while a request is unfinished."""
        if self.scheduler.has_work or self._steps_in_flight:
            return False
        self.scheduler.kv_cache.clear_cache()
        return True

    def shed_memory(self, *, end_requests: bool) -> None:
        """Drop the grammars and rows that no request uses. With `end_requests`, end the requests of the largest cause.

        That is the tenant with the most grammars in use, each of which takes up to `MAX_LEXER_STATES` states.
        """
        dropped = self._grammars.drop_cached()
        ended = self._find_largest_cause() if end_requests else []
        for seq in ended:
            self.scheduler.cancel(seq.id)
        self._pending_deltas += self._fail_requests(ended, TOO_MUCH_MEMORY)
        self.executor.keep_rows({seq.row for seq in self.scheduler.running})
        before = private_memory_bytes()
        gc.collect()
        return_free_memory()
        log.warning(
            "engine_memory_shed",
            dropped_grammars=dropped,
            ended=[seq.id for seq in ended],
            released_bytes=before - private_memory_bytes(),
        )

    def set_sleep_level(self, level: int) -> SleepChanged:
        """Free memory while no request is unfinished, or allocate it again, see `SetSleepLevel`.

        Prompts stay in the prefix cache as far as host memory has room for their blocks.

        Raises:
            RuntimeError: The results of the model are not those that it had before it slept.
            ValueError: The files of the model were replaced meanwhile.
        """
        started_at = self._clock()
        handler, speculation = self._sleep_handler, self.speculation
        if level > handler.level:
            if not handler.level:
                plan = StepPlan(0)
                self.scheduler.kv_cache.move_cache_to_host(plan)
                self.executor.submit(plan).result()
                self._grammars.drop_cached()
                self._adapters.drop_unused()
            if speculation is not None:
                speculation.draft_model = None
            handler.sleep(level)
            gc.collect()
            return_free_memory()
        elif level < handler.level:
            handler.wake_up(level, self._progress)
            if speculation is not None and level == 0:
                speculation.draft_model = handler.create_draft_model()
        return SleepChanged(
            handler.level, self._clock() - started_at, self._build_kv_change(started_at)
        )

    def _find_largest_cause(self) -> list[Sequence]:
        """Return the constrained requests of the tenant with the most grammars in use."""
        by_tenant: defaultdict[TenantCounter, list[Sequence]] = defaultdict(list)
        for request_id in self._grammars_in_use:
            if (seq := self.scheduler.requests.get(request_id)) is not None:
                by_tenant[seq.tenant_counter].append(seq)
        return max(
            by_tenant.values(),
            key=lambda seqs: len({seq.params.grammar for seq in seqs}),
            default=[],
        )

    def close(self) -> None:
        """Stop the threads, and close the step log. The core cannot be used any more."""
        if self._step_log is not None:
            self._step_log.close()
        self._grammars.close()

    def step(self) -> StepOutputs:
        """Run one engine step. Raises only after too many consecutive failed steps, when the worker is broken."""
        started_at = self._clock()
        if self._step_log is not None:
            self._step_log.begin_step(started_at)
        self._device.begin_step(started_at)
        self._adapters.advance(started_at)
        if self._held:
            self._update_held_requests(started_at)
        deltas, self._pending_deltas = self._pending_deltas, []
        deltas += [
            self._delta_builder.build_full_delta(seq, "timeout")
            for seq in self.scheduler.expire(started_at)
        ]
        drafts = NO_DRAFTS
        if self.speculation is not None:
            drafts = self.speculation.propose(self.scheduler.running)
        plan = self.scheduler.schedule(started_at, drafts)
        planned_at = self._clock()
        self._phase_s["plan"] += planned_at - started_at
        max_in_flight = self._max_steps_in_flight if plan.total_tokens else 0
        step_handle: StepHandle | Future[StepResult]
        try:
            step_handle = self.executor.submit(plan)
        except Exception as error:  # noqa: BLE001 - any error is the result of this step
            step_handle, max_in_flight = Future(), 0  # earlier steps are collected before
            step_handle.set_exception(error)
        self._steps_in_flight.append((plan, step_handle))
        while len(self._steps_in_flight) > max_in_flight:
            deltas += self._collect_step()
        if self.speculation is not None:
            self.speculation.record_duration(plan, self._clock() - started_at, deltas)
        for delta in deltas:
            if delta.finish_reason is not None:
                self._release(delta.id)
        return StepOutputs(
            deltas,
            self._build_stats(plan, started_at, planned_at),
            self._build_kv_change(started_at),
            self._adapters.drain_report(),
        )

    def _release(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._grammars_in_use.pop(request_id, None)
        self._adapters.release(request_id, self._clock())
        if self.speculation is not None:
            self.speculation.release(request_id)

    def _rejection_reason(self, request: EngineRequest) -> str | None:
        """Return why a request cannot run, or None if it can."""
        if (request.pooling is None) != (self.info.pooling is None):
            return (
                "the model computes vectors and generates no text"
                if request.pooling is None
                else "the model generates text and computes no vectors"
            ) + "; send the request to another model"
        if request.adapter is not None and not self._config.enable_lora:
            return "adapters are not enabled; start the engine with --enable-lora"
        total = len(request.prompt) + max(request.max_tokens, len(request.resumed_tokens))
        if request.id in self.scheduler.requests or request.id in self._held:
            return "the request id is in use; choose another one"
        if not request.prompt:
            return "the prompt has no tokens"
        if total > self.info.max_model_len:
            return f"{total} tokens exceed the limit of {self.info.max_model_len}; lower max_tokens"
        return None

    def _timeout_s(self, request: EngineRequest) -> float:
        return self._request_timeout_s if request.timeout_s is None else request.timeout_s

    def _update_held_requests(self, now: float) -> None:
        """End held requests that have timed out, and queue those that are ready."""
        if not (self.scheduler.has_work or self._pending_deltas or self._steps_in_flight):
            self._held.wait(HELD_WAIT_S)
        self._pending_deltas += [
            Delta(id=request_id, finish_reason="timeout")
            for request_id in self._held.pop_expired(now)
        ]
        self._queue_ready_requests()

    def _collect_step(self) -> list[Delta]:
        """Wait for the oldest step in flight and commit its result."""
        plan, step_handle = self._steps_in_flight.popleft()
        try:
            result = step_handle.result()
        except Exception as error:
            if is_out_of_memory(error):
                return self._recover_out_of_memory(plan, error)
            log.exception("step_failed", failures=self._consecutive_failures)
            return self._recover_from_failure(error)
        collected_at = self._clock()
        self._consecutive_failures = 0
        deltas = []
        for update in self.scheduler.commit(result):
            delta = self._delta_builder.build_delta(plan, result, update)
            if delta is not None:
                deltas.append(delta)
        phase_s, durations = self._phase_s, result.durations
        phase_s["launch"] += durations.launch_s
        phase_s["compute"] += durations.compute_s
        phase_s["sample"] += durations.sample_s
        ended_at = self._clock()
        phase_s["commit"] += ended_at - collected_at
        if self._step_log is not None:
            self._step_log.end_step(plan, ended_at, has_work=self.scheduler.has_work)
        self._constraint_stats.record_step(result, deltas)
        self._speed.record_step(plan, result)
        if self.speculation is not None:
            self.speculation.record_step(plan, result)
        return deltas

    def _recover_from_failure(self, error: Exception) -> list[Delta]:
        """Recover from a step that raised.

        A sequence that was alone in the step ends with an error. All others are preempted and restart from their
        tokens.
        """
        self._discard_steps(error)
        failed = self.scheduler.recover_failed_step()
        self.executor.reset()
        return self._fail_requests(
            failed, SequenceFailure("the engine failed on this request; see the server's log")
        )

    def _recover_out_of_memory(self, plan: StepPlan, error: Exception) -> list[Delta]:
        """Recover from a step that ran out of memory. Its sequences restart from their tokens in smaller steps.

        A sequence ends with an error if memory does not suffice for one token of it.
        """
        self._discard_steps(error)
        self._out_of_memory_steps += 1
        failed = self.scheduler.recover_out_of_memory()
        log.warning(
            "step_out_of_memory",
            tokens=plan.total_tokens,
            token_budget=self.scheduler.token_budget.tokens,
            ended=[seq.id for seq in failed],
            error=str(error),
        )
        self.executor.reset()
        return self._fail_requests(failed, OUT_OF_MEMORY)

    def _discard_steps(self, error: Exception) -> None:
        """Drop all steps in flight after one of them raised `error`, and raise it if too many failed in a row."""
        self._consecutive_failures += 1
        if self._consecutive_failures > MAX_CONSECUTIVE_FAILED_STEPS:
            raise error
        self._steps_in_flight.clear()

    def _fail_requests(self, seqs: list[Sequence], failure: SequenceFailure) -> list[Delta]:
        return [self._delta_builder.build_full_delta(seq, "error", failure=failure) for seq in seqs]

    def _build_kv_change(self, now: float) -> KvChange | None:
        """Return the prefix cache changes to report with this step, or None.

        Pending changes are reported at the latest before the core becomes idle.
        """
        kv_cache, requests_started = self.scheduler.kv_cache, self._delta_builder.requests_started
        is_recent = (
            requests_started == self._kv_reported_starts
            and now - self._kv_reported_at < KV_REPORT_INTERVAL_S
        )
        if not kv_cache.has_changes or (is_recent and self.scheduler.has_work):
            return None
        self._kv_reported_at, self._kv_reported_starts = now, requests_started
        stored, removed = kv_cache.drain_changes()
        if not stored and not removed:
            return None  # only blocks of windows changed
        return KvChange(_pack_block_names(stored), _pack_block_names(removed))

    def _build_stats(self, plan: StepPlan, started_at: float, planned_at: float) -> CoreStats:
        scheduler, kv_cache = self.scheduler, self.scheduler.kv_cache
        now = self._clock()
        if now - self._queue_reported_at >= QUEUE_REPORT_INTERVAL_S or not scheduler.has_work:
            self._queue_reported_at = now
            self._queued_tokens = scheduler.queued_tokens
        return CoreStats(
            step=plan.step,
            running=len(scheduler.running),
            waiting=scheduler.waiting + len(self._held),
            blocks_total=kv_cache.pool.num_blocks,
            blocks_used=kv_cache.pool.used_blocks,
            blocks_cached=kv_cache.pool.cached_blocks,
            queued_tokens=self._queued_tokens,
            step_tokens=plan.total_tokens,
            step_s=now - started_at,
            schedule_s=planned_at - started_at,
            prompt_tokens_total=self._delta_builder.prompt_tokens_total,
            generation_tokens_total=self._delta_builder.generated_tokens_total,
            prefix_query_tokens_total=kv_cache.query_tokens,
            prefix_hit_tokens_total=kv_cache.hit_tokens,
            host_hit_tokens_total=kv_cache.host_hit_tokens,
            preemptions_total=scheduler.preemptions,
            corrupt_blocks_total=kv_cache.corrupt_blocks,
            phase_s_total=self._phase_s.copy(),
            prefill_tokens_per_s=self._speed.prefill_tokens_per_s,
            inter_token_s=self._speed.inter_token_s(len(scheduler.running) + 1),
            held=len(self._held),
            grammar_compiles_total=self._grammars.compiles,
            grammar_cache_hits_total=self._grammars.cache_hits,
            grammar_compile_s_total=self._grammars.compile_s,
            grammar_dead_ends_total=self._constraint_stats.dead_ends,
            masked_tokens_total=self._constraint_stats.masked_tokens,
            mask_fill_s_total=self._constraint_stats.mask_fill_s,
            mask_wait_s_total=self._constraint_stats.mask_wait_s,
            out_of_memory_steps_total=self._out_of_memory_steps,
            step_token_budget=scheduler.token_budget.tokens,
            compute_threads=self._device.num_compute_threads,
            adapters_resident=self._adapters.num_resident,
            adapter_bytes=self._adapters.used_bytes,
            adapter_loads_total=dict(self._adapters.loads),
            adapter_load_s_total=self._adapters.load_s,
            adapter_wait_s_total=self._adapters.wait_s,
            adapter_evictions_total=self._adapters.evictions,
            adapter_load_bytes_per_s=self._adapters.load_bytes_per_s,
            **({} if self.speculation is None else self.speculation.stats.totals),
        )


def describe_core(config: EngineConfig, loaded: LoadedExecutor) -> CoreReady:
    """Describe the core of a loaded executor to the request's side. Its memory is measured, which is to be loaded."""
    limits, used_bytes = loaded.limits, private_memory_bytes()
    needed_bytes = used_bytes + loaded.reserved_bytes if used_bytes else 0
    has_bound = needed_bytes and config.memory_headroom_bytes
    return CoreReady(
        max_model_len=limits.max_model_len,
        vocab_size=loaded.architecture.vocab_size,
        eos_token_ids=list(loaded.architecture.eos_token_ids),
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        max_seqs=limits.max_seqs,
        kv_capacity_tokens=limits.kv_capacity_tokens,
        load_s=loaded.load_s,
        backend=loaded.backend,
        fingerprint=loaded.fingerprint,
        accelerator=loaded.device.name,
        arithmetic=loaded.arithmetic,
        is_exact=loaded.is_exact,
        pooling=loaded.pooling,
        memory_bound_bytes=needed_bytes + config.memory_headroom_bytes if has_bound else 0,
        mapped_bytes=loaded.mapped_bytes,
        awake_bytes=needed_bytes + loaded.mapped_bytes if needed_bytes else 0,
        model=loaded.model,
        step_s=loaded.step_s,
        no_drafts_reason=loaded.no_drafts_reason,
    )


def _load_grammar_tokenizer(config: EngineConfig, vocab_size: int) -> GrammarTokenizer:
    """Load the checkpoint's tokenizer for the compiler.

    Raises:
        ValueError: The checkpoint has no tokenizer.
    """
    path = resolve_model_path(config.model, config.revision, config.digest)
    return build_grammar_tokenizer(Tokenizer.load(path), vocab_size)


def _check_draft_tokenizer(config: EngineConfig) -> None:
    """Check that the draft model has the tokenizer of the model. The head of a model may have none.

    Raises:
        ValueError: It has another one.
    """
    source = config.draft_source
    if source is None or source == config.model:
        return
    path = resolve_model_path(config.model, config.revision, config.digest)
    draft_path = resolve_model_path(source, None)
    if is_eagle_head(draft_path) and not (draft_path / "tokenizer.json").exists():
        return
    digest = Tokenizer.load(path).digest
    draft_digest = Tokenizer.load(draft_path).digest
    if digest != draft_digest:
        raise ValueError(
            f"{source} cannot draft for {config.model}, because its tokenizer is another one "
            f"({draft_digest[:12]}, not {digest[:12]}); use a draft_model with the same tokenizer"
        )


def _pack_block_names(keys: list[bytes]) -> bytes:
    return b"".join([key[:BLOCK_NAME_BYTES] for key in keys])


def _build_batching_policy(config: EngineConfig) -> BatchingPolicy:
    if config.batching == "static":
        return StaticBatching()
    if config.batching == "dynamic":
        return DynamicBatching(config.max_seqs, config.max_batch_wait_s)
    return ContinuousBatching()
