"""Loop that asks sources for conditions, keeps the alerts that follow from them, and notifies people."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import structlog

from argosy.alerting.alert_orders import AlertOrders, OrderBook
from argosy.alerting.alert_records import (
    NO_ANSWER,
    STORE_TIMEOUT_S,
    AlertRecords,
    ReceiverState,
)
from argosy.alerting.notifier import Notifier
from argosy.deployment import AlertingConfig
from argosy.policy.alerting import Alert, AlertCondition, update_alerts, update_groups
from argosy.process import run_in_daemon_thread
from argosy.store import StoreError

EVALUATION_INTERVAL_S = 10.0
DELIVERY_INTERVAL_S = 1.0
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
        orders: Silences and test notices that people ordered.
        sources: Where conditions come from. One that raises or takes too long has no data.
        read_config: Returns the settings in force.
        on_changed: Called with the alerts that started or ended, after the store has them.
        clock: Returns seconds since the epoch.
        monotonic: Returns seconds of a clock without steps.
    """

    def __init__(
        self,
        records: AlertRecords,
        orders: OrderBook,
        sources: Sequence[AlertSource],
        read_config: Callable[[], AlertingConfig],
        *,
        on_changed: Callable[[Sequence[Alert]], None] = lambda _: None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._records = records
        self._orders = orders
        self._sources = sources
        self._read_config = read_config
        self._on_changed = on_changed
        self._clock = clock
        self._monotonic = monotonic
        self._notifier = Notifier(records, clock)
        self._known_orders = AlertOrders()
        self._evaluated_at = monotonic()
        self._reported_at = [self._evaluated_at] * len(sources)
        self._problems = [""] * len(sources)
        """Last problem of each source; empty once it reports again."""

    async def run(self) -> None:
        """Evaluate and notify until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._repeat(self.evaluate, EVALUATION_INTERVAL_S))
                tasks.create_task(self._repeat(self.deliver, DELIVERY_INTERVAL_S))
        finally:
            await self._records.release()

    async def _repeat(self, work: Callable[[], Awaitable[None]], interval_s: float) -> None:
        while True:
            try:
                await work()
            except Exception:
                log.exception("alert_evaluation_failed")
            await asyncio.sleep(interval_s)

    async def evaluate(self) -> None:
        """Evaluate once, if this process is the one that does."""
        now, monotonic = self._clock(), self._monotonic()
        elapsed_s, self._evaluated_at = monotonic - self._evaluated_at, monotonic
        if not await self._records.acquire(now):
            return
        conditions, is_complete = await self._read_sources(now, monotonic)
        orders = await self._read_orders()
        config, state = self._read_config(), self._records.state
        alerts = update_alerts(
            state.alerts,
            [*conditions, *self._notifier.list_conditions()],
            is_complete=is_complete,
            now=now,
            elapsed_s=elapsed_s,
            timing=config.timing,
        )
        groups = update_groups(state.groups, alerts, config.find_routes, orders.silences, now)
        tests = {each.id for each in orders.tests}
        self._records.state = msgspec.structs.replace(
            state,
            alerts=alerts,
            groups=groups,
            receivers={name: state.receivers.get(name, ReceiverState()) for name in config.targets},
            tests={name: each for name, each in state.tests.items() if name in tests},
            evaluated_at=now,
        )
        for order in orders.tests:
            self._notifier.add_test(order)
        changed = [
            alert
            for fingerprint, alert in alerts.items()
            if fingerprint not in state.alerts
            or alert.ended_at != state.alerts[fingerprint].ended_at
        ]
        is_pending = groups != state.groups or any(
            each.id not in state.tests for each in orders.tests
        )
        if (changed or is_pending) and await self._records.save(now):
            self._report(changed)

    async def deliver(self) -> None:
        """Send what is due once, if this process evaluates the alerts."""
        if self._records.is_held:
            await self._notifier.deliver(self._read_config())

    def _report(self, changed: Sequence[Alert]) -> None:
        for alert in changed:
            if alert.is_firing:
                log.warning("alert_fires", labels=alert.labels, summary=alert.summary)
            else:
                log.info("alert_ended", labels=alert.labels, summary=alert.summary)
        if changed:
            self._on_changed(changed)

    async def _read_orders(self) -> AlertOrders:
        """Return what people ordered, as it was known last while the store cannot be read."""
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                self._known_orders = await run_in_daemon_thread(self._orders.read)
        except (StoreError, TimeoutError) as error:
            self._records.report_problem(str(error) or NO_ANSWER)
        return self._known_orders

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
                self._reported_at[index], self._problems[index] = monotonic, ""
            elif isinstance(result, Exception):
                is_complete, problem = False, repr(result)
                if problem != self._problems[index]:
                    source = _name(self._sources[index])
                    log.warning("alert_source_failed", source=source, reason=problem)
                self._problems[index] = problem
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
