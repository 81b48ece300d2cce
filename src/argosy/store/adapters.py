"""Registry of adapters: the operations that add versions, let them answer and remove names."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import UNSET, UnsetType
from sqlalchemy import func, select, update

from argosy.store import schema
from argosy.store.api_keys import generate_id
from argosy.store.errors import ConflictError
from argosy.store.fleet_store import FleetDocument
from argosy.store.record_tables import (
    ALL_RECORDS,
    AccountTransaction,
    PageRequest,
    RecordTables,
)
from argosy.store.records import DEFAULT_STEP_S, Adapter
from argosy.store.validation import validate_record

_NO_CANDIDATE: Mapping[str, int | None] = {
    "candidate": None,
    "candidate_percent": 0,
    "step_s": None,
}
_NOT_REJECTED: Mapping[str, str | None] = {"rejected": None, "rejection": ""}


class Adapters(RecordTables):
    """Reads and changes the registry of adapters. `actor` names who makes a change, for the audit log.

    Lists are ordered oldest first and paged like those of `Accounts`. See `RecordTables` for the errors of changes.
    """

    def add_version(
        self,
        name: str,
        base_model: str,
        digest: str,
        *,
        organisation: str | None = None,
        project: str | None = None,
        candidate_percent: int | UnsetType = UNSET,
        step_s: float = DEFAULT_STEP_S,
        base_digest: str | None = None,
        pinned: bool | UnsetType = UNSET,
        min_replicas: int | UnsetType = UNSET,
        replaces: bool = False,
        actor: str,
    ) -> Adapter:
        """Add an adapter, whose first version answers at once, or add a candidate to one of the same name and owner.

        Args:
            name: Model name of requests.
            base_model: Public name of the base model.
            digest: The version.
            organisation: Id of the owner. None for the project's, that of this view, or else all callers.
            project: Id of the project whose requests may name the adapter. None for the whole organisation.
            candidate_percent: Share of the users whom the candidate answers, which a person then changes. Without it
                gateways roll the candidate out: they raise its share step by step while the evidence permits it.
            step_s: Shortest time of such a step.
            base_digest: Version of the base model that it was made for. None serves it on any.
            pinned: Whether all replicas keep it loaded.
            min_replicas: Number of replicas that keep it loaded without requests.
            replaces: Whether a new version answers at once.
            actor: Who makes the change.

        Raises:
            ConflictError: The name is that of an adapter of another base model, or the version was rolled back.
        """
        with self._begin_transaction(actor) as transaction:
            organisation = self._find_owner(transaction, organisation, project)
            new = validate_record(
                Adapter(
                    id=generate_id("adapter"),
                    organisation=organisation,
                    project=project,
                    name=name,
                    base_model=base_model,
                    digest=digest,
                    base_digest=base_digest,
                    pinned=pinned is True,
                    min_replicas=0 if min_replicas is UNSET else min_replicas,
                    created_at=transaction.now,
                )
            )
            found = transaction.find_records(
                Adapter, organisation=organisation, project=project, name=new.name
            )
            if not found:
                return transaction.create_record(new)
            adapter = found[0]
            if adapter.base_model != new.base_model:
                raise ConflictError(
                    f"{new.name!r} is an adapter of {adapter.base_model!r}. Remove it first, or choose another name."
                )
            is_candidate = digest != adapter.digest and not replaces
            is_known = is_candidate and digest == adapter.candidate
            is_rollout = is_candidate and candidate_percent is UNSET
            if is_rollout and digest == adapter.rejected:
                raise ConflictError(
                    f"This version of {new.name!r} was rolled back: {adapter.rejection}. Give it a share, or let it "
                    "replace the one that answers."
                )
            percent = 0 if candidate_percent is UNSET else candidate_percent
            if is_known and is_rollout:
                percent = adapter.candidate_percent
            return transaction.update_record(
                adapter,
                "add_version",
                digest=adapter.digest if is_candidate else digest,
                candidate=digest if is_candidate else None,
                candidate_percent=percent if is_candidate else 0,
                rollout=generate_id("rollout") if is_candidate and not is_known else UNSET,
                step_s=step_s if is_rollout else None,
                base_digest=base_digest,
                pinned=pinned,
                min_replicas=min_replicas,
                **(_NOT_REJECTED if digest == adapter.rejected else {}),
            )

    def get_adapter(self, adapter: str) -> Adapter:
        """Return the adapter with this id, or raise NotFoundError."""
        return self._get_record(Adapter, adapter)

    def list_adapters(
        self, organisation: str | None = None, page: PageRequest = ALL_RECORDS
    ) -> list[Adapter]:
        """List the adapters of an organisation, or of all."""
        return self._find_records(Adapter, page, organisation=organisation)

    def change_adapter(
        self,
        adapter: str,
        *,
        candidate_percent: int | UnsetType = UNSET,
        pinned: bool | UnsetType = UNSET,
        min_replicas: int | UnsetType = UNSET,
        actor: str,
    ) -> Adapter:
        """Change how an adapter is served. A share ends the rollout of the candidate, which stays at this share.

        Raises:
            ConflictError: A share is given although there is no candidate.
        """
        with self._begin_transaction(actor) as transaction:
            found = transaction.get_record(Adapter, adapter)
            if found.candidate is None and candidate_percent is not UNSET:
                raise ConflictError(f"{found.name!r} has no candidate. Add a version first.")
            return transaction.update_record(
                found,
                "change",
                candidate_percent=candidate_percent,
                step_s=UNSET if candidate_percent is UNSET else None,
                pinned=pinned,
                min_replicas=min_replicas,
            )

    def promote(self, adapter: str, *, actor: str) -> Adapter:
        """Let the candidate answer all requests. Raises ConflictError if there is none."""
        with self._begin_transaction(actor) as transaction:
            found = transaction.get_record(Adapter, adapter)
            if found.candidate is None:
                raise ConflictError(f"{found.name!r} has no candidate. Add a version first.")
            return _promote(transaction, found)

    def follow_rollout(
        self, compared: Adapter, percent: int | None, rejection: str = "", *, actor: str
    ) -> Adapter | None:
        """Change the share of a candidate as the evidence of its rollout says, and return the adapter.

        Returns None, and changes nothing, if the share or the candidate has changed meanwhile.

        Args:
            compared: The adapter as it was when the evidence was judged.
            percent: New share. 0 rolls the candidate back, and None lets it answer all requests.
            rejection: Why it is rolled back.
            actor: Who makes the change.

        Raises:
            NotFoundError: The adapter was removed.
        """
        with self._begin_transaction(actor) as transaction:
            found = transaction.get_record(Adapter, compared.id)
            if _read_rollout(found) != _read_rollout(compared):
                return None
            if percent is None:
                return _promote(transaction, found)
            if percent:
                return transaction.update_record(found, "raise_share", candidate_percent=percent)
            return transaction.update_record(
                found,
                "roll_back",
                rejected=found.candidate,
                rejection=rejection,
                **_NO_CANDIDATE,
            )

    def read_evidence(self, adapters: Collection[str]) -> dict[str, FleetDocument]:
        """Return the evidence of the last rollouts of adapters with these ids."""
        columns = schema.adapters.c
        query = select(columns.id, columns.evidence_version, columns.evidence).where(
            columns.id.in_(adapters), columns.evidence.is_not(None)
        )
        with self._database.read_transaction() as connection:
            return {
                row.id: FleetDocument(row.evidence_version, bytes(row.evidence))
                for row in connection.execute(query)
            }

    def replace_evidence(self, adapter: str, evidence: bytes, *, after: int) -> bool:
        """Replace the evidence of the last rollout, unless another process has done so meanwhile.

        Args:
            adapter: Id of the adapter.
            evidence: The new evidence.
            after: Version of the replaced one; 0 if there is none.

        Returns:
            Whether it was replaced.
        """
        columns = schema.adapters.c
        query = (
            update(schema.adapters)
            .where(columns.id == adapter, func.coalesce(columns.evidence_version, 0) == after)
            .values(evidence_version=after + 1, evidence=evidence)
        )
        with self._database.write_transaction() as connection:
            return bool(connection.execute(query).rowcount)

    def remove(self, adapter: str, *, actor: str) -> None:
        """Remove the adapter with this id, or raise NotFoundError. Running requests end as they began."""
        with self._begin_transaction(actor) as transaction:
            transaction.delete_record(transaction.get_record(Adapter, adapter))


def _read_rollout(adapter: Adapter) -> tuple[object, ...]:
    return adapter.rollout, adapter.candidate, adapter.candidate_percent, adapter.step_s


def _promote(transaction: AccountTransaction, found: Adapter) -> Adapter:
    cleared = _NOT_REJECTED if found.candidate == found.rejected else {}
    return transaction.update_record(
        found, "promote", digest=found.candidate, **_NO_CANDIDATE, **cleared
    )
