"""Accounts: organisations, projects, users and keys, and every way to change them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from argosy.store.api_keys import create_key, generate_id, rotate_key
from argosy.store.record_tables import ALL_RECORDS, PageRequest, RecordTables
from argosy.store.records import (
    Key,
    Organisation,
    Project,
    QuotaFailureMode,
    Role,
    RoleScope,
    Tier,
    User,
)


class Accounts(RecordTables):
    """Reads and changes accounts. `actor` says who makes a change, for the audit log.

    What has been ended (archived, disabled, revoked) is kept, and listed, but cannot be changed any more.
    Lists are oldest first, and can be had in parts; one goes on after what was the last of another part, whatever has
    come or gone since, and raises ValueError where that is not in it. To end something twice does nothing.
    """

    def bootstrap(self, *, actor: str) -> tuple[Key, str] | None:
        """An organisation and a project named "default" and an admin's key, if there is nothing yet; else None."""
        with self._begin_transaction(actor) as change:
            if change.find_records(Organisation):
                return None
            organisation = change.create_record(_new_organisation("default", change.now))
            project = change.create_record(
                Project(
                    id=generate_id("proj"),
                    organisation=organisation.id,
                    name="default",
                    created_at=change.now,
                )
            )
            return create_key(
                change, project=project.id, name="admin", role="admin", scope="gateway"
            )

    # --- organisations ---------------------------------------------------------------------------

    def create_organisation(self, name: str, *, actor: str) -> Organisation:
        """A new organisation."""
        with self._begin_transaction(actor) as change:
            return change.create_record(_new_organisation(name, change.now))

    def get_organisation(self, organisation: str) -> Organisation:
        """The one with this id."""
        return self._get_record(Organisation, organisation)

    def list_organisations(self, page: PageRequest = ALL_RECORDS) -> list[Organisation]:
        """All of them."""
        return self._find_records(Organisation, page)

    def change_organisation(self, organisation: str, *, name: str, actor: str) -> Organisation:
        """Give it another name."""
        with self._begin_transaction(actor) as change:
            return change.update_record(
                change.get_active_record(Organisation, organisation), "change", name=name
            )

    def archive_organisation(self, organisation: str, *, actor: str) -> Organisation:
        """End it, with all its projects and users."""
        with self._begin_transaction(actor) as change:
            for project in change.find_records(
                Project, organisation=organisation, archived_at=None
            ):
                change.update_record(project, "archive", archived_at=change.now)
            for user in change.find_records(User, organisation=organisation, disabled_at=None):
                change.update_record(user, "disable", disabled_at=change.now)
            ended = change.get_record(Organisation, organisation)
            return change.update_record(
                ended, "archive", archived_at=ended.archived_at or change.now
            )

    # --- projects --------------------------------------------------------------------------------

    def create_project(
        self,
        organisation: str,
        name: str,
        *,
        tier: Tier = "standard",
        weight: float = 1.0,
        share_cache: bool = False,
        when_unsure: QuotaFailureMode = "open",
        networks: Sequence[str] = (),
        flags: Sequence[str] = (),
        actor: str,
    ) -> Project:
        """A new project of the organisation with this id."""
        with self._begin_transaction(actor) as change:
            return change.create_record(
                Project(
                    id=generate_id("proj"),
                    organisation=change.get_active_record(Organisation, organisation).id,
                    name=name,
                    tier=tier,
                    weight=weight,
                    share_cache=share_cache,
                    when_unsure=when_unsure,
                    networks=tuple(networks),
                    flags=tuple(flags),
                    created_at=change.now,
                )
            )

    def get_project(self, project: str) -> Project:
        """The one with this id."""
        return self._get_record(Project, project)

    def list_projects(
        self, organisation: str | None = None, page: PageRequest = ALL_RECORDS
    ) -> list[Project]:
        """Those of the organisation with this id, or all."""
        return self._find_records(Project, page, organisation=organisation)

    def change_project(
        self,
        project: str,
        *,
        name: str | UnsetType = UNSET,
        tier: Tier | UnsetType = UNSET,
        weight: float | UnsetType = UNSET,
        share_cache: bool | UnsetType = UNSET,
        when_unsure: QuotaFailureMode | UnsetType = UNSET,
        networks: Sequence[str] | UnsetType = UNSET,
        flags: Sequence[str] | UnsetType = UNSET,
        actor: str,
    ) -> Project:
        """Change what is given."""
        with self._begin_transaction(actor) as change:
            return change.update_record(
                change.get_active_record(Project, project),
                "change",
                name=name,
                tier=tier,
                weight=weight,
                share_cache=share_cache,
                when_unsure=when_unsure,
                networks=networks if networks is UNSET else tuple(networks),
                flags=flags if flags is UNSET else tuple(flags),
            )

    def archive_project(self, project: str, *, actor: str) -> Project:
        """End it: its keys are refused from now on."""
        with self._begin_transaction(actor) as change:
            ended = change.get_record(Project, project)
            return change.update_record(
                ended, "archive", archived_at=ended.archived_at or change.now
            )

    # --- users -----------------------------------------------------------------------------------

    def create_user(
        self,
        organisation: str,
        email: str,
        *,
        role: Role = "caller",
        scope: RoleScope = "organisation",
        project: str | None = None,
        actor: str,
    ) -> User:
        """A new user of the organisation with this id."""
        with self._begin_transaction(actor) as change:
            change.get_active_record(Organisation, organisation)
            change.check_same_organisation(organisation, Project, project)
            return change.create_record(
                User(
                    id=generate_id("user"),
                    organisation=organisation,
                    email=email,
                    role=role,
                    scope=scope,
                    project=project,
                    created_at=change.now,
                )
            )

    def get_user(self, user: str) -> User:
        """The one with this id."""
        return self._get_record(User, user)

    def list_users(
        self, organisation: str | None = None, page: PageRequest = ALL_RECORDS
    ) -> list[User]:
        """Those of the organisation with this id, or all."""
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
        """Change what is given."""
        with self._begin_transaction(actor) as change:
            before = change.get_active_record(User, user)
            if project is not UNSET:
                change.check_same_organisation(before.organisation, Project, project)
            return change.update_record(
                before, "change", email=email, role=role, scope=scope, project=project
            )

    def disable_user(self, user: str, *, actor: str) -> User:
        """End it: the user may not sign in any more, and their keys are refused."""
        with self._begin_transaction(actor) as change:
            ended = change.get_record(User, user)
            return change.update_record(
                ended, "disable", disabled_at=ended.disabled_at or change.now
            )

    # --- keys ------------------------------------------------------------------------------------

    def create_key(
        self,
        project: str,
        name: str,
        *,
        user: str | None = None,
        role: Role = "caller",
        scope: RoleScope = "organisation",
        models: Sequence[str] = (),
        networks: Sequence[str] = (),
        flags: Sequence[str] = (),
        expires_at: float | None = None,
        actor: str,
    ) -> tuple[Key, str]:
        """A new key of the project with this id, and the plain key, which cannot be told again."""
        with self._begin_transaction(actor) as change:
            return create_key(
                change,
                project=project,
                name=name,
                user=user,
                role=role,
                scope=scope,
                models=tuple(models),
                networks=tuple(networks),
                flags=tuple(flags),
                expires_at=expires_at,
            )

    def get_key(self, key: str) -> Key:
        """The one with this id."""
        return self._get_record(Key, key)

    def list_keys(self, project: str | None = None, page: PageRequest = ALL_RECORDS) -> list[Key]:
        """Those of the project with this id, or all."""
        return self._find_records(Key, page, project=project)

    def rotate_key(self, key: str, overlap_s: float, *, actor: str) -> tuple[Key, str]:
        """A key in place of this one, and the plain key. The old one works for `overlap_s` more, at most.

        The new one lives as long as the old one was to live.
        """
        if not 0 <= overlap_s < float("inf"):
            raise ValueError("An overlap takes 0 seconds or more.")
        with self._begin_transaction(actor) as change:
            return rotate_key(change, change.get_record(Key, key), overlap_s)

    def revoke_key(self, key: str, *, actor: str) -> Key:
        """End it at once."""
        with self._begin_transaction(actor) as change:
            ended = change.get_record(Key, key)
            return change.update_record(ended, "revoke", revoked_at=ended.revoked_at or change.now)


def _new_organisation(name: str, now: float) -> Organisation:
    return Organisation(id=generate_id("org"), name=name, created_at=now)
