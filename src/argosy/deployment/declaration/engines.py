"""Engines of replicas: how processes of each kind are started, become ready and are drained, and the built-in kinds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from argosy.deployment.settings.replica_config import BackendKind
from argosy.engine import REPLICA_OPTIONS
from argosy.settings import define_options

ARGOSY_ENGINE = "argosy"

OptionName = Annotated[
    str, Meta(max_length=100, pattern=r"^[A-Za-z][A-Za-z0-9_.-]*$(?!\n)", examples=["max_seqs"])
]
OptionValue = str | int | float | bool | list[str | int | float] | dict[str, Any]
"""Value of an option of an engine's command line. A mapping becomes JSON."""
Arguments = tuple[str, ...]
HttpPath = Annotated[str, Meta(pattern=r"^/[!-~]*$(?!\n)", examples=["/health"])]

LAUNCHER_PLACEHOLDERS = frozenset({"host", "port", "socket", "name"})
"""Placeholders that the launcher replaces."""
PLACEHOLDERS = LAUNCHER_PLACEHOLDERS | {
    "digest",
    "drain_deadline_s",
    "hub_model",
    "model",
    "model_path",
    "revision",
    "served_name",
}
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
FLEET_OPTIONS = {
    "model": "models[].source",
    "revision": "models[].revision",
    "digest": "models[].digest",
    "served_model_name": "models[].name",
    "drain_deadline": "drain_deadline_s of the pool",
    "zone": "zones of the pool",
    "label": "labels of the pool",
    "log_name": "",
    "host": "",
    "port": "",
    "uds": "",
    "tls_cert": "",
    "tls_key": "",
    "tls_client_ca": "",
}
"""Options of `argosy replica` that the fleet sets, with the setting to use instead. Empty where there is none."""
ArgosyOptions = define_options(
    "ArgosyOptions",
    "Options of `argosy replica`, with its defaults.",
    (option for name, option in REPLICA_OPTIONS.items() if name not in FLEET_OPTIONS),
)


class EngineKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How replicas of one kind are started and stopped.

    Arguments may contain placeholders. The launcher assigns `{host}`, `{port}`, `{socket}` (path of a Unix socket) and
    `{name}` (of the replica). `{model}` is the model's source. If the source is a path, it is also `{model_path}`.
    Otherwise it is also `{hub_model}`. `{revision}`, `{digest}` and `{served_name}` belong to the model,
    `{drain_deadline_s}` to the pool.
    """

    command: Annotated[Arguments, Meta(min_length=1)]
    """Program and first arguments. The options of the pool follow."""
    optional_arguments: tuple[Annotated[Arguments, Meta(min_length=1)], ...] = ()
    """Groups of further arguments. A group is left out if a placeholder in it has no value, such as `{revision}`."""
    socket_arguments: Arguments = ()
    """Arguments to listen on `{socket}`, used for replicas on the controller's machine. Empty if it cannot."""
    port_arguments: Arguments = ()
    """Arguments to listen on `{host}` and `{port}`, if `command` does not contain them."""
    false_options: Literal["no-prefix", "omit"] = "no-prefix"
    """Form of the option `x: false`: `--no-x` or nothing."""
    list_options: Literal["append", "repeat"] = "append"
    """Form of the option `x: [1, 2]`: `--x 1 2` or `--x 1 --x 2`."""
    kind: BackendKind = "auto"
    """Kind of server, for the gateway. `auto` detects it."""
    ready_path: HttpPath = "/health"
    """Path that answers with status 200 once the replica can serve."""
    drain_signal: Literal["SIGTERM", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2"] = "SIGTERM"
    """Signal that ends the process. Requests that it does not finish are resumed on other replicas."""

    def arguments(self) -> Iterator[str]:
        """Yield all arguments of the template."""
        yield from self.command
        for group in self.optional_arguments:
            yield from group
        yield from self.socket_arguments
        yield from self.port_arguments


def find_placeholders(argument: str) -> list[str]:
    """Return the names in an argument's braces."""
    return _PLACEHOLDER.findall(argument)


def fill_placeholders(argument: str, values: Mapping[str, str | None]) -> str | None:
    """Return an argument with its placeholders replaced; None if one of them has no value.

    Those that the launcher replaces are kept.
    """
    names = set(find_placeholders(argument)) - LAUNCHER_PLACEHOLDERS
    if any(values[name] is None for name in names):
        return None
    return _PLACEHOLDER.sub(
        lambda match: match[0] if match[1] in LAUNCHER_PLACEHOLDERS else values[match[1]] or "",
        argument,
    )


BUILT_IN_ENGINES: Mapping[str, EngineKind] = MappingProxyType(
    {
        ARGOSY_ENGINE: EngineKind(
            command=("argosy", "replica"),
            socket_arguments=("--uds", "{socket}"),
            port_arguments=("--host", "{host}", "--port", "{port}"),
            kind="argosy",
            ready_path="/ready",
        ),
        "vllm": EngineKind(
            command=(
                "vllm",
                "serve",
                "{model}",
                "--served-model-name",
                "{served_name}",
                "--shutdown-timeout",
                "{drain_deadline_s}",
            ),
            optional_arguments=(("--revision", "{revision}"),),
            port_arguments=("--host", "{host}", "--port", "{port}"),
            kind="vllm",
        ),
        "sglang": EngineKind(
            command=(
                "python3",
                "-m",
                "sglang.launch_server",
                "--model-path",
                "{model}",
                "--served-model-name",
                "{served_name}",
            ),
            optional_arguments=(("--revision", "{revision}"),),
            port_arguments=("--host", "{host}", "--port", "{port}"),
            false_options="omit",
            kind="sglang",
        ),
        "llama-cpp": EngineKind(
            command=("llama-server", "--alias", "{served_name}"),
            optional_arguments=(("--model", "{model_path}"), ("--hf-repo", "{hub_model}")),
            port_arguments=("--host", "{host}", "--port", "{port}"),
            list_options="repeat",
            kind="llama.cpp",
        ),
    }
)
"""Built-in kinds by name. The options are those of vLLM 0.32, SGLang 0.5 and llama.cpp of November 2026."""
