"""Index of an account snapshot that finds credentials by a key's digest or by the claims of a token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

import msgspec

from argosy.gateway.auth.client_address import IpNetwork, parse_networks
from argosy.gateway.principal import TIERS, Principal
from argosy.protocol import ApiError
from argosy.store import AccountSnapshot, Key, Project, Role, RoleScope, User

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


P = TypeVar("P", bound=Project | User)


class TokenClaims(msgspec.Struct, frozen=True, kw_only=True):
    """Claims that the gateway uses. Missing claims are empty."""

    subject: str
    email: str
    organisation: str
    project: str
    role: Role
    expires_at: float


@dataclass(frozen=True, slots=True)
class CredentialEntry:
    """Principal of a key or token, and the conditions under which it is accepted."""

    principal: Principal
    allowed_networks: tuple[tuple[IpNetwork, ...], ...] = ()
    """Allow-lists. The client's address must be in each of them."""
    expires_at: float | None = None
    display_name: str = ""
    """Name for error messages, without secrets."""


class CredentialIndex:
    """Finds the entry of a key or token. Construction is cheap, since entries are built on first use."""

    def __init__(self, snapshot: AccountSnapshot) -> None:
        self.requires_keys = snapshot.requires_keys
        """Whether at least one key exists, so that requests need one."""
        self._keys_by_digest = {key.digest: key for key in snapshot.keys}
        self._projects = {project.id: project for project in snapshot.projects}
        self._projects_by_name = _group_by_name(
            snapshot.projects, lambda record: record.name, snapshot.renamed_at
        )
        active_organisations = [
            organisation
            for organisation in snapshot.organisations
            if organisation.archived_at is None
        ]
        self._organisations = {
            organisation.name: organisation for organisation in active_organisations
        } | {organisation.id: organisation for organisation in active_organisations}
        self._users = {user.id: user for user in snapshot.users}
        self._users_by_email = _group_by_name(
            snapshot.users, lambda record: record.email.lower(), snapshot.renamed_at
        )
        self._entries: dict[bytes, CredentialEntry] = {}

    def find_by_digest(self, digest: bytes) -> CredentialEntry | None:
        """Return the entry of a key, or None if the key does not exist.

        Raises:
            ApiError: 401 if the key's project is archived or its user is disabled.
        """
        entry = self._entries.get(digest)
        if entry is None:
            key = self._keys_by_digest.get(digest)
            if key is None:
                return None
            entry = self._entries[digest] = self._build_key_entry(key)
        return entry

    def find_by_claims(self, claims: TokenClaims) -> CredentialEntry:
        """Return the entry of a token's bearer.

        Raises:
            ApiError: 401 if the user is disabled or the project is archived. 403 if the token matches no project or
                organisation.
        """
        named_organisation = self._find_organisation(claims)
        user = self._find_user(claims, named_organisation)
        role, own_project = claims.role, None
        scope: RoleScope = "organisation"
        if user is not None:
            _check_user(user)
            role, scope, own_project = user.role, user.scope, user.project
        elif not named_organisation and role != "user":
            message = (
                f"The token has the role {role} but names no organisation to hold it in. "
                "Ask the issuer's administrator to add one."
            )
            raise ApiError(403, "no_organisation", message)
        organisation = named_organisation if user is None else user.organisation
        project = self._find_project(claims.project or own_project, organisation, role)
        principal = _build_principal(
            organisation or (project.organisation if project else ""),
            project,
            user=user.id if user else claims.email or claims.subject,
            role=role,
            scope=scope,
        )
        return CredentialEntry(principal, _parse_allow_lists(project.networks) if project else ())

    def find_by_key_id(self, key_id: str) -> CredentialEntry | None:
        """Return the entry of the key with this id, or None if there is none. Raises as `find_by_digest`."""
        digests = (digest for digest, key in self._keys_by_digest.items() if key.id == key_id)
        digest = next(digests, None)
        return None if digest is None else self.find_by_digest(digest)

    def find_by_project(self, project_id: str) -> CredentialEntry | None:
        """Return the entry of a key without restrictions in a project, or None if there is no such project.

        Raises:
            ApiError: 401 if the project is archived.
        """
        project = self._projects.get(project_id)
        if project is None:
            return None
        _check_project(project)
        return CredentialEntry(
            _build_principal(
                project.organisation, project, role="user", scope="organisation", user=""
            )
        )

    def _build_key_entry(self, key: Key) -> CredentialEntry:
        if key.user is not None:
            _check_user(self._users[key.user])
        project = _check_project(self._projects[key.project])
        principal = _build_principal(
            project.organisation,
            project,
            key=key.id,
            user=key.user or "",
            role=key.role,
            scope=key.scope,
            models=frozenset(key.models) or None,
            flags=key.flags,
        )
        networks = _parse_allow_lists(key.networks, project.networks)
        return CredentialEntry(principal, networks, key.expires_at, f"The key {key.prefix}...")

    def _find_organisation(self, claims: TokenClaims) -> str:
        """Return the id of the organisation that a token names, or an empty string if it names none.

        Raises:
            ApiError: 403 if the organisation is unknown.
        """
        if not claims.organisation:
            return ""
        organisation = self._organisations.get(claims.organisation)
        if organisation is None:
            message = f"The token's organisation {claims.organisation[:100]!r} is unknown. Check the token."
            raise ApiError(403, "unknown_organisation", message)
        return organisation.id

    def _find_user(self, claims: TokenClaims, organisation: str) -> User | None:
        """Return the user with the subject's id or email, in the organisation with this id if one is given."""
        subject_user = self._users.get(claims.subject)
        for user in (
            self._users_by_email.get(claims.email, ()) if subject_user is None else (subject_user,)
        ):
            if not organisation or user.organisation == organisation:
                return user
        return None

    def _find_project(
        self, name_or_id: str | None, organisation: str, role: Role
    ) -> Project | None:
        """Return the project with this id or name, or None if none is given and `role` needs none.

        Raises:
            ApiError: 401 if the project is archived. 403 if it is unknown, or missing for the role user.
        """
        if not name_or_id:
            if role == "user":
                message = "The token names no project. Ask the issuer's administrator to add one."
                raise ApiError(403, "no_project", message)
            return None
        project_by_id = self._projects.get(name_or_id)
        for project in (
            self._projects_by_name.get(name_or_id, ())
            if project_by_id is None
            else (project_by_id,)
        ):
            if not organisation or project.organisation == organisation:
                return _check_project(project)
        message = f"The token's project {name_or_id[:100]!r} is unknown. Check the token."
        raise ApiError(403, "unknown_project", message)


def _group_by_name(
    records: Iterable[P], get_name: Callable[[P], str], renamed_at: Mapping[str, float]
) -> dict[str, list[P]]:
    """Group records by name or email, longest holder first, so that a newer record with the same name gets no tokens.

    Archived projects and disabled users come last, since their names are free again.
    """

    def sort_key(record: P) -> tuple[bool, float]:
        ended_at = record.archived_at if isinstance(record, Project) else record.disabled_at
        return ended_at is not None, renamed_at.get(record.id, record.created_at)

    grouped: dict[str, list[P]] = {}
    for record in records:
        grouped.setdefault(get_name(record), []).append(record)
    for same_name in grouped.values():
        if len(same_name) > 1:
            same_name.sort(key=sort_key)
    return grouped


def _build_principal(
    organisation: str,
    project: Project | None,
    *,
    role: Role,
    scope: RoleScope,
    user: str,
    key: str = "",
    models: frozenset[str] | None = None,
    flags: tuple[str, ...] = (),
) -> Principal:
    if project is None:
        return Principal(
            organisation=organisation,
            user=user,
            role=role,
            role_scope=scope,
            cache_domain=organisation,
        )
    return Principal(
        organisation=organisation,
        project=project.id,
        key=key,
        user=user,
        role=role,
        role_scope=scope,
        tier=TIERS.index(project.tier),
        weight=project.weight,
        cache_domain=project.organisation if project.share_cache else project.id,
        allowed_models=models,
        flags=frozenset(project.flags + flags),
        quality=project.quality,
    )


@lru_cache(maxsize=1024)
def _parse_allow_lists(*lists: tuple[str, ...]) -> tuple[tuple[IpNetwork, ...], ...]:
    """Parse the non-empty allow-lists. Cached, since the entry of a token is built anew for each request."""
    return tuple(parse_networks(networks) for networks in lists if networks)


def _check_project(project: Project) -> Project:
    if project.archived_at is not None:
        message = f"The project {project.name!r} is archived. Use a key of another project."
        raise ApiError(401, "project_archived", message)
    return project


def _check_user(user: User) -> None:
    if user.disabled_at is not None:
        message = "This user is disabled. Ask an administrator."
        raise ApiError(401, "user_disabled", message)
