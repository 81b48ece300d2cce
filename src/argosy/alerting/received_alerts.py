"""Alerts of other programs, such as Prometheus, in the form in which Alertmanager receives them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta

from argosy.policy.alerting import AlertCondition
from argosy.process import run_in_daemon_thread
from argosy.store import ConflictError, FleetDocument, FleetStore

DOCUMENT_NAME = "alerting/received"
RESOLVE_TIMEOUT_S = 300.0
"""Time after which an alert without an end is over unless it is sent again."""
MAX_RECEIVED = 200
MAX_LABELS = 30
RUNBOOK = "receivedalert"
_PAGES = frozenset({"page", "critical"})
_MAX_ATTEMPTS = 5

Label = Annotated[str, Meta(max_length=300)]
Text = Annotated[str, Meta(max_length=2000)]


class ReceivedAlert(msgspec.Struct, frozen=True, rename="camel"):
    """Alert as Alertmanager's API has it. Unknown fields are ignored."""

    labels: Annotated[dict[Label, Label], Meta(min_length=1, max_length=MAX_LABELS)]
    annotations: Annotated[dict[Label, Text], Meta(max_length=MAX_LABELS)] = {}
    starts_at: datetime | None = None
    ends_at: datetime | None = None
    """Time at which it ends if it is not sent again. An alert in the past has ended."""


class _Stored(msgspec.Struct, frozen=True):
    labels: dict[str, str]
    summary: str
    description: str
    ends_at: float


def receive_alerts(
    store: FleetStore, fleet: str, alerts: Sequence[ReceivedAlert], now: float
) -> None:
    """Store alerts for the process that evaluates them. One with the labels of a stored one replaces it.

    Raises:
        ValueError: An alert has no label `alertname`.
        ConflictError: More than `MAX_RECEIVED` alerts would fire.
    """
    for _ in range(_MAX_ATTEMPTS):
        document = store.read_documents(fleet, DOCUMENT_NAME).get(DOCUMENT_NAME)
        kept = {
            tuple(sorted(each.labels.items())): each
            for each in _decode(document)
            if each.ends_at > now
        }
        for alert in alerts:
            kept[tuple(sorted(alert.labels.items()))] = _to_stored(alert, now)
        firing = [each for each in kept.values() if each.ends_at > now]
        if len(firing) > MAX_RECEIVED:
            raise ConflictError(
                f"{MAX_RECEIVED} alerts of other programs fire already. Send fewer of them, such as only pages."
            )
        version = 0 if document is None else document.version
        content = msgspec.json.encode(firing)
        if store.replace_document(
            fleet, DOCUMENT_NAME, FleetDocument(version + 1, content), after=version
        ):
            return
    raise ConflictError("Other alerts were received meanwhile. Send them again.")


class ReceivedAlerts:
    """Source of the conditions of received alerts."""

    def __init__(self, store: FleetStore, fleet: str) -> None:
        self._store = store
        self._fleet = fleet

    async def read(self, now: float) -> list[AlertCondition]:
        """Return those that fire."""
        read = partial(self._store.read_documents, self._fleet, DOCUMENT_NAME)
        document = (await run_in_daemon_thread(read)).get(DOCUMENT_NAME)
        return [
            AlertCondition(
                name=each.labels["alertname"],
                labels={
                    name: value
                    for name, value in each.labels.items()
                    if name not in {"alertname", "severity"}
                },
                severity="page" if each.labels.get("severity") in _PAGES else "ticket",
                is_firing=True,
                summary=each.summary,
                description=each.description,
                runbook=RUNBOOK,
            )
            for each in _decode(document)
            if each.ends_at > now
        ]


def _to_stored(alert: ReceivedAlert, now: float) -> _Stored:
    name = alert.labels.get("alertname", "")
    if not name:
        raise ValueError("labels: alertname is missing. Each alert needs a name.")
    ends_at = now + RESOLVE_TIMEOUT_S
    if alert.ends_at is not None and alert.ends_at.year > 1:  # Go writes the year 1 for no time
        end = alert.ends_at if alert.ends_at.tzinfo else alert.ends_at.replace(tzinfo=UTC)
        ends_at = end.timestamp()
    return _Stored(
        labels=alert.labels,
        summary=alert.annotations.get("summary", name)[:300],
        description=alert.annotations.get("description", ""),
        ends_at=ends_at,
    )


def _decode(document: FleetDocument | None) -> list[_Stored]:
    if document is None:
        return []
    try:
        return msgspec.json.decode(document.content, type=list[_Stored])
    except msgspec.MsgspecError:  # of another version
        return []
