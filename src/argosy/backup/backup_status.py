"""State of the backups of a store: the newest one, drills of restores, and which process makes the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from argosy.backup.backup_manifest import BackupError
from argosy.store import FleetDocument, FleetStore

DOCUMENT_NAME = "backup/status"
NO_FLEET = "-"
"""Name under which the document is kept, since backups are those of a store with all its fleets."""
MAX_DRILLS = 20
MAX_PROBLEM_CHARS = 500
HOLD_S = 120.0
"""Time after which another process may take over from one that makes a backup and no longer reports."""
RETRY_S = 900.0
"""Longest pause after a failure."""
_MAX_ATTEMPTS = 10
BackupCommand = Literal["create", "drill"]


class DrillResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a drill: a restore into a scratch folder, with all checks."""

    at: float
    """Time of its end in seconds since the epoch."""
    backup_id: str
    problem: str
    """Empty if it passed."""
    restore_s: float
    """How long restore and checks took, which estimates the time of a real recovery."""
    backup_age_s: float
    """Age of the backup: what a loss of the store would have cost."""


class BackupStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of the backups of a store. Times are seconds since the epoch."""

    holder: str = ""
    """Process that makes a backup or a drill now; empty if none does."""
    held_until: float = 0.0
    """Time from which another process may take over."""
    first_at: float | None = None
    """Time of the first backup."""
    created_at: float | None = None
    """Time of the newest backup."""
    failing_since: float | None = None
    """Time of the first failure to make one since the last success."""
    failed_at: float = 0.0
    """Time of the last failure of a backup or drill."""
    problem: str = ""
    """Reason of the last failure to make a backup."""
    drills: tuple[DrillResult, ...] = ()
    """The latest drills, from old to new."""

    def with_backup(self, created_at: float) -> BackupStatus:
        """Return the state after a backup was made."""
        first_at = created_at if self.first_at is None else self.first_at
        done = {"created_at": created_at, "failing_since": None, "problem": ""}
        return msgspec.structs.replace(self, first_at=first_at, **done)

    def with_failure(self, problem: str, now: float) -> BackupStatus:
        """Return the state after a backup failed."""
        since = now if self.failing_since is None else self.failing_since
        return msgspec.structs.replace(
            self, failing_since=since, failed_at=now, problem=problem[:MAX_PROBLEM_CHARS]
        )

    def with_drill(self, result: DrillResult) -> BackupStatus:
        """Return the state after a drill."""
        drills = (*self.drills, result)[-MAX_DRILLS:]
        failed_at = result.at if result.problem else self.failed_at
        return msgspec.structs.replace(self, drills=drills, failed_at=failed_at)

    def with_holder(self, holder: str, now: float) -> BackupStatus:
        """Return the state with a process that makes a backup or a drill, or with none if its name is empty."""
        return msgspec.structs.replace(self, holder=holder, held_until=now + HOLD_S)

    def find_due(
        self, every_s: float, drill_every_s: float | None, now: float
    ) -> BackupCommand | None:
        """Return what the schedule asks for now, if no process is at it.

        Args:
            every_s: Time between two backups.
            drill_every_s: Time between two drills; None for no drills.
            now: The time.
        """
        is_held = bool(self.holder) and now < self.held_until
        if is_held or 0 <= now - self.failed_at < min(RETRY_S, every_s):
            return None
        if self.created_at is None or now - self.created_at >= every_s:
            return "create"
        drilled_at = self.drills[-1].at if self.drills else float("-inf")
        return "drill" if drill_every_s is not None and now - drilled_at >= drill_every_s else None


def read_status(store: FleetStore) -> BackupStatus:
    """Return the state of the backups of a store. Blocks on the store."""
    return _decode(store.read_documents(NO_FLEET, DOCUMENT_NAME).get(DOCUMENT_NAME))


def change_status(
    store: FleetStore, change: Callable[[BackupStatus], BackupStatus | None]
) -> BackupStatus | None:
    """Change the state of the backups of a store. Blocks on the store.

    Args:
        store: The store.
        change: Returns the new state for the present one, or None to leave it as it is. May be called several times.

    Returns:
        The new state; None if `change` left it as it was.

    Raises:
        BackupError: Others change it all the time.
    """
    for _ in range(_MAX_ATTEMPTS):
        document = store.read_documents(NO_FLEET, DOCUMENT_NAME).get(DOCUMENT_NAME)
        new = change(_decode(document))
        if new is None:
            return None
        version = 0 if document is None else document.version
        written = FleetDocument(version + 1, msgspec.json.encode(new))
        if store.replace_document(NO_FLEET, DOCUMENT_NAME, written, after=version):
            return new
    raise BackupError("Other processes change the state of backups all the time. Try again.")


def _decode(document: FleetDocument | None) -> BackupStatus:
    """Return a stored state; an empty one for that of another version, which is replaced."""
    try:
        content = b"{}" if document is None else document.content
        return msgspec.json.decode(content, type=BackupStatus)
    except msgspec.MsgspecError:
        return BackupStatus()
