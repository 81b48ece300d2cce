"""Registry of prompts: the operations that add versions, move labels and delete versions."""

from __future__ import annotations

from collections.abc import Sequence

from argosy.store.api_keys import generate_id
from argosy.store.errors import ConflictError
from argosy.store.record_tables import (
    ALL_RECORDS,
    AccountTransaction,
    PageRequest,
    RecordTables,
    find_records,
)
from argosy.store.records import LATEST, PRODUCTION, Prompt


class Prompts(RecordTables):
    """Reads and changes the registry of prompts. `actor` names who makes a change, for the audit log.

    The content of a version is checked before it comes here, and never changes. See `RecordTables` for the errors.
    """

    def add_version(
        self,
        name: str,
        content: str,
        *,
        organisation: str | None = None,
        project: str | None = None,
        labels: Sequence[str] = (),
        actor: str,
    ) -> Prompt:
        """Add a version with the next number. The first one gets the label `production`.

        Args:
            name: Name of the prompt.
            content: A `PromptContent` as JSON.
            organisation: Id of the owner. None for the project's, that of this view, or else all callers.
            project: Id of the project whose requests may use it. None for the whole organisation.
            labels: Labels that move to the version.
            actor: Who makes the change.
        """
        with self._begin_transaction(actor) as transaction:
            organisation = self._find_owner(transaction, organisation, project)
            others = transaction.find_records(
                Prompt, organisation=organisation, project=project, name=name
            )
            if all(each.deleted_at is not None for each in others):
                labels = (*labels, PRODUCTION)
            added = transaction.create_record(
                Prompt(
                    id=generate_id("prompt"),
                    organisation=organisation,
                    project=project,
                    name=name,
                    version=max((each.version for each in others), default=0) + 1,
                    content=content,
                    created_at=transaction.now,
                    created_by=actor,
                )
            )
            for label in dict.fromkeys(labels):
                added = _move_label(transaction, added, label)
            return added

    def get_prompt(self, prompt: str) -> Prompt:
        """Return the version with this id, or raise NotFoundError."""
        return self._get_record(Prompt, prompt)

    def list_prompts(
        self, organisation: str | None = None, page: PageRequest = ALL_RECORDS
    ) -> list[Prompt]:
        """List the versions of an organisation, or of all, that are not deleted, oldest first."""
        owner = {} if organisation is None else {"organisation": organisation}
        with self._database.read_transaction() as connection:
            return find_records(
                connection, Prompt, self._organisation_id, page, **owner, deleted_at=None
            )

    def set_label(self, prompt: str, label: str, *, removes: bool = False, actor: str) -> Prompt:
        """Move a label to the version with this id, or remove it from there."""
        with self._begin_transaction(actor) as transaction:
            found = transaction.get_active_record(Prompt, prompt)
            if removes:
                labels = tuple(each for each in found.labels if each != label)
                return transaction.update_record(found, "label", labels=labels)
            return _move_label(transaction, found, label)

    def delete(self, prompt: str, *, actor: str) -> Prompt:
        """Delete the content of a version. Its number is not used again.

        Raises:
            ConflictError: It has a label, and there are other versions to which the label may move.
        """
        with self._begin_transaction(actor) as transaction:
            found = transaction.get_active_record(Prompt, prompt)
            others = [each for each in _find_siblings(transaction, found) if each.id != found.id]
            if found.labels and others:
                raise ConflictError(
                    f"Version {found.version} of {found.name!r} has the label {found.labels[0]!r}. Move it first."
                )
            return transaction.update_record(
                found, "delete", deleted_at=transaction.now, labels=(), content=""
            )


def _find_siblings(transaction: AccountTransaction, prompt: Prompt) -> list[Prompt]:
    """Return the versions of the same prompt that are not deleted."""
    owner = {"organisation": prompt.organisation, "project": prompt.project}
    found = transaction.find_records(Prompt, **owner, name=prompt.name)
    return [each for each in found if each.deleted_at is None]


def _move_label(transaction: AccountTransaction, prompt: Prompt, label: str) -> Prompt:
    """Move a label to a version. Raises ValueError if it cannot be one."""
    if label == LATEST or label.isdigit():
        raise ValueError(f"The label {label!r} has a meaning of its own. Choose another one.")
    for other in _find_siblings(transaction, prompt):
        if label in other.labels and other.id != prompt.id:
            labels = tuple(each for each in other.labels if each != label)
            transaction.update_record(other, "label", labels=labels)
    labels = tuple(dict.fromkeys((*prompt.labels, label)))
    return transaction.update_record(prompt, "label", labels=labels)
