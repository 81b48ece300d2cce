"""Prometheus metrics of a gateway: counters of events, and gauges that are read at each scrape.

The number of label values is bounded. Models and replicas are those of the configuration. Tenants beyond
`MAX_TENANT_LABELS` and error codes beyond `MAX_CODE_LABELS` are counted as `OTHER_LABEL`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from argosy.policy import ReplicaStatus
from argosy.protocol import TokenUsage
from argosy.telemetry.instruments import (
    ITL_BUCKETS,
    PHASE_BUCKETS,
    TTFT_BUCKETS,
    Counter,
    CounterChild,
    Histogram,
    gauge_family,
)
from argosy.version import VERSION

MAX_TENANT_LABELS = 1000
MAX_CODE_LABELS = 100
MAX_VERSION_LABELS = 1000
OTHER_LABEL = "other"
NANODOLLARS_PER_DOLLAR = 10**9
QUEUE_BUCKETS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
BACKUP_GAUGES = {
    "backup_age_seconds": "Age of the newest backup of the store.",
    "backup_drill_passed": "Whether the last drill restored a backup without a problem.",
    "backup_drill_age_seconds": "Time since the last drill.",
    "backup_drill_restore_seconds": "Time that the last drill took to restore and check a backup.",
    "backup_drill_loss_seconds": "Age of the newest backup at the last drill: the loss without the store.",
}


@dataclass(frozen=True, slots=True)
class ReplicaGauges:
    """Current state of one replica."""

    model: str
    replica: str
    status: ReplicaStatus
    in_flight: int


@dataclass(frozen=True, slots=True)
class QuotaBackendGauges:
    """State of the quota backend that gateways share."""

    is_connected: bool
    """Whether the quota backend is reachable."""
    degraded_allowed: int
    """Requests and running streams permitted while the backend was unreachable, since the gateway started."""
    degraded_rejected: int
    """Requests and running streams rejected while the backend was unreachable, since the gateway started."""


@dataclass(frozen=True, slots=True)
class GatewayGauges:
    """Current values of a gateway that are read rather than counted."""

    in_flight: int = 0
    """Running HTTP requests."""
    connections: int = 0
    """Open client connections."""
    fast_path_streams: int = 0
    """Streams on the fast path."""
    event_loop_lag_s: float = 0.0
    """Mean delay of the event loop's callbacks in seconds."""
    queue_depths: Mapping[str, int] = field(default_factory=dict)
    """Queued requests by model."""
    replicas: Sequence[ReplicaGauges] = ()
    arithmetics: Mapping[str, int] = field(default_factory=dict)
    """Number of different arithmetic identities of the replicas by model; of the version with most."""
    routes: Mapping[str, int] = field(default_factory=dict)
    """Version of the route that the gateway follows, by pool; empty without rollouts."""
    serving_replicas: Mapping[str, int] = field(default_factory=dict)
    """Number of replicas that shall serve by model, as the controller published it; empty without a fleet."""
    desired_replicas: Mapping[str, int] = field(default_factory=dict)
    """Number of replicas that the fleet's autoscaler wants by pool; empty without a controller."""
    firing_alerts: Mapping[tuple[str, ...], int] | None = None
    """Alerts that fire by name and severity; None if the controller of a fleet evaluates them."""
    usage_pending_records: int = 0
    """Usage records that are not in the store yet."""
    usage_unpersisted_records: int = 0
    """Usage records that are only in memory because the disk is full, and would be lost with the gateway."""
    stored_bytes: Mapping[str, int] = field(default_factory=dict)
    """Stored bytes of responses and conversations by tenant."""
    backups: Mapping[str, float] = field(default_factory=dict)
    """Figures of backups by the names in `BACKUP_GAUGES`; empty without a backup or a store."""
    batch_windows: Mapping[str, int] | None = None
    """Lines of batches that may run by model; None without a store."""
    batch_lines_running: int = 0
    batches_at_risk: int = 0
    """Batches whose lines may not end in time."""
    store_up: bool | None = None
    """Whether the account snapshot is current; None without a store."""
    quota_backend: QuotaBackendGauges | None = None
    """State of the quota backend; None if the gateway shares no limits."""


class _BoundedLabel:
    """Label with at most `max_values` values from outside; further values become `OTHER_LABEL`."""

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
    """Counters of one tenant's usage of a model."""

    tenant: str
    """Label value of the tenant."""
    input_tokens: CounterChild
    cached_tokens: CounterChild
    output_tokens: CounterChild
    cost: CounterChild


class GatewayMetrics(Collector):
    """Metrics of a gateway. Record from one event loop; `exposition` may run in any thread.

    Callers add to the counters and histograms, whose label values are few. The methods `record_*` bound the values of
    labels that come from outside.
    """

    def __init__(self) -> None:
        self._gauge_values = GatewayGauges()
        self._tenant_label = _BoundedLabel(MAX_TENANT_LABELS)
        self._code_label = _BoundedLabel(MAX_CODE_LABELS)
        self._version_label = _BoundedLabel(MAX_VERSION_LABELS)
        self._usage_counters: dict[tuple[str, str], _UsageCounters] = {}
        self._instruments: list[Counter | Histogram] = []
        """Instruments in the order of the exposition."""
        self._create_request_counters()
        self._create_rollout_counters()
        self._create_latency_histograms()

    def _create_request_counters(self) -> None:
        self.http_requests = self._add_counter(
            "argosy_gateway_http_requests", "HTTP responses sent.", "route", "status"
        )
        self.connection_refusals = self._add_counter(
            "argosy_gateway_connections_refused",
            "Client connections refused because all connections of their address ran requests.",
        )
        self.connection_refusals.child(())
        self.connection_evictions = self._add_counter(
            "argosy_gateway_connections_evicted",
            "Idle client connections closed for new ones, by the limit that was reached.",
            "reason",
        )
        self._requests = self._add_counter(
            "argosy_gateway_requests",
            "Ended generation requests by status.",
            *("model", "tenant", "status"),
        )
        self._errors = self._add_counter(
            "argosy_gateway_request_errors",
            "Rejected and failed generation requests by error code.",
            *("model", "code"),
        )
        self.limit_rejections = self._add_counter(
            "argosy_gateway_limit_rejections",
            "Rejections by a limit, by the limited unit.",
            *("model", "unit"),
        )
        self.cache_requests = self._add_counter(
            "argosy_gateway_cache_requests",
            "Requests that a cache rule matches, by how the cache answered: hit, joined, semantic, miss or bypass.",
            *("rule", "result"),
        )
        self.cache_saved_seconds = self._add_counter(
            "argosy_gateway_cache_saved_seconds",
            "Time that the computation of kept answers took, for each request that the cache answered.",
            "rule",
        )
        self.semantic_lookups = self._add_counter(
            "argosy_gateway_semantic_lookups",
            "Questions of rules with `semantic`: served, would_serve (dry run), rejected, none or unavailable; and "
            "answers that a dry run compared: agreed or differed.",
            *("rule", "result"),
        )
        self.route_decisions = self._add_counter(
            "argosy_gateway_route_decisions",
            "Decisions of routes about prompts, load and budgets: simple, not_simple, escalated or degraded.",
            *("route", "decision", "dry_run"),
        )
        self.content_matches = self._add_counter(
            "argosy_gateway_content_matches",
            "Matches of content rules, by the side on which they were found: input or output.",
            *("rule", "side", "detector", "action"),
        )
        self.quality_samples = self._add_counter(
            "argosy_gateway_quality_samples",
            "Sampled answers by whether their grade passes: passed or failed.",
            *("model", "version", "result"),
        )
        self.objective_requests = self._add_counter(
            "argosy_objective_requests",
            "Requests that count for a service level objective; tokens if it is about the time between them.",
            "objective",
        )
        self.objective_misses = self._add_counter(
            "argosy_objective_misses",
            "Those that missed it, by error code, or `slow`.",
            *("objective", "code"),
        )
        self.traces = self._add_counter(
            "argosy_gateway_traces",
            "Ended requests by whether their trace was kept, and why: error, attempts, caller, ratio, unsampled, bound"
            " or tenant_bound.",
            "decision",
        )
        self.spans_dropped = self._add_counter(
            "argosy_gateway_spans_dropped",
            "Spans of kept traces that were not delivered: queue_full, refused or stopped.",
            "reason",
        )
        self.trace_exports = self._add_counter(
            "argosy_gateway_trace_exports",
            "Batches of spans that were sent, by outcome: success or failure.",
            "outcome",
        )
        self._tokens = self._add_counter(
            "argosy_gateway_tokens",
            "Tokens by kind: input (computed), cached (found in a prefix cache) and output (delivered).",
            *("model", "tenant", "kind"),
        )
        self._cost = self._add_counter(
            "argosy_gateway_cost_dollars",
            "Cost of requests in dollars.",
            *("model", "tenant"),
            divisor=NANODOLLARS_PER_DOLLAR,
        )
        self.batch_lines = self._add_counter(
            "argosy_batch_lines",
            "Ends of the lines of batches at this gateway: completed, failed, or retried later.",
            "outcome",
        )
        self.batch_claims_lapsed = self._add_counter(
            "argosy_batch_claims_lapsed",
            "Lines of batches that another gateway held when it stopped, and that this one has released.",
        )
        self.retries = self._add_counter(
            "argosy_gateway_retries",
            "Attempts after the first, without hedged attempts and failovers of a started response.",
            "model",
        )
        self.failovers = self._add_counter(
            "argosy_gateway_failovers", "Responses resumed on another replica.", "model"
        )
        self.pauses = self._add_counter(
            "argosy_gateway_pauses",
            "Streams paused for requests that had waited too long.",
            "model",
        )
        self.hedges = self._add_counter(
            "argosy_gateway_hedges",
            "Hedged attempts, by whether the second attempt delivered the response.",
            *("model", "won"),
        )

    def _create_rollout_counters(self) -> None:
        self.shadow_requests = self._add_counter(
            "argosy_shadow_requests",
            "Requests selected to be copied to another version, by the status of the copy, capped or dropped.",
            *("model", "outcome"),
        )
        self.shadow_answers = self._add_counter(
            "argosy_shadow_answers",
            "Requests without random sampling whose copy was answered too, by whether the tokens are equal.",
            *("model", "equal"),
        )
        self.rollbacks = self._add_counter(
            "argosy_gateway_rollbacks",
            "Versions that this gateway rolled back by itself, because no controller was heard.",
            "model",
        )
        self._version_requests = self._add_counter(
            "argosy_version_requests",
            "Ended generation requests for models whose changes are rollouts, by the version that served them last.",
            *("model", "version"),
        )

    def _create_latency_histograms(self) -> None:
        self.ttft = self._add_histogram(
            "argosy_gateway_time_to_first_token_seconds",
            "Time from the arrival of a streaming request to its first token.",
            TTFT_BUCKETS,
        )
        self.itl = self._add_histogram(
            "argosy_gateway_inter_token_latency_seconds",
            "Time between two chunks of a stream that contain tokens.",
            ITL_BUCKETS,
        )
        self._e2e = self._add_histogram(
            "argosy_gateway_request_duration_seconds",
            "Time from the arrival of a generation request to its end.",
            PHASE_BUCKETS,
        )
        self.queue = self._add_histogram(
            "argosy_gateway_queue_seconds",
            "Time spent in the queue, including requests that were never dispatched.",
            QUEUE_BUCKETS,
        )

    # --- events ---------------------------------------------------------------------------------

    def record_error(self, model: str, code: str) -> None:
        """Count a rejected or failed request."""
        self._errors.add((model, self._code_label(code)))

    def record_version(self, model: str, version: str) -> None:
        """Count a request that a version of a model served."""
        self._version_requests.add((model, self._version_label(version)))

    def record_request_end(
        self,
        model: str,
        tenant: str,
        status: str,
        duration_s: float | None,
        usage: TokenUsage,
        nano_dollars: int,
    ) -> None:
        """Record the end of a request, with its duration if a client waited. The label `status` has a few values."""
        counters = self._usage_counters.get((model, tenant)) or self._bind_usage_counters(
            model, self._tenant_label(tenant)
        )
        self._requests.add((model, counters.tenant, status))
        if duration_s is not None:
            self._e2e.observe((model,), duration_s)
        counters.input_tokens.value += usage.uncached_tokens
        counters.cached_tokens.value += usage.cached_tokens
        counters.output_tokens.value += usage.output_tokens
        counters.cost.value += nano_dollars

    def _bind_usage_counters(self, model: str, tenant: str) -> _UsageCounters:
        counters = self._usage_counters[model, tenant] = _UsageCounters(
            tenant,
            self._tokens.child((model, tenant, "input")),
            self._tokens.child((model, tenant, "cached")),
            self._tokens.child((model, tenant, "output")),
            self._cost.child((model, tenant)),
        )
        return counters

    # --- exposition -----------------------------------------------------------------------------

    def exposition(self, gauges: GatewayGauges) -> bytes:
        """Return all metrics in the Prometheus text format."""
        self._gauge_values = gauges
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        for instrument in self._instruments:
            yield instrument.metric_family()
        yield from self._gauge_families(self._gauge_values)

    def _gauge_families(self, gauges: GatewayGauges) -> Iterator[Metric]:
        for name, help_text, value in (
            ("requests_in_flight", "Running HTTP requests.", gauges.in_flight),
            ("connections", "Open client connections.", gauges.connections),
            (
                "fast_path_streams",
                "Streams on the fast path, which native code forwards.",
                gauges.fast_path_streams,
            ),
            (
                "event_loop_lag_seconds",
                "Mean delay of the event loop's callbacks. From 0.1 s on, reads of the admin API run one at a time.",
                gauges.event_loop_lag_s,
            ),
            (
                "usage_pending_records",
                "Usage records that are not in the store yet.",
                gauges.usage_pending_records,
            ),
            (
                "usage_unpersisted_records",
                "Usage records, including running requests, that are only in memory because the disk is full.",
                gauges.usage_unpersisted_records,
            ),
        ):
            yield gauge_family(f"argosy_gateway_{name}", help_text, {(): value})
        yield gauge_family(
            "argosy_gateway_queue_depth",
            "Requests in the queue.",
            {(model,): depth for model, depth in gauges.queue_depths.items()},
            "model",
        )
        yield gauge_family(
            "argosy_gateway_replica_requests_in_flight",
            "Running requests of this gateway on a replica.",
            {(replica.model, replica.replica): replica.in_flight for replica in gauges.replicas},
            *("model", "replica"),
        )
        yield gauge_family(
            "argosy_gateway_replica_status",
            "1 for the status of a replica: ready, starting, draining, cordoned, backoff, ejected or unreachable.",
            {
                (replica.model, replica.replica, status.value): replica.status is status
                for replica in gauges.replicas
                for status in ReplicaStatus
            },
            *("model", "replica", "status"),
        )
        yield gauge_family(
            "argosy_gateway_pool_arithmetics",
            "Different arithmetic identities of a model's replicas. Streams are resumed only within one; more than 1"
            " is a mixed pool.",
            {(model,): count for model, count in gauges.arithmetics.items()},
            "model",
        )
        if gauges.routes:
            yield gauge_family(
                "argosy_route_version",
                "Version of the route that divides the requests of a pool among the versions of its model."
                " Absent without rollouts.",
                {(pool,): version for pool, version in gauges.routes.items()},
                "pool",
            )
        if gauges.desired_replicas:
            yield gauge_family(
                "argosy_desired_replicas",
                "Replicas that the autoscaler wants, also if it is only advisory. Absent without a controller.",
                {(pool,): count for pool, count in gauges.desired_replicas.items()},
                "pool",
            )
        if gauges.firing_alerts is not None:
            yield gauge_family(
                "argosy_alerts_firing",
                "Alerts that fire, by name and severity. Absent in a fleet, whose controller evaluates them.",
                gauges.firing_alerts,
                "alertname",
                "severity",
            )
        yield from _batch_families(gauges)
        yield from self._store_families(gauges)
        if gauges.quota_backend is not None:
            yield from _quota_backend_families(gauges.quota_backend)
        yield gauge_family(
            "argosy_gateway_build_info",
            "Version of the running program.",
            {(VERSION,): 1},
            "version",
        )

    def _store_families(self, gauges: GatewayGauges) -> Iterator[Metric]:
        if gauges.store_up is None:
            return
        yield gauge_family(
            "argosy_gateway_stored_bytes",
            "Bytes of stored responses and conversations of a tenant in the store, read every 10 minutes.",
            self._sum_by_tenant(gauges.stored_bytes),
            "tenant",
        )
        yield gauge_family(
            "argosy_gateway_store_up",
            "1 while the store is readable, 0 while the gateway uses the last account snapshot.",
            {(): gauges.store_up},
        )

        for name, value in gauges.backups.items():
            yield gauge_family(f"argosy_{name}", BACKUP_GAUGES[name], {(): value})

    def _sum_by_tenant(self, values: Mapping[str, int]) -> dict[tuple[str, ...], int]:
        summed: defaultdict[tuple[str, ...], int] = defaultdict(int)
        for tenant, value in values.items():
            summed[self._tenant_label(tenant),] += value
        return summed

    def _add_counter(self, name: str, help_text: str, *labels: str, divisor: int = 1) -> Counter:
        counter = Counter(name, help_text, *labels, divisor=divisor)
        self._instruments.append(counter)
        return counter

    def _add_histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(name, help_text, buckets, "model")
        self._instruments.append(histogram)
        return histogram


def _batch_families(gauges: GatewayGauges) -> Iterator[Metric]:
    if gauges.batch_windows is None:
        return
    yield gauge_family(
        "argosy_batch_window",
        "Lines of batches that this gateway may run beside online requests.",
        {(model,): size for model, size in gauges.batch_windows.items()},
        "model",
    )
    yield gauge_family(
        "argosy_batch_lines_running",
        "Lines of batches that this gateway runs.",
        {(): gauges.batch_lines_running},
    )
    yield gauge_family(
        "argosy_batches_at_risk",
        "Batches whose lines may not end within their completion window at the present pace.",
        {(): gauges.batches_at_risk},
    )


def _quota_backend_families(gauges: QuotaBackendGauges) -> Iterator[Metric]:
    yield gauge_family(
        "argosy_gateway_quota_store_up",
        "1 while the quota backend (Redis) is reachable.",
        {(): gauges.is_connected},
    )
    degraded = Counter(
        "argosy_gateway_quota_degraded_decisions",
        "Requests and running streams allowed or rejected while the quota backend was unreachable.",
        "outcome",
    )
    degraded.add(("allowed",), gauges.degraded_allowed)
    degraded.add(("rejected",), gauges.degraded_rejected)
    yield degraded.metric_family()
