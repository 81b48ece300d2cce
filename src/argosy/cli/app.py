"""Typer application with all commands of `argosy`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from argosy.cli import (
    audit,
    bench,
    build_native,
    chat,
    controller,
    embed,
    explain,
    fleet,
    fleet_logs,
    fleet_status,
    gateway,
    keys,
    models,
    render,
    replica,
    replicas,
    rollout,
    serve,
    store,
    tenants,
    usage,
    validate,
)

SERVERS, DECLARED, REQUESTS = "Servers", "Declared fleet", "Requests"
ACCOUNTS, TOOLS = "Accounts", "Tools"
"""Groups of commands in the help."""

app = typer.Typer(
    name="argosy",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={
        "help_option_names": ["-h", "--help"],
        "color": False if os.environ.get("NO_COLOR") else None,
    },
)
app.command("serve", rich_help_panel=SERVERS)(serve.serve)
app.command("replica", rich_help_panel=SERVERS)(replica.replica)
app.command("gateway", rich_help_panel=SERVERS)(gateway.gateway)
app.command("up", rich_help_panel=DECLARED)(fleet.up)
app.command("validate", rich_help_panel=DECLARED)(validate.validate)
app.command("plan", rich_help_panel=DECLARED)(fleet.plan)
app.command("apply", rich_help_panel=DECLARED)(fleet.apply)
app.command("diff", rich_help_panel=DECLARED)(fleet.diff)
app.command("status", rich_help_panel=DECLARED)(fleet_status.status)
app.command("history", rich_help_panel=DECLARED)(fleet.history)
app.command("rollback", rich_help_panel=DECLARED)(fleet.rollback)
app.command("scale", rich_help_panel=DECLARED)(fleet.scale)
app.add_typer(rollout.app, name="rollout", rich_help_panel=DECLARED)
app.command("down", rich_help_panel=DECLARED)(fleet.down)
app.command("events", rich_help_panel=DECLARED)(fleet_status.events)
app.command("logs", rich_help_panel=DECLARED)(fleet_logs.logs)
app.add_typer(render.app, name="render", rich_help_panel=DECLARED)
app.command("controller", rich_help_panel=SERVERS)(controller.controller)
app.command("chat", rich_help_panel=REQUESTS)(chat.chat)
app.command("embed", rich_help_panel=REQUESTS)(embed.embed)
app.add_typer(keys.app, name="keys", rich_help_panel=ACCOUNTS)
app.add_typer(tenants.app, name="tenants", rich_help_panel=ACCOUNTS)
app.command("usage", rich_help_panel=ACCOUNTS)(usage.usage)
app.command("audit", rich_help_panel=ACCOUNTS)(audit.audit)
app.command("explain", rich_help_panel=TOOLS)(explain.explain)
app.add_typer(store.app, name="store", rich_help_panel=ACCOUNTS)
app.add_typer(models.app, name="models", rich_help_panel=TOOLS)
app.add_typer(replicas.app, name="replicas", rich_help_panel=TOOLS)
app.add_typer(bench.app, name="bench", rich_help_panel=TOOLS)
app.command("build-native", rich_help_panel=TOOLS)(build_native.build_native)


@app.command("version", rich_help_panel=TOOLS)
def print_version() -> None:
    """Print the version."""
    from argosy.version import VERSION

    typer.echo(f"argosy {VERSION}")


def _print_version_and_exit(wanted: bool) -> None:  # noqa: FBT001 - typer passes the flag
    if wanted:
        print_version()
        raise typer.Exit


@app.callback()
def argosy(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version_and_exit, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Serve large language models: one command on a laptop, a fleet when you need one."""
