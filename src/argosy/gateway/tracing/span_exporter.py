"""Sends spans to an OTLP receiver in batches, without ever delaying a request."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import socket
import time
from collections import deque
from collections.abc import Iterable, Mapping
from urllib.parse import unquote, urlsplit

import structlog

from argosy.deployment import TracingConfig
from argosy.extras import install_command
from argosy.gateway.request_context import RequestContext
from argosy.gateway.tracing.receivers import (
    GrpcReceiver,
    HttpReceiver,
    Receiver,
    ReceiverAnswer,
)
from argosy.gateway.tracing.request_spans import SCHEMA_URLS, build_spans
from argosy.gateway.tracing.trace_sampler import TraceSampler
from argosy.process import run_in_daemon_thread
from argosy.telemetry import (
    AttributeValue,
    GatewayMetrics,
    Span,
    SpanKind,
    encode_request,
    encode_spans,
)
from argosy.version import VERSION

HTTP, GRPC = "http/protobuf", "grpc"
TRACES_PATH = "/v1/traces"
MAX_QUEUE_BYTES = 8 << 20
"""Encoded spans that wait. Beyond it, the oldest are dropped."""
MAX_BATCH_BYTES = 1 << 20
BATCH_INTERVAL_S = 5.0
MAX_RETRY_DELAY_S = 30.0
DEFAULT_TIMEOUT_MS = 10_000
FLUSH_TIMEOUT_S = 2.0
"""Time for the last batch when the gateway stops."""
_ALL_ACCEPTED = b"\x0a\x00"
"""An answer with an empty `partial_success`, which some receivers send instead of nothing."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class SpanExporter:
    """Keeps and sends the traces of requests. Use it from one event loop.

    The environment's standard variables set what the settings leave open: `OTEL_EXPORTER_OTLP_ENDPOINT`, `_PROTOCOL`,
    `_HEADERS`, `_TIMEOUT` and `_CERTIFICATE`, also as `OTEL_EXPORTER_OTLP_TRACES_...`, `OTEL_SERVICE_NAME` and
    `OTEL_RESOURCE_ATTRIBUTES`.
    """

    def __init__(
        self,
        config: TracingConfig,
        gateway_id: str,
        metrics: GatewayMetrics,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Create an exporter.

        Raises:
            ValueError: No endpoint is set, its URL or its protocol is unknown, or grpcio is not installed. The message
                says what to change.
        """
        protocol = _find_protocol(config, environment)
        self.endpoint = _find_endpoint(config, environment, TRACES_PATH * (protocol != GRPC))
        self._config = config
        self._metrics = metrics
        self._sampler = TraceSampler(config.sample_ratio, config.max_traces_per_s)
        headers = _parse_pairs(_read(environment, "HEADERS"))
        if config.headers_env is not None:
            headers |= _parse_pairs(environment.get(config.headers_env, ""))
        connect = GrpcReceiver if protocol == GRPC else HttpReceiver
        self._receiver: Receiver = connect(
            self.endpoint,
            headers,
            _read(environment, "CERTIFICATE"),
            _read_timeout_s(environment),
        )
        self._resource: dict[str, AttributeValue] = {
            "service.name": "argosy-gateway",
            "service.version": VERSION,
            "service.instance.id": gateway_id,
            "host.name": socket.gethostname(),
            **_parse_pairs(environment.get("OTEL_RESOURCE_ATTRIBUTES", "")),
        }
        if environment.get("OTEL_SERVICE_NAME"):
            self._resource["service.name"] = environment["OTEL_SERVICE_NAME"]
        self._queue: deque[tuple[bytes, int]] = deque()
        """Encoded spans of a request, with their number."""
        self._queued_bytes = 0
        self._is_full = asyncio.Event()
        """Set when a batch is complete before its time."""
        self._was_reachable: bool | None = None
        self._in_flight: tuple[asyncio.Future[ReceiverAnswer], list[tuple[bytes, int]]] | None = (
            None
        )
        """Batch that a thread sends, and its answer. Sent again by `close`, it would arrive twice."""

    def add(self, context: RequestContext) -> None:
        """Queue the spans of an ended request, if its trace is kept."""
        trace = context.trace
        trace_context = trace.trace_context
        if trace_context is None:
            return
        reason = self._sampler.decide(trace, trace_context, time.monotonic())
        self._metrics.traces.add((reason,))
        if reason in {"unsampled", "bound", "tenant_bound"}:
            return
        spans = build_spans(context, trace_context, reason, self._config.semconv)
        state = self._sampler.trace_state(trace_context, reason)
        encoded = encode_spans(bytes.fromhex(trace_context.trace_id), state, spans)
        self._queue.append((encoded, len(spans)))
        self._queued_bytes += len(encoded)
        while self._queued_bytes > MAX_QUEUE_BYTES:
            dropped, count = self._queue.popleft()
            self._queued_bytes -= len(dropped)
            self._metrics.spans_dropped.add(("queue_full",), count)
        if self._queued_bytes >= MAX_BATCH_BYTES:
            self._is_full.set()

    async def run(self) -> None:
        """Send a first span that shows whether the receiver is reachable, then batches, until cancelled."""
        now_ns = time.time_ns()
        start = Span(
            name="argosy.start",
            kind=SpanKind.INTERNAL,
            span_id=os.urandom(8),
            start_ns=now_ns,
            end_ns=now_ns,
        )
        await self._send([(encode_spans(os.urandom(16), "", [start]), 1)])
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_full.wait(), BATCH_INTERVAL_S)
            self._is_full.clear()
            while self._queue:
                batch = self._take_batch()
                try:
                    await self._send(batch)
                except asyncio.CancelledError:  # `close` sends it, or waits for its answer
                    if self._in_flight is None:
                        self._put_back(batch)
                    raise

    async def close(self) -> None:
        """Send what is queued, for at most `FLUSH_TIMEOUT_S`."""
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                if self._in_flight is not None:
                    post, batch = self._in_flight
                    if (await asyncio.shield(post)).outcome != "taken":
                        self._put_back(batch)
                while self._queue:
                    await self._send(self._take_batch(), retries=False)
        except TimeoutError:
            self._metrics.spans_dropped.add(("stopped",), sum(count for _, count in self._queue))
        self._receiver.close()

    def _put_back(self, batch: list[tuple[bytes, int]]) -> None:
        self._queue.extendleft(reversed(batch))
        self._queued_bytes += _count_bytes(batch)

    def _take_batch(self) -> list[tuple[bytes, int]]:
        batch = [self._queue.popleft()]
        size = len(batch[0][0])
        while self._queue and size + len(self._queue[0][0]) <= MAX_BATCH_BYTES:
            batch.append(self._queue.popleft())
            size += len(batch[-1][0])
        self._queued_bytes -= size
        return batch

    async def _send(self, batch: list[tuple[bytes, int]], *, retries: bool = True) -> None:
        """Send a batch, again while the receiver is away, and in halves if it is too large for the receiver."""
        delay_s = 1.0
        while True:
            post = asyncio.ensure_future(run_in_daemon_thread(self._post, batch))
            self._in_flight = post, batch
            answer = await asyncio.shield(post)
            self._in_flight = None
            self._report_reachable(answer.problem)
            if answer.outcome == "taken":
                self._metrics.trace_exports.add(("success",))
                return
            self._metrics.trace_exports.add(("failure",))
            if answer.outcome == "too_large" and len(batch) > 1:
                middle = len(batch) // 2
                await self._send(batch[:middle], retries=retries)
                await self._send(batch[middle:], retries=retries)
                return
            if not retries or answer.outcome != "unreachable":
                self._metrics.spans_dropped.add(("refused",), sum(count for _, count in batch))
                return
            await asyncio.sleep(min(max(delay_s, answer.wait_s), MAX_RETRY_DELAY_S))
            delay_s *= 2

    def _post(self, batch: list[tuple[bytes, int]]) -> ReceiverAnswer:
        """Send a batch, from a thread."""
        spans = [encoded for encoded, _ in batch]
        schema_url = SCHEMA_URLS[self._config.semconv]
        answer = self._receiver.export(encode_request(self._resource, VERSION, schema_url, spans))
        if len(answer.content) > len(_ALL_ACCEPTED):
            log.warning("spans_rejected", endpoint=self.endpoint, answer=repr(answer.content[:200]))
        return answer

    def _report_reachable(self, problem: str) -> None:
        """Log whether the receiver takes spans, when that changes."""
        if self._was_reachable == (not problem):
            return
        self._was_reachable = not problem
        if problem:
            remedy = "check tracing.endpoint, tracing.protocol, its headers, and that an OTLP receiver listens there"
            log.warning(
                "tracing_unreachable", endpoint=self.endpoint, reason=problem, remedy=remedy
            )
        else:
            log.info("tracing_ready", endpoint=self.endpoint)


def _find_protocol(config: TracingConfig, environment: Mapping[str, str]) -> str:
    """Return the protocol of the receiver.

    Raises:
        ValueError: The environment has another one, or gRPC is not installed. The message says what to change.
    """
    protocol = config.protocol or _read(environment, "PROTOCOL") or HTTP
    if protocol not in {HTTP, GRPC}:
        raise ValueError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; it has to be {HTTP}, often on port 4318, or {GRPC} on 4317"
        )
    if protocol == GRPC and importlib.util.find_spec("grpc") is None:
        raise ValueError(f"traces over gRPC need grpcio: {install_command('grpc')}")
    return protocol


def _find_endpoint(config: TracingConfig, environment: Mapping[str, str], path: str) -> str:
    """Return the URL of the receiver. `path` is added to one that is for all signals.

    Raises:
        ValueError: No endpoint is set, or it is no URL of HTTP. The message says what to change.
    """
    exact = environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
    base = config.endpoint or environment.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    if config.endpoint is None and exact:
        endpoint = exact
    elif base:
        endpoint = base if base.endswith(TRACES_PATH) else base.rstrip("/") + path
    else:
        raise ValueError(
            "tracing needs tracing.endpoint or OTEL_EXPORTER_OTLP_ENDPOINT, such as http://collector:4318"
        )
    parts = urlsplit(endpoint)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.username:
        raise ValueError(
            f"the endpoint of tracing has to be http:// or https:// without a password, and is {parts.scheme}://"
        )
    return endpoint


def _count_bytes(batch: Iterable[tuple[bytes, int]]) -> int:
    return sum(len(encoded) for encoded, _ in batch)


def _read_timeout_s(environment: Mapping[str, str]) -> float:
    """Return the timeout of the environment, which is in milliseconds.

    Raises:
        ValueError: It is no positive number.
    """
    text = _read(environment, "TIMEOUT") or str(DEFAULT_TIMEOUT_MS)
    if not text.isdecimal() or not int(text):
        raise ValueError(
            f"OTEL_EXPORTER_OTLP_TIMEOUT is {text!r}; it has to be a number of milliseconds, such as 10000"
        )
    return int(text) / 1000


def _read(environment: Mapping[str, str], name: str) -> str:
    general = environment.get(f"OTEL_EXPORTER_OTLP_{name}", "")
    return environment.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}", general).strip()


def _parse_pairs(text: str) -> dict[str, str]:
    """Parse `name=value,name=value`, in which values are percent-encoded."""
    pairs = (pair.partition("=") for pair in text.split(",") if "=" in pair)
    return {name.strip(): unquote(value.strip()) for name, _, value in pairs}
