"""The gateway's metrics: numbers in dictionaries, one addition each, made into Prometheus' families when asked.

A token passes here, so there are no locks and no objects for each label: one thread counts, and whoever
reads takes what is there. Names follow the Prometheus guidelines, so that `promtool check metrics` is content.
Labels are bounded: models and replicas are those of the configuration, tenants beyond `MOST_TENANTS` are
counted together as "other".
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from argosy.telemetry.gateway_reading import (
    REPLICA_STATES,
    GatewayReading,
    SharedLimitsReading,
)
from argosy.telemetry.metrics import ITL_BUCKETS, PHASE_BUCKETS, TTFT_BUCKETS

MOST_TENANTS = 1000
MOST_CODES = 100
OTHER = "other"
QUEUE_BUCKETS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)


class _Bounded:
    """Label values from outside: so many different ones, the others together."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._seen: set[str] = set()

    def __call__(self, value: str) -> str:
        if value not in self._seen:
            if len(self._seen) >= self._most:
                return OTHER
            self._seen.add(value)
        return value


class _Counts:
    """A counter for each set of label values."""

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._values: dict[tuple[str, ...], int] = {}

    def add(self, labels: tuple[str, ...], amount: int = 1) -> None:
        """Count."""
        self._values[labels] = self._values.get(labels, 0) + amount

    def family(self) -> Metric:
        """As Prometheus has it."""
        shown = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, value in list(self._values.items()):
            shown.add_metric(labels, value)
        return shown


class _Spread:
    """A histogram for each model."""

    def __init__(self, name: str, text: str, buckets: tuple[float, ...]) -> None:
        self._name, self._text, self._buckets = name, text, buckets
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def observe(self, model: str, *values: float) -> None:
        """Count values."""
        counts = self._counts.get(model)
        if counts is None:
            counts = self._counts[model] = [0] * (len(self._buckets) + 1)
            self._sums[model] = 0.0
        for value in values:
            counts[bisect_left(self._buckets, value)] += 1
        self._sums[model] += sum(values)

    def family(self) -> Metric:
        """As Prometheus has it."""
        shown = HistogramMetricFamily(self._name, self._text, labels=["model"])
        bounds = [*map(str, self._buckets), "+Inf"]
        for model, counts in list(self._counts.items()):
            below = zip(bounds, accumulate(counts), strict=True)
            shown.add_metric([model], list(below), self._sums[model])
        return shown


class GatewayMetrics(Collector):
    """Every number that a gateway shows. One event loop counts; `exposition` may run in any thread."""

    def __init__(self) -> None:
        self._reading = GatewayReading()
        self._tenant = _Bounded(MOST_TENANTS)
        self._code = _Bounded(MOST_CODES)
        self._requests()
        self._latencies()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def _requests(self) -> None:
        self._http = _Counts(
            "argosy_gateway_http_requests", "HTTP requests answered.", "route", "status"
        )
        self._ended = _Counts(
            "argosy_gateway_requests",
            "Generation requests ended, by how.",
            *("model", "tenant", "status"),
        )
        self._refused = _Counts(
            "argosy_gateway_requests_unanswered",
            "Generation requests refused or failed, by the error's code.",
            *("model", "code"),
        )
        self._limited = _Counts(
            "argosy_gateway_limit_refusals",
            "Limits that stood in a request's way, by what they limit.",
            *("model", "unit"),
        )
        self._tokens = _Counts(
            "argosy_gateway_tokens",
            "Tokens of prompts (input: computed; cached: found) and of answers (output: delivered).",
            *("model", "tenant", "kind"),
        )
        self._cost = _Counts(
            "argosy_gateway_cost_nano_dollars",
            "What requests cost, in billionths of a dollar.",
            *("model", "tenant"),
        )
        self._retries = _Counts(
            "argosy_gateway_retries", "Attempts after one that gave nothing.", "model"
        )
        self._failovers = _Counts(
            "argosy_gateway_failovers", "Streams carried on by another replica.", "model"
        )
        self._hedges = _Counts(
            "argosy_gateway_hedges",
            "Second attempts beside one that was silent, by whether theirs was the answer.",
            *("model", "won"),
        )

    def _latencies(self) -> None:
        self._ttft = _Spread(
            "argosy_gateway_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            TTFT_BUCKETS,
        )
        self._itl = _Spread(
            "argosy_gateway_inter_token_latency_seconds",
            "Between two pieces of an answer that brought tokens.",
            ITL_BUCKETS,
        )
        self._e2e = _Spread(
            "argosy_gateway_request_duration_seconds",
            "From a generation request's arrival to its end.",
            PHASE_BUCKETS,
        )
        self._queue = _Spread(
            "argosy_gateway_queue_seconds", "Waiting for a replica.", QUEUE_BUCKETS
        )

    # --- what happens ---------------------------------------------------------------------------

    def answered(self, route: str, status: int) -> None:
        """An HTTP request on `route` (one of a fixed few) was answered."""
        self._http.add((route, str(status)))

    def first_token(self, model: str, ttft_s: float) -> None:
        """A request got its first token."""
        self._ttft.observe(model, ttft_s)

    def next_tokens(self, model: str, gaps_s: Sequence[float]) -> None:
        """It got more, so often, each so long after the one before."""
        if gaps_s:
            self._itl.observe(model, *gaps_s)

    def placed(self, model: str, queued_s: float) -> None:
        """It was given to a replica."""
        self._queue.observe(model, queued_s)

    def retried(self, model: str) -> None:
        """It was tried once more."""
        self._retries.add((model,))

    def failed_over(self, model: str) -> None:
        """Its stream was carried on elsewhere."""
        self._failovers.add((model,))

    def hedged(self, model: str, *, won: bool) -> None:
        """A second replica was asked while the first was silent."""
        self._hedges.add((model, "true" if won else "false"))

    def refused(self, model: str, code: str) -> None:
        """It was refused, or failed, with the error `code`."""
        self._refused.add((model, self._code(code)))

    def limited(self, model: str, unit: str) -> None:
        """A limit of `unit`s, one of a fixed few, stood in its way."""
        self._limited.add((model, unit))

    def ended(self, model: str, tenant: str, status: str, seconds: float) -> None:
        """It has ended; `status` is one of a fixed few."""
        self._ended.add((model, self._tenant(tenant), status))
        self._e2e.observe(model, seconds)

    def used(
        self,
        model: str,
        tenant: str,
        *,
        input_tokens: int,
        cached_tokens: int,
        output_tokens: int,
        nano_dollars: int,
    ) -> None:
        """What it used; `input_tokens` are those that were not cached."""
        tenant = self._tenant(tenant)
        self._tokens.add((model, tenant, "input"), input_tokens)
        self._tokens.add((model, tenant, "cached"), cached_tokens)
        self._tokens.add((model, tenant, "output"), output_tokens)
        self._cost.add((model, tenant), nano_dollars)

    # --- what is shown --------------------------------------------------------------------------

    def exposition(self, reading: GatewayReading) -> bytes:
        """The Prometheus text format."""
        self._reading = reading
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's `Collector`."""
        counts = (self._http, self._ended, self._refused, self._limited, self._tokens, self._cost)
        for kind in (*counts, self._retries, self._failovers, self._hedges):
            yield kind.family()
        for spread in (self._ttft, self._itl, self._e2e, self._queue):
            yield spread.family()
        yield from self._gauges(self._reading)

    def _gauges(self, reading: GatewayReading) -> Iterator[Metric]:
        yield _gauge("requests_in_flight", "HTTP requests being answered.", reading.in_flight)
        yield _gauge(
            "fast_path_streams",
            "Streams that native code passes on.",
            reading.on_fast_path,
        )
        yield _gauge(
            "ledger_backlog_rows",
            "Rows of usage that the store does not have yet.",
            reading.backlog,
        )
        yield _gauge(
            "ledger_memory_rows",
            "Rows of usage, of running requests too, that are in memory only: the disk is full.",
            reading.in_memory,
        )
        depth = GaugeMetricFamily(
            "argosy_gateway_queue_depth", "Requests that wait for a replica.", labels=["model"]
        )
        for model, waiting in reading.queued.items():
            depth.add_metric([model], waiting)
        yield depth
        busy = GaugeMetricFamily(
            "argosy_gateway_replica_requests_in_flight",
            "Requests of this gateway at a replica.",
            labels=["model", "replica"],
        )
        state = GaugeMetricFamily(
            "argosy_gateway_replica_state",
            "1 for the state that a replica is in: ready, cooling, open (its breaker), away.",
            labels=["model", "replica", "state"],
        )
        for one in reading.replicas:
            busy.add_metric([one.model, one.replica], one.in_flight)
            for name in REPLICA_STATES:
                state.add_metric([one.model, one.replica, name], one.state == name)
        yield from (busy, state)
        if reading.shared_limits is not None:
            yield from _shared_limits(reading.shared_limits)
        build = GaugeMetricFamily(
            "argosy_gateway_build_info", "The running version.", labels=["version"]
        )
        build.add_metric([version("argosy")], 1)
        yield build


def _shared_limits(reading: SharedLimitsReading) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "argosy_shared_limits_up",
        "1 while Redis, where the limits are shared, can be reached.",
        value=reading.up,
    )
    unsure = CounterMetricFamily(
        "argosy_shared_limits_unsure_decisions",
        "Requests let in or refused, and streams carried on or ended, while Redis could not be reached.",
        labels=["outcome"],
    )
    unsure.add_metric(["allowed"], reading.allowed)
    unsure.add_metric(["refused"], reading.refused)
    yield unsure


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"argosy_gateway_{name}", text, value=value)
