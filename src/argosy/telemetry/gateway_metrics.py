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

from argosy.telemetry.gateway_gauges import (
    REPLICA_STATES,
    GatewayReading,
    SharedLimitsReading,
)
from argosy.telemetry.instruments import (
    ITL_BUCKETS,
    PHASE_BUCKETS,
    TTFT_BUCKETS,
    Counter,
    Histogram,
    Sum,
    gauge,
)

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


class _Used(NamedTuple):
    """What a tenant used of a model."""

    tenant: str
    """As it is shown."""
    input: Sum
    cached: Sum
    output: Sum
    cost: Sum


class GatewayMetrics(Collector):
    """Every number that a gateway shows. One event loop counts; `exposition` may run in any thread."""

    def __init__(self) -> None:
        self._reading = GatewayReading()
        self._tenant = _Bounded(MOST_TENANTS)
        self._code = _Bounded(MOST_CODES)
        self._used: dict[tuple[str, str], _Used] = {}
        self._counted: list[Counter | Histogram] = []
        """In the order in which they are shown."""
        self._requests()
        self._latencies()

    def _requests(self) -> None:
        self._http = self._counter(
            "argosy_gateway_http_requests", "HTTP requests answered.", "route", "status"
        )
        self._ended = self._counter(
            "argosy_gateway_requests",
            "Generation requests ended, by how.",
            *("model", "tenant", "status"),
        )
        self._refused = self._counter(
            "argosy_gateway_requests_unanswered",
            "Generation requests refused or failed, by the error's code.",
            *("model", "code"),
        )
        self._limited = self._counter(
            "argosy_gateway_limit_refusals",
            "Limits that stood in a request's way, by what they limit.",
            *("model", "unit"),
        )
        self._tokens = self._counter(
            "argosy_gateway_tokens",
            "Tokens of prompts (input: computed; cached: found) and of answers (output: delivered).",
            *("model", "tenant", "kind"),
        )
        self._cost = self._counter(
            "argosy_gateway_cost_nano_dollars",
            "What requests cost, in billionths of a dollar.",
            *("model", "tenant"),
        )
        self._retries = self._counter(
            "argosy_gateway_retries",
            "Attempts after the first, but for hedges and those that carried an answer on.",
            "model",
        )
        self._failovers = self._counter(
            "argosy_gateway_failovers", "Answers carried on by another replica.", "model"
        )
        self._hedges = self._counter(
            "argosy_gateway_hedges",
            "Second attempts beside one that was silent, by whether theirs was the answer.",
            *("model", "won"),
        )

    def _latencies(self) -> None:
        self._ttft = self._histogram(
            "argosy_gateway_time_to_first_token_seconds",
            "From the arrival of a request for a stream to its first token.",
            TTFT_BUCKETS,
        )
        self._itl = self._histogram(
            "argosy_gateway_inter_token_latency_seconds",
            "Between two pieces of a stream that brought tokens.",
            ITL_BUCKETS,
        )
        self._e2e = self._histogram(
            "argosy_gateway_request_duration_seconds",
            "From a generation request's arrival to its end.",
            PHASE_BUCKETS,
        )
        self._queue = self._histogram(
            "argosy_gateway_queue_seconds", "Waiting for a replica, in vain too.", QUEUE_BUCKETS
        )

    # --- what happens ---------------------------------------------------------------------------

    def answered(self, route: str, status: int) -> None:
        """An HTTP request on `route` (one of a fixed few) was answered."""
        self._http.add((route, str(status)))

    def first_token(self, model: str, ttft_s: float) -> None:
        """A request got its first token."""
        self._ttft.observe((model,), ttft_s)

    def next_tokens(self, model: str, gaps_s: Sequence[float]) -> None:
        """It got more, so often, each so long after the one before."""
        if gaps_s:
            self._itl.observe_all((model,), gaps_s)

    def waited(self, model: str, queued_s: float) -> None:
        """It was given to a replica, or waited for one in vain."""
        self._queue.observe((model,), queued_s)

    def retried(self, model: str) -> None:
        """It was tried once more."""
        self._retries.add((model,))

    def failed_over(self, model: str) -> None:
        """It was carried on elsewhere."""
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

    def ended(
        self,
        model: str,
        tenant: str,
        status: str,
        seconds: float,
        *,
        input_tokens: int,
        cached_tokens: int,
        output_tokens: int,
        nano_dollars: int,
    ) -> None:
        """It has ended; `status` is one of a fixed few, `input_tokens` are those that were not cached."""
        used = self._used.get((model, tenant)) or self._use(model, self._tenant(tenant))
        self._ended.add((model, used.tenant, status))
        self._e2e.observe((model,), seconds)
        used.input.value += input_tokens
        used.cached.value += cached_tokens
        used.output.value += output_tokens
        used.cost.value += nano_dollars

    def _use(self, model: str, tenant: str) -> _Used:
        used = self._used[model, tenant] = _Used(
            tenant,
            self._tokens.of((model, tenant, "input")),
            self._tokens.of((model, tenant, "cached")),
            self._tokens.of((model, tenant, "output")),
            self._cost.of((model, tenant)),
        )
        return used

    # --- what is shown --------------------------------------------------------------------------

    def exposition(self, reading: GatewayReading) -> bytes:
        """The Prometheus text format."""
        self._reading = reading
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's `Collector`."""
        for counted in self._counted:
            yield counted.family()
        yield from self._gauges(self._reading)

    def _gauges(self, reading: GatewayReading) -> Iterator[Metric]:
        for name, text, value in (
            ("requests_in_flight", "HTTP requests being answered.", reading.in_flight),
            ("fast_path_streams", "Streams that native code passes on.", reading.on_fast_path),
            (
                "ledger_backlog_rows",
                "Rows of usage that the store does not have yet.",
                reading.backlog,
            ),
            (
                "ledger_memory_rows",
                "Rows of usage, of running requests too, that are in memory only: the disk is full.",
                reading.in_memory,
            ),
        ):
            yield gauge(f"argosy_gateway_{name}", text, {(): value})
        yield gauge(
            "argosy_gateway_queue_depth",
            "Requests that wait for a replica.",
            {(model,): waiting for model, waiting in reading.queued.items()},
            "model",
        )
        yield gauge(
            "argosy_gateway_replica_requests_in_flight",
            "Requests of this gateway at a replica.",
            {(one.model, one.replica): one.in_flight for one in reading.replicas},
            *("model", "replica"),
        )
        yield gauge(
            "argosy_gateway_replica_state",
            "1 for the state that a replica is in: ready, cooling, open (its breaker), away.",
            {
                (one.model, one.replica, state): one.state == state
                for one in reading.replicas
                for state in REPLICA_STATES
            },
            *("model", "replica", "state"),
        )
        if reading.store_up is not None:
            yield gauge(
                "argosy_gateway_store_up",
                "1 while accounts are as the store has them; 0: as they were when it was last read.",
                {(): reading.store_up},
            )
        if reading.shared_limits is not None:
            yield from _shared_limits(reading.shared_limits)
        yield gauge(
            "argosy_gateway_build_info",
            "The running version.",
            {(version("argosy"),): 1},
            "version",
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        made = Counter(name, text, *labels)
        self._counted.append(made)
        return made

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        made = Histogram(name, text, buckets, "model")
        self._counted.append(made)
        return made


def _shared_limits(reading: SharedLimitsReading) -> Iterator[Metric]:
    yield gauge(
        "argosy_shared_limits_up",
        "1 while Redis, where the limits are shared, can be reached.",
        {(): reading.up},
    )
    unsure = Counter(
        "argosy_shared_limits_unsure_decisions",
        "Requests let in or refused, and streams carried on or ended, while Redis could not be reached.",
        "outcome",
    )
    unsure.add(("allowed",), reading.allowed)
    unsure.add(("refused",), reading.refused)
    yield unsure.family()
