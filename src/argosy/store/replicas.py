"""Replicas in the store: what operators decide about them for every gateway, and the logs that a controller records."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import UNSET, UnsetType
from sqlalchemy import ColumnElement, ScalarSelect, delete, insert, or_, select

from argosy.store import schema
from argosy.store.database import Database
from argosy.store.fleet_store import (
    IDLE_TIMEOUT_S,
    AuditedDecision,
    FleetLease,
    FleetStore,
    require_leader,
)
from argosy.store.record_tables import RecordTables
from argosy.store.records import ReplicaSetting, ReplicaState

CONTROLLER_LOG = "controller"
"""Name under which the log of the fleet's controller is kept beside those of its replicas."""
MAX_RUNS = 5
"""Number of runs of a replica that are kept, the latest ones."""
MAX_FLEET_RUNS = 500
"""Number of runs of all replicas of a fleet that are kept."""

_logs = schema.replica_logs.c


class ReplicaSettings(RecordTables):
    """Changes replica settings. `actor` names who makes a change, for the audit log."""

    def change_setting(
        self,
        model: str,
        replica: str,
        action: str,
        *,
        state: ReplicaState | UnsetType = UNSET,
        weight: float | UnsetType = UNSET,
        grace_s: float = 0.0,
        reason: str = "",
        actor: str,
    ) -> ReplicaSetting:
        """Change the setting of a replica, which need not exist at the moment, or create it.

        `action` is the verb for the audit log, such as `drain`. Raises ValueError that names an invalid field.
        """
        with self._begin_transaction(actor) as transaction:
            setting_id = f"{model}/{replica}"
            found = transaction.find_records(ReplicaSetting, id=setting_id)
            fields = {"grace_s": grace_s, "reason": reason, "state": state, "weight": weight}
            fields |= {"changed_at": transaction.now, "changed_by": actor}
            if found:
                setting = transaction.update_record(found[0], action, **fields)
            else:
                given = {name: value for name, value in fields.items() if value is not UNSET}
                given |= {"id": setting_id, "model": model, "replica": replica}
                setting = transaction.create_record(msgspec.convert(given, ReplicaSetting), action)
        # Apart, because those who change a fleet lock it before the accounts.
        decision = AuditedDecision(actor=actor, action=f"replica.{action}", reason=reason)
        FleetStore(self._database, self._clock).record_replica_decision(replica, decision)
        return setting

    def record_sleep(self, model: str, replica: str, level: int, reason: str, actor: str) -> None:
        """Record that `actor` put a replica to sleep, or woke it up (level 0). The replica keeps its state itself."""
        action = "replica.sleep" if level else "replica.wake"
        with self._begin_transaction(actor) as transaction:
            details = {"model": model, "level": level, "reason": reason}
            transaction.append_decision(action, f"{model}/{replica}", details)
        decision = AuditedDecision(actor=actor, action=action, reason=reason)
        FleetStore(self._database, self._clock).record_replica_decision(replica, decision)


class ReplicaLogRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run of a replica whose log is kept. Times are seconds since the epoch."""

    started_at: float
    attempt: int
    """Number of times that the replica was started."""
    exited_at: float | None = None
    """None while it runs."""
    exit_status: int | None = None
    """Exit status, or the negative number of the signal that ended it."""
    reason: str = ""
    """Why it ended."""
    read_at: float
    """When the log was read."""
    error: str = ""
    """Why the log could not be read."""


class ReplicaLogStore:
    """Logs of the recent runs of replicas. Every call may block on the database."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    def save(self, lease: FleetLease, replica: str, run: ReplicaLogRun, log: bytes) -> None:
        """Save a run of a replica with the end of its log, or replace it. Its older runs are deleted.

        Raises DeposedError, and saves nothing, if another controller leads by now.
        """
        of_replica = (_logs.fleet == lease.fleet) & (_logs.replica == replica)
        oldest = _find_nth_latest(_logs.started_at, MAX_RUNS, of_replica)
        row = msgspec.structs.asdict(run) | {"fleet": lease.fleet, "replica": replica, "log": log}
        with self._database.write_transaction(idle_timeout_s=IDLE_TIMEOUT_S) as connection:
            require_leader(connection, lease)
            connection.execute(
                delete(schema.replica_logs).where(of_replica, _logs.started_at == run.started_at)
            )
            connection.execute(insert(schema.replica_logs), row)
            connection.execute(
                delete(schema.replica_logs).where(of_replica, _logs.started_at < oldest)
            )

    def list_replicas(self, fleet: str) -> list[str]:
        """Return the names of the replicas of which runs are kept, also of removed ones."""
        query = select(_logs.replica).where(_logs.fleet == fleet).distinct().order_by(_logs.replica)
        with self._database.read_transaction() as connection:
            return [*connection.execute(query).scalars()]

    def list_runs(self, fleet: str, replica: str) -> list[ReplicaLogRun]:
        """Return the runs of a replica whose logs are kept, the latest first."""
        columns = [_logs[name] for name in ReplicaLogRun.__struct_fields__]
        query = (
            select(*columns)
            .where(_logs.fleet == fleet, _logs.replica == replica)
            .order_by(_logs.started_at.desc())
        )
        with self._database.read_transaction() as connection:
            return [ReplicaLogRun(**row._asdict()) for row in connection.execute(query)]

    def read_log(self, fleet: str, replica: str, started_at: float) -> bytes:
        """Return the end of the log of one run; empty if it is not kept."""
        query = select(_logs.log).where(
            _logs.fleet == fleet, _logs.replica == replica, _logs.started_at == started_at
        )
        with self._database.read_transaction() as connection:
            return bytes(connection.execute(query).scalar_one_or_none() or b"")

    def prune(self, lease: FleetLease, *, keep_s: float) -> int:
        """Delete the runs of a fleet whose logs are older than `keep_s` or too many, and return how many.

        Raises DeposedError, and deletes nothing, if another controller leads by now.
        """
        oldest = _find_nth_latest(_logs.read_at, MAX_FLEET_RUNS, _logs.fleet == lease.fleet)
        is_old = or_(_logs.read_at < self._clock() - keep_s, _logs.read_at < oldest)
        with self._database.write_transaction(idle_timeout_s=IDLE_TIMEOUT_S) as connection:
            require_leader(connection, lease)
            pruned = delete(schema.replica_logs).where(_logs.fleet == lease.fleet, is_old)
            return connection.execute(pruned).rowcount


def _find_nth_latest(
    at: ColumnElement[float], n: int, where: ColumnElement[bool]
) -> ScalarSelect[float]:
    """Select the nth latest time of the logs that meet a condition. It is NULL if there are fewer."""
    return select(at).where(where).order_by(at.desc()).offset(n - 1).limit(1).scalar_subquery()
