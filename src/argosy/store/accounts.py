"""Accounts: organisations, projects, users and keys, and every way to change them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from argosy.store.api_keys import create_key, new_id, rotate_key
from argosy.store.record_tables import ALL, Part, Records
from argosy.store.records import (
    Key,
    Organisation,
    Project,
    Role,
    RoleScope,
    Tier,
    Unsure,
    User,
)


class Accounts(Records):
    """Reads and changes accounts. `actor` says who makes a change, for the audit log.

    What has been ended (archived, disabled, revoked) is kept, and listed, but cannot be changed any more.
    Lists are oldest first, and can be had in parts; one goes on after what was the last of another part, whatever has
    come or gone since, and raises ValueError where that is not in it. To end something twice does nothing.
    """

    def first_run(self, *, actor: str) -> tuple[Key, str] | None:
        """An organisation and a project named "default" and an admin's key, if there is nothing yet; else None."""
        with self._change(actor) as change:
            if change.find(Organisation):
                return None
            organisation = change.create(_organisation("default", change.now))
            project = change.create(
                Project(
                    id=new_id("proj"),
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
        with self._change(actor) as change:
            return change.create(_organisation(name, change.now))

    def get_organisation(self, organisation: str) -> Organisation:
        """The one with this id."""
        return self._get(Organisation, organisation)

    def list_organisations(self, part: Part = ALL) -> list[Organisation]:
        """All of them."""
        return self._find(Organisation, part)

    def change_organisation(self, organisation: str, *, name: str, actor: str) -> Organisation:
        """Give it another name."""
        with self._change(actor) as change:
            return change.change(change.get_living(Organisation, organisation), "change", name=name)

    def archive_organisation(self, organisation: str, *, actor: str) -> Organisation:
        """End it, with all its projects and users."""
        with self._change(actor) as change:
            for project in change.find(Project, organisation=organisation, archived_at=None):
                change.change(project, "archive", archived_at=change.now)
            for user in change.find(User, organisation=organisation, disabled_at=None):
                change.change(user, "disable", disabled_at=change.now)
            ended = change.get(Organisation, organisation)
            return change.change(ended, "archive", archived_at=ended.archived_at or change.now)

    # --- projects --------------------------------------------------------------------------------

    def create_project(
        self,
        organisation: str,
        name: str,
        *,
        tier: Tier = "standard",
        weight: float = 1.0,
        share_cache: bool = False,
        when_unsure: Unsure = "open",
        networks: Sequence[str] = (),
        flags: Sequence[str] = (),
        actor: str,
    ) -> Project:
        """A new project of the organisation with this id."""
        with self._change(actor) as change:
            return change.create(
                Project(
                    id=new_id("proj"),
                    organisation=change.get_living(Organisation, organisation).id,
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
        return self._get(Project, project)

    def list_projects(self, organisation: str | None = None, part: Part = ALL) -> list[Project]:
        """Those of the organisation with this id, or all."""
        return self._find(Project, part, organisation=organisation)

    def change_project(
        self,
        project: str,
        *,
        name: str | UnsetType = UNSET,
        tier: Tier | UnsetType = UNSET,
        weight: float | UnsetType = UNSET,
        share_cache: bool | UnsetType = UNSET,
        when_unsure: Unsure | UnsetType = UNSET,
        networks: Sequence[str] | UnsetType = UNSET,
        flags: Sequence[str] | UnsetType = UNSET,
        actor: str,
    ) -> Project:
        """Change what is given."""
        with self._change(actor) as change:
            return change.change(
                change.get_living(Project, project),
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
        with self._change(actor) as change:
            ended = change.get(Project, project)
            return change.change(ended, "archive", archived_at=ended.archived_at or change.now)

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
        with self._change(actor) as change:
            change.get_living(Organisation, organisation)
            change.check_organisation(organisation, Project, project)
            return change.create(
                User(
                    id=new_id("user"),
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
        return self._get(User, user)

    def list_users(self, organisation: str | None = None, part: Part = ALL) -> list[User]:
        """Those of the organisation with this id, or all."""
        return self._find(User, part, organisation=organisation)

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
        with self._change(actor) as change:
            before = change.get_living(User, user)
            if project is not UNSET:
                change.check_organisation(before.organisation, Project, project)
            return change.change(
                before, "change", email=email, role=role, scope=scope, project=project
            )

    def disable_user(self, user: str, *, actor: str) -> User:
        """End it: the user may not sign in any more, and their keys are refused."""
        with self._change(actor) as change:
            ended = change.get(User, user)
            return change.change(ended, "disable", disabled_at=ended.disabled_at or change.now)

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
        with self._change(actor) as change:
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
        return self._get(Key, key)

    def list_keys(self, project: str | None = None, part: Part = ALL) -> list[Key]:
        """Those of the project with this id, or all."""
        return self._find(Key, part, project=project)

    def rotate_key(self, key: str, overlap_s: float, *, actor: str) -> tuple[Key, str]:
        """A key in place of this one, and the plain key. The old one works for `overlap_s` more, at most.

        The new one lives as long as the old one was to live.
        """
        if not 0 <= overlap_s < float("inf"):
            raise ValueError("An overlap takes 0 seconds or more.")
        with self._change(actor) as change:
            return rotate_key(change, change.get(Key, key), overlap_s)

    def revoke_key(self, key: str, *, actor: str) -> Key:
        """End it at once."""
        with self._change(actor) as change:
            ended = change.get(Key, key)
            return change.change(ended, "revoke", revoked_at=ended.revoked_at or change.now)


def _organisation(name: str, now: float) -> Organisation:
    return Organisation(id=new_id("org"), name=name, created_at=now)
