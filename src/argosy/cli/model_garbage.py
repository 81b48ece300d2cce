"""`argosy models gc`: removal of models that neither a fleet nor a running replica uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from argosy.cli.account_lookup import StoreUrl, open_existing_store
from argosy.cli.failure import EXIT_FAILURE, fail
from argosy.cli.sizes import format_size
from argosy.model_store import ModelStoreError, collect_garbage, open_model_store

if TYPE_CHECKING:
    from argosy.fleet.control import UsedModels
    from argosy.store import FleetStore


def collect(
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be removed.")
    ] = False,
    store: StoreUrl = None,
) -> None:
    """Remove retired versions that no fleet of the store and no running replica uses, and files without a model."""
    try:
        with _open_fleets(store) as fleets:
            used = None if fleets is None else _find_used(fleets)
        garbage = collect_garbage(
            open_model_store(),
            used_digests=() if used is None else used.digests,
            used_sources=() if used is None else used.urls,
            is_dry_run=dry_run,
        )
    except ModelStoreError as error:
        fail(str(error), EXIT_FAILURE)
    for digest, reason in garbage.used.items():
        typer.echo(f"keeps {digest}: {reason}")
    verb = "would remove" if dry_run else "removed"
    for version in garbage.versions:
        typer.echo(f"{verb} {version.name} {version.digest} ({format_size(version.size)})")
    for digest in garbage.models:
        typer.echo(f"{verb} {digest}, which has no name")
    typer.echo(
        f"{verb} {garbage.blobs} files and {garbage.partial_files} interrupted downloads, {format_size(garbage.size)}"
    )


def _find_used(fleets: FleetStore) -> UsedModels:
    from argosy.fleet.control import find_used_models

    try:
        return find_used_models(fleets)
    except ValueError as error:
        fail(
            f"{error} Nothing was removed, since the models of the fleets are unknown.",
            EXIT_FAILURE,
        )


@contextmanager
def _open_fleets(url: str | None) -> Iterator[FleetStore | None]:
    """Open the fleets of a store, or None if the default store was never created."""
    from argosy.store import default_store_url

    default = default_store_url()
    is_new = default.startswith("sqlite:") and not Path(default.removeprefix("sqlite:///")).exists()
    if url is None and is_new:
        yield None
        return
    with open_existing_store(url) as store:
        yield store.fleets
