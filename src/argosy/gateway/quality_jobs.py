"""Work of a gateway for the quality of models: it grades samples of answers, and runs golden sets on a schedule."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import structlog

from argosy.alerting import STANDALONE_FLEET
from argosy.deployment import GatewayConfig, ScheduledRun
from argosy.gateway.accounting import AccountingService
from argosy.gateway.principal import TIERS, Principal
from argosy.gateway.proxy import AnswerSampler, CompletionHandlers
from argosy.gateway.request_context import CHAT
from argosy.process import run_in_daemon_thread
from argosy.quality import (
    GoldenSetRun,
    ModelClient,
    QualityRunError,
    decode_set,
    describe_stored_run,
)
from argosy.series import SeriesRecorder
from argosy.store import FleetDocument, QualitySample, StoreError
from argosy.telemetry import GatewayMetrics

REQUEST_TIMEOUT_S = 300.0
CHECK_INTERVAL_S = 60.0
CONCURRENCY = 2
"""Items of a golden set at a time."""
DOCUMENT_NAME = "quality_schedule"
"""Name of the fleet document with the time of the last run of each entry."""
ACTOR = "schedule"
_HOUR_S = 3600.0

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class QualityJobs:
    """Grades samples and runs golden sets, by requests in the lowest tier of the project of the settings.

    Args:
        config: Settings of the gateway.
        accounting: Its store.
        generation: Handlers of its requests.
        metrics: Its metrics.
        series: Its series. None if it keeps none.
    """

    def __init__(
        self,
        config: GatewayConfig,
        accounting: AccountingService,
        generation: CompletionHandlers,
        metrics: GatewayMetrics,
        series: SeriesRecorder | None,
    ) -> None:
        self._config = config
        self._accounting = accounting
        self._generation = generation
        self._metrics = metrics
        self._series = series
        quality = accounting.store.quality
        self.sampler = AnswerSampler(config.quality, quality, self._send, self._record_grade)

    async def run_schedule(self) -> None:
        """Run the golden sets that are due, one after another, until cancelled."""
        while True:
            for entry in self._config.quality.schedule:
                try:
                    if await run_in_daemon_thread(self._claim, entry, time.time()):
                        loop = asyncio.get_running_loop()
                        await run_in_daemon_thread(self._run_set, entry, loop)
                except (StoreError, QualityRunError, ValueError) as error:
                    log.warning(
                        "golden_set_not_run", set=entry.set, model=entry.model, reason=str(error)
                    )
            await asyncio.sleep(CHECK_INTERVAL_S)

    async def _send(self, body: dict[str, Any]) -> tuple[int, bytes]:
        """Send a chat completion for the project that pays (see `quality.SendRequest`)."""
        config, payer = self._config, self._config.quality.project
        projects = self._accounting.snapshot.projects
        project = next((each for each in projects if each.id == payer), None)
        if project is None or project.archived_at is not None:
            message = f"quality.project: there is no active project {payer!r}"
            return 404, msgspec.json.encode({"error": {"message": message}})
        principal = Principal(
            organisation=project.organisation,
            project=project.id,
            tier=len(TIERS) - 1,
            weight=project.weight,
            cache_domain=project.id,
        )
        try:
            return await self._generation.call_for_quality(
                principal, config, CHAT, msgspec.json.encode(body), REQUEST_TIMEOUT_S
            )
        except TimeoutError:
            return 504, b"the model does not answer in time"

    def _record_grade(self, sample: QualitySample, tenant: str, replica: str) -> None:
        """Count the grade of a sample."""
        result = "passed" if sample.has_passed else "failed"
        self._metrics.quality_samples.add((sample.model, sample.version, result))
        if self._series is not None:
            self._series.record_grade(
                sample.model,
                version=sample.version,
                replica=replica,
                tenant=tenant,
                has_passed=sample.has_passed,
            )

    def _claim(self, entry: ScheduledRun, now: float) -> bool:
        """Return whether an entry is due and this gateway runs it, of all that share the store. Raises StoreError."""
        store, fleet = self._accounting.store.fleets, self._config.fleet or STANDALONE_FLEET
        document = store.read_documents(fleet, DOCUMENT_NAME).get(DOCUMENT_NAME)
        started: dict[str, float] = {}
        if document is not None:
            started = msgspec.json.decode(document.content, type=dict[str, float])
        keys = {_entry_key(each) for each in self._config.quality.schedule}
        key = _entry_key(entry)
        if now - started.get(key, 0.0) < entry.every_hours * _HOUR_S:
            return False
        kept = {name: at for name, at in started.items() if name in keys} | {key: now}
        version = 0 if document is None else document.version
        replacement = FleetDocument(version + 1, msgspec.json.encode(kept))
        return store.replace_document(fleet, DOCUMENT_NAME, replacement, after=version)

    def _run_set(self, entry: ScheduledRun, loop: asyncio.AbstractEventLoop) -> None:
        """Run a golden set in this thread, and keep the result. Requests are sent by the gateway's event loop.

        Raises:
            ValueError: There is no such set.
            QualityRunError: A model does not answer.
            StoreError: The store cannot be used.
        """

        async def send(body: dict[str, Any]) -> tuple[int, bytes]:
            return await asyncio.wrap_future(
                asyncio.run_coroutine_threadsafe(self._send(body), loop)
            )

        quality = self._accounting.store.quality
        found = quality.find_set(entry.set)
        golden = decode_set(quality.read_content(found))
        candidate, baseline, judge = (
            ModelClient(name, send) if name else None
            for name in (entry.model, entry.against, golden.judge)
        )
        assert candidate is not None  # noqa: S101 - has a name
        run = GoldenSetRun(golden, candidate, baseline, judge, concurrency=CONCURRENCY)
        summary = asyncio.run(run.run()).summary
        quality.add_run(found.id, **describe_stored_run(summary), actor=ACTOR)
        log.info("golden_set_run", set=found.reference, model=entry.model, score=summary.score)


def _entry_key(entry: ScheduledRun) -> str:
    return msgspec.json.encode([entry.set, entry.model, entry.against]).decode()
