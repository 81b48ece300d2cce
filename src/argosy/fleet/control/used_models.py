"""Models that declared fleets use, which must stay in the model stores of their machines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from argosy.deployment import (
    FleetModelConfig,
    decode_replicas,
    find_newest_revision,
    list_known_revisions,
    parse_fleet,
)
from argosy.model_store import DIGEST_PREFIX, is_url, stored_digest
from argosy.store import FleetRevision, FleetStore


@dataclass(frozen=True, slots=True)
class UsedModels:
    """Models of the revisions in force, and of earlier ones whose replicas still run."""

    digests: frozenset[str]
    urls: frozenset[str]
    """Sources that replicas download into the store themselves."""


def find_used_models(store: FleetStore) -> UsedModels:
    """Return the models that the fleets of a store use. Blocks on the store.

    Raises:
        ValueError: The declaration of a revision is invalid for this version.
    """
    models = [
        model
        for fleet in store.list_fleets()
        for revision in _running_revisions(store, fleet)
        for model in parse_fleet(
            revision.declaration, f"{fleet}, revision {revision.number}"
        ).models
    ]
    return UsedModels(
        frozenset(filter(None, map(_digest_of, models))),
        frozenset(
            model.source.rstrip("/") for model in models if model.source and is_url(model.source)
        ),
    )


def _running_revisions(store: FleetStore, fleet: str) -> Iterator[FleetRevision]:
    replicas = decode_replicas(store.read_records(fleet)).values()
    revisions = list_known_revisions(store, fleet, replicas)
    yield from revisions[:1]
    for pool, generation in {(each.pool, each.generation) for each in replicas}:
        revision = find_newest_revision(revisions[1:], pool, generation)
        if revision is not None:
            yield revision


def _digest_of(model: FleetModelConfig) -> str:
    source = model.source or ""
    if model.digest is not None or source.startswith(DIGEST_PREFIX):
        return model.digest or source
    return stored_digest(Path(source)) if source.startswith("/") else ""
