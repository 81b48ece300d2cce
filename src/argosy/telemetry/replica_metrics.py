"""Prometheus metrics of a replica, under Argosy's names and optionally under vLLM's.

The number of label values is bounded. They are the served model, route templates, statuses and finish reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from argosy.telemetry.core_stats import CoreStats
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
from argosy.version import VERSION

LENGTH_BUCKETS = (*(step * 10**decade for decade in range(5) for step in (1, 2, 5)), 100_000)
STEP_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
CHOICE_BUCKETS = (1, 2, 5, 10, 20)

_CORE_COUNTERS = {
    "prompt_tokens": "Prompt tokens computed or found in the prefix cache.",
    "generation_tokens": "Generated tokens.",
    "prefix_query_tokens": "Prompt tokens looked up in the prefix cache.",
    "prefix_hit_tokens": "Prompt tokens found in the prefix cache.",
    "host_hit_tokens": "Prompt tokens found in the host tier of the cache.",
    "preemptions": "Sequences preempted to free KV blocks.",
    "corrupt_blocks": "Host blocks dropped because their checksum was wrong.",
    "grammar_compiles": "Grammars compiled by the engine, including those that it refused.",
    "grammar_cache_hits": "Constrained requests whose grammar was compiled already.",
    "grammar_compile_seconds": "Time spent on compiling grammars.",
    "grammar_dead_ends": "Sequences ended because no token could continue their constrained output.",
    "masked_tokens": "Tokens sampled under the mask of a grammar or a reasoning budget.",
    "mask_fill_seconds": "Time a thread spent on computing masks, while the device computed.",
    "mask_wait_seconds": "Time for which sampling waited for masks.",
    "out_of_memory_steps": "Steps that ran out of memory and were repeated in smaller steps.",
    "draft_gain_seconds": "Time of steps that sequences did not wait for, because drafts were accepted.",
    "draft_cost_seconds": "Time that sequences waited longer for steps, because of drafts.",
    "adapter_load_seconds": "Time spent on loading LoRA adapters, including those that failed.",
    "adapter_wait_seconds": "Time for which requests waited for their adapter.",
    "adapter_evictions": "Adapters evicted to make room for others.",
}
"""Help text of each counter that the engine core keeps, in the field `*_total` of `CoreStats`."""
_DRAFT_COUNTERS = {
    "drafts": "Steps of a sequence that verified drafts.",
    "draft_tokens": "Drafts that steps verified.",
    "accepted_draft_tokens": "Drafts that equalled the sampled tokens, so that a step had more than one token.",
}
"""Help text of each counter that the engine core keeps by drafter, in the field `*_total` of `CoreStats`."""


@dataclass(slots=True)
class SequenceTimes:
    """Times of one sequence in seconds on a monotonic clock; None for a state that the sequence did not reach."""

    arrived_at: float
    submitted_at: float
    queued_s: float | None = None
    """Seconds in the engine's queue."""
    first_token_at: float | None = None
    last_token_at: float | None = None
    ended_at: float = 0.0


ENGINE_STATES = ("starting", "ready", "sleeping", "waking", "restarting", "failed", "stopped")
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""States by level of sleep, as vLLM names them."""


@dataclass(frozen=True, slots=True)
class SleepStats:
    """Sleep of the model of a replica."""

    state: str = "ready"
    """State of the engine, of `ENGINE_STATES`."""
    level: int = 0
    totals: Mapping[int, int] = field(default_factory=dict)
    """Number of times that it fell asleep, by level."""
    wake_s: float = 0.0
    """How long it took to wake up last."""
    mapped_bytes: int = 0
    """Bytes of mapped weights, which are 0 while it sleeps."""


class ReplicaMetrics(Collector):
    """Metrics of a replica. Record from one event loop; `exposition` may run in any thread.

    Callers add to the counters and histograms, whose label values begin with `model_label`.
    """

    def __init__(self, model: str) -> None:
        self.model_label = (model,)
        self._instruments: list[Counter | Histogram] = []
        """Instruments in the order of the exposition."""
        self._create_latency_histograms()
        self._create_size_histograms()
        self._create_result_counters()
        self._phases = self._add_counter(
            "argosy_step_seconds", "Time spent in engine steps by phase.", "phase"
        )
        self._core_counters = {
            name: self._add_counter(f"argosy_{name}", help_text)
            for name, help_text in _CORE_COUNTERS.items()
        }
        self._draft_counters = {
            name: self._add_counter(f"argosy_{name}", help_text, "drafter")
            for name, help_text in _DRAFT_COUNTERS.items()
        }
        self._adapter_loads = self._add_counter(
            "argosy_adapter_loads", "Loads of LoRA adapters by result.", "result"
        )
        self._accepted_by_position = self._add_counter(
            "argosy_accepted_draft_tokens_per_position",
            "Accepted drafts by their position among the drafts of a step, from 0.",
            *("drafter", "position"),
        )
        self._stats: CoreStats | None = None
        self._ready = False
        self._sleep = SleepStats()
        self._sleeps = self._add_counter(
            "argosy_sleeps", "Times that the model fell asleep, by level.", "level"
        )
        self._memory_bytes = self._memory_bound_bytes = 0
        self._kv_layout: dict[LabelValues, float] = {}
        self._vllm_collector = VllmMetricsCollector(self)

    def _create_latency_histograms(self) -> None:
        duration_name = "argosy_request_{}_seconds"
        self.ttft = self._add_histogram(
            "argosy_time_to_first_token_seconds",
            "Time from the arrival of a request to its first token.",
            TTFT_BUCKETS,
        )
        self.itl = self._add_histogram(
            "argosy_inter_token_latency_seconds",
            "Time between two steps that generated tokens of a sequence.",
            ITL_BUCKETS,
        )
        self._tpot = self._add_histogram(
            "argosy_time_per_output_token_seconds",
            "Decode time of a sequence divided by its tokens after the first.",
            ITL_BUCKETS,
        )
        self._e2e = self._add_histogram(
            duration_name.format("duration"),
            "Time from the arrival to the last token.",
            PHASE_BUCKETS,
        )
        self._queue = self._add_histogram(
            duration_name.format("queue"), "Time in the engine's queue.", PHASE_BUCKETS
        )
        self._prefill = self._add_histogram(
            duration_name.format("prefill"),
            "Time from the first step to the first token.",
            PHASE_BUCKETS,
        )
        self._decode = self._add_histogram(
            duration_name.format("decode"), "Time from the first token to the last.", PHASE_BUCKETS
        )
        self._inference = self._add_histogram(
            duration_name.format("inference"),
            "Time from the first step to the last token.",
            PHASE_BUCKETS,
        )

    def _create_size_histograms(self) -> None:
        self._prompt_length = self._add_histogram(
            "argosy_request_prompt_tokens", "Prompt tokens of a sequence.", LENGTH_BUCKETS
        )
        self._output_length = self._add_histogram(
            "argosy_request_generation_tokens", "Generated tokens of a sequence.", LENGTH_BUCKETS
        )
        self._max_tokens = self._add_histogram(
            "argosy_request_max_tokens", "Token limit of a sequence.", LENGTH_BUCKETS
        )
        self.choices = self._add_histogram(
            "argosy_request_choices", "Requested choices per request.", CHOICE_BUCKETS
        )
        self._step_tokens = self._add_histogram(
            "argosy_step_tokens", "Tokens computed per step.", STEP_BUCKETS
        )
        self._batch_size = self._add_histogram(
            "argosy_batch_size", "Running sequences per step.", BATCH_BUCKETS
        )

    def _create_result_counters(self) -> None:
        self._finished = self._add_counter(
            "argosy_sequences_finished", "Ended sequences by finish reason.", "finish_reason"
        )
        self.aborted = self._add_counter(
            "argosy_requests_aborted", "Aborted requests by reason.", "reason"
        )
        self.rejected = self._add_counter(
            "argosy_requests_rejected",
            "Requests rejected before they reached the engine.",
            "status",
        )
        self.http_requests = self._add_counter(
            "argosy_http_requests", "HTTP responses sent.", "route", "status"
        )
        self.connection_refusals = self._add_counter(
            "argosy_http_connections_refused",
            "Client connections refused because all connections of their address ran requests.",
        )
        self.connection_refusals.child(self.model_label)
        self.connection_evictions = self._add_counter(
            "argosy_http_connections_evicted",
            "Idle client connections closed for new ones, by the limit that was reached.",
            "reason",
        )
        self._tool_calls = self._add_counter(
            "argosy_tool_calls",
            "Tool calls in model output. An incomplete call was cut or malformed.",
            "result",
        )

    # --- events ---------------------------------------------------------------------------------

    def record_tool_calls(self, complete: int, incomplete: int) -> None:
        """Count the tool calls of a sequence."""
        for result, calls in (("complete", complete), ("incomplete", incomplete)):
            if calls:
                self._tool_calls.add((*self.model_label, result), calls)

    def record_sequence_end(
        self,
        finish_reason: str,
        times: SequenceTimes,
        *,
        prompt_tokens: int,
        output_tokens: int,
        max_tokens: int,
    ) -> None:
        """Record the end of a sequence. `finish_reason` is that of the response, or why it failed or ended early."""
        self._finished.add((*self.model_label, finish_reason))
        self._prompt_length.observe(self.model_label, prompt_tokens)
        self._output_length.observe(self.model_label, output_tokens)
        self._max_tokens.observe(self.model_label, max_tokens)
        self._e2e.observe(self.model_label, times.ended_at - times.arrived_at)
        if times.queued_s is None:
            return
        self._queue.observe(self.model_label, times.queued_s)
        if times.first_token_at is None or times.last_token_at is None:
            return
        started_at = times.submitted_at + times.queued_s
        decode_s = times.last_token_at - times.first_token_at
        self._prefill.observe(self.model_label, max(0.0, times.first_token_at - started_at))
        self._decode.observe(self.model_label, decode_s)
        self._inference.observe(self.model_label, max(0.0, times.last_token_at - started_at))
        if output_tokens > 1:
            self._tpot.observe(self.model_label, decode_s / (output_tokens - 1))

    def record_step(self, stats: CoreStats) -> None:
        """Record an engine step; empty steps are ignored."""
        if stats.step_tokens:
            self._step_tokens.observe(self.model_label, stats.step_tokens)
            self._batch_size.observe(self.model_label, stats.running)

    def set_kv_layout(self, block_size: int, num_blocks: int) -> None:
        """Set the KV cache layout when the engine is ready."""
        self._kv_layout = {(*self.model_label, str(block_size), str(num_blocks)): 1}

    # --- exposition -----------------------------------------------------------------------------

    def update_stats(
        self,
        stats: CoreStats,
        *,
        ready: bool,
        memory_bytes: int = 0,
        memory_bound_bytes: int = 0,
        sleep: SleepStats | None = None,
    ) -> None:
        """Update the metrics from the engine core's statistics and its memory; call it before `exposition`."""
        earlier_sleep, self._sleep = self._sleep, sleep or self._sleep
        for level, count in self._sleep.totals.items():
            increase = count - earlier_sleep.totals.get(level, 0)
            self._sleeps.add((*self.model_label, str(level)), increase)
        self._memory_bytes, self._memory_bound_bytes = memory_bytes, memory_bound_bytes
        previous, self._stats, self._ready = self._stats or CoreStats(), stats, ready
        for name, counter in self._core_counters.items():
            total = attrgetter(name.replace("_seconds", "_s") + "_total")
            counter.add(self.model_label, _increase(total(previous), total(stats)))
        self._add_increases(self._phases, previous.phase_s_total, stats.phase_s_total)
        self._add_increases(
            self._adapter_loads, previous.adapter_loads_total, stats.adapter_loads_total
        )
        for name, counter in self._draft_counters.items():
            totals = attrgetter(f"{name}_total")
            self._add_increases(counter, totals(previous), totals(stats))
        for drafter, counts in stats.accepted_by_position_total.items():
            earlier = previous.accepted_by_position_total.get(drafter) or repeat(0)
            for position, (before, count) in enumerate(zip(earlier, counts, strict=False)):
                self._accepted_by_position.add(
                    (*self.model_label, drafter, str(position)), _increase(before, count)
                )

    def _add_increases(
        self, counter: Counter, previous: Mapping[str, float], current: Mapping[str, float]
    ) -> None:
        for label, total in current.items():
            counter.add((*self.model_label, label), _increase(previous.get(label, 0), total))

    def set_lora_requests(self, running: Iterable[str], waiting: Iterable[str], limit: int) -> None:
        """Set the names of the adapters whose requests generate tokens, and of others whose requests wait.

        They are exported under vLLM's name only, because each combination of names is another series.
        """
        self._vllm_collector.lora_requests = (
            str(limit),
            ",".join(sorted(running)),
            ",".join(sorted(waiting)),
        )

    def exposition(self) -> bytes:
        """Return all metrics in the Prometheus text format under Argosy's names."""
        return generate_latest(self)

    def vllm_exposition(self) -> bytes:
        """Return the same metrics under vLLM's names, whose colons fail promtool's lint."""
        return generate_latest(self._vllm_collector)

    def collect(self) -> Iterator[Metric]:
        for instrument in self._instruments:
            yield instrument.metric_family()
        if self._stats is not None:
            yield from self._gauge_families(self._stats)
        yield gauge_family(
            "argosy_kv_config_info",
            "Layout of the KV cache.",
            self._kv_layout,
            *("model", "block_size", "num_blocks"),
        )
        yield gauge_family(
            "argosy_build_info",
            "Version of the running program.",
            {(VERSION,): 1},
            "version",
        )

    def _gauge_families(self, stats: CoreStats) -> Iterator[Metric]:
        usage_ratio = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
        for name, help_text, value in (
            ("requests_running", "Sequences in the running batch.", stats.running),
            ("requests_waiting", "Sequences in the queue.", stats.waiting),
            ("requests_held", "Sequences that wait for a grammar or an adapter.", stats.held),
            ("adapters_resident", "LoRA adapters in memory.", stats.adapters_resident),
            ("adapter_bytes", "Memory of LoRA adapters.", stats.adapter_bytes),
            ("queued_prompt_tokens", "Prompt tokens not computed yet.", stats.queued_tokens),
            (
                "kv_usage_ratio",
                "Fraction of the KV blocks that sequences hold (0 to 1).",
                usage_ratio,
            ),
            (
                "step_token_budget",
                "Maximum tokens in one step, reduced for a while after memory ran out.",
                stats.step_token_budget,
            ),
            (
                "compute_threads",
                "CPU threads that compute, which follow the free CPUs. 0 on a GPU.",
                stats.compute_threads,
            ),
            ("step_duration_seconds", "Duration of the latest step.", stats.step_s),
            (
                "schedule_duration_seconds",
                "Time of the latest step spent on scheduling.",
                stats.schedule_s,
            ),
            (
                "engine_memory_bytes",
                "Private memory of the engine process, without mapped weights.",
                self._memory_bytes,
            ),
            (
                "engine_memory_bound_bytes",
                "Memory above which the engine process sheds and is replaced. 0 means no bound.",
                self._memory_bound_bytes,
            ),
            ("wake_seconds", "How long the model took to wake up last.", self._sleep.wake_s),
            (
                "resident_model_bytes",
                "Private memory of the engine process and the weights that it maps, without those that sleep.",
                self._memory_bytes + self._sleep.mapped_bytes,
            ),
            ("ready", "1 while the replica accepts new requests.", self._ready),
        ):
            yield gauge_family(f"argosy_{name}", help_text, {self.model_label: value}, "model")
        for name, help_text, states, present in (
            ("engine_state", "1 for the state of the engine.", ENGINE_STATES, self._sleep.state),
            (
                "engine_sleep_state",
                "1 for what sleep has freed: nothing (awake), all but the weights (weights_offloaded), or all.",
                SLEEP_STATES,
                SLEEP_STATES[self._sleep.level],
            ),
        ):
            values: dict[LabelValues, float] = {
                (*self.model_label, state): state == present for state in states
            }
            label = name.removeprefix("engine_")
            yield gauge_family(f"argosy_{name}", help_text, values, "model", label)
        free = stats.blocks_total - stats.blocks_used - stats.blocks_cached
        yield gauge_family(
            "argosy_kv_blocks",
            "KV blocks by state: used by sequences, cached for reuse, or free.",
            {
                (*self.model_label, "used"): stats.blocks_used,
                (*self.model_label, "cached"): stats.blocks_cached,
                (*self.model_label, "free"): free,
            },
            *("model", "state"),
        )

    def _add_counter(self, name: str, help_text: str, *labels: str) -> Counter:
        counter = Counter(name, help_text, "model", *labels)
        self._instruments.append(counter)
        return counter

    def _add_histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(name, help_text, buckets, "model")
        histogram.observe_many(self.model_label, ())
        self._instruments.append(histogram)
        return histogram


def _increase(previous: float, current: float) -> float:
    """Return the increase of a total, which restarts from 0 with the core's process."""
    return current - previous if current >= previous else current
