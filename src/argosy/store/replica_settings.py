"""Replica settings: what operators decide about replicas, for every gateway of the store."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from argosy.store.record_tables import RecordTables
from argosy.store.records import ReplicaSetting, ReplicaState


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
        """Change the setting of a replica, or create it.

        Args:
            model: Public name of the model.
            replica: Name of the replica. It need not exist at the moment.
            action: Verb for the audit log, such as `drain`.
            state: New state.
            weight: New weight.
            grace_s: How long streams may continue on a draining replica.
            reason: Why.
            actor: Who.

        Raises:
            ValueError: A field is invalid. The message names it.
        """
        with self._begin_transaction(actor) as transaction:
            setting_id = f"{model}/{replica}"
            found = transaction.find_records(ReplicaSetting, id=setting_id)
            fields = {"grace_s": grace_s, "reason": reason, "state": state, "weight": weight}
            fields |= {"changed_at": transaction.now, "changed_by": actor}
            if found:
                return transaction.update_record(found[0], action, **fields)
            given = {name: value for name, value in fields.items() if value is not UNSET}
            return transaction.create_record(
                msgspec.convert(
                    {"id": setting_id, "model": model, "replica": replica} | given, ReplicaSetting
                ),
                action,
            )
