"""Accounts: the operations that read and change organisations, projects, users and keys."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec import UNSET, UnsetType
from sqlalchemy import delete

from argosy.store import schema
from argosy.store.api_keys import create_key, generate_id, rotate_key
from argosy.store.record_tables import ALL_RECORDS, PageRequest, RecordTables
from argosy.store.records import (
    Key,
    Organisation,
    Project,
    QualityConsent,
    QuotaFailureMode,
    Role,
    RoleScope,
    Tier,
    User,
)
from argosy.store.validation import validate_flags


class Accounts(RecordTables):
    """Reads and changes accounts. `actor` names who makes a change, for the audit log.

    Records that have ended (archived, disabled or revoked) stay in the store and in lists, but cannot be changed.
    Ending a record twice has no effect. Lists are ordered oldest first and can be read in pages. A page continues after
    the last record of the previous page, whatever was added or has ended since. A list raises ValueError if that record
    is not in it. See `RecordTables` for the errors that changes raise.
    """

    def bootstrap(self, *, actor: str) -> tuple[Key, str] | None:
        """Create an organisation and a project named "default" and an admin key for the whole gateway.

        Returns:
            The stored key and the plain key, or None if the store already has an organisation.
        """
        with self._begin_transaction(actor) as transaction:
            if transaction.find_records(Organisation):
                return None
            organisation = transaction.create_record(_new_organisation("default", transaction.now))
            project = transaction.create_record(
                Project(
                    id=generate_id("proj"),
                    organisation=organisation.id,
                    name="default",
                    created_at=transaction.now,
                )
            )
            return create_key(
                transaction, project=project.id, name="admin", role="admin", scope="gateway"
            )

    def find_names(self, ids: Collection[str]) -> dict[str, str]:
        """Return the names of those ids that are of organisations, projects, keys or users, also of ended ones."""
        wanted = {*ids}
        records: list[Organisation | Project | Key] = [
            *self._find_records(Organisation, id=wanted),
            *self._find_records(Project, id=wanted),
            *self._find_records(Key, id=wanted),
        ]
        users = {user.id: user.email for user in self._find_records(User, id=wanted)}
        return users | {record.id: record.name for record in records}

    def find_tiers(self, ids: Collection[str]) -> dict[str, str]:
        """Return the tiers of those ids that are of projects, also of archived ones."""
        return {each.id: each.tier for each in self._find_records(Project, id={*ids})}

    # --- organisations ---------------------------------------------------------------------------

    def create_organisation(self, name: str, *, actor: str) -> Organisation:
        """Create an organisation."""
        with self._begin_transaction(actor) as transaction:
            return transaction.create_record(_new_organisation(name, transaction.now))

    def get_organisation(self, organisation: str) -> Organisation:
        """Return the organisation with this id, or raise NotFoundError."""
        return self._get_record(Organisation, organisation)

    def list_organisations(self, page: PageRequest = ALL_RECORDS) -> list[Organisation]:
        """List all organisations."""
        return self._find_records(Organisation, page)

    def change_organisation(self, organisation: str, *, name: str, actor: str) -> Organisation:
        """Rename an organisation."""
        with self._begin_transaction(actor) as transaction:
            return transaction.update_record(
                transaction.get_active_record(Organisation, organisation), "change", name=name
            )

    def archive_organisation(self, organisation: str, *, actor: str) -> Organisation:
        """Archive an organisation, archive its projects and disable its users."""
        with self._begin_transaction(actor) as transaction:
            for project in transaction.find_records(
                Project, organisation=organisation, archived_at=None
            ):
                transaction.update_record(project, "archive", archived_at=transaction.now)
            for user in transaction.find_records(User, organisation=organisation, disabled_at=None):
                transaction.update_record(user, "disable", disabled_at=transaction.now)
            return transaction.end_record(Organisation, organisation, "archive")

    # --- projects --------------------------------------------------------------------------------

    def create_project(
        self,
        organisation: str,
        name: str,
        *,
        tier: Tier = "standard",
        weight: float = 1.0,
        share_cache: bool = False,
        quota_failure_mode: QuotaFailureMode = "open",
        networks: Sequence[str] = (),
        flags: Sequence[str] = (),
        quality: QualityConsent = "off",
        actor: str,
    ) -> Project:
        """Create a project of the organisation with this id."""
        with self._begin_transaction(actor) as transaction:
            return transaction.create_record(
                Project(
                    id=generate_id("proj"),
                    organisation=transaction.get_active_record(Organisation, organisation).id,
                    name=name,
                    tier=tier,
                    weight=weight,
                    share_cache=share_cache,
                    quota_failure_mode=quota_failure_mode,
                    networks=tuple(networks),
                    flags=validate_flags(flags),
                    quality=quality,
                    created_at=transaction.now,
                )
            )

    def get_project(self, project: str) -> Project:
        """Return the project with this id, or raise NotFoundError."""
        return self._get_record(Project, project)

    def record_decision(
        self, action: str, subject: str, details: Mapping[str, object], actor: str
    ) -> None:
        """Record a decision of `actor` in the audit log that changes nothing in the store, such as `cache.purge`."""
        with self._begin_transaction(actor) as transaction:
            transaction.append_decision(action, subject, dict(details))

    def list_projects(
        self, organisation: str | None = None, page: PageRequest = ALL_RECORDS
    ) -> list[Project]:
        """List the projects of the organisation with this id, or of all."""
        return self._find_records(Project, page, organisation=organisation)

    def change_project(
        self,
        project: str,
        *,
        name: str | UnsetType = UNSET,
        tier: Tier | UnsetType = UNSET,
        weight: float | UnsetType = UNSET,
        share_cache: bool | UnsetType = UNSET,
        quota_failure_mode: QuotaFailureMode | UnsetType = UNSET,
        networks: Sequence[str] | UnsetType = UNSET,
        flags: Sequence[str] | UnsetType = UNSET,
        quality: QualityConsent | UnsetType = UNSET,
        actor: str,
    ) -> Project:
        """Change the given fields of a project. Without consent to samples of its answers, they are deleted."""
        with self._begin_transaction(actor) as transaction:
            changed = transaction.update_record(
                transaction.get_active_record(Project, project),
                "change",
                name=name,
                tier=tier,
                weight=weight,
                share_cache=share_cache,
                quota_failure_mode=quota_failure_mode,
                networks=networks if networks is UNSET else tuple(networks),
                flags=flags if flags is UNSET else validate_flags(flags),
                quality=quality,
            )
            if changed.quality == "off":
                samples = schema.quality_samples
                transaction.connection.execute(delete(samples).where(samples.c.project == project))
            return changed

    def archive_project(self, project: str, *, actor: str) -> Project:
        """Archive a project. The gateway then rejects its keys."""
        with self._begin_transaction(actor) as transaction:
            return transaction.end_record(Project, project, "archive")

    # --- users -----------------------------------------------------------------------------------

    def create_user(
        self,
        organisation: str,
        email: str,
        *,
        role: Role = "user",
        scope: RoleScope = "organisation",
        project: str | None = None,
        actor: str,
    ) -> User:
        """Create a user of the organisation with this id."""
        with self._begin_transaction(actor) as transaction:
            transaction.get_active_record(Organisation, organisation)
            transaction.check_same_organisation(organisation, Project, project)
            return transaction.create_record(
                User(
                    id=generate_id("user"),
                    organisation=organisation,
                    email=email,
                    role=role,
                    scope=scope,
                    project=project,
                    created_at=transaction.now,
                )
            )

    def get_user(self, user: str) -> User:
        """Return the user with this id, or raise NotFoundError."""
        return self._get_record(User, user)

    def list_users(
        self, organisation: str | None = None, page: PageRequest = ALL_RECORDS
    ) -> list[User]:
        """List the users of the organisation with this id, or of all."""
        return self._find_records(User, page, organisation=organisation)

    def change_user(
        self,
        user: str,
        *,
        email: str | UnsetType = UNSET,
        role: Role | UnsetType = UNSET,
        scope: RoleScope | UnsetType = UNSET,
        project: str | UnsetType | None = UNSET,
        actor: str,
    ) -> User:
        """Change the given fields of a user. A project must belong to the same organisation."""
        with self._begin_transaction(actor) as transaction:
            current = transaction.get_active_record(User, user)
            if project is not UNSET:
                transaction.check_same_organisation(current.organisation, Project, project)
            return transaction.update_record(
                current, "change", email=email, role=role, scope=scope, project=project
            )

    def disable_user(self, user: str, *, actor: str) -> User:
        """Disable a user. The user can no longer sign in, and the gateway rejects the user's keys."""
        with self._begin_transaction(actor) as transaction:
            return transaction.end_record(User, user, "disable")

    # --- keys ------------------------------------------------------------------------------------

    def create_key(
        self,
        project: str,
        name: str,
        *,
        user: str | None = None,
        role: Role = "user",
        scope: RoleScope = "organisation",
        models: Sequence[str] = (),
        networks: Sequence[str] = (),
        flags: Sequence[str] = (),
        expires_at: float | None = None,
        actor: str,
    ) -> tuple[Key, str]:
        """Create a key of the project with this id.

        Returns:
            The stored key and the plain key, which is not stored and cannot be shown again.
        """
        with self._begin_transaction(actor) as transaction:
            return create_key(
                transaction,
                project=project,
                name=name,
                user=user,
                role=role,
                scope=scope,
                models=tuple(models),
                networks=tuple(networks),
                flags=validate_flags(flags),
                expires_at=expires_at,
            )

    def get_key(self, key: str) -> Key:
        """Return the key with this id, or raise NotFoundError."""
        return self._get_record(Key, key)

    def list_keys(self, project: str | None = None, page: PageRequest = ALL_RECORDS) -> list[Key]:
        """List the keys of the project with this id, or of all projects."""
        return self._find_records(Key, page, project=project)

    def rotate_key(self, key: str, overlap_s: float, *, actor: str) -> tuple[Key, str]:
        """Replace a key. The old key stays valid for at most `overlap_s` seconds.

        The new key has the same lifetime as the old one had.

        Returns:
            The new key and its plain key.
        """
        if not 0 <= overlap_s < float("inf"):
            raise ValueError("overlap_s must be a finite number of seconds, 0 or more.")
        with self._begin_transaction(actor) as transaction:
            return rotate_key(transaction, transaction.get_record(Key, key), overlap_s)

    def revoke_key(self, key: str, *, actor: str) -> Key:
        """Revoke a key with immediate effect."""
        with self._begin_transaction(actor) as transaction:
            return transaction.end_record(Key, key, "revoke")


def _new_organisation(name: str, now: float) -> Organisation:
    return Organisation(id=generate_id("org"), name=name, created_at=now)
