"""Alerts as people see them and decide about them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from argosy.alerting.alert_orders import OrderBook
from argosy.alerting.alert_records import AlertState
from argosy.policy.alerting import Alert, Silence, find_silence, index_inhibitors


class ShownAlert(msgspec.Struct, frozen=True):
    """An alert, with the reason for which it is not notified if there is one."""

    alert: Alert
    silence: Silence | None
    explained_by: Alert | None


class AlertAdmin:
    """Alerts of a fleet for operators. Every call may block on the store.

    Args:
        orders: Silences and test notices.
        read_state: Returns the alerts.
    """

    def __init__(self, orders: OrderBook, read_state: Callable[[], AlertState]) -> None:
        self.orders = orders
        self.read_state = read_state

    def list_alerts(
        self, state: AlertState, silences: tuple[Silence, ...], now: float
    ) -> list[ShownAlert]:
        """Return the alerts, those that fire first, then the latest first."""
        firing = [each for each in state.alerts.values() if each.is_firing]
        find_inhibitor = index_inhibitors(firing)
        shown = [
            ShownAlert(
                each,
                find_silence(each.labels, silences, now) if each.is_firing else None,
                find_inhibitor(each.labels) if each.is_firing else None,
            )
            for each in state.alerts.values()
        ]
        return sorted(
            shown,
            key=lambda each: (
                not each.alert.is_firing,
                each.alert.severity != "page",
                -(each.alert.ended_at or each.alert.started_at),
            ),
        )
