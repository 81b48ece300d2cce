"""`argosy serve`: a model behind a gateway on this machine, with one command."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer
from typer import Option

from argosy.cli.account_lookup import StoreUrl
from argosy.cli.failure import EXIT_FAILURE, EXIT_USAGE, fail
from argosy.cli.replica_options import with_replica_options
from argosy.cli.server_options import (
    AllowedHosts,
    ConsoleInsecureHttp,
    ServeConsole,
    TlsCert,
    TlsClientCa,
    TlsKey,
    build_tls_config,
)
from argosy.engine import ReplicaServerConfig
from argosy.process import format_os_error


def parse_models(option: str, values: Sequence[str], taken_names: Sequence[str]) -> dict[str, str]:
    """Return the paths or hub names of models by their public names.

    Args:
        option: Option that has the values.
        values: Models, each alone or after its name and `=`.
        taken_names: Names that other models have.

    Raises:
        ValueError: Two models have the same name.
    """
    models: dict[str, str] = {}
    for value in values:
        name, separator, model = value.partition("=")
        if not separator or Path(value).exists():
            (name,), model = ReplicaServerConfig().model_names_for(value), value
        if name in models or name in taken_names:
            raise ValueError(f"two models are called {name!r}; name one with {option} NAME={model}")
        models[name] = model
    return models


@with_replica_options(
    omitted=("colocated_replicas", "digest", "log_name"), defaults={"log_level": "warning"}
)
def serve(
    options: Mapping[str, Any],
    *,
    context: typer.Context,  # noqa: ARG001 - every command with these options gets it
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    replicas: Annotated[
        int,
        Option(
            min=1,
            help="Number of replica processes, each on its own GPU; without GPUs they share CPUs and memory.",
        ),
    ] = 1,
    embedding_model: Annotated[
        list[str] | None,
        Option(
            "--embedding-model",
            metavar="[NAME=]MODEL",
            help="Embedding model or reranker to serve at the same address, on the CPU; may be given several times.",
        ),
    ] = None,
    add_model: Annotated[
        list[str] | None,
        Option(
            "--add-model",
            metavar="[NAME=]MODEL",
            help="Further model to serve at the same address, with the same options; may be given several times.",
        ),
    ] = None,
    model_memory: Annotated[
        str | None,
        Option(
            metavar="SIZE",
            help="Memory for all models together, like 16GiB. Models for which it has no room sleep, and a request"
            " wakes them up.",
        ),
    ] = None,
    sleep_after: Annotated[
        float | None,
        Option(
            min=0,
            metavar="SECONDS",
            help="Free the memory of a model after this time without requests.",
        ),
    ] = None,
    sleep_level: Annotated[
        int,
        Option(
            min=1,
            max=2,
            help="What sleep frees: all but the weights (1), or the weights too (2).",
            rich_help_panel="Advanced",
        ),
    ] = 1,
    gpus: Annotated[
        Literal["own", "shared"],
        Option(
            help="Whether several replicas may share a GPU; by default each has its own.",
            rich_help_panel="Advanced",
        ),
    ] = "own",
    store: StoreUrl = None,
    auth: Annotated[
        Literal["auto", "required", "disabled"],
        Option(
            help="Which requests need an API key: all (required), none (disabled), or all once a key exists (auto)."
            " With auto, the first key is created if the server listens on a public address.",
            rich_help_panel="Access",
        ),
    ] = "auto",
    allowed_origins: Annotated[
        list[str] | None,
        Option(
            metavar="ORIGIN",
            help="Origin of web pages that may send requests, like https://app.example.com or chrome-extension://ID, or"
            " * for all; may be given several times. By default origins on this machine.",
            rich_help_panel="Access",
        ),
    ] = None,
    console: ServeConsole = True,
    allowed_host: AllowedHosts = None,
    console_insecure_http: ConsoleInsecureHttp = False,
    log_content: Annotated[
        bool,
        Option(
            "--log-content",
            help="Keep prompts and raw outputs for `argosy explain`; all users who may explain a request can"
            " read them.",
            rich_help_panel="Advanced",
        ),
    ] = False,
    otlp_traces_endpoint: Annotated[
        str | None,
        Option(
            metavar="URL",
            help="Export traces of requests to this receiver of OTLP over HTTP, like http://localhost:4318.",
            rich_help_panel="Advanced",
        ),
    ] = None,
    alert_webhook: Annotated[
        str | None,
        Option(
            metavar="URL",
            help="Notify this webhook of alerts, in Alertmanager's format.",
            rich_help_panel="Advanced",
        ),
    ] = None,
) -> None:
    """Serve a model with the OpenAI API on this machine (the bundled model by default)."""
    from argosy.cli.adapters import register_modules
    from argosy.cli.auth_bootstrap import AuthBootstrap
    from argosy.cli.local_fleet import LocalFleet
    from argosy.cli.replica_fleet import FleetFailedError
    from argosy.cli.startup_display import StartupDisplay
    from argosy.deployment import SleepConfig
    from argosy.engine import build_replica_settings
    from argosy.fleet import group_replicas, usable_gpus
    from argosy.fleet.launchers import LaunchError

    with StartupDisplay() as display:
        try:
            server, engine = build_replica_settings(options)
            tls = build_tls_config(tls_cert, tls_key, tls_client_ca)
            server = msgspec.structs.replace(server, tls=tls)
            host = "localhost" if server.uds is not None else server.host
            groups = group_replicas(replicas, usable_gpus(engine.device, os.environ), gpus)
            auth_bootstrap = AuthBootstrap(
                store,
                auth,
                host,
                allowed_origins,
                console=console,
                allowed_hosts=allowed_host,
                console_insecure_http=console_insecure_http,
            )
            names = server.model_names_for(engine.model)
            if server.lora_modules:
                if not engine.enable_lora:
                    fail("--lora-modules needs --enable-lora")
                register_modules(server.lora_modules, names[0], store=store)
                options = {name: value for name, value in options.items() if name != "lora_modules"}
            added = parse_models("--add-model", add_model or (), names)
            sleeps = model_memory is not None or sleep_after is not None
            fleet = LocalFleet(
                server=server,
                engine=engine,
                groups=groups,
                auth_bootstrap=auth_bootstrap,
                display=display,
                options=options,
                log_content=log_content,
                otlp_traces_endpoint=otlp_traces_endpoint,
                alert_webhook=alert_webhook,
                embedding_models=parse_models(
                    "--embedding-model", embedding_model or (), (*names, *added)
                ),
                added_models=added,
                sleep=SleepConfig(after_s=sleep_after, level=2 if sleep_level > 1 else 1)
                if sleeps
                else None,
                model_memory=model_memory,
            )
            fleet.serve()
        except (ValueError, LaunchError) as error:
            fail(str(error))
        except FleetFailedError as error:
            fail(str(error), EXIT_FAILURE if fleet.has_served else EXIT_USAGE)
        except OSError as error:
            fail(format_os_error(error))
