"""Stored records and messages of rollouts: those of earlier versions are read, and fields of later ones are ignored.

Each file in `records` was written by a version of the policies and is never changed. Add a file when a record changes.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from argosy.policy.rollout import (
    Baseline,
    GateRecord,
    OutcomeBatch,
    PoolRollouts,
    RolloutCommand,
    RolloutState,
    UserRates,
)
from argosy.policy.traffic import PoolRoute

TYPES: dict[str, type[msgspec.Struct]] = {
    each.__name__: each
    for each in (
        Baseline,
        GateRecord,
        OutcomeBatch,
        PoolRollouts,
        PoolRoute,
        RolloutCommand,
        UserRates,
    )
}
FILES = sorted(Path(__file__).with_name("records").glob("rollouts_v*.json"))


def is_part(part: object, whole: object) -> bool:
    """Return whether a record contains all that another one contains."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(key in whole and is_part(part[key], whole[key]) for key in part)
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) <= len(whole) and all(map(is_part, part, whole))
    return bool(part == whole)


def add_later_fields(value: object) -> object:
    """Return a record of named fields as a later version could write it."""
    if isinstance(value, dict):
        named = {key: add_later_fields(each) for key, each in value.items()}
        return {**named, "later": [1]} if "schema" in value else named
    return [*map(add_later_fields, value)] if isinstance(value, list) else value


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_records_of_earlier_versions_are_read(file: Path) -> None:
    records = json.loads(file.read_text())
    for name, stored in records.items():
        read = msgspec.convert(stored, TYPES[name.partition(" ")[0]])
        assert is_part(stored, json.loads(msgspec.json.encode(read))), name
        later = msgspec.convert(add_later_fields(stored), TYPES[name.partition(" ")[0]])
        assert later == read
    assert {name.partition(" ")[0] for name in records} == TYPES.keys()
    rollouts = msgspec.convert(records["PoolRollouts"], PoolRollouts)
    assert rollouts.current is not None
    assert rollouts.current.state is RolloutState.PAUSED
