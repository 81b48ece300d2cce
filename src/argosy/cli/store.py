"""`argosy store`: copy the database of accounts, usage and the audit log."""

from __future__ import annotations

from typing import Annotated

import typer

from argosy.cli.account_lookup import StoreUrl, open_existing_store, open_or_create_store

app = typer.Typer(help="The store: copy it for a move to another database.", no_args_is_help=True)


@app.command("copy")
def copy_store(
    target_url: Annotated[
        str,
        typer.Argument(
            metavar="URL", help="A new sqlite:///PATH, or an empty postgresql://... database."
        ),
    ],
    *,
    store: StoreUrl = None,
) -> None:
    """Copy all accounts, usage and the audit log as of this moment. Gateways may run meanwhile."""
    from argosy.store import default_store_url, usage_log_folder

    with (
        open_existing_store(store) as source,
        open_or_create_store(target_url, is_expected=True) as target,
    ):
        copied = source.copy_to(target)
    typer.echo(f"{copied} rows are copied.", err=True)
    folder = usage_log_folder(store or default_store_url())
    if any(folder.glob("*.usage")):
        typer.echo(
            f"A gateway uses the store, or was killed. Its latest usage is still in {folder} and not in the"
            " copy. Before a move, stop the gateway with SIGTERM.",
            err=True,
        )
