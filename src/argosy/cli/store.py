"""`argosy store`: the database of accounts, usage and the audit log, as a whole."""

from __future__ import annotations

from typing import Annotated

import typer

from argosy.cli.account_lookup import StoreUrl, opened, opened_or_made

app = typer.Typer(help="The store: copy it, for a backup or a move.", no_args_is_help=True)


@app.command("copy")
def copy(
    to: Annotated[
        str,
        typer.Argument(metavar="URL", help="A new sqlite:///PATH, or an empty postgresql://..."),
    ],
    *,
    store: StoreUrl = None,
) -> None:
    """Copy all accounts, usage and the audit log, as of this moment; gateways may run meanwhile."""
    with opened(store) as source, opened_or_made(to, wanted=True) as target:
        copied = source.copy_to(target)
    typer.echo(f"{copied} rows are copied.", err=True)
    waiting = _waiting(store)
    if waiting:
        typer.echo(
            f"A gateway runs on the store, or was killed: what it has not settled yet waits in {waiting},"
            " and is not in the copy. Before a move, stop it with SIGTERM.",
            err=True,
        )


def _waiting(store: str | None) -> str:
    """The folder where usage waits for the store; empty where none can."""
    from argosy.store import default_url, usage_folder

    folder = usage_folder(store or default_url())
    return str(folder) if any(folder.glob("*.usage")) else ""
