"""Delivery of notices: claims those that are due, sends them, and records the results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

import msgspec
import structlog

from argosy.alerting.alert_orders import TestOrder
from argosy.alerting.alert_records import AlertRecords, ReceiverState, TestResult
from argosy.alerting.notice_channels import Delivery, NoticeChannels
from argosy.deployment import WATCHDOG, AlertingConfig
from argosy.policy.alerting import RECEIVER_FAILING, Alert, AlertCondition, Notice, NoticeGroup
from argosy.process import run_in_daemon_thread

MAX_DELIVERY_S = 30.0
PUSH_INTERVAL_S = 60.0
PUSH_RETRY_S = 10.0
PUSH_ENDED_S = 900.0
"""Time for which the end of an alert is pushed again."""
RECEIVER_FAILING_S = 900.0

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.alerting")


class Notifier:
    """Delivers notices. Use it from one event loop.

    Args:
        records: The alerts with their notices.
        clock: Returns seconds since the epoch.
    """

    def __init__(self, records: AlertRecords, clock: Callable[[], float]) -> None:
        self._records = records
        self._clock = clock
        self._busy: set[str] = set()
        """Receivers whose last delivery has not returned, although its time is over."""
        self._pushed_at = self._pinged_at = float("-inf")
        self._pushed: set[tuple[str, bool]] = set()
        """Alerts of the last push, and whether they fired. A change is pushed at once."""

    async def deliver(self, config: AlertingConfig) -> None:
        """Send what is due: notices, alerts for Alertmanagers, and the request of the dead man's switch."""
        channels, now = NoticeChannels(config), self._clock()
        await self._deliver_notices(channels, now)
        alerts = self._select_pushed(now)
        state = {(each.fingerprint, each.is_firing) for each in alerts}
        if config.alertmanagers and (
            now - self._pushed_at >= PUSH_INTERVAL_S or state != self._pushed
        ):
            self._pushed_at, self._pushed = now, state
            for number, manager in enumerate(config.alertmanagers):
                push = partial(channels.push, number, alerts, now)
                result = await self._run(manager.url, push)
                self._record_result(manager.url, result)
                if result.error:
                    self._pushed_at = now - PUSH_INTERVAL_S + PUSH_RETRY_S
        if config.watchdog is not None and now - self._pinged_at >= config.watchdog.interval_s:
            self._pinged_at = now
            self._record_result(WATCHDOG, await self._run(WATCHDOG, channels.ping_watchdog))

    def add_test(self, order: TestOrder) -> None:
        """Queue an ordered test notice, unless that has happened."""
        key = f"test/{order.id}"
        state, now = self._records.state, self._clock()
        if order.id in state.tests or key in state.groups:
            return
        alert = Alert(
            labels={"alertname": "Test", "severity": "ticket", "receiver": order.receiver},
            summary="This is a test of Argosy",
            description="It was ordered by `argosy alerts test`. Nothing is wrong.",
            runbook="test",
            started_at=now,
        )
        notice = Notice(
            id=key, alerts=(alert,), firing=("test",), created_at=now, due_at=now, is_test=True
        )
        self._replace_groups(
            {
                key: NoticeGroup(
                    key=key,
                    receiver=order.receiver,
                    labels=alert.labels,
                    created_at=now,
                    pending=notice,
                )
            }
        )

    def list_conditions(self) -> list[AlertCondition]:
        """Return a condition for each receiver, which fires if it has failed for long."""
        now = self._clock()
        conditions = []
        for name, receiver in self._records.state.receivers.items():
            since = receiver.failing_since
            failing_s = 0.0 if since is None else now - since
            conditions.append(
                AlertCondition(
                    name=RECEIVER_FAILING,
                    labels={"receiver": name},
                    severity="ticket",
                    is_firing=failing_s >= RECEIVER_FAILING_S,
                    summary=f"Notices do not reach {name}",
                    description=f"For {failing_s:.0f} s every attempt failed: {receiver.error}.",
                    runbook="receiverfailing",
                )
            )
        return conditions

    async def _deliver_notices(self, channels: NoticeChannels, now: float) -> None:
        """Send the oldest notice that is due to each receiver."""
        due: dict[str, tuple[float, NoticeGroup]] = {}
        for group in self._records.state.groups.values():
            if group.pending is not None and group.receiver not in self._busy:
                at = group.pending.due_at
                if at <= now and (group.receiver not in due or at < due[group.receiver][0]):
                    due[group.receiver] = at, group
        if not due:
            return
        claimed = [group.on_attempt(now) for _, group in due.values()]
        self._replace_groups({group.key: group for group in claimed})
        if await self._records.save(now):
            await asyncio.gather(*(self._send(channels, group) for group in claimed))
            await self._records.save(self._clock())

    async def _send(self, channels: NoticeChannels, group: NoticeGroup) -> None:
        notice = group.pending
        assert notice is not None  # noqa: S101 - it was claimed
        result = await self._run(group.receiver, lambda: channels.send(group, notice))
        current = self._records.state.groups.get(group.key)
        if current is None or current.pending is None or current.pending.id != notice.id:
            return  # another process has taken over
        now = self._clock()
        updated = current.on_result(now, result.error, is_final=result.is_final or notice.is_test)
        self._replace_groups({group.key: updated})
        self._record_result(group.receiver, result)
        self._record_delivery(group.receiver, notice, result, now)
        if not result.error:
            log.info("notice_sent", receiver=group.receiver, notice=notice.id, status=notice.status)
        elif updated.pending is None:
            log.error(
                "notice_dropped", receiver=group.receiver, notice=notice.id, reason=result.error
            )
        else:
            log.warning(
                "notice_failed",
                receiver=group.receiver,
                notice=notice.id,
                attempt=notice.attempts,
                reason=result.error,
            )

    async def _run(self, receiver: str, deliver: Callable[[], Delivery]) -> Delivery:
        """Run a delivery in a thread, of which a receiver has at most one."""
        if receiver in self._busy:
            return Delivery("the last attempt has not ended")
        self._busy.add(receiver)

        def run() -> Delivery:
            try:
                return deliver()
            finally:
                self._busy.discard(receiver)

        try:
            return await asyncio.wait_for(run_in_daemon_thread(run), MAX_DELIVERY_S)
        except TimeoutError:
            return Delivery(f"no answer within {MAX_DELIVERY_S:.0f} s")

    def _select_pushed(self, now: float) -> list[Alert]:
        return [
            each
            for each in self._records.state.alerts.values()
            if each.ended_at is None or now - each.ended_at < PUSH_ENDED_S
        ]

    def _replace_groups(self, groups: Mapping[str, NoticeGroup]) -> None:
        state = self._records.state
        self._records.state = msgspec.structs.replace(state, groups={**state.groups, **groups})

    def _record_result(self, receiver: str, result: Delivery) -> None:
        """Record whether a receiver can be reached."""
        state, now = self._records.state, self._clock()
        known = state.receivers.get(receiver, ReceiverState())
        if not result.error:
            updated = ReceiverState(delivered_at=now)
        else:
            if known.failing_since is None:
                log.warning("receiver_failing", receiver=receiver, reason=result.error)
            updated = ReceiverState(
                delivered_at=known.delivered_at,
                failing_since=now if known.failing_since is None else known.failing_since,
                error=result.error,
            )
        self._records.state = msgspec.structs.replace(
            state, receivers={**state.receivers, receiver: updated}
        )

    def _record_delivery(self, receiver: str, notice: Notice, result: Delivery, now: float) -> None:
        """Record who was notified of which alerts, and the result of a test."""
        state = self._records.state
        if notice.is_test:
            tests = {**state.tests, notice.id.removeprefix("test/"): TestResult(now, result.error)}
            self._records.state = msgspec.structs.replace(state, tests=tests)
        elif not result.error:
            alerts = dict(state.alerts)
            for fingerprint in (each.fingerprint for each in notice.alerts):
                alert = alerts.get(fingerprint)
                if alert is not None:
                    notified = {**alert.notified, receiver: now}
                    alerts[fingerprint] = msgspec.structs.replace(alert, notified=notified)
            self._records.state = msgspec.structs.replace(state, alerts=alerts)
