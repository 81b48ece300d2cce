"""Options of commands: a structure of settings declares each one beside the type of its field.

From the declaration follow the option of the command line, that of a settings file, and their documentation.
"""

from __future__ import annotations

import functools
import typing
from typing import Annotated, Any, Literal

import msgspec

from argosy.settings.conversion import SettingError, convert_settings
from argosy.settings.sizes import Size

Panel = Literal["", "Model", "Adapters", "Memory", "Access", "Advanced"]
"""Heading of options on a help page. Empty for the first ones."""


def option(
    description: str,
    panel: Panel = "",
    *,
    name: str | None = None,
    metavar: str | None = None,
    **constraints: Any,  # noqa: ANN401 - those of `msgspec.Meta`
) -> msgspec.Meta:
    """Return the annotation that makes a field an option, with its help text and the heading above it.

    `name` is given if it is not that of the field. In help texts `metavar` stands for the value. Constraints are the
    range of a number (`ge`, `le`) or the `pattern` of a text.
    """
    extra = {"panel": panel, "name": name, "metavar": metavar}
    return msgspec.Meta(description=description, extra=extra, **constraints)


class DeclaredOption(msgspec.Struct, frozen=True, kw_only=True):
    """Option, as a field of a structure declares it."""

    name: str
    field: str
    hint: Any
    """Type of the value, with its constraints."""
    plain_hint: Any
    """Type of the value without them."""
    meta: msgspec.Meta
    panel: Panel
    metavar: str | None
    default: Any
    """Default of the field. None if it has none."""

    @property
    def is_size(self) -> bool:
        """Whether the value is a number of bytes, which may be written as `8GiB`."""
        return self.field.endswith("_bytes")


@functools.cache
def declared_options(*structs: type[msgspec.Struct]) -> dict[str, DeclaredOption]:
    """Return the options that structures declare, by name."""
    options = {}
    for struct in structs:
        hints, plain_hints = _hints(struct), typing.get_type_hints(struct)
        for field in msgspec.structs.fields(struct):
            meta = _find_meta(hints[field.name])
            if meta is None:
                continue
            extra = meta.extra or {}
            # A size has its unit, and times are in seconds.
            name = extra["name"] or field.name.removesuffix("_bytes").removesuffix("_s")
            default = None if field.default is msgspec.NODEFAULT else field.default
            if field.default_factory is not msgspec.NODEFAULT:
                default = field.default_factory()
            options[name] = DeclaredOption(
                name=name,
                field=field.name,
                hint=hints[field.name],
                plain_hint=plain_hints[field.name],
                meta=meta,
                panel=extra["panel"],
                metavar=extra["metavar"],
                default=default,
            )
    return options


def define_options(
    name: str, description: str, options: typing.Iterable[DeclaredOption]
) -> type[msgspec.Struct]:
    """Return a structure whose fields are options, each with its default."""
    fields = []
    for each in options:
        hint, default = each.hint, each.default
        if each.is_size:
            hint, default = (
                Annotated[Size | None, msgspec.Meta(description=each.meta.description)],
                None,
            )
        fields.append((each.name, hint, default))
    return msgspec.defstruct(
        name,
        fields,
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=True,
        namespace={"__doc__": description},
    )


def check_fields(settings: msgspec.Struct) -> None:
    """Check each field of a structure, which its constructor does not.

    Raises:
        SettingError: A value has another type or is out of its range. The message names the field and its range.
    """
    for name, hint in _hints(type(settings)).items():
        try:
            convert_settings(getattr(settings, name), hint)
        except SettingError as error:
            raise SettingError(f"{name}: {error}", (name,)) from error


@functools.cache
def _hints(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return typing.get_type_hints(struct, include_extras=True)


def _find_meta(hint: Any) -> msgspec.Meta | None:  # noqa: ANN401 - any type
    """Return the annotation that `option` made, in a type or in a member of a union."""
    for part in (hint, *typing.get_args(hint)):
        for meta in getattr(part, "__metadata__", ()):
            if isinstance(meta, msgspec.Meta) and "panel" in (meta.extra or {}):
                return meta
    return None
