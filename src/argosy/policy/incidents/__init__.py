"""Incidents: which alerts are one, what is known about it, and when it may be rolled back without a person.

The function `update_incidents` opens, joins and closes incidents by the alerts of a round, and `add_entries` appends to
their timelines. Changes that cannot have caused one are left out by `select_causes`. The function `judge_rollback`
names what speaks for and against a rollback, and `write_postmortem` drafts a report.
"""

from argosy.policy.incidents.causes import select_causes
from argosy.policy.incidents.incident import (
    MAX_ENTRIES,
    Incident,
    IncidentAlert,
    RollbackAdvice,
    TimelineEntry,
    add_entries,
    share_scope,
)
from argosy.policy.incidents.incident_rules import (
    close_incident,
    open_incident,
    update_incidents,
)
from argosy.policy.incidents.postmortem import write_postmortem
from argosy.policy.incidents.rollback_rules import PoolVersions, judge_rollback
