"""Counts of service level objectives, by hour and gateway process. They outlive the gateways that counted them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import msgspec
from sqlalchemy import delete, func, select, update

from argosy.policy.objectives import HourCounts
from argosy.store import schema
from argosy.store.database import Database, conflict_aware_insert

MAX_DETAIL_VALUES = 20
"""Values of one kind of which misses are counted in an hour. Further ones are counted as `other`."""
MAX_EXAMPLES = 5
_OTHER = "other"

_table = schema.objective_hours
_columns = _table.c
_SLOT_BYTES = 10
"""Bytes of a slot: its number in 2, requests and misses in 4 each."""


class MissDetails(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Misses of an objective by what they have in common, and some of the requests."""

    causes: dict[str, int] = {}
    """By error code, or `slow`."""
    replicas: dict[str, int] = {}
    versions: dict[str, int] = {}
    tenants: dict[str, int] = {}
    requests: list[str] = []
    """Ids of responses, for explanations. The latest come last."""

    def add(self, other: MissDetails) -> None:
        """Add other misses, within the bounds of one hour."""
        for name in ("causes", "replicas", "versions", "tenants"):
            counts: dict[str, int] = getattr(self, name)
            for value, count in getattr(other, name).items():
                is_bounded = value not in counts and len(counts) >= MAX_DETAIL_VALUES
                key = _OTHER if is_bounded else value
                counts[key] = counts.get(key, 0) + count
        self.requests = [*self.requests, *other.requests][-MAX_EXAMPLES:]


_details_decoder = msgspec.json.Decoder(MissDetails)


class ObjectiveHour(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one hour by one gateway process."""

    hour: int
    """Start in seconds since the epoch."""
    objective: str
    """Id of the objective. Empty for the times at which the process reported."""
    gateway: str
    counts: HourCounts = HourCounts((), (), ())
    """Without an objective, 1 and whether it stopped for each slot."""
    details: MissDetails = msgspec.field(default_factory=MissDetails)


class ObjectiveHours:
    """Counts of all objectives. Every call may block on the database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def write(self, fleet: str, hours: Sequence[ObjectiveHour]) -> None:
        """Insert or replace hours, all in one transaction."""
        rows = [
            {
                "fleet": fleet,
                "hour": each.hour,
                "objective": each.objective,
                "gateway": each.gateway,
                "requests": sum(each.counts.requests),
                "misses": sum(each.counts.misses),
                "slots": _encode(each.counts),
                "details": msgspec.json.encode(each.details),
            }
            for each in hours
        ]
        keys = [column.name for column in _table.primary_key]
        with self._database.write_transaction() as connection:
            insert = conflict_aware_insert(connection, _table)
            values = {name: insert.excluded[name] for name in rows[0] if name not in keys}
            connection.execute(insert.on_conflict_do_update(index_elements=keys, set_=values), rows)

    def read_slots(self, fleet: str, since: int) -> list[ObjectiveHour]:
        """Return the hours that start at `since` or later and have slots, without details."""
        query = select(_columns.hour, _columns.objective, _columns.gateway, _columns.slots).where(
            _columns.fleet == fleet, _columns.hour >= since, _columns.slots != b""
        )
        with self._database.read_transaction() as connection:
            return [
                ObjectiveHour(
                    hour=row.hour,
                    objective=row.objective,
                    gateway=row.gateway,
                    counts=_decode(row.slots),
                )
                for row in connection.execute(query)
            ]

    def sum_counts(
        self, fleet: str, since: int, objectives: Iterable[str]
    ) -> dict[str, tuple[int, int]]:
        """Return the requests and misses of objectives, by id, in the hours that start at `since` or later."""
        sums = func.sum(_columns.requests), func.sum(_columns.misses)
        query = (
            select(_columns.objective, *sums)
            .where(
                _columns.fleet == fleet,
                _columns.hour >= since,
                _columns.objective.in_(list(objectives)),
            )
            .group_by(_columns.objective)
        )
        with self._database.read_transaction() as connection:
            rows = connection.execute(query).all()
        return {name: (int(requests), int(misses)) for name, requests, misses in rows}

    def read_details(
        self, fleet: str, since: int, objectives: Iterable[str]
    ) -> dict[str, MissDetails]:
        """Return what the misses of objectives have in common, by id, in the hours that start at `since` or later."""
        query = (
            select(_columns.objective, _columns.details)
            .where(
                _columns.fleet == fleet,
                _columns.hour >= since,
                _columns.misses > 0,
                _columns.objective.in_(list(objectives)),
            )
            .order_by(_columns.hour)
        )
        found: dict[str, MissDetails] = {}
        with self._database.read_transaction() as connection:
            for name, details in connection.execute(query):
                found.setdefault(name, MissDetails()).add(_details_decoder.decode(details))
        return found

    def prune(self, *, rows_before: int, slots_before: int) -> None:
        """Delete hours that start before a time, and the slots of hours before another, in seconds since the epoch."""
        with self._database.write_transaction() as connection:
            connection.execute(delete(_table).where(_columns.hour < rows_before))
            is_fine = (_columns.hour < slots_before) & (_columns.slots != b"")
            connection.execute(update(_table).where(is_fine).values(slots=b""))
            is_report = (_columns.hour < slots_before) & (_columns.objective == "")
            connection.execute(delete(_table).where(is_report))


def _encode(counts: HourCounts) -> bytes:
    """Return the numbers of the slots, then their requests, then their misses."""
    size = len(counts.slots)
    return struct.pack(f"<{size}H{2 * size}I", *counts.slots, *counts.requests, *counts.misses)


def _decode(encoded: bytes) -> HourCounts:
    size = len(encoded) // _SLOT_BYTES
    numbers = struct.unpack(f"<{size}H{2 * size}I", encoded)
    return HourCounts(numbers[:size], numbers[size : 2 * size], numbers[2 * size :])
