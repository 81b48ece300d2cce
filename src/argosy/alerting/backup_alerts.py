"""Conditions of alerts about backups: none is made, or none was shown to be restored."""

from __future__ import annotations

import time

from argosy.backup import BackupStatus, read_status
from argosy.policy.alerting import AlertCondition
from argosy.process import run_in_daemon_thread
from argosy.store import FleetStore

READ_INTERVAL_S = 60.0
FAILED_DRILLS = 3
UNVERIFIED_S = 14 * 86_400.0
FAILING_S = 3600.0


class BackupAlerts:
    """Source of conditions about the backups of a store. Use it from one event loop.

    There are none before the first backup that is known, since backups may be made by other means.
    """

    def __init__(self, store: FleetStore) -> None:
        self._store = store
        self._read_at = float("-inf")
        self._status = BackupStatus()

    async def read(self, now: float) -> list[AlertCondition]:
        """Return the conditions as they are now.

        Raises:
            StoreError: The store cannot be used, so there are no data.
        """
        if not 0 <= now - self._read_at < READ_INTERVAL_S:
            self._status = await run_in_daemon_thread(read_status, self._store)
            self._read_at = now
        return judge_backups(self._status, now)


def judge_backups(status: BackupStatus, now: float) -> list[AlertCondition]:
    """Return the conditions that follow from the state of backups. The time is in seconds since the epoch."""
    conditions = []
    if status.first_at is not None:
        latest = status.drills[-FAILED_DRILLS:]
        passed_at = max((each.at for each in status.drills if not each.problem), default=None)
        has_failed = len(latest) == FAILED_DRILLS and all(each.problem for each in latest)
        since = status.first_at if passed_at is None else passed_at
        reason = "No drill has run." if not latest else latest[-1].problem or "No later one ran."
        conditions.append(
            AlertCondition(
                name="BackupNotVerified",
                labels={},
                severity="ticket",
                is_firing=has_failed or now - since > UNVERIFIED_S,
                summary="No backup was shown to be restored lately",
                description=f"The last drill that passed ended {_format(passed_at)}. {reason}",
                runbook="backupnotverified",
            )
        )
    if status.first_at is not None or status.failing_since is not None:
        failing_since = now if status.failing_since is None else status.failing_since
        conditions.append(
            AlertCondition(
                name="BackupFailing",
                labels={},
                severity="ticket",
                is_firing=now - failing_since >= FAILING_S,
                summary="Backups fail",
                description=f"The newest backup is of {_format(status.created_at)}. {status.problem}",
                runbook="backupfailing",
            )
        )
    return conditions


def _format(at: float | None) -> str:
    return "never" if at is None else time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))
