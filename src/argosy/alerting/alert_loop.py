"""Loop that asks sources for conditions, and keeps the alerts that follow from them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import structlog

from argosy.alerting.alert_records import AlertRecords
from argosy.policy.alerting import (
    DEFAULT_TIMING,
    Alert,
    AlertCondition,
    AlertTiming,
    update_alerts,
)

EVALUATION_INTERVAL_S = 10.0
SOURCE_TIMEOUT_S = 8.0
MAX_BLIND_S = 300.0
"""Time without data of a source after which that is an alert."""

AlertSource = Callable[[float], Awaitable[list[AlertCondition]]]
"""Returns all conditions that it knows at a time in seconds since the epoch. One that it leaves out is false."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.alerting")


class AlertLoop:
    """Evaluates alerts. Use it from one event loop.

    Args:
        records: The alerts.
        sources: Where conditions come from. One that raises or takes too long has no data.
        on_changed: Called with the alerts that started or ended, after the store has them.
        clock: Returns seconds since the epoch.
        monotonic: Returns seconds of a clock without steps.
    """

    def __init__(
        self,
        records: AlertRecords,
        sources: Sequence[AlertSource],
        *,
        timing: AlertTiming = DEFAULT_TIMING,
        on_changed: Callable[[Sequence[Alert]], None] = lambda _: None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._records = records
        self._sources = sources
        self._timing = timing
        self._on_changed = on_changed
        self._clock = clock
        self._monotonic = monotonic
        self._evaluated_at = monotonic()
        self._reported_at = [self._evaluated_at] * len(sources)

    async def run(self) -> None:
        """Evaluate until cancelled."""
        try:
            while True:
                try:
                    await self.evaluate()
                except Exception:
                    log.exception("alert_evaluation_failed")
                await asyncio.sleep(EVALUATION_INTERVAL_S)
        finally:
            await self._records.release()

    async def evaluate(self) -> None:
        """Evaluate once, if this process is the one that does."""
        now, monotonic = self._clock(), self._monotonic()
        elapsed_s, self._evaluated_at = monotonic - self._evaluated_at, monotonic
        if not await self._records.acquire(now):
            return
        conditions, is_complete = await self._read_sources(now, monotonic)
        state = self._records.state
        alerts = update_alerts(
            state.alerts,
            conditions,
            is_complete=is_complete,
            now=now,
            elapsed_s=elapsed_s,
            timing=self._timing,
        )
        changed = [
            alert
            for fingerprint, alert in alerts.items()
            if fingerprint not in state.alerts
            or alert.ended_at != state.alerts[fingerprint].ended_at
        ]
        self._records.state = msgspec.structs.replace(state, alerts=alerts)
        if changed and await self._records.save(self._records.state, now):
            for alert in changed:
                if alert.is_firing:
                    log.warning("alert_fires", labels=alert.labels, summary=alert.summary)
                else:
                    log.info("alert_ended", labels=alert.labels, summary=alert.summary)
            self._on_changed(changed)

    async def _read_sources(
        self, now: float, monotonic: float
    ) -> tuple[list[AlertCondition], bool]:
        """Return the conditions of all sources, and whether each source reported."""
        results = await asyncio.gather(
            *(asyncio.wait_for(source(now), SOURCE_TIMEOUT_S) for source in self._sources),
            return_exceptions=True,
        )
        conditions: list[AlertCondition] = []
        is_complete = True
        for index, result in enumerate(results):
            if not isinstance(result, BaseException):
                conditions += result
                self._reported_at[index] = monotonic
            elif isinstance(result, Exception):
                is_complete = False
                log.warning(
                    "alert_source_failed", source=_name(self._sources[index]), reason=repr(result)
                )
            else:
                raise result
        conditions += [
            AlertCondition(
                name="AlertSourceFailing",
                labels={"source": _name(source)},
                severity="ticket",
                is_firing=monotonic - reported_at > MAX_BLIND_S,
                summary=f"Alerts of {_name(source)} are blind",
                description=(
                    f"{_name(source)} has reported nothing for {monotonic - reported_at:.0f} s. Its alerts keep their "
                    "state. The log has `alert_source_failed` with the reason."
                ),
                runbook="alertsourcefailing",
            )
            for source, reported_at in zip(self._sources, self._reported_at, strict=True)
        ]
        return conditions, is_complete


def _name(source: AlertSource) -> str:
    owner = getattr(source, "__self__", None)
    return getattr(source, "__name__", "") if owner is None else type(owner).__name__
