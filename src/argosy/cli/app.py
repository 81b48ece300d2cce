"""Typer application with all commands of `argosy`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated

import typer

from argosy.cli import (
    adapters,
    alerts,
    audit,
    backup,
    batch,
    bench,
    build_native,
    cache,
    capacity,
    chat,
    controller,
    doctor,
    embed,
    explain,
    files,
    flags,
    fleet,
    fleet_logs,
    fleet_status,
    gateway,
    incidents,
    keys,
    models,
    objectives,
    prompts,
    quality,
    quantize,
    render,
    replica,
    replicas,
    rollout,
    routing,
    serve,
    store,
    tenants,
    twin,
    usage,
    validate,
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


_COMMANDS: dict[str, dict[str, Callable[..., None] | typer.Typer]] = {
    "Servers": {
        "serve": serve.serve,
        "replica": replica.replica,
        "gateway": gateway.gateway,
        "controller": controller.controller,
    },
    "Declared fleet": {
        "up": fleet.up,
        "validate": validate.validate,
        "plan": fleet.plan,
        "apply": fleet.apply,
        "diff": fleet.diff,
        "status": fleet_status.status,
        "history": fleet.history,
        "rollback": fleet.rollback,
        "scale": fleet.scale,
        "down": fleet.down,
        "events": fleet_status.events,
        "logs": fleet_logs.logs,
        "rollout": rollout.app,
        "incidents": incidents.app,
        "drift": incidents.drift,
        "render": render.app,
    },
    "Requests": {"chat": chat.chat, "embed": embed.embed, "batch": batch.app, "files": files.app},
    "Accounts": {
        "usage": usage.app,
        "audit": audit.audit,
        "keys": keys.app,
        "tenants": tenants.app,
        "store": store.app,
        "backup": backup.app,
    },
    "Tools": {
        "explain": explain.explain,
        "doctor": doctor.app,
        "build-native": build_native.build_native,
        "version": print_version,
        "models": models.app,
        "cache": cache.app,
        "adapters": adapters.app,
        "prompts": prompts.app,
        "alerts": alerts.app,
        "quality": quality.app,
        "flags": flags.app,
        "objectives": objectives.app,
        "quantize": quantize.quantize,
        "replicas": replicas.app,
        "routing": routing.app,
        "bench": bench.app,
        "twin": twin.app,
        "capacity": capacity.app,
    },
}
"""Commands by their group in the help."""

for _panel, _commands in _COMMANDS.items():
    for _name, _command in _commands.items():
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_name, rich_help_panel=_panel)
        else:
            app.command(_name, rich_help_panel=_panel)(_command)
