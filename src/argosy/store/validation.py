"""What a record of an account may hold, and when two of them are in each other's way."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from argosy.store.records import Key, Limit, Organisation, Project, Record, User

R = TypeVar("R", bound=Record)

UNIQUE: dict[type[Record], tuple[str, ...]] = {
    Organisation: ("name",),
    Project: ("organisation", "name"),
    User: ("organisation", "email"),
    Key: ("project", "name"),
}
"""Fields whose values no two living records share."""

MOST: dict[type[Record], int] = {Project: 2_000, User: 20_000, Key: 20_000, Limit: 20_000}
"""How many that have not ended one organisation may have: every gateway keeps those of all in memory."""


def noun(kind: type[Record]) -> str:
    """What people call such a record."""
    return kind.__name__.lower()


def living(record: Record, now: float) -> bool:
    """Whether it is neither archived, disabled, revoked, expired nor rotated."""
    match record:
        case Organisation() | Project():
            return record.archived_at is None
        case User():
            return record.disabled_at is None
        case Key():
            return working(record, now) and record.replaced_by is None
        case _:
            return True


def working(key: Key, now: float) -> bool:
    """Whether a key is still accepted, which a rotated one is until it expires."""
    return key.revoked_at is None and (key.expires_at is None or key.expires_at > now)


def checked(record: R) -> R:
    """The record with its fields checked and tidied. Raises ValueError, naming the field that is wrong."""
    kind = type(record)
    try:
        typed = msgspec.convert(msgspec.to_builtins(record, builtin_types=(bytes,)), kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"This {noun(kind)} cannot be kept: {error}.") from error
    tidied = {}
    for name, tidy in _TIDY.items():
        if name in kind.__struct_fields__:
            try:
                tidied[name] = tidy(getattr(typed, name))
            except ValueError as error:
                raise ValueError(f"This {noun(kind)} cannot be kept: {name}: {error}.") from error
    return msgspec.structs.replace(typed, **tidied)


def _text(text: str) -> str:
    text = text.strip()
    if not text or not text.isprintable():
        raise ValueError("give some printable text")
    return text


def _email(text: str) -> str:
    return _text(text).lower()


def _model(text: str | None) -> str | None:
    return None if text is None else _text(text)


def _names(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_text(name) for name in names))


def _networks(networks: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(ipaddress.ip_network(text.strip(), strict=False)) for text in networks)


_TIDY: dict[str, Callable[[Any], object]] = {
    "name": _text,
    "email": _email,
    "model": _model,
    "models": _names,
    "flags": _names,
    "networks": _networks,
}
