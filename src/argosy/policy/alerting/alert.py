"""Conditions that sources report, and alerts as they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

Severity = Literal["page", "ticket"]
_FNV_OFFSET = 0xCBF29CE484222325
_FNV_PRIME = 0x100000001B3
_MASK = (1 << 64) - 1


class AlertCondition(msgspec.Struct, frozen=True):
    """Something that may be wrong, as a source sees it now."""

    name: str
    """Name of the alert, such as `PoolNotReady`. It is the label `alertname`."""
    labels: dict[str, str]
    """Scope, such as `model` and `replica`. Name, labels and severity identify the alert."""
    severity: Severity
    is_firing: bool | None
    """None: there are no data, and the alert keeps its state."""
    summary: str
    """Line of text without values that change from round to round."""
    description: str
    """Sentences that explain the numbers, as of now."""
    runbook: str
    """Anchor in docs/how-to/runbooks.md."""


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """Alert that fires, or has ended. Times are seconds since the epoch."""

    labels: dict[str, str]
    """Labels of the condition, with `alertname` and `severity`."""
    summary: str
    description: str
    runbook: str
    started_at: float
    ended_at: float | None = None
    """None while it fires."""
    quiet_s: float = 0.0
    """Observed time for which its condition has been false."""
    changes: tuple[float, ...] = ()
    """Times of the starts and ends in the last hour before the latest of them."""

    notified: dict[str, float] = {}
    """Times of the latest notices about it, by receiver."""

    @property
    def is_firing(self) -> bool:
        """Whether it has not ended."""
        return self.ended_at is None

    @property
    def name(self) -> str:
        """Name of the alert."""
        return self.labels["alertname"]

    @property
    def severity(self) -> str:
        """`page` or `ticket`."""
        return self.labels["severity"]

    @property
    def fingerprint(self) -> str:
        """Identity of the alert."""
        return compute_fingerprint(self.labels)


def build_labels(condition: AlertCondition) -> dict[str, str]:
    """Return the labels of a condition's alert."""
    return condition.labels | {"alertname": condition.name, "severity": condition.severity}


def compute_fingerprint(labels: Mapping[str, str]) -> str:
    """Return Alertmanager's fingerprint of labels: FNV-1a of 64 bits over their sorted names and values."""
    value = _FNV_OFFSET
    for name, text in sorted(labels.items()):
        for byte in b"%b\xff%b\xff" % (name.encode(), text.encode()):
            value = ((value ^ byte) * _FNV_PRIME) & _MASK
    return f"{value:016x}"
