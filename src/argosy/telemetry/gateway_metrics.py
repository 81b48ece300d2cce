"""The gateway's metrics.

Labels are bounded: models and replicas are those of the configuration, tenants beyond `MOST_TENANTS` are counted
together as "other".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import NamedTuple

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from argosy.policy import ReplicaStatus
from argosy.telemetry.gateway_gauges import (
    GatewayGauges,
    QuotaBackendGauges,
)
from argosy.telemetry.instruments import (
    ITL_BUCKETS,
    PHASE_BUCKETS,
    TTFT_BUCKETS,
    Counter,
    CounterChild,
    Histogram,
    gauge_family,
)

MAX_TENANT_LABELS = 1000
MAX_CODE_LABELS = 100
OTHER_LABEL = "other"
NANODOLLARS_PER_DOLLAR = 10**9
QUEUE_BUCKETS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)


class _BoundedLabel:
    """Label values from outside: so many different ones, the others together."""

    def __init__(self, max_values: int) -> None:
        self._max_values = max_values
        self._values: set[str] = set()

    def __call__(self, value: str) -> str:
        if value not in self._values:
            if len(self._values) >= self._max_values:
                return OTHER_LABEL
            self._values.add(value)
        return value


class _UsageCounters(NamedTuple):
    """What a tenant used of a model."""

    tenant: str
    """As it is shown."""
    input_tokens: CounterChild
    cached_tokens: CounterChild
    output_tokens: CounterChild
    cost: CounterChild


class GatewayMetrics(Collector):
    """Every number that a gateway shows. One event loop counts; `exposition` may run in any thread."""

    def __init__(self) -> None:
        self._gauge_values = GatewayGauges()
        self._tenant_label = _BoundedLabel(MAX_TENANT_LABELS)
        self._code_label = _BoundedLabel(MAX_CODE_LABELS)
        self._usage_counters: dict[tuple[str, str], _UsageCounters] = {}
        self._instruments: list[Counter | Histogram] = []
        """In the order in which they are shown."""
        self._create_request_counters()
        self._create_latency_histograms()

    def _create_request_counters(self) -> None:
        self._http = self._add_counter(
            "argosy_gateway_http_requests", "HTTP requests answered.", "route", "status"
        )
        self._ended = self._add_counter(
            "argosy_gateway_requests",
            "Generation requests ended, by how.",
            *("model", "tenant", "status"),
        )
        self._refused = self._add_counter(
            "argosy_gateway_request_errors",
            "Generation requests refused or failed, by the error's code.",
            *("model", "code"),
        )
        self._limited = self._add_counter(
            "argosy_gateway_limit_rejections",
            "Limits that stood in a request's way, by what they limit.",
            *("model", "unit"),
        )
        self._tokens = self._add_counter(
            "argosy_gateway_tokens",
            "Tokens of prompts (input: computed; cached: found) and of answers (output: delivered).",
            *("model", "tenant", "kind"),
        )
        self._cost = self._add_counter(
            "argosy_gateway_cost_dollars",
            "Cost of requests in dollars.",
            *("model", "tenant"),
            divisor=NANODOLLARS_PER_DOLLAR,
        )
        self._retries = self._add_counter(
            "argosy_gateway_retries",
            "Attempts after the first, but for hedges and those that carried an answer on.",
            "model",
        )
        self._failovers = self._add_counter(
            "argosy_gateway_failovers", "Answers carried on by another replica.", "model"
        )
        self._hedges = self._add_counter(
            "argosy_gateway_hedges",
            "Second attempts beside one that was silent, by whether theirs was the answer.",
            *("model", "won"),
        )

    def _create_latency_histograms(self) -> None:
        self._ttft = self._add_histogram(
            "argosy_gateway_time_to_first_token_seconds",
            "From the arrival of a request for a stream to its first token.",
            TTFT_BUCKETS,
        )
        self._itl = self._add_histogram(
            "argosy_gateway_inter_token_latency_seconds",
            "Between two pieces of a stream that brought tokens.",
            ITL_BUCKETS,
        )
        self._e2e = self._add_histogram(
            "argosy_gateway_request_duration_seconds",
            "From a generation request's arrival to its end.",
            PHASE_BUCKETS,
        )
        self._queue = self._add_histogram(
            "argosy_gateway_queue_seconds", "Waiting for a replica, in vain too.", QUEUE_BUCKETS
        )

    # --- what happens ---------------------------------------------------------------------------

    def record_http_response(self, route: str, status: int) -> None:
        """An HTTP request on `route` (one of a fixed few) was answered."""
        self._http.add((route, str(status)))

    def record_first_token(self, model: str, ttft_s: float) -> None:
        """A request got its first token."""
        self._ttft.observe((model,), ttft_s)

    def record_inter_token_gaps(self, model: str, gaps_s: Sequence[float]) -> None:
        """It got more, so often, each so long after the one before."""
        if gaps_s:
            self._itl.observe_many((model,), gaps_s)

    def record_queue_wait(self, model: str, queued_s: float) -> None:
        """It was given to a replica, or waited for one in vain."""
        self._queue.observe((model,), queued_s)

    def record_retry(self, model: str) -> None:
        """It was tried once more."""
        self._retries.add((model,))

    def record_failover(self, model: str) -> None:
        """It was carried on elsewhere."""
        self._failovers.add((model,))

    def record_hedge(self, model: str, *, won: bool) -> None:
        """A second replica was asked while the first was silent."""
        self._hedges.add((model, "true" if won else "false"))

    def record_error(self, model: str, code: str) -> None:
        """It was refused, or failed, with the error `code`."""
        self._refused.add((model, self._code_label(code)))

    def record_limit_rejection(self, model: str, unit: str) -> None:
        """A limit of `unit`s, one of a fixed few, stood in its way."""
        self._limited.add((model, unit))

    def record_request_end(
        self,
        model: str,
        tenant: str,
        status: str,
        duration_s: float,
        *,
        input_tokens: int,
        cached_tokens: int,
        output_tokens: int,
        nano_dollars: int,
    ) -> None:
        """It has ended; `status` is one of a fixed few, `input_tokens` are those that were not cached."""
        used = self._usage_counters.get((model, tenant)) or self._bind_usage_counters(
            model, self._tenant_label(tenant)
        )
        self._ended.add((model, used.tenant, status))
        self._e2e.observe((model,), duration_s)
        used.input_tokens.value += input_tokens
        used.cached_tokens.value += cached_tokens
        used.output_tokens.value += output_tokens
        used.cost.value += nano_dollars

    def _bind_usage_counters(self, model: str, tenant: str) -> _UsageCounters:
        used = self._usage_counters[model, tenant] = _UsageCounters(
            tenant,
            self._tokens.child((model, tenant, "input")),
            self._tokens.child((model, tenant, "cached")),
            self._tokens.child((model, tenant, "output")),
            self._cost.child((model, tenant)),
        )
        return used

    # --- what is shown --------------------------------------------------------------------------

    def exposition(self, gauges: GatewayGauges) -> bytes:
        """The Prometheus text format."""
        self._gauge_values = gauges
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's `Collector`."""
        for counted in self._instruments:
            yield counted.metric_family()
        yield from self._gauge_families(self._gauge_values)

    def _gauge_families(self, reading: GatewayGauges) -> Iterator[Metric]:
        for name, text, value in (
            ("requests_in_flight", "HTTP requests being answered.", reading.in_flight),
            ("fast_path_streams", "Streams that native code passes on.", reading.fast_path_streams),
            (
                "usage_pending_records",
                "Rows of usage that the store does not have yet.",
                reading.usage_pending_records,
            ),
            (
                "usage_unpersisted_records",
                "Rows of usage, of running requests too, that are in memory only: the disk is full.",
                reading.usage_unpersisted_records,
            ),
        ):
            yield gauge_family(f"argosy_gateway_{name}", text, {(): value})
        yield gauge_family(
            "argosy_gateway_queue_depth",
            "Requests that wait for a replica.",
            {(model,): waiting for model, waiting in reading.queue_depths.items()},
            "model",
        )
        yield gauge_family(
            "argosy_gateway_replica_requests_in_flight",
            "Requests of this gateway at a replica.",
            {(one.model, one.replica): one.in_flight for one in reading.replicas},
            *("model", "replica"),
        )
        yield gauge_family(
            "argosy_gateway_replica_status",
            "1 for the status of a replica: ready, starting, draining, backoff, ejected, unreachable.",
            {
                (one.model, one.replica, status.value): one.status is status
                for one in reading.replicas
                for status in ReplicaStatus
            },
            *("model", "replica", "status"),
        )
        if reading.store_up is not None:
            yield gauge_family(
                "argosy_gateway_store_up",
                "1 while accounts are as the store has them; 0: as they were when it was last read.",
                {(): reading.store_up},
            )
        if reading.quota_backend is not None:
            yield from _quota_backend_families(reading.quota_backend)
        yield gauge_family(
            "argosy_gateway_build_info",
            "The running version.",
            {(version("argosy"),): 1},
            "version",
        )

    def _add_counter(self, name: str, text: str, *labels: str, divisor: int = 1) -> Counter:
        made = Counter(name, text, *labels, divisor=divisor)
        self._instruments.append(made)
        return made

    def _add_histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        made = Histogram(name, text, buckets, "model")
        self._instruments.append(made)
        return made


def _quota_backend_families(reading: QuotaBackendGauges) -> Iterator[Metric]:
    yield gauge_family(
        "argosy_gateway_quota_store_up",
        "1 while Redis, where the limits are shared, can be reached.",
        {(): reading.is_connected},
    )
    unsure = Counter(
        "argosy_gateway_quota_degraded_decisions",
        "Requests let in or refused, and streams carried on or ended, while Redis could not be reached.",
        "outcome",
    )
    unsure.add(("allowed",), reading.degraded_allowed)
    unsure.add(("rejected",), reading.degraded_rejected)
    yield unsure.metric_family()
