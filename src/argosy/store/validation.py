"""Rules of account records: field values, unique names, record counts, which are active, and whose they are."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar, get_args

import msgspec
from sqlalchemy import ColumnElement, Table, null, or_

from argosy.store import schema
from argosy.store.records import (
    AccountRecord,
    Adapter,
    Flag,
    GatewayFlag,
    Key,
    Limit,
    Organisation,
    Price,
    Project,
    Prompt,
    QualityRun,
    QualitySample,
    QualitySet,
    ReplicaSetting,
    User,
)

ORGANISATION_COLUMNS: dict[type[AccountRecord], ColumnElement[Any]] = {
    Organisation: schema.organisations.c.id,
    Project: schema.projects.c.organisation,
    User: schema.users.c.organisation,
    Key: schema.keys.c.organisation,
    Limit: schema.limits.c.organisation,
    Price: null(),
    ReplicaSetting: null(),
    Adapter: schema.adapters.c.organisation,
    Prompt: schema.prompts.c.organisation,
    QualitySet: schema.quality_sets.c.organisation,
    QualityRun: schema.quality_runs.c.organisation,
    QualitySample: schema.quality_samples.c.organisation,
    Flag: null(),
}
"""Id of the organisation that a record belongs to. NULL for records of the whole gateway."""
RecordT = TypeVar("RecordT", bound=AccountRecord)

UNIQUE_FIELDS: dict[type[AccountRecord], tuple[str, ...]] = {
    Organisation: ("name",),
    Project: ("organisation", "name"),
    User: ("organisation", "email"),
    Key: ("project", "name"),
    Adapter: ("organisation", "project", "name"),
    Prompt: ("organisation", "project", "name", "version"),
    QualitySet: ("organisation", "name", "version"),
}
"""Fields whose combined values are unique among active records."""

END_FIELDS: dict[type[AccountRecord], str] = {
    Organisation: "archived_at",
    Project: "archived_at",
    User: "disabled_at",
    Key: "revoked_at",
    Prompt: "deleted_at",
    QualitySet: "deleted_at",
}
"""Field with the time at which a record was ended."""

MAX_RECORDS_PER_ORGANISATION: dict[type[AccountRecord], int] = {
    Project: 2_000,
    User: 20_000,
    Key: 20_000,
    Limit: 20_000,
    Adapter: 2_000,
    Prompt: 500,
    QualitySet: 200,
}
"""Maximum number of active records of one organisation. Every gateway holds those of all organisations in memory."""


SIMILAR_FLAG = 0.85
"""Similarity of a flag to one of `GatewayFlag` from which it counts as misspelt."""


def validate_flags(flags: Sequence[str]) -> tuple[str, ...]:
    """Return the flags of a project or key. Raises ValueError if one is almost that of a gateway."""
    known = get_args(GatewayFlag)
    for flag in map(str.strip, flags):
        similar = get_close_matches(flag, known, 1, SIMILAR_FLAG)
        if similar and flag not in known:
            raise ValueError(f"Nothing reads the flag {flag[:100]!r}. Did you mean {similar[0]!r}?")
    return tuple(flags)


_NOUNS: dict[type[AccountRecord], str] = {
    ReplicaSetting: "replica",
    QualitySet: "golden_set",
    QualityRun: "quality_run",
    QualitySample: "quality_sample",
}


def active_conditions(table: Table, now: float) -> list[ColumnElement[bool]]:
    """Conditions for records that are neither archived, disabled, revoked nor expired at `now`."""
    conditions: list[ColumnElement[bool]] = [
        table.c[name].is_(None) for name in {*END_FIELDS.values()} if name in table.c
    ]
    if table is schema.keys:
        conditions.append(or_(table.c.expires_at.is_(None), table.c.expires_at > now))
    return conditions


def record_noun(record_type: type[AccountRecord]) -> str:
    """Name of a record type in messages, ids and audit actions, such as `key`."""
    return _NOUNS.get(record_type, record_type.__name__.lower())


def is_active(record: AccountRecord, now: float) -> bool:
    """Return whether the record is neither archived, disabled, revoked, expired nor rotated."""
    match record:
        case Organisation() | Project():
            return record.archived_at is None
        case User():
            return record.disabled_at is None
        case Prompt() | QualitySet():
            return record.deleted_at is None
        case Key():
            return is_key_valid(record, now) and record.replaced_by is None
        case _:
            return True


def is_key_valid(key: Key, now: float) -> bool:
    """Return whether a key is accepted. A rotated key is accepted until it expires."""
    return key.revoked_at is None and (key.expires_at is None or key.expires_at > now)


def validate_record(record: RecordT) -> RecordT:
    """Return the record with validated and normalized fields.

    Raises:
        ValueError: A field is invalid. The message names it.
    """
    record_type = type(record)
    try:
        valid = msgspec.convert(msgspec.to_builtins(record, builtin_types=(bytes,)), record_type)
    except msgspec.ValidationError as error:
        raise ValueError(f"This {record_noun(record_type)} is not valid: {error}.") from error
    normalized = {}
    for name, normalize in _NORMALIZERS.items():
        if name in record_type.__struct_fields__:
            try:
                normalized[name] = normalize(getattr(valid, name))
            except ValueError as error:
                raise ValueError(
                    f"This {record_noun(record_type)} is not valid: {name}: {error}."
                ) from error
    return msgspec.structs.replace(valid, **normalized)


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
    "base_model": _normalize_text,
    "models": _normalize_names,
    "flags": _normalize_names,
    "networks": _normalize_networks,
}
