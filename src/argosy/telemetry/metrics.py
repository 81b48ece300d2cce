"""The replica's metrics under our own names, and on demand the same numbers under vLLM's.

Names follow the Prometheus guidelines (base units, `_total`, no colons), so that `promtool check
metrics` is content. Labels are bounded: the served model, route templates, statuses, finish reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from argosy.telemetry.engine_stats import EngineStats
from argosy.telemetry.vllm_names import VllmNames

disable_created_metrics()  # type: ignore[no-untyped-call]  # the library's `_created` gauges double the exposition and say nothing here

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
PHASE_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2),
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
CHOICE_BUCKETS = (1, 2, 5, 10, 20)


_TOTALS: dict[str, tuple[str, Callable[[EngineStats], int]]] = {
    "prompt_tokens": (
        "Prompt tokens computed or found.",
        lambda stats: stats.prompt_tokens_total,
    ),
    "generation_tokens": (
        "Tokens generated.",
        lambda stats: stats.generated_tokens_total,
    ),
    "prefix_query_tokens": (
        "Prompt tokens looked up in the prefix cache.",
        lambda stats: stats.prefix_query_tokens_total,
    ),
    "prefix_hit_tokens": (
        "Prompt tokens found in the prefix cache.",
        lambda stats: stats.prefix_hit_tokens_total,
    ),
    "host_hit_tokens": (
        "Prompt tokens found in the host tier.",
        lambda stats: stats.host_hit_tokens_total,
    ),
    "preemptions": (
        "Sequences put back to free blocks.",
        lambda stats: stats.preemptions_total,
    ),
    "corrupt_blocks": (
        "Host blocks dropped because their checksum was wrong.",
        lambda stats: stats.corrupt_blocks_total,
    ),
}
"""Counters that the core keeps: what each says, and where it is read."""


@dataclass(frozen=True, slots=True)
class SequenceTimes:
    """When one sequence passed its stations, in seconds of one monotonic clock; None: never did."""

    arrived: float
    queued_s: float | None
    """Seconds in the engine's queue."""
    submitted: float
    first_token: float | None
    last_token: float | None
    ended: float


def token_buckets(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 ... up to `most`."""
    buckets = []
    decade = 1
    while decade <= most:
        buckets += [decade * step for step in (1, 2, 5) if decade * step <= most]
        decade *= 10
    return tuple(buckets)


class Metrics:
    """Every number the replica shows. One event loop owns it; `exposition` may run in any thread."""

    def __init__(self, model: str, *, max_model_len: int = 131_072) -> None:
        self._model = model
        self._registry = CollectorRegistry()
        self._latencies()
        self._sizes(token_buckets(max_model_len))
        self._ends()
        self._state_gauges()
        self._engine_counters()
        self._vllm = VllmNames(self._registry, model)

    def _latencies(self) -> None:
        seconds = "argosy_request_{}_seconds"
        self._ttft = self._histogram(
            "argosy_time_to_first_token_seconds",
            "From the request's arrival to its first token.",
            TTFT_BUCKETS,
        )
        self._itl = self._histogram(
            "argosy_inter_token_latency_seconds",
            "Between two steps that gave a sequence tokens.",
            ITL_BUCKETS,
        )
        self._tpot = self._histogram(
            "argosy_time_per_output_token_seconds",
            "Decode time of a sequence by its tokens after the first.",
            ITL_BUCKETS,
        )
        self._e2e = self._histogram(
            seconds.format("duration"), "From arrival to the last token.", PHASE_BUCKETS
        )
        self._queue = self._histogram(
            seconds.format("queue"), "Waiting in the engine's queue.", PHASE_BUCKETS
        )
        self._prefill = self._histogram(
            seconds.format("prefill"), "From the first step to the first token.", PHASE_BUCKETS
        )
        self._decode = self._histogram(
            seconds.format("decode"), "From the first token to the last.", PHASE_BUCKETS
        )
        self._inference = self._histogram(
            seconds.format("inference"), "From the first step to the last token.", PHASE_BUCKETS
        )

    def _sizes(self, lengths: tuple[int, ...]) -> None:
        self._prompt_length = self._histogram(
            "argosy_request_prompt_tokens", "Prompt tokens of a sequence.", lengths
        )
        self._output_length = self._histogram(
            "argosy_request_generation_tokens", "Tokens generated for a sequence.", lengths
        )
        self._max_tokens = self._histogram(
            "argosy_request_max_tokens", "Most tokens that a sequence asked for.", lengths
        )
        self._n = self._histogram(
            "argosy_request_choices", "Choices that a request asked for.", CHOICE_BUCKETS
        )
        self._step_tokens = self._histogram(
            "argosy_step_tokens", "Tokens computed by a step.", STEP_BUCKETS
        )
        self._batch = self._histogram(
            "argosy_batch_size", "Sequences running in a step.", BATCH_BUCKETS
        )

    def _ends(self) -> None:
        self._finished = self._counter(
            "argosy_requests", "Sequences ended, by reason.", "finish_reason"
        )
        self._aborted = self._counter(
            "argosy_requests_aborted", "Requests ended before their time, by reason.", "reason"
        )
        self._rejected = self._counter(
            "argosy_requests_rejected", "Requests refused before the engine saw them.", "status"
        )
        self._http = Counter(
            "argosy_http_requests",
            "HTTP requests answered.",
            ("model", "route", "status"),
            registry=self._registry,
        )

    def _state_gauges(self) -> None:
        self._running = self._gauge("argosy_requests_running", "Sequences in the running batch.")
        self._waiting = self._gauge("argosy_requests_waiting", "Sequences in the queue.")
        self._queued_tokens = self._gauge(
            "argosy_queued_prompt_tokens", "Prompt tokens waiting to be computed."
        )
        self._kv_usage = self._gauge(
            "argosy_kv_usage_ratio", "Part of the KV blocks that sequences hold (0 to 1)."
        )
        self._blocks = Gauge(
            "argosy_kv_blocks",
            "KV blocks by state: used by sequences, cached for reuse, free.",
            ("model", "state"),
            registry=self._registry,
        )
        self._step_s = self._gauge("argosy_step_duration_seconds", "Duration of the latest step.")
        self._schedule_s = self._gauge(
            "argosy_schedule_duration_seconds", "The scheduler's part of the latest step."
        )
        self._ready = self._gauge("argosy_ready", "1 while new requests are taken.")
        self._kv_config = Gauge(
            "argosy_kv_config_info",
            "How the KV cache is laid out.",
            ("model", "block_size", "num_blocks"),
            registry=self._registry,
        )
        build = Gauge(
            "argosy_build_info", "The running version.", ("version",), registry=self._registry
        )
        build.labels(version("argosy")).set(1)

    def _engine_counters(self) -> None:
        self._phases = self._counter(
            "argosy_step_seconds", "Time of the engine's steps, by phase.", "phase"
        )
        self._last_phases: Mapping[str, float] = {}
        self._totals = {name: self._total(name, about) for name, (about, _) in _TOTALS.items()}
        self._last: dict[str, int] = {}

    # --- what happens ---------------------------------------------------------------------------

    def answered(self, route: str, status: int) -> None:
        """An HTTP request on the route template `route` was answered."""
        self._http.labels(self._model, route, str(status)).inc()

    def rejected(self, status: int) -> None:
        """A generation request was refused with `status` before the engine saw it."""
        self._rejected.labels(self._model, str(status)).inc()

    def aborted(self, reason: str) -> None:
        """A request ended early; `reason` is one of a fixed few (disconnect, slow_reader, ...)."""
        self._aborted.labels(self._model, reason).inc()

    def accepted(self, choices: int) -> None:
        """A request of so many choices goes to the engine."""
        self._n.observe(choices)

    def first_token(self, ttft_s: float) -> None:
        """A sequence got its first token."""
        self._ttft.observe(ttft_s)

    def next_tokens(self, gap_s: float) -> None:
        """A later step gave a sequence tokens."""
        self._itl.observe(gap_s)

    def sequence_ended(
        self,
        finish: str,
        times: SequenceTimes,
        *,
        prompt_tokens: int,
        output_tokens: int,
        max_tokens: int,
    ) -> None:
        """A sequence ended with the wire's finish reason `finish`."""
        self._finished.labels(self._model, finish).inc()
        self._prompt_length.observe(prompt_tokens)
        self._output_length.observe(output_tokens)
        self._max_tokens.observe(max_tokens)
        self._e2e.observe(times.ended - times.arrived)
        if times.queued_s is None:
            return
        self._queue.observe(times.queued_s)
        if times.first_token is None or times.last_token is None:
            return
        started = times.submitted + times.queued_s
        decode_s = times.last_token - times.first_token
        self._prefill.observe(max(0.0, times.first_token - started))
        self._decode.observe(decode_s)
        self._inference.observe(max(0.0, times.last_token - started))
        if output_tokens > 1:
            self._tpot.observe(decode_s / (output_tokens - 1))

    def step_seen(self, stats: EngineStats) -> None:
        """A step ended. One that had nothing to compute does not count."""
        if stats.step_tokens:
            self._step_tokens.observe(stats.step_tokens)
            self._batch.observe(stats.running)

    def kv_layout(self, block_size: int, num_blocks: int) -> None:
        """The engine is up with this KV cache."""
        self._kv_config.clear()
        self._kv_config.labels(self._model, str(block_size), str(num_blocks)).set(1)

    # --- what is shown --------------------------------------------------------------------------

    def refresh(self, stats: EngineStats, *, ready: bool) -> None:
        """Bring gauges and the engine's counters up to date; call before `exposition`."""
        self._ready.set(ready)
        self._running.set(stats.running)
        self._waiting.set(stats.waiting)
        self._queued_tokens.set(stats.queued_tokens)
        self._kv_usage.set(stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0)
        free = stats.blocks_total - stats.blocks_used - stats.blocks_cached
        for state, blocks in (
            ("used", stats.blocks_used),
            ("cached", stats.blocks_cached),
            ("free", free),
        ):
            self._blocks.labels(self._model, state).set(blocks)
        self._step_s.set(stats.step_s)
        self._schedule_s.set(stats.schedule_s)
        for name, (_, read) in _TOTALS.items():
            total = read(stats)
            self._totals[name].inc(_growth(self._last.get(name, 0), total))
            self._last[name] = total
        for phase, seconds in stats.phase_s_total.items():
            before = self._last_phases.get(phase, 0.0)
            self._phases.labels(self._model, phase).inc(_growth(before, seconds))
        self._last_phases = stats.phase_s_total

    def exposition(self) -> bytes:
        """The Prometheus text format under our own names."""
        return generate_latest(self._registry)

    def vllm_exposition(self) -> bytes:
        """The same numbers under vLLM's names (with colons, which promtool's lint refuses)."""
        return generate_latest(self._vllm)

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(name, help_text, ("model",), registry=self._registry).labels(self._model)

    def _counter(self, name: str, help_text: str, label: str) -> Counter:
        return Counter(name, help_text, ("model", label), registry=self._registry)

    def _total(self, name: str, help_text: str) -> Counter:
        family = Counter(f"argosy_{name}", help_text, ("model",), registry=self._registry)
        return family.labels(self._model)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(name, help_text, ("model",), registry=self._registry, buckets=buckets)
        return family.labels(self._model)


def _growth(before: float, now: float) -> float:
    """What a total of the core has grown by; one that is less than before began anew with the core."""
    return now - before if now >= before else now
