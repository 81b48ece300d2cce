"""A directory of the store, indexed for finding callers: by a key's digest, or by what a token says."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from argosy.gateway.auth.client_address import IpNetwork, parse_networks
from argosy.gateway.principal import TIERS, Principal
from argosy.protocol import ApiError
from argosy.store import AccountSnapshot, Key, Project, Role, RoleScope, User

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from argosy.gateway.auth.token_verifier import TokenClaims

P = TypeVar("P", bound=Project | User)


@dataclass(frozen=True, slots=True)
class CredentialEntry:
    """A caller, and what must hold for it to be let in."""

    principal: Principal
    allowed_networks: tuple[tuple[IpNetwork, ...], ...] = ()
    """The address must lie in each of these allow-lists."""
    expires_at: float | None = None
    display_name: str = ""
    """What to call it in a refusal; not secret."""


class CredentialIndex:
    """Cheap to make: what is asked for is worked out then, and kept."""

    def __init__(self, snapshot: AccountSnapshot) -> None:
        self.requires_keys = snapshot.requires_keys
        """Callers need keys."""
        self._keys_by_digest = {key.digest: key for key in snapshot.keys}
        self._projects = {project.id: project for project in snapshot.projects}
        self._projects_by_name = _group_by_name(
            snapshot.projects, lambda one: one.name, snapshot.renamed_at
        )
        living = [item for item in snapshot.organisations if item.archived_at is None]
        self._organisations = {item.name: item for item in living} | {
            item.id: item for item in living
        }
        self._users = {user.id: user for user in snapshot.users}
        self._users_by_email = _group_by_name(
            snapshot.users, lambda one: one.email.lower(), snapshot.renamed_at
        )
        self._entries: dict[bytes, CredentialEntry] = {}

    def find_by_digest(self, digest: bytes) -> CredentialEntry | None:
        """The entry of a key; None when there is no such key. Raises ApiError when it is locked out."""
        entry = self._entries.get(digest)
        if entry is None:
            key = self._keys_by_digest.get(digest)
            if key is None:
                return None
            entry = self._entries[digest] = self._build_key_entry(key)
        return entry

    def find_by_claims(self, claims: TokenClaims) -> CredentialEntry:
        """The entry of a token's bearer. Raises ApiError when there is no place for them here."""
        named = self._find_organisation(claims)
        user = self._find_user(claims, named)
        role, own = claims.role, None
        scope: RoleScope = "organisation"
        if user is not None:
            _check_user(user)
            role, scope, own = user.role, user.scope, user.project
        elif not named and role != "caller":
            message = (
                f"The token gives the role {role} and names no organisation to hold it in. "
                "Ask for one to be set for you."
            )
            raise ApiError(403, "no_organisation", message)
        home = named if user is None else user.organisation
        project = self._find_project(claims.project or own, home, role)
        principal = _build_principal(
            home or (project.organisation if project else ""),
            project,
            user=user.id if user else claims.email or claims.subject,
            role=role,
            scope=scope,
        )
        return CredentialEntry(principal, _parse_allow_lists(project.networks) if project else ())

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
        """Id of the one that a token names; empty when it names none. Raises ApiError 403 for an unknown one."""
        if not claims.organisation:
            return ""
        found = self._organisations.get(claims.organisation)
        if found is None:
            message = f"The token's organisation {claims.organisation[:100]!r} is not known here."
            raise ApiError(403, "unknown_organisation", message)
        return found.id

    def _find_user(self, claims: TokenClaims, organisation: str) -> User | None:
        """The user with the subject's id or email, in the organisation with this id, if any."""
        known = self._users.get(claims.subject)
        for user in self._users_by_email.get(claims.email, ()) if known is None else (known,):
            if not organisation or user.organisation == organisation:
                return user
        return None

    def _find_project(
        self, name_or_id: str | None, organisation: str, role: Role
    ) -> Project | None:
        """The project with this id or name. Raises ApiError 403 when there is none to count requests for."""
        if not name_or_id:
            if role == "caller":
                message = "The token names no project. Ask for one to be set for you."
                raise ApiError(403, "no_project", message)
            return None
        one = self._projects.get(name_or_id)
        for project in self._projects_by_name.get(name_or_id, ()) if one is None else (one,):
            if not organisation or project.organisation == organisation:
                return _check_project(project)
        message = f"The token's project {name_or_id[:100]!r} is not known here."
        raise ApiError(403, "unknown_project", message)


def _group_by_name(
    records: Iterable[P], name: Callable[[P], str], renamed_at: Mapping[str, float]
) -> dict[str, list[P]]:
    """By name or email, first who has had it the longest: nobody takes tokens from others by naming theirs so.

    What has ended comes last, as its name is free.
    """

    def place(one: P) -> tuple[bool, float]:
        ended = one.archived_at if isinstance(one, Project) else one.disabled_at
        return ended is not None, renamed_at.get(one.id, one.created_at)

    found: dict[str, list[P]] = {}
    for record in records:
        found.setdefault(name(record), []).append(record)
    for same in found.values():
        if len(same) > 1:
            same.sort(key=place)
    return found


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
    )


@lru_cache(maxsize=1024)
def _parse_allow_lists(*lists: tuple[str, ...]) -> tuple[tuple[IpNetwork, ...], ...]:
    """Those that there are, parsed once: the bearer of a token is placed anew at each request."""
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
