"""A directory of the store, indexed for finding callers: by a key's digest, or by what a token says."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from argosy.gateway.auth.client_address import Network, parse_networks
from argosy.gateway.principal import TIERS, Caller
from argosy.protocol import ApiError
from argosy.store import Directory, Key, Project, Role, RoleScope, User

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from argosy.gateway.auth.token_verifier import Claims

P = TypeVar("P", bound=Project | User)


@dataclass(frozen=True, slots=True)
class Entry:
    """A caller, and what must hold for it to be let in."""

    caller: Caller
    networks: tuple[tuple[Network, ...], ...] = ()
    """The address must lie in each of these allow-lists."""
    expires_at: float | None = None
    name: str = ""
    """What to call it in a refusal; not secret."""


class Book:
    """Cheap to make: what is asked for is worked out then, and kept."""

    def __init__(self, directory: Directory) -> None:
        self.keyed = directory.keyed
        """Callers need keys."""
        self._keys = {key.digest: key for key in directory.keys}
        self._projects = {project.id: project for project in directory.projects}
        self._named = _namesakes(directory.projects, lambda one: one.name, directory.named)
        living = [item for item in directory.organisations if item.archived_at is None]
        self._organisations = {item.name: item for item in living} | {
            item.id: item for item in living
        }
        self._users = {user.id: user for user in directory.users}
        self._emails = _namesakes(directory.users, lambda one: one.email.lower(), directory.named)
        self._entries: dict[bytes, Entry] = {}

    def by_digest(self, digest: bytes) -> Entry | None:
        """The entry of a key; None when there is no such key. Raises ApiError when it is locked out."""
        entry = self._entries.get(digest)
        if entry is None:
            key = self._keys.get(digest)
            if key is None:
                return None
            entry = self._entries[digest] = self._by_key(key)
        return entry

    def by_claims(self, claims: Claims) -> Entry:
        """The entry of a token's bearer. Raises ApiError when there is no place for them here."""
        named = self._organisation(claims)
        user = self._user(claims, named)
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
        project = self._project(claims.project or own, home, role)
        caller = _caller(
            home or (project.organisation if project else ""),
            project,
            user=user.id if user else claims.email or claims.subject,
            role=role,
            scope=scope,
        )
        return Entry(caller, _allow_lists(project.networks) if project else ())

    def _by_key(self, key: Key) -> Entry:
        if key.user is not None:
            _check_user(self._users[key.user])
        project = _checked(self._projects[key.project])
        caller = _caller(
            project.organisation,
            project,
            key=key.id,
            user=key.user or "",
            role=key.role,
            scope=key.scope,
            models=frozenset(key.models) or None,
            flags=key.flags,
        )
        networks = _allow_lists(key.networks, project.networks)
        return Entry(caller, networks, key.expires_at, f"The key {key.prefix}...")

    def _organisation(self, claims: Claims) -> str:
        """Id of the one that a token names; empty when it names none. Raises ApiError 403 for an unknown one."""
        if not claims.organisation:
            return ""
        found = self._organisations.get(claims.organisation)
        if found is None:
            message = f"The token's organisation {claims.organisation[:100]!r} is not known here."
            raise ApiError(403, "unknown_organisation", message)
        return found.id

    def _user(self, claims: Claims, organisation: str) -> User | None:
        """The user with the subject's id or email, in the organisation with this id, if any."""
        known = self._users.get(claims.subject)
        for user in self._emails.get(claims.email, ()) if known is None else (known,):
            if not organisation or user.organisation == organisation:
                return user
        return None

    def _project(self, wanted: str | None, home: str, role: Role) -> Project | None:
        """The project with this id or name. Raises ApiError 403 when there is none to count requests for."""
        if not wanted:
            if role == "caller":
                message = "The token names no project. Ask for one to be set for you."
                raise ApiError(403, "no_project", message)
            return None
        one = self._projects.get(wanted)
        for project in self._named.get(wanted, ()) if one is None else (one,):
            if not home or project.organisation == home:
                return _checked(project)
        message = f"The token's project {wanted[:100]!r} is not known here."
        raise ApiError(403, "unknown_project", message)


def _namesakes(
    records: Iterable[P], name: Callable[[P], str], named: Mapping[str, float]
) -> dict[str, list[P]]:
    """By name or email, first who has had it the longest: nobody takes tokens from others by naming theirs so.

    What has ended comes last, as its name is free.
    """

    def place(one: P) -> tuple[bool, float]:
        ended = one.archived_at if isinstance(one, Project) else one.disabled_at
        return ended is not None, named.get(one.id, one.created_at)

    found: dict[str, list[P]] = {}
    for record in records:
        found.setdefault(name(record), []).append(record)
    for same in found.values():
        if len(same) > 1:
            same.sort(key=place)
    return found


def _caller(
    organisation: str,
    project: Project | None,
    *,
    role: Role,
    scope: RoleScope,
    user: str,
    key: str = "",
    models: frozenset[str] | None = None,
    flags: tuple[str, ...] = (),
) -> Caller:
    if project is None:
        return Caller(
            organisation=organisation, user=user, role=role, scope=scope, domain=organisation
        )
    return Caller(
        organisation=organisation,
        project=project.id,
        key=key,
        user=user,
        role=role,
        scope=scope,
        tier=TIERS.index(project.tier),
        weight=project.weight,
        domain=project.organisation if project.share_cache else project.id,
        models=models,
        flags=frozenset(project.flags + flags),
    )


@lru_cache(maxsize=1024)
def _allow_lists(*lists: tuple[str, ...]) -> tuple[tuple[Network, ...], ...]:
    """Those that there are, parsed once: the bearer of a token is placed anew at each request."""
    return tuple(parse_networks(networks) for networks in lists if networks)


def _checked(project: Project) -> Project:
    if project.archived_at is not None:
        message = f"The project {project.name!r} is archived. Use a key of another project."
        raise ApiError(401, "project_archived", message)
    return project


def _check_user(user: User) -> None:
    if user.disabled_at is not None:
        message = "This user is disabled. Ask an administrator."
        raise ApiError(401, "user_disabled", message)
