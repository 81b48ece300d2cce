"""Incidents in the store: a document for each, which the controller and people change one after the other."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from argosy.policy.incidents import (
    Incident,
    TimelineEntry,
    add_entries,
    close_incident,
    open_incident,
)
from argosy.store import AuditedDecision, ConflictError, FleetDocument, FleetStore, NotFoundError

INCIDENT_PREFIX = "incident/"
MAX_CLOSED = 200
"""Closed incidents that are kept."""
MAX_OPEN = 50
_MAX_ATTEMPTS = 5


class IncidentRecords:
    """Incidents of a fleet. Every call blocks on the store."""

    def __init__(self, store: FleetStore, fleet: str) -> None:
        self._store = store
        self._fleet = fleet

    def list_all(self) -> list[Incident]:
        """Return all incidents, the latest first. Those of another version of Argosy are left out."""
        found = [incident for _, incident in self._read().values()]
        return sorted(found, key=lambda each: each.number, reverse=True)

    def get(self, number: int) -> Incident:
        """Return an incident. Raises NotFoundError if there is none with the number."""
        entry = self._read(f"{INCIDENT_PREFIX}{number}").get(number)
        if entry is None:
            raise NotFoundError(
                f"There is no incident {number}. `argosy incidents list` has them all."
            )
        return entry[1]

    def read_rollbacks(self) -> dict[str, float]:
        """Return when each pool was rolled back last without a person."""
        found: dict[str, float] = {}
        for incident in self.list_all():
            advice = incident.rollback
            if advice is not None and advice.is_done:
                found[advice.pool] = max(found.get(advice.pool, 0.0), incident.opened_at)
        return found

    def change(
        self,
        number: int,
        change: Callable[[Incident], Incident],
        decision: AuditedDecision | None = None,
    ) -> Incident:
        """Change an incident, and return it.

        Raises:
            NotFoundError: There is no such incident.
            ConflictError: Others changed it again and again meanwhile.
        """
        for _ in range(_MAX_ATTEMPTS):
            entry = self._read(f"{INCIDENT_PREFIX}{number}").get(number)
            if entry is None:
                return self.get(number)
            version, incident = entry
            changed = change(incident)
            if changed == incident or self._replace(changed, version, decision):
                return changed
        raise ConflictError(
            f"The incident {number} was changed at the same time. Repeat the command."
        )

    def add(self, incident: Incident, decision: AuditedDecision | None = None) -> bool:
        """Add an incident, and delete the oldest closed ones. Returns False if its number is taken."""
        if not self._replace(incident, 0, decision):
            return False
        closed = sorted(
            (number, version)
            for number, (version, each) in self._read().items()
            if not each.is_open
        )
        for number, version in closed[:-MAX_CLOSED]:
            self._store.replace_document(
                self._fleet, f"{INCIDENT_PREFIX}{number}", None, after=version
            )
        return True

    def open(self, title: str, labels: dict[str, str], actor: str, now: float) -> Incident:
        """Open an incident by hand.

        Raises:
            ConflictError: Too many are open.
        """
        decision = AuditedDecision(
            actor=actor, action="incident.open", pool=labels.get("pool", ""), reason=title
        )
        for _ in range(_MAX_ATTEMPTS):
            known = self._read()
            if sum(each.is_open for _, each in known.values()) >= MAX_OPEN:
                raise ConflictError(f"{MAX_OPEN} incidents are open. Close some of them first.")
            number = max(known, default=0) + 1
            incident = open_incident(number, title, labels, now, actor)
            if self.add(incident, decision):
                return incident
        raise ConflictError("Another incident was opened at the same time. Repeat the command.")

    def close(self, number: int, reason: str, actor: str, now: float) -> Incident:
        """Close an incident by hand. Raises as `change`, and ConflictError if it is closed."""

        def close(incident: Incident) -> Incident:
            if not incident.is_open:
                raise ConflictError(f"{incident.name} is closed already.")
            return close_incident(incident, now, actor, reason)

        decision = AuditedDecision(actor=actor, action="incident.close", reason=reason)
        return self.change(number, close, decision)

    def comment(
        self, number: int, text: str, actor: str, now: float, *, is_cause: bool = False
    ) -> Incident:
        """Append a comment, which may be the confirmed cause. Raises as `change`."""

        def comment(incident: Incident) -> Incident:
            entry = TimelineEntry(
                at=now, source="comment", text=f"Cause: {text}" if is_cause else text, actor=actor
            )
            if is_cause:
                incident = msgspec.structs.replace(incident, cause=text, cause_by=actor)
            return add_entries(incident, [entry])

        return self.change(number, comment)

    def _read(self, prefix: str = INCIDENT_PREFIX) -> dict[int, tuple[int, Incident]]:
        found = {}
        for document in self._store.read_documents(self._fleet, prefix).values():
            try:
                incident = msgspec.json.decode(document.content, type=Incident)
            except msgspec.MsgspecError:  # of another version
                continue
            found[incident.number] = document.version, incident
        return found

    def _replace(self, incident: Incident, version: int, decision: AuditedDecision | None) -> bool:
        return self._store.replace_document(
            self._fleet,
            f"{INCIDENT_PREFIX}{incident.number}",
            FleetDocument(version + 1, msgspec.json.encode(incident)),
            after=version,
            decision=decision,
        )
