"""Marks of settings that say in their definition who may change them: an operator over HTTP, or the command line."""

from __future__ import annotations

import typing
from functools import cache
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

T = TypeVar("T")
ChangedBy = Literal["operator", "command line"]
_KEY = "changed_by"

ByOperator = Annotated[T, Meta(extra={_KEY: "operator"})]
"""Type of a setting that an operator may change. Each field of a section so marked has a mark of its own."""
ByCommandLine = Annotated[T, Meta(extra={_KEY: "command line"})]
"""Type of a setting that decides what machines run, read or trust, with all that is in it."""


@cache
def changed_by(struct: type[msgspec.Struct]) -> dict[str, ChangedBy]:
    """Return who may change the fields of a structure, by field name. A field without a mark is missing."""
    found: dict[str, ChangedBy] = {}
    for name, hint in typing.get_type_hints(struct, include_extras=True).items():
        for meta in getattr(hint, "__metadata__", ()):
            if isinstance(meta, Meta) and meta.extra and _KEY in meta.extra:
                found[name] = meta.extra[_KEY]
    return found
