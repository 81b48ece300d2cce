"""Decisions of operators about feature flags, which override the settings of every gateway."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, UnsetType

from argosy.store.errors import NotFoundError
from argosy.store.record_tables import RecordTables
from argosy.store.records import Flag, SwitchState


class Flags(RecordTables):
    """Changes what operators decide about flags. `actor` names who makes a change, for the audit log."""

    def switch(
        self,
        name: str,
        *,
        state: SwitchState | UnsetType | None = UNSET,
        default_variant: str | UnsetType | None = UNSET,
        targeting: str | UnsetType | None = UNSET,
        reason: str = "",
        actor: str,
    ) -> Flag:
        """Override parts of a declared flag. None leaves a part to the declaration again.

        Args:
            name: Name of the flag.
            state: Whether its rules apply.
            default_variant: Variant of requests for which they select none.
            targeting: Rules in JsonLogic as JSON.
            reason: Why, for the audit log.
            actor: Who makes the change.
        """
        fields = {"state": state, "default_variant": default_variant, "targeting": targeting}
        given: dict[str, Any] = {key: value for key, value in fields.items() if value is not UNSET}
        with self._begin_transaction(actor) as transaction:
            given |= {"reason": reason, "changed_at": transaction.now, "changed_by": actor}
            found = transaction.find_records(Flag, id=name)
            if found:
                return transaction.update_record(found[0], "switch", **given)
            return transaction.create_record(Flag(id=name, **given), "switch")

    def list_flags(self) -> list[Flag]:
        """List what was decided."""
        return self._find_records(Flag)

    def reset(self, name: str, *, actor: str) -> None:
        """Leave a flag to its declaration. Raises NotFoundError if nothing was decided about it."""
        with self._begin_transaction(actor) as transaction:
            found = transaction.find_records(Flag, id=name)
            if not found:
                raise NotFoundError(f"The flag {name!r} is as it was declared.")
            transaction.delete_record(found[0])
