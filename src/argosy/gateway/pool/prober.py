"""Health checks of replicas: kind, load, readiness, and recovery after a failure."""

from __future__ import annotations

import asyncio
import time

import msgspec
import structlog

from argosy.gateway.backends import CHAT_PATH, DetectedBackend, LoadSource, detect_backend
from argosy.gateway.pool.replica_endpoint import ReplicaEndpoint
from argosy.gateway.upstream import UpstreamError, fetch_path, fetch_response
from argosy.policy import BLOCK_TOKENS, AdminState, AttemptOutcome, classify_status, start_deadline
from argosy.protocol import LoadResponse

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

NATIVE_PROBE_INTERVAL_S = 0.5
SHARED_PROBE_INTERVAL_S = 0.25
"""Interval for a native replica that other gateways use too, because their share of the slots changes."""
LOAD_PROBE_INTERVAL_S = 1.0
HEALTH_PROBE_INTERVAL_S = 5.0
PROBE_TIMEOUT_S = 2.0
TEST_GENERATION_TIMEOUT_S = 10.0
"""Timeout for the token that an ejected replica must generate before it gets requests again."""
TOKENS_PER_WAITING_REQUEST = 512
"""Assumed prompt tokens per queued request at servers of other backends, which do not report prompt lengths."""
MAX_LOAD_REPORT_BYTES = 1024 * 1024
"""Maximum size of a load report in bytes. Parsing blocks the event loop, and a probe repeats it every second."""
UNSUPPORTED_STATUSES = frozenset({401, 403, 404, 405, 501})
"""Statuses of servers that do not support a load report."""

_HEADERS = [(b"content-type", b"application/json")]

PROBE_ERRORS = (
    UpstreamError,
    TimeoutError,
    msgspec.DecodeError,
    UnicodeDecodeError,
    RecursionError,
)
"""Exceptions of a probe: the server failed, is missing, or sent no text or JSON that is nested too deeply."""


class Prober:
    """Periodic health check and load report of one replica."""

    def __init__(self, replica: ReplicaEndpoint) -> None:
        self._replica = replica
        self._load_sources = list(replica.adapter.load_sources)
        """Load reports that the replica may support. Unsupported ones are removed."""
        self._logged_unreadable: set[LoadSource] = set()
        """Load reports that were logged as invalid. Some servers have no gauges before their first request."""
        self._logged_refused: set[bytes] = set()
        """Paths that the replica refused."""
        self._is_detected = False
        """Whether the kind of the server was detected."""
        self._detected_backend: DetectedBackend | None = None
        """Result of the last detection."""
        self._logged_unreachable = False
        """Whether the last probe failed and this was logged."""
        self._engine_step = 0
        """Step of the engine in its last report."""
        self.first_probe_done = asyncio.Event()
        """Set after the first probe, whatever its result."""

    async def run(self) -> None:
        """Probe the replica periodically, after an initial pause, until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s())
            await self.probe()

    def _interval_s(self) -> float:
        if self._replica.slot_shares is not None:
            return SHARED_PROBE_INTERVAL_S
        if self._replica.kind in {"argosy", "auto"}:
            return NATIVE_PROBE_INTERVAL_S
        return LOAD_PROBE_INTERVAL_S if self._load_sources else HEALTH_PROBE_INTERVAL_S

    async def probe(self) -> None:
        """Probe the replica once and update its state.

        An ejected replica whose circuit breaker is due for a probe must also pass a test generation.
        """
        replica, breaker = self._replica, self._replica.breaker
        is_half_open = breaker.is_probe_due(time.monotonic())
        if not (breaker.is_closed or is_half_open or replica.outage.is_down):
            return
        if is_half_open:
            breaker.on_probe_sent()
            self._is_detected = False  # another server may run at the address now
            self._load_sources = list(replica.adapter.load_sources)
        outcome, is_healthy = AttemptOutcome.FAILURE, False
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                is_healthy = (
                    self._is_detected or await self._detect()
                ) and await self._check_load_or_health()
            self._log_reachable()
            if is_healthy:
                outcome = (
                    await self._run_test_generation() if is_half_open else AttemptOutcome.SUCCESS
                )
                self._on_healthy()
        except PROBE_ERRORS as error:
            if isinstance(error, UpstreamError) and not is_half_open:
                outcome = error.outcome or outcome
            self._log_unreachable(str(error) or f"no answer within {PROBE_TIMEOUT_S:g} s")
        finally:
            self.first_probe_done.set()
            now = time.monotonic()
            if is_half_open:
                breaker.record_probe_outcome(outcome, now)
                if breaker.is_closed:
                    replica.reset_speed()
                if outcome is AttemptOutcome.BACKPRESSURE:
                    replica.backpressure.on_rejected(replica.load.in_flight, now)
                replica.on_capacity_change()
            elif outcome is AttemptOutcome.FAILURE:
                breaker.record_outcome(outcome, now)
            if not is_healthy:
                replica.on_unreachable(now)
            replica.observe_status(now)
            replica.expire_speed(now)

    async def _detect(self) -> bool:
        """Detect the kind and the models of the server. Return whether it may get requests."""
        replica = self._replica
        detected = await detect_backend(self._fetch)
        if detected is None:
            return replica.kind != "auto"
        if detected != self._detected_backend:
            self._detected_backend = detected
            self._log_detected(detected)
        if detected.kind == "argosy" and not self._serves_model(detected):
            # A native replica lists all models that it serves and rejects others.
            replica.is_accepting = False
            return False
        self._is_detected = True
        if replica.kind == "auto":
            replica.kind = detected.kind
            self._load_sources = list(replica.adapter.load_sources)
            replica.is_accepting = True
        replica.max_model_len = detected.models.get(replica.upstream_model)
        replica.on_capacity_change()
        return True

    def _serves_model(self, detected: DetectedBackend) -> bool:
        """Whether the server lists the replica's model, or lists no models."""
        return not detected.models or self._replica.upstream_model in detected.models

    def _log_detected(self, detected: DetectedBackend) -> None:
        """Log the detected kind and models, with a warning if the replica's model is missing."""
        name, model, models = (
            self._replica.name,
            self._replica.upstream_model,
            list(detected.models)[:10],
        )
        log.info("replica_detected", replica=name, kind=detected.kind, models=models)
        if not self._serves_model(detected):
            remedy = "set `model` of this replica, or start the server with --served-model-name"
            log.warning("replica_model_missing", replica=name, model=model, remedy=remedy)

    def _log_unreachable(self, reason: str) -> None:
        """Log why the replica is unreachable, once per outage. No other log shows a wrong URL or certificate."""
        self._replica.last_failure = reason
        if not self._logged_unreachable:
            log.info("replica_unreachable", replica=self._replica.name, reason=reason)
        self._logged_unreachable = True

    def _log_reachable(self) -> None:
        if self._logged_unreachable:
            log.info("replica_reachable_again", replica=self._replica.name)
        self._logged_unreachable = False

    def _on_healthy(self) -> None:
        """Mark a healthy replica of another backend than Argosy as ready. Native replicas report their own state."""
        replica = self._replica
        if replica.kind != "argosy":
            replica.on_reported_state("ready", time.monotonic())
            replica.on_capacity_change()

    async def _check_load_or_health(self) -> bool:
        """Fetch the load report, or else the health endpoint. Return whether the replica is healthy."""
        replica = self._replica
        if replica.kind == "argosy":
            status, body = await fetch_path(replica.upstream, b"/load", replica.gateway_header)
            if status == 200:
                report = msgspec.json.decode(body, type=LoadResponse)
                self._apply_native_load(report)
                await self._request_drain_or_undrain(report.state)
            return status < 500
        for source in tuple(self._load_sources):
            status, body = await self._fetch(source.path)
            if status in UNSUPPORTED_STATUSES:
                self._load_sources.remove(source)
                log.info("load_report_missing", replica=replica.name, path=source.path.decode())
            elif status != 200:
                break
            elif self._apply_load_report(source, body):
                return True
        status, _ = await self._fetch(replica.adapter.health_path)
        return status < 500

    async def _request_drain_or_undrain(self, state: str) -> None:
        """Let a native replica's own state follow the operators' decision, so that all of its clients see it.

        A replica that drains for another reason is left alone.
        """
        replica = self._replica
        if replica.admin.state is AdminState.DRAINING and state == "ready":
            await self._post(b"/drain")
        elif replica.needs_undrain and state == "draining":
            await self._post(b"/undrain")
        elif state != "draining":
            replica.needs_undrain = False

    async def _post(self, path: bytes) -> None:
        upstream = self._replica.upstream
        status, _ = await fetch_response(
            upstream, upstream.build_request(b"POST", path, b"", _HEADERS)
        )
        if status != 200 and path not in self._logged_refused:
            self._logged_refused.add(path)
            log.warning(
                "replica_drain_request_refused",
                replica=self._replica.name,
                path=path.decode(),
                status=status,
            )

    async def _run_test_generation(self) -> AttemptOutcome:
        """Let the replica generate one token. A server may report that it is healthy and still fail every request."""
        upstream, priority_sign = self._replica.upstream, self._replica.adapter.priority_sign
        message = {"role": "user", "content": "Hi"}
        body = {"model": self._replica.upstream_model, "messages": [message], "max_tokens": 1}
        if priority_sign:
            body["priority"] = priority_sign * int(start_deadline(0, time.time()))
        request = upstream.build_request(b"POST", CHAT_PATH, msgspec.json.encode(body), _HEADERS)
        async with asyncio.timeout(TEST_GENERATION_TIMEOUT_S):
            status, _ = await fetch_response(upstream, request)
        return classify_status(status)

    async def _fetch(self, path: bytes) -> tuple[int, bytes]:
        return await fetch_path(self._replica.upstream, path)

    def _apply_native_load(self, report: LoadResponse) -> None:
        replica, load = self._replica, self._replica.load
        replica.on_load_report(report)
        replica.on_reported_state(report.state, time.monotonic())
        replica.max_model_len = report.max_model_len or None
        if replica.is_exact and not report.exact:
            log.warning("replica_not_exact", replica=replica.name)
        replica.is_exact = report.exact
        replica.has_reported_speed = report.prefill_tokens_per_s > 0
        if report.step < self._engine_step:
            replica.prefix_index.clear()  # the engine was restarted
        self._engine_step = report.step
        replica.prefix_index.resize(report.kv_blocks_total * report.block_size // BLOCK_TOKENS)
        load.queued_tokens = report.queued_tokens
        load.running, load.waiting = report.running, report.waiting
        load.max_seqs = report.max_seqs
        replica.update_slot_shares(report.other_gateways)
        load.kv_usage_ratio = report.kv_blocks_used / max(1, report.kv_blocks_total)
        load.prefill_tokens_per_s = report.prefill_tokens_per_s or load.prefill_tokens_per_s
        load.inter_token_s = report.decode_s or load.inter_token_s
        load.reported_at = time.monotonic()
        load.sent_tokens = 0
        replica.on_capacity_change()

    def _apply_load_report(self, source: LoadSource, body: bytes) -> bool:
        """Apply the load report of another backend than Argosy. Values that it lacks stay unchanged.

        Returns:
            Whether the report could be parsed.
        """
        try:
            if len(body) > MAX_LOAD_REPORT_BYTES:
                raise ValueError(f"the report exceeds {MAX_LOAD_REPORT_BYTES} bytes")  # noqa: TRY301
            reported = source.parse(body)
        except (ValueError, OverflowError, msgspec.DecodeError) as error:
            if source not in self._logged_unreadable:
                self._logged_unreadable.add(source)
                log.warning("load_report_invalid", replica=self._replica.name, reason=str(error))
            return False
        load = self._replica.load
        load.running = load.running if reported.running is None else reported.running
        load.waiting = load.waiting if reported.waiting is None else reported.waiting
        load.kv_usage_ratio = load.kv_usage_ratio if reported.kv_used is None else reported.kv_used
        load.max_seqs = load.max_seqs if reported.capacity is None else reported.capacity
        if reported.kv_capacity_tokens is not None:
            self._replica.prefix_index.resize(reported.kv_capacity_tokens // BLOCK_TOKENS)
        load.queued_tokens = load.waiting * TOKENS_PER_WAITING_REQUEST
        load.reported_at = time.monotonic()
        load.sent_tokens = 0
        self._replica.on_capacity_change()
        return True
