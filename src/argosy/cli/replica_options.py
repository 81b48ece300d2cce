"""Command-line options of `argosy serve` and `argosy replica`, made from the settings that declare them."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
import typer

from argosy.cli.failure import fail
from argosy.cli.quantities import parse_size
from argosy.engine import REPLICA_OPTIONS
from argosy.extras import install_command
from argosy.settings import DeclaredOption, Panel, SettingError, convert_settings

_PANELS = typing.get_args(Panel)
Command = Callable[..., None]
"""`run(options, context=..., **own)`: the options of a replica that are given, by name, and the command's own ones."""


def with_replica_options(
    *, omitted: Collection[str] = (), defaults: Mapping[str, Any] = MappingProxyType({})
) -> Callable[[Command], Command]:
    """Give a command the options of a replica, of which it receives those on the command line, by name.

    Args:
        omitted: Names of options that the command does not have.
        defaults: Defaults that differ from those of a replica. The command receives them too.
    """
    shared = {
        declared.name: _build_parameter(declared, defaults.get(declared.name, declared.default))
        for declared in sorted(REPLICA_OPTIONS.values(), key=lambda each: _PANELS.index(each.panel))
        if declared.name not in omitted
    }

    def decorate(run: Command) -> Command:
        _, *own = inspect.signature(run, eval_str=True).parameters.values()

        @functools.wraps(run)
        def command(*, context: typer.Context, **values: Any) -> None:  # noqa: ANN401 - options have any type
            if importlib.util.find_spec("torch") is None:
                fail(f"the engine is not installed; install it with: {install_command('engine')}")
            options = {name: values.pop(name) for name in shared}
            given = {name: value for name, value in options.items() if _is_given(context, name)}
            if "label" in given:
                given["label"] = _parse_labels(given["label"])
            run({**defaults, **given}, context=context, **values)

        command.__signature__ = inspect.Signature([*shared.values(), *own])  # type: ignore[attr-defined]
        return command

    return decorate


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _build_parameter(declared: DeclaredOption, default: object) -> inspect.Parameter:
    """Return the parameter of a command from which typer makes an option."""
    meta, hint = declared.meta, declared.plain_hint
    if declared.name == "model":
        argument = typer.Argument(help=meta.description)
        return _parameter(declared.name, str | None, argument, None)
    flag = f"--{declared.name.replace('_', '-')}"
    flags = f"{flag}/--no-{flag[2:]}" if default is True else flag
    parser: Callable[[str], Any] | None = None
    callback: Callable[[Any], Any] | None = None
    metavar = declared.metavar
    if declared.is_size:
        hint, default, parser, metavar = int | None, None, parse_size, "SIZE"
    elif declared.name == "label":
        hint, default = list[str] | None, None
    elif declared.name == "tool_format":
        callback = check_tool_format
    elif metavar == "JSON":
        hint, default, parser = Any, None, functools.partial(_parse_json, declared.plain_hint)
    elif isinstance(default, tuple):
        hint, default = list[str] | None, None
    made = typer.Option(
        flags,
        help=meta.description,
        rich_help_panel=declared.panel or None,
        metavar=metavar,
        min=meta.ge,
        max=meta.le,
        parser=parser,
        callback=callback,
    )
    return _parameter(declared.name, hint, made, default)


def _parameter(name: str, hint: Any, made: Any, default: object) -> inspect.Parameter:  # noqa: ANN401
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[hint, made],
    )


def check_tool_format(name: str) -> str:
    """Return the name of a tool format. The name `list` prints the known ones and ends the command."""
    if name in {"auto", "none"}:
        return name
    from argosy.engine import tool_format_names

    names = tool_format_names()
    if name == "list":
        typer.echo("\n".join(names))
        raise typer.Exit
    if name not in names:
        fail(f"the tool format {name!r} is unknown; `--tool-format list` prints the known ones")
    return name


def _parse_labels(labels: list[str]) -> dict[str, str]:
    """Return labels of the form KEY=VALUE by key. Others end the command."""
    parsed = {}
    for label in labels:
        key, separator, value = label.partition("=")
        if not (key and separator and label.isprintable()):
            fail(f"the label {label!r} has no key; write it as --label KEY=VALUE")
        parsed[key] = value
    return parsed


def _parse_json(hint: Any, text: str) -> Any:  # noqa: ANN401 - the type of the option
    """Parse the JSON of an option.

    Raises:
        typer.BadParameter: `text` is no JSON of the type `hint`.
    """
    try:
        return convert_settings(msgspec.json.decode(text), hint)
    except (msgspec.DecodeError, SettingError) as error:
        raise typer.BadParameter(f"{error}; write an object like the one in --help") from error
