"""Which recorded changes can have caused an incident, by the alerts that opened it."""

from __future__ import annotations

from collections.abc import Iterable

from argosy.policy.detection import PastChange
from argosy.policy.incidents.incident import Incident

_CAUSES: dict[str, tuple[str, ...]] = {
    "AlertSourceFailing": (),
    "BackupFailing": ("revision_in_force",),
    "BackupNotVerified": ("revision_in_force",),
    "BudgetUsed": ("key.", "limit.", "price.", "project."),
    "CertificateExpires": ("revision_in_force",),
    "DiskNearlyFull": ("retention.set", "rollout_state"),
    "ObjectivesUnknown": (),
    "ReceiverFailing": ("revision_in_force",),
    "StoreUnreachable": (),
}
"""Beginnings of the kinds of changes that can cause an alert. All changes can cause alerts that are not named."""
_HARMLESS = ("content.read", "retention.set", "tenant.erase")
"""Kinds that change neither a replica nor what requests get."""


def select_causes(incident: Incident, changes: Iterable[PastChange]) -> list[PastChange]:
    """Return the changes that can have caused an incident. Its tickets do not widen the choice if it has a page."""
    alerts = incident.deciding_alerts
    if not alerts or any(each.name not in _CAUSES for each in alerts):
        return [each for each in changes if each.kind not in _HARMLESS]
    kinds = tuple({kind for each in alerts for kind in _CAUSES[each.name]})
    return [each for each in changes if each.kind.startswith(kinds)]
