"""Command-line options of the console, for `argosy serve` and `argosy gateway`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec
from typer import Option

if TYPE_CHECKING:
    from argosy.gateway import ConsoleConfig

_console = partial(Option, rich_help_panel="Console")
ServeConsole = Annotated[
    bool,
    _console("--console/--no-console", help="Serve the web console at /."),
]
AllowedHosts = Annotated[
    list[str] | None,
    _console(
        "--allowed-host",
        help="Name under which browsers may open the console, such as llm.example.com; may be given several times.",
    ),
]
ConsoleInsecureHttp = Annotated[
    bool,
    _console(
        "--console-insecure-http",
        help="Allow to sign in to the console over plain HTTP from other machines.",
    ),
]


def override_console_config(
    config: ConsoleConfig,
    *,
    console: bool,
    allowed_hosts: list[str] | None,
    insecure_http: bool,
) -> ConsoleConfig:
    """Return the settings of the console with what the command line says."""
    return msgspec.structs.replace(
        config,
        enabled=config.enabled and console,
        allowed_hosts=(*config.allowed_hosts, *(allowed_hosts or ())),
        insecure_http=config.insecure_http or insecure_http,
    )
