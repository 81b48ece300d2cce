"""The replica's metrics under our own names, and on demand the same numbers under vLLM's.

Labels are bounded: the served model, route templates, statuses, finish reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from argosy.telemetry.engine_stats import EngineStats
from argosy.telemetry.instruments import (
    ITL_BUCKETS,
    PHASE_BUCKETS,
    TTFT_BUCKETS,
    Counter,
    Histogram,
    LabelValues,
    gauge_family,
)
from argosy.telemetry.vllm_metrics import VllmMetricsCollector

LENGTH_BUCKETS = (*(step * 10**decade for decade in range(5) for step in (1, 2, 5)), 100_000)
STEP_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
CHOICE_BUCKETS = (1, 2, 5, 10, 20)

_CORE_COUNTERS: dict[str, tuple[str, Callable[[EngineStats], int]]] = {
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

    arrived_at: float
    queued_s: float | None
    """Seconds in the engine's queue."""
    submitted_at: float
    first_token_at: float | None
    last_token_at: float | None
    ended_at: float


class ReplicaMetrics(Collector):
    """Every number the replica shows. One event loop counts; `exposition` may run in any thread."""

    def __init__(self, model: str) -> None:
        self._model_label = (model,)
        self._instruments: list[Counter | Histogram] = []
        """In the order in which they are shown."""
        self._create_latency_histograms()
        self._create_size_histograms()
        self._create_result_counters()
        self._phases = self._add_counter(
            "argosy_step_seconds", "Time of the engine's steps, by phase.", "phase"
        )
        self._core_counters = {
            name: self._add_counter(f"argosy_{name}", text)
            for name, (text, _) in _CORE_COUNTERS.items()
        }
        self._stats: EngineStats | None = None
        self._ready = False
        self._kv_layout: dict[LabelValues, float] = {}
        self._vllm_collector = VllmMetricsCollector(self)

    def _create_latency_histograms(self) -> None:
        seconds = "argosy_request_{}_seconds"
        self._ttft = self._add_histogram(
            "argosy_time_to_first_token_seconds",
            "From the request's arrival to its first token.",
            TTFT_BUCKETS,
        )
        self._itl = self._add_histogram(
            "argosy_inter_token_latency_seconds",
            "Between two steps that gave a sequence tokens.",
            ITL_BUCKETS,
        )
        self._tpot = self._add_histogram(
            "argosy_time_per_output_token_seconds",
            "Decode time of a sequence by its tokens after the first.",
            ITL_BUCKETS,
        )
        self._e2e = self._add_histogram(
            seconds.format("duration"), "From arrival to the last token.", PHASE_BUCKETS
        )
        self._queue = self._add_histogram(
            seconds.format("queue"), "Waiting in the engine's queue.", PHASE_BUCKETS
        )
        self._prefill = self._add_histogram(
            seconds.format("prefill"), "From the first step to the first token.", PHASE_BUCKETS
        )
        self._decode = self._add_histogram(
            seconds.format("decode"), "From the first token to the last.", PHASE_BUCKETS
        )
        self._inference = self._add_histogram(
            seconds.format("inference"), "From the first step to the last token.", PHASE_BUCKETS
        )

    def _create_size_histograms(self) -> None:
        self._prompt_length = self._add_histogram(
            "argosy_request_prompt_tokens", "Prompt tokens of a sequence.", LENGTH_BUCKETS
        )
        self._output_length = self._add_histogram(
            "argosy_request_generation_tokens", "Tokens generated for a sequence.", LENGTH_BUCKETS
        )
        self._max_tokens = self._add_histogram(
            "argosy_request_max_tokens", "Most tokens that a sequence asked for.", LENGTH_BUCKETS
        )
        self._n = self._add_histogram(
            "argosy_request_choices", "Choices that a request asked for.", CHOICE_BUCKETS
        )
        self._step_tokens = self._add_histogram(
            "argosy_step_tokens", "Tokens computed by a step.", STEP_BUCKETS
        )
        self._batch = self._add_histogram(
            "argosy_batch_size", "Sequences running in a step.", BATCH_BUCKETS
        )

    def _create_result_counters(self) -> None:
        self._finished = self._add_counter(
            "argosy_sequences_finished", "Sequences ended, by reason.", "finish_reason"
        )
        self._aborted = self._add_counter(
            "argosy_requests_aborted", "Requests ended before their time, by reason.", "reason"
        )
        self._rejected = self._add_counter(
            "argosy_requests_rejected", "Requests refused before the engine saw them.", "status"
        )
        self._http = self._add_counter(
            "argosy_http_requests", "HTTP requests answered.", "route", "status"
        )

    # --- what happens ---------------------------------------------------------------------------

    def record_http_response(self, route: str, status: int) -> None:
        """An HTTP request on the route template `route` was answered."""
        self._http.add((*self._model_label, route, str(status)))

    def record_rejection(self, status: int) -> None:
        """A generation request was refused with `status` before the engine saw it."""
        self._rejected.add((*self._model_label, str(status)))

    def record_abort(self, reason: str) -> None:
        """A request ended early; `reason` is one of a fixed few (client_closed_request, slow_reader, ...)."""
        self._aborted.add((*self._model_label, reason))

    def record_accepted(self, choices: int) -> None:
        """A request of so many choices goes to the engine."""
        self._n.observe(self._model_label, choices)

    def record_first_token(self, ttft_s: float) -> None:
        """A sequence got its first token."""
        self._ttft.observe(self._model_label, ttft_s)

    def record_inter_token_gap(self, gap_s: float) -> None:
        """A later step gave a sequence tokens."""
        self._itl.observe(self._model_label, gap_s)

    def record_sequence_end(
        self,
        finish_reason: str,
        times: SequenceTimes,
        *,
        prompt_tokens: int,
        output_tokens: int,
        max_tokens: int,
    ) -> None:
        """A sequence ended with the wire's finish reason `finish`."""
        self._finished.add((*self._model_label, finish_reason))
        self._prompt_length.observe(self._model_label, prompt_tokens)
        self._output_length.observe(self._model_label, output_tokens)
        self._max_tokens.observe(self._model_label, max_tokens)
        self._e2e.observe(self._model_label, times.ended_at - times.arrived_at)
        if times.queued_s is None:
            return
        self._queue.observe(self._model_label, times.queued_s)
        if times.first_token_at is None or times.last_token_at is None:
            return
        started = times.submitted_at + times.queued_s
        decode_s = times.last_token_at - times.first_token_at
        self._prefill.observe(self._model_label, max(0.0, times.first_token_at - started))
        self._decode.observe(self._model_label, decode_s)
        self._inference.observe(self._model_label, max(0.0, times.last_token_at - started))
        if output_tokens > 1:
            self._tpot.observe(self._model_label, decode_s / (output_tokens - 1))

    def record_step(self, stats: EngineStats) -> None:
        """A step ended. One that had nothing to compute does not count."""
        if stats.step_tokens:
            self._step_tokens.observe(self._model_label, stats.step_tokens)
            self._batch.observe(self._model_label, stats.running)

    def set_kv_layout(self, block_size: int, num_blocks: int) -> None:
        """The engine is up with this KV cache."""
        self._kv_layout = {(*self._model_label, str(block_size), str(num_blocks)): 1}

    # --- what is shown --------------------------------------------------------------------------

    def update_stats(self, stats: EngineStats, *, ready: bool) -> None:
        """Take over what the engine says of itself; call before `exposition`."""
        before, self._stats, self._ready = self._stats, stats, ready
        for name, (_, read) in _CORE_COUNTERS.items():
            known = 0 if before is None else read(before)
            self._core_counters[name].add(self._model_label, _increase(known, read(stats)))
        phases = {} if before is None else before.phase_s_total
        for phase, seconds in stats.phase_s_total.items():
            self._phases.add(
                (*self._model_label, phase), _increase(phases.get(phase, 0.0), seconds)
            )

    def exposition(self) -> bytes:
        """The Prometheus text format under our own names."""
        return generate_latest(self)

    def vllm_exposition(self) -> bytes:
        """The same numbers under vLLM's names (with colons, which promtool's lint refuses)."""
        return generate_latest(self._vllm_collector)

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's `Collector`."""
        for counted in self._instruments:
            yield counted.metric_family()
        if self._stats is not None:
            yield from self._gauge_families(self._stats)
        yield gauge_family(
            "argosy_kv_config_info",
            "How the KV cache is laid out.",
            self._kv_layout,
            *("model", "block_size", "num_blocks"),
        )
        yield gauge_family(
            "argosy_build_info", "The running version.", {(version("argosy"),): 1}, "version"
        )

    def _gauge_families(self, stats: EngineStats) -> Iterator[Metric]:
        used = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
        for name, text, value in (
            ("requests_running", "Sequences in the running batch.", stats.running),
            ("requests_waiting", "Sequences in the queue.", stats.waiting),
            ("queued_prompt_tokens", "Prompt tokens waiting to be computed.", stats.queued_tokens),
            ("kv_usage_ratio", "Part of the KV blocks that sequences hold (0 to 1).", used),
            ("step_duration_seconds", "Duration of the latest step.", stats.step_s),
            (
                "schedule_duration_seconds",
                "The scheduler's part of the latest step.",
                stats.schedule_s,
            ),
            ("ready", "1 while new requests are taken.", self._ready),
        ):
            yield gauge_family(f"argosy_{name}", text, {self._model_label: value}, "model")
        free = stats.blocks_total - stats.blocks_used - stats.blocks_cached
        yield gauge_family(
            "argosy_kv_blocks",
            "KV blocks by state: used by sequences, cached for reuse, free.",
            {
                (*self._model_label, "used"): stats.blocks_used,
                (*self._model_label, "cached"): stats.blocks_cached,
                (*self._model_label, "free"): free,
            },
            *("model", "state"),
        )

    def _add_counter(self, name: str, text: str, *labels: str) -> Counter:
        made = Counter(name, text, "model", *labels)
        self._instruments.append(made)
        return made

    def _add_histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        made = Histogram(name, text, buckets, "model")
        made.observe_many(self._model_label, ())
        self._instruments.append(made)
        return made


def _increase(before: float, now: float) -> float:
    """What a total of the core has grown by; one that is less than before began anew with the core."""
    return now - before if now >= before else now
