"""Sends the probes that a `HealthCheck` decides on, and feeds the results back to it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import structlog

from argosy.gateway.backends import CHAT_PATH, DetectedBackend, detect_backend
from argosy.gateway.pool.replica_endpoint import ReplicaEndpoint
from argosy.gateway.upstream import UpstreamError, fetch_path, fetch_response
from argosy.policy import (
    UNSUPPORTED_STATUSES,
    AttemptOutcome,
    FindingKind,
    HealthCheck,
    Probe,
    ProbeAnswer,
    ProbeEffect,
    ProbeFinding,
    ProbeKind,
    ServerProfile,
    WakeAt,
    start_deadline,
)
from argosy.protocol import LoadResponse, TaskName

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

MAX_LOAD_REPORT_BYTES = 1024 * 1024
"""Maximum size of a load report in bytes. Parsing blocks the event loop, and a probe repeats it every second."""
MAX_LOGGED_MODELS = 10

_TEST_REQUESTS: tuple[tuple[TaskName, bytes, dict[str, Any]], ...] = (
    ("generate", CHAT_PATH, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}),
    ("embed", b"/v1/embeddings", {"input": "Hi"}),
    ("score", b"/v1/rerank", {"query": "Hi", "documents": ["Hi"]}),
    ("classify", b"/classify", {"input": "Hi"}),
)
"""Requests that test an ejected replica, by the task that its model needs."""

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
    """Driver of the health check of one replica. Not thread-safe: use it from one event loop."""

    def __init__(self, replica: ReplicaEndpoint) -> None:
        self._replica = replica
        self._check = HealthCheck(replica.health, replica.load, _configured_profile(replica))
        self._load_parsers = {source.path: source.parse for source in replica.adapter.load_sources}
        self._detected_backend: DetectedBackend | None = None
        """Result of the last detection."""
        self._wake_at = 0.0
        self.first_probe_done = asyncio.Event()
        """Set after the first check, whatever its result."""

    async def run(self) -> None:
        """Check the replica whenever a check is due, until cancelled."""
        while True:
            await asyncio.sleep(self._wake_at - time.monotonic())
            await self.probe()

    async def probe(self) -> None:
        """Check the replica once and update its state."""
        replica = self._replica
        was_ejected = replica.health.is_ejected
        effects = self._check.on_tick(time.monotonic())
        try:
            while (probe := self._apply_effects(effects)) is not None:
                effects = await self._send(probe)
        finally:
            self.first_probe_done.set()
        if was_ejected and not replica.health.is_ejected:
            replica.reset_speed()
        if replica.health.is_down:
            replica.adapter_loads.clear()  # a restarted server has none
        replica.expire_speed(time.monotonic())
        replica.on_capacity_change()

    def _apply_effects(self, effects: list[ProbeEffect]) -> Probe | None:
        """Log the findings. Return the next probe; None at the end of the check."""
        for effect in effects:
            match effect:
                case ProbeFinding():
                    self._log_finding(effect)
                case WakeAt(at):
                    self._wake_at = at
                case Probe():
                    return effect
        return None

    async def _send(self, probe: Probe) -> list[ProbeEffect]:
        """Send a probe and return the effects of its result."""
        check = self._check
        try:
            async with asyncio.timeout(probe.timeout_s):
                if probe.kind is ProbeKind.DETECT:
                    return check.on_detected(await self._detect(), time.monotonic())
                return check.on_answer(await self._fetch_answer(probe), time.monotonic())
        except PROBE_ERRORS as error:
            outcome = getattr(error, "outcome", None) or AttemptOutcome.FAILURE
            return check.on_failure(str(error), time.monotonic(), outcome)

    async def _fetch_answer(self, probe: Probe) -> ProbeAnswer:
        match probe.kind:
            case ProbeKind.LOAD:
                return await self._fetch_load(probe)
            case ProbeKind.HEALTH:
                return ProbeAnswer((await self._fetch(self._replica.adapter.health_path))[0])
            case ProbeKind.TEST_GENERATION:
                return await self._run_test_generation()
            case _:
                return await self._post(b"/" + probe.kind.value.encode(), b"")

    async def _detect(self) -> ServerProfile | None:
        """Detect the kind and the models of the server."""
        replica = self._replica
        detected = await detect_backend(self._fetch)
        if detected is None:
            return None
        # A native replica lists all models that it serves and rejects others.
        lists_model = not detected.models or replica.upstream_model in detected.models
        if detected != self._detected_backend:
            self._detected_backend = detected
            self._log_detected(detected, lists_model=lists_model)
        if detected.kind == "argosy" and not lists_model:
            return ServerProfile(is_native=True, serves_model=False)
        if replica.kind == "auto":
            replica.kind = detected.kind
            sources = replica.adapter.load_sources
            self._load_parsers = {source.path: source.parse for source in sources}
        replica.max_model_len = detected.models.get(replica.upstream_model)
        replica.tasks = detected.tasks.get(replica.upstream_model)
        return _configured_profile(replica)

    async def _fetch(self, path: bytes) -> tuple[int, bytes]:
        return await fetch_path(self._replica.upstream, path)

    async def _fetch_load(self, probe: Probe) -> ProbeAnswer:
        replica = self._replica
        if replica.is_native:
            status, body = await fetch_path(replica.upstream, probe.path, replica.gateway_header)
            return ProbeAnswer(status) if status != 200 else self._apply_native_load(body)
        status, body = await self._fetch(probe.path)
        if status != 200:
            return ProbeAnswer(status)
        try:
            if len(body) > MAX_LOAD_REPORT_BYTES:
                raise ValueError(f"the report exceeds {MAX_LOAD_REPORT_BYTES} bytes")  # noqa: TRY301
            report = self._load_parsers[probe.path](body)
        except (ValueError, OverflowError, msgspec.DecodeError) as error:
            return ProbeAnswer(status, invalid_reason=str(error))
        replica.on_load_report(report, time.monotonic())
        return ProbeAnswer(status)

    def _apply_native_load(self, body: bytes) -> ProbeAnswer:
        report = msgspec.json.decode(body, type=LoadResponse)
        self._replica.on_native_load(report, time.monotonic())
        startup = report.startup
        return ProbeAnswer(
            200,
            state=report.state,
            state_explanation=f"{startup.activity}, {startup.fraction:.0%}" if startup else "",
            is_shared=bool(report.other_gateways),
        )

    async def _run_test_generation(self) -> ProbeAnswer:
        """Let the replica generate one token, or compute what its model can compute instead.

        If its tasks are unknown, the first request is tried that it supports.
        """
        replica, priority_sign = self._replica, self._replica.adapter.priority_sign
        answer = ProbeAnswer(0)
        for task, path, fields in _TEST_REQUESTS:
            if replica.tasks is not None and task not in replica.tasks:
                continue
            body = {"model": replica.upstream_model, **fields}
            if priority_sign:
                body["priority"] = priority_sign * int(start_deadline(0, time.time()))
            answer = await self._post(path, msgspec.json.encode(body))
            if answer.status not in UNSUPPORTED_STATUSES:
                break
        return answer

    async def _post(self, path: bytes, body: bytes) -> ProbeAnswer:
        upstream = self._replica.upstream
        request = upstream.build_request(b"POST", path, body, _HEADERS)
        return ProbeAnswer((await fetch_response(upstream, request))[0])

    # --- Logs ------------------------------------------------------------------------------------

    def _log_detected(self, detected: DetectedBackend, *, lists_model: bool) -> None:
        """Log the detected kind and models, with a warning if the replica's model is missing."""
        name, models = self._replica.name, list(detected.models)[:MAX_LOGGED_MODELS]
        log.info("replica_detected", replica=name, kind=detected.kind, models=models)
        if not lists_model:
            remedy = "set `model` of this replica, or start the server with --served-model-name"
            model = self._replica.upstream_model
            log.warning("replica_model_missing", replica=name, model=model, remedy=remedy)

    def _log_finding(self, finding: ProbeFinding) -> None:
        name, path = self._replica.name, finding.path.decode()
        match finding.kind:
            case FindingKind.UNREACHABLE:  # no other log shows a wrong URL or certificate
                log.info("replica_unreachable", replica=name, reason=finding.reason)
            case FindingKind.REACHABLE_AGAIN:
                log.info("replica_reachable_again", replica=name)
            case FindingKind.LOAD_REPORT_MISSING:
                log.info("load_report_missing", replica=name, path=path)
            case FindingKind.LOAD_REPORT_INVALID:
                log.warning("load_report_invalid", replica=name, path=path, reason=finding.reason)
            case FindingKind.DRAIN_REFUSED:
                status = finding.status
                log.warning("replica_drain_request_refused", replica=name, path=path, status=status)


def _configured_profile(replica: ReplicaEndpoint) -> ServerProfile | None:
    """Return the profile of the replica's kind; None if the kind has to be detected."""
    if replica.kind == "auto":
        return None
    paths = tuple(source.path for source in replica.adapter.load_sources)
    return ServerProfile(replica.is_native, paths)
