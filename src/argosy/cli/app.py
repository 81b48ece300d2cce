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
)

app = typer.Typer(
    name="argosy",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={
        "help_option_names": ["-h", "--help"],
        "color": False if os.environ.get("NO_COLOR") else None,
    },
)
app.command("serve")(serve.serve)
app.command("replica")(replica.replica)
app.command("gateway")(gateway.gateway)
app.command("up")(fleet.up)
app.command("plan")(fleet.plan)
app.command("apply")(fleet.apply)
app.command("diff")(fleet.diff)
app.command("status")(fleet_status.status)
app.command("history")(fleet.history)
app.command("rollback")(fleet.rollback)
app.command("scale")(fleet.scale)
app.add_typer(rollout.app, name="rollout")
app.command("down")(fleet.down)
app.command("events")(fleet_status.events)
app.command("logs")(fleet_status.logs)
app.add_typer(render.app, name="render")
app.command("controller")(controller.controller)
app.command("chat")(chat.chat)
app.command("embed")(embed.embed)
app.add_typer(keys.app, name="keys")
app.add_typer(tenants.app, name="tenants")
app.command("usage")(usage.usage)
app.command("audit")(audit.audit)
app.command("explain")(explain.explain)
app.add_typer(store.app, name="store")
app.add_typer(models.app, name="models")
app.add_typer(replicas.app, name="replicas")
app.add_typer(bench.app, name="bench")
app.command("build-native")(build_native.build_native)


@app.command("version")
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
