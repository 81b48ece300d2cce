"""Description of an engine kind: how its process is started, and how it becomes ready, warm and drained."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from argosy.deployment.settings.replica_config import BackendKind

OptionName = Annotated[str, Meta(max_length=100, pattern="^[A-Za-z][A-Za-z0-9_.-]*$")]
OptionValue = str | int | float | bool | list[str | int | float] | dict[str, Any]
"""Value of an option of an engine's command line. A mapping becomes JSON."""
Arguments = tuple[str, ...]
HttpPath = Annotated[str, Meta(pattern=r"^/[!-~]*$")]

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
