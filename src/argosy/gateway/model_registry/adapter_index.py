"""Adapters by the name under which a caller knows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from argosy.deployment import AdapterConfig
from argosy.gateway.model_registry.owner_scopes import OwnerScope, find_owners, list_scopes
from argosy.gateway.principal import Principal
from argosy.policy.traffic import TrafficSubject, choose_weighted, sticky_key
from argosy.store import AccountSnapshot, Adapter

DECLARED = "declared"
"""Beginning of the ids of adapters that are in the settings."""


class DeclaredAdapter(NamedTuple):
    """Adapter in the settings, with the name of its base model."""

    base_model: str
    config: AdapterConfig


class AdapterReplica(msgspec.Struct, frozen=True, kw_only=True):
    """Replica that may load an adapter."""

    replica: str
    """Name."""
    is_wanted: bool
    """Whether it shall keep the version that answers loaded."""
    is_loaded: bool
    """Whether it has that version loaded."""
    has_candidate: bool
    """Whether it has the candidate loaded."""
    size_bytes: int
    """Memory of the version that answers; 0 if it is not known, as on other engines."""


class AdapterIndex:
    """Finds the adapter that a model name means in the organisation and project of a caller. Immutable.

    A name of the project hides one of its organisation, which hides one of the whole gateway. Adapters of others are
    not found, as if they did not exist.
    """

    def __init__(self, adapters: Iterable[Adapter] = ()) -> None:
        self._adapters: dict[OwnerScope, dict[str, Adapter]] = {}
        for adapter in adapters:
            scope = OwnerScope(adapter.organisation, adapter.project)
            self._adapters.setdefault(scope, {})[adapter.name] = adapter

    def __iter__(self) -> Iterator[Adapter]:
        """Yield all adapters."""
        for adapters in self._adapters.values():
            yield from adapters.values()

    def find(self, name: str, principal: Principal) -> Adapter | None:
        """Return the adapter that a caller means by a name, or None."""
        if not self._adapters:
            return None
        found = (self._adapters.get(scope, {}).get(name) for scope in list_scopes(principal))
        return next((adapter for adapter in found if adapter is not None), None)

    def list(self, principal: Principal) -> list[Adapter]:
        """Return the adapters that a caller may name, sorted by name."""
        known: dict[str, Adapter] = {}
        for scope in list_scopes(principal):
            known = self._adapters.get(scope, {}) | known
        return [adapter for _, adapter in sorted(known.items())]


def select_version(
    adapter: Adapter, subject: TrafficSubject, *, prefers_candidate: bool = False
) -> Adapter:
    """Return the adapter with the version that answers a sender as its `digest`.

    A user or session stays at the candidate while its share grows.
    """
    candidate = adapter.candidate
    if candidate is None:
        return adapter
    shares = [(candidate, adapter.candidate_percent / 100)]
    if prefers_candidate or choose_weighted(adapter.id, sticky_key(subject, ()), shares):
        return msgspec.structs.replace(adapter, digest=candidate)
    return adapter


def resolve_owners(
    declared: Sequence[DeclaredAdapter], snapshot: AccountSnapshot
) -> tuple[list[Adapter], dict[str, str]]:
    """Return declared adapters with the ids of their owners, and the unknown owners by adapter."""
    owners = find_owners([each.config.owner for each in declared], snapshot)
    adapters, unknown = [], {}
    for base_model, config in declared:
        if config.owner is not None and not owners[config.owner]:
            unknown[config.name] = config.owner
        adapters += [
            Adapter(
                id=f"{DECLARED}/{base_model}/{config.name}",
                organisation=scope.organisation,
                project=scope.project,
                name=config.name,
                base_model=base_model,
                digest=config.source,
                base_digest=config.base_digest,
                pinned=config.pinned,
                min_replicas=config.min_replicas,
                created_at=0.0,
            )
            for scope in owners[config.owner]
        ]
    return adapters, unknown
