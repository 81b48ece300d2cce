"""What a record of an account may hold, and when two of them are in each other's way."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from argosy.store.records import AccountRecord, Key, Limit, Organisation, Project, User

RecordT = TypeVar("RecordT", bound=AccountRecord)

UNIQUE_FIELDS: dict[type[AccountRecord], tuple[str, ...]] = {
    Organisation: ("name",),
    Project: ("organisation", "name"),
    User: ("organisation", "email"),
    Key: ("project", "name"),
}
"""Fields whose values no two living records share."""

MAX_RECORDS_PER_ORGANISATION: dict[type[AccountRecord], int] = {
    Project: 2_000,
    User: 20_000,
    Key: 20_000,
    Limit: 20_000,
}
"""How many that have not ended one organisation may have: every gateway keeps those of all in memory."""


def record_noun(record_type: type[AccountRecord]) -> str:
    """What people call such a record."""
    return record_type.__name__.lower()


def is_active(record: AccountRecord, now: float) -> bool:
    """Whether it is neither archived, disabled, revoked, expired nor rotated."""
    match record:
        case Organisation() | Project():
            return record.archived_at is None
        case User():
            return record.disabled_at is None
        case Key():
            return is_key_valid(record, now) and record.replaced_by is None
        case _:
            return True


def is_key_valid(key: Key, now: float) -> bool:
    """Whether a key is still accepted, which a rotated one is until it expires."""
    return key.revoked_at is None and (key.expires_at is None or key.expires_at > now)


def validate_record(record: RecordT) -> RecordT:
    """The record with its fields checked and tidied. Raises ValueError, naming the field that is wrong."""
    kind = type(record)
    try:
        typed = msgspec.convert(msgspec.to_builtins(record, builtin_types=(bytes,)), kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"This {record_noun(kind)} cannot be kept: {error}.") from error
    tidied = {}
    for name, tidy in _NORMALIZERS.items():
        if name in kind.__struct_fields__:
            try:
                tidied[name] = tidy(getattr(typed, name))
            except ValueError as error:
                raise ValueError(
                    f"This {record_noun(kind)} cannot be kept: {name}: {error}."
                ) from error
    return msgspec.structs.replace(typed, **tidied)


def _normalize_text(text: str) -> str:
    text = text.strip()
    if not text or not text.isprintable():
        raise ValueError("give some printable text")
    return text


def _normalize_email(text: str) -> str:
    return _normalize_text(text).lower()


def _normalize_model(text: str | None) -> str | None:
    return None if text is None else _normalize_text(text)


def _normalize_names(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_normalize_text(name) for name in names))


def _normalize_networks(networks: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(ipaddress.ip_network(text.strip(), strict=False)) for text in networks)


_NORMALIZERS: dict[str, Callable[[Any], object]] = {
    "name": _normalize_text,
    "email": _normalize_email,
    "model": _normalize_model,
    "models": _normalize_names,
    "flags": _normalize_names,
    "networks": _normalize_networks,
}
