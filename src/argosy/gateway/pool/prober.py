"""Asks each replica how it is: its load, whether it takes requests and, once it failed, whether it is back."""

from __future__ import annotations

import asyncio
import time

import msgspec
import structlog

from argosy.gateway.backends import CHAT_PATH, DetectedBackend, LoadSource, detect_backend
from argosy.gateway.pool.replica_endpoint import ReplicaEndpoint
from argosy.gateway.upstream import UpstreamError, fetch_path, fetch_response
from argosy.policy import BLOCK_TOKENS, AttemptOutcome, classify_status, start_deadline
from argosy.protocol import LoadResponse

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

NATIVE_PROBE_INTERVAL_S = 0.5
SHARED_PROBE_INTERVAL_S = 0.25
"""One of ours that other gateways use too: what they have there changes."""
LOAD_PROBE_INTERVAL_S = 1.0
HEALTH_PROBE_INTERVAL_S = 5.0
PROBE_TIMEOUT_S = 2.0
TEST_GENERATION_TIMEOUT_S = 10.0
"""For the token that a replica has to give before it gets requests again."""
TOKENS_PER_WAITING_REQUEST = 512
"""A request that waits somewhere else counts as so many prompt tokens: others do not say how long theirs are."""
MAX_LOAD_REPORT_BYTES = 1024 * 1024
"""Bytes. While more is read, which is done each second, all others wait."""
UNSUPPORTED_STATUSES = frozenset({401, 403, 404, 405, 501})
"""A server that answers this when asked for its load does not tell it that way."""

_HEADERS = [(b"content-type", b"application/json")]

PROBE_ERRORS = (
    UpstreamError,
    TimeoutError,
    msgspec.DecodeError,
    UnicodeDecodeError,
    RecursionError,
)
"""What comes of asking a server that is not well, or none; what it answers may be no text, or nested too deeply."""


class Prober:
    """Probes one replica."""

    def __init__(self, replica: ReplicaEndpoint) -> None:
        self._replica = replica
        self._load_sources = list(replica.adapter.load_sources)
        """Where it may tell its load; what it has not is dropped."""
        self._logged_unreadable: set[LoadSource] = set()
        """Those that could not be read yet, as the log was told: the gauges of some are there once they were set."""
        self._is_detected = False
        """It has been asked what it is."""
        self._detected_backend: DetectedBackend | None = None
        """What it told then."""
        self._logged_unreachable = False
        """It gave no answer when it was asked last, as the log was told."""
        self._engine_step = 0
        """The engine's, when it told last."""
        self.first_probe_done = asyncio.Event()
        """Set once it has been probed, whatever came of it."""

    async def run(self) -> None:
        """Probe again and again, from a while after now on."""
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
        """Ask once and take in the answer."""
        replica, breaker = self._replica, self._replica.breaker
        probing = breaker.is_probe_due(time.monotonic())
        if not (breaker.is_closed or probing or replica.outage.is_down):
            return
        if probing:
            breaker.on_probe_sent()
            self._is_detected = False  # what comes back may have been changed
            self._load_sources = list(replica.adapter.load_sources)
        outcome, well = AttemptOutcome.FAILURE, False
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                well = (
                    self._is_detected or await self._detect()
                ) and await self._check_load_or_health()
            self._log_reachable()
            if well:
                outcome = await self._run_test_generation() if probing else AttemptOutcome.SUCCESS
                self._on_healthy()
        except PROBE_ERRORS as error:
            if isinstance(error, UpstreamError) and not probing:
                outcome = error.outcome or outcome
            self._log_unreachable(str(error) or f"no answer within {PROBE_TIMEOUT_S:g} s")
        finally:
            self.first_probe_done.set()
            now = time.monotonic()
            if probing:
                breaker.record_probe_outcome(outcome, now)
                if breaker.is_closed:
                    replica.reset_speed()
                if outcome is AttemptOutcome.BACKPRESSURE:
                    replica.backpressure.on_rejected(replica.load.in_flight, now)
                replica.on_capacity_change()
            elif outcome is AttemptOutcome.FAILURE:
                breaker.record_outcome(outcome, now)
            if not well:
                replica.on_unreachable(now)
            replica.expire_speed(now)

    async def _detect(self) -> bool:
        """Find out what it is and which models it has; whether it may be sent requests."""
        replica = self._replica
        found = await detect_backend(self._fetch)
        if found is None:
            return replica.kind != "auto"
        if found != self._detected_backend:
            self._detected_backend = found
            self._log_detected(found)
        if found.kind == "argosy" and not self._serves_model(found):
            replica.is_accepting = False  # ours tell of all that they serve, and refuse the rest
            return False
        self._is_detected = True
        if replica.kind == "auto":
            replica.kind = found.kind
            self._load_sources = list(replica.adapter.load_sources)
            replica.is_accepting = True
        replica.max_model_len = found.models.get(replica.upstream_model)
        replica.on_capacity_change()
        return True

    def _serves_model(self, detected: DetectedBackend) -> bool:
        """Whether the model is among those that it tells, if it tells any."""
        return not detected.models or self._replica.upstream_model in detected.models

    def _log_detected(self, detected: DetectedBackend) -> None:
        """Say what was found, and whether it has the model."""
        name, wanted, models = (
            self._replica.name,
            self._replica.upstream_model,
            list(detected.models)[:10],
        )
        log.info("replica_detected", replica=name, kind=detected.kind, models=models)
        if not self._serves_model(detected):
            remedy = "write `model: ITS NAME` beside its url, or start it with --served-model-name"
            log.warning("replica_model_missing", replica=name, wanted=wanted, remedy=remedy)

    def _log_unreachable(self, reason: str) -> None:
        """Say why it cannot be asked, once until it can: nothing else tells of a wrong URL or certificate."""
        if not self._logged_unreachable:
            log.info("replica_unreachable", replica=self._replica.name, reason=reason)
        self._logged_unreachable = True

    def _log_reachable(self) -> None:
        if self._logged_unreachable:
            log.info("replica_reachable_again", replica=self._replica.name)
        self._logged_unreachable = False

    def _on_healthy(self) -> None:
        """It is well: one that came while others served gets requests from now on. Ours say so themselves."""
        replica = self._replica
        if replica.kind != "argosy":
            replica.on_reported_state("ready", time.monotonic())
            replica.on_capacity_change()

    async def _check_load_or_health(self) -> bool:
        """Ask for its load, or else its health; whether it is well."""
        replica = self._replica
        if replica.kind == "argosy":
            status, body = await fetch_path(replica.upstream, b"/load", replica.gateway_header)
            if status == 200:
                self._apply_native_load(msgspec.json.decode(body, type=LoadResponse))
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

    async def _run_test_generation(self) -> AttemptOutcome:
        """Have it generate a token: one that says that it is well may still answer nobody."""
        upstream, urgency = self._replica.upstream, self._replica.adapter.priority_sign
        message = {"role": "user", "content": "Hi"}
        asked = {"model": self._replica.upstream_model, "messages": [message], "max_tokens": 1}
        if urgency:
            asked["priority"] = urgency * int(start_deadline(0, time.time()))
        request = upstream.build_request(b"POST", CHAT_PATH, msgspec.json.encode(asked), _HEADERS)
        async with asyncio.timeout(TEST_GENERATION_TIMEOUT_S):
            status, _ = await fetch_response(upstream, request)
        return classify_status(status)

    async def _fetch(self, path: bytes) -> tuple[int, bytes]:
        return await fetch_path(self._replica.upstream, path)

    def _apply_native_load(self, report: LoadResponse) -> None:
        replica, load = self._replica, self._replica.load
        replica.on_reported_state(report.state, time.monotonic())
        replica.max_model_len = report.max_model_len or None
        replica.has_reported_speed = report.prefill_tokens_per_s > 0
        if report.step < self._engine_step:
            replica.prefix_index.clear()  # the engine was started anew
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
        """What a server of another kind says; what it does not say stays as it was. Whether it could be read."""
        try:
            if len(body) > MAX_LOAD_REPORT_BYTES:
                raise ValueError(f"it is longer than {MAX_LOAD_REPORT_BYTES} bytes")  # noqa: TRY301
            told = source.parse(body)
        except (ValueError, OverflowError, msgspec.DecodeError) as error:
            if source not in self._logged_unreadable:
                self._logged_unreadable.add(source)
                log.warning("load_report_invalid", replica=self._replica.name, reason=str(error))
            return False
        load = self._replica.load
        load.running = load.running if told.running is None else told.running
        load.waiting = load.waiting if told.waiting is None else told.waiting
        load.kv_usage_ratio = load.kv_usage_ratio if told.kv_used is None else told.kv_used
        load.max_seqs = load.max_seqs if told.capacity is None else told.capacity
        if told.kv_capacity_tokens is not None:
            self._replica.prefix_index.resize(told.kv_capacity_tokens // BLOCK_TOKENS)
        load.queued_tokens = load.waiting * TOKENS_PER_WAITING_REQUEST
        load.reported_at = time.monotonic()
        load.sent_tokens = 0
        self._replica.on_capacity_change()
        return True
