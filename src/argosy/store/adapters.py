"""Registry of adapters: the operations that add versions, let them answer and remove names."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from argosy.store.api_keys import generate_id
from argosy.store.errors import ConflictError
from argosy.store.record_tables import (
    ALL_RECORDS,
    AccountTransaction,
    PageRequest,
    RecordTables,
)
from argosy.store.records import Adapter, Organisation, Project
from argosy.store.validation import validate_record


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
        candidate_percent: int = 0,
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
            candidate_percent: Share of the users whom the candidate answers.
            base_digest: Version of the base model that it was made for. None serves it on any.
            pinned: Whether all replicas keep it loaded.
            min_replicas: Number of replicas that keep it loaded without requests.
            replaces: Whether a new version answers at once.
            actor: Who makes the change.

        Raises:
            ConflictError: The name is that of an adapter of another base model.
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
            return transaction.update_record(
                adapter,
                "add_version",
                digest=adapter.digest if is_candidate else digest,
                candidate=digest if is_candidate else None,
                candidate_percent=candidate_percent if is_candidate else 0,
                base_digest=base_digest,
                pinned=pinned,
                min_replicas=min_replicas,
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
        """Change how an adapter is served.

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
                pinned=pinned,
                min_replicas=min_replicas,
            )

    def promote(self, adapter: str, *, actor: str) -> Adapter:
        """Let the candidate answer all requests. Raises ConflictError if there is none."""
        with self._begin_transaction(actor) as transaction:
            found = transaction.get_record(Adapter, adapter)
            if found.candidate is None:
                raise ConflictError(f"{found.name!r} has no candidate. Add a version first.")
            return transaction.update_record(
                found, "promote", digest=found.candidate, candidate=None, candidate_percent=0
            )

    def remove(self, adapter: str, *, actor: str) -> None:
        """Remove the adapter with this id, or raise NotFoundError. Running requests end as they began."""
        with self._begin_transaction(actor) as transaction:
            transaction.delete_record(transaction.get_record(Adapter, adapter))

    def _find_owner(
        self, transaction: AccountTransaction, organisation: str | None, project: str | None
    ) -> str | None:
        """Return the id of the organisation of a new adapter, after a check that the owners exist."""
        organisation = organisation or self._organisation_id
        if project is not None:
            owner = transaction.get_active_record(Project, project).organisation
            organisation = organisation or owner
            transaction.check_same_organisation(organisation, Project, project)
        if organisation is not None:
            transaction.get_active_record(Organisation, organisation)
        return organisation
