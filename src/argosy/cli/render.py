"""`argosy render`: writes the objects of a fleet for the tools of an environment, such as GitOps on Kubernetes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from argosy.cli.failure import fail
from argosy.cli.fleet_target import FilesArgument, FilesOption, load_declaration
from argosy.process import format_os_error

app = typer.Typer(help="Write a fleet as objects of another system.", no_args_is_help=True)


@app.callback()
def render() -> None:
    """Write a fleet as objects of another system."""


@app.command("kubernetes")
def render_kubernetes(
    files: FilesArgument = None,
    *,
    overlays: FilesOption = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for the files. Default: standard output."),
    ] = None,
    static: Annotated[
        bool,
        typer.Option("--static", help="Write the replicas instead of a controller that runs them."),
    ] = False,
) -> None:
    """Write a fleet as manifests for Kubernetes. No cluster is needed.

    Without --static these are the gateways and a controller, which starts the replicas, replaces them and repairs the
    fleet. With --static they are the gateways and the replicas, which Kubernetes alone keeps running.
    """
    from argosy.fleet.kubernetes_manifests import (
        build_kustomization,
        build_manifests,
        dump_manifests,
    )

    config = load_declaration(files, overlays)
    try:
        manifests = build_manifests(config, is_static=static)
    except ValueError as error:
        fail(str(error))
    texts = {name: dump_manifests(objects) for name, objects in manifests.items()}
    if output is None:
        typer.echo("---\n".join(texts.values()), nl=False)
        return
    texts["kustomization"] = build_kustomization(manifests)
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (output / f"{name}.yaml").write_text(text, encoding="utf-8")
    except OSError as error:
        fail(format_os_error(error))
