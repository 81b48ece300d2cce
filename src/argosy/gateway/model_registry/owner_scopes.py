"""Owners of named objects of tenants, such as adapters and prompts, and which of them a caller may name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from argosy.gateway.model_routes import find_tenant_ids
from argosy.gateway.principal import Principal
from argosy.store import AccountSnapshot


class OwnerScope(NamedTuple):
    """Organisation and project whose requests may name an object. None stands for any."""

    organisation: str | None
    project: str | None


def list_scopes(principal: Principal) -> Iterator[OwnerScope]:
    """Yield the scopes of what a caller may name. A name of an earlier scope hides one of a later scope."""
    if principal.organisation:
        if principal.project:
            yield OwnerScope(principal.organisation, principal.project)
        yield OwnerScope(principal.organisation, None)
    yield OwnerScope(None, None)


def find_owners(
    owners: Collection[str | None], snapshot: AccountSnapshot
) -> Mapping[str | None, Sequence[OwnerScope]]:
    """Return the scopes that each owner in the settings means. An unknown owner has none, and None all callers."""
    ids = find_tenant_ids(snapshot) if any(owners) else {}
    organisations = {project.id: project.organisation for project in snapshot.projects}
    scopes: dict[str | None, Sequence[OwnerScope]] = {None: [OwnerScope(None, None)]}
    for owner in owners:
        if owner is not None:
            scopes[owner] = [
                OwnerScope(organisations.get(each, each), each if each in organisations else None)
                for each in sorted(ids.get(owner, ()))
            ]
    return scopes
