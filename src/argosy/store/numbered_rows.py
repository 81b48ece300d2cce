"""Ranges of time in tables whose rows are numbered in the order of their times."""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, select


def in_time_range(
    connection: Connection,
    number: ColumnElement[int],
    at: ColumnElement[float],
    since: float | None,
    until: float | None,
    *conditions: ColumnElement[bool],
) -> list[ColumnElement[bool]]:
    """Return conditions for rows from `since` to before `until`, which need no index of the times.

    Clocks of several machines differ, so rows at the ends of the range may be missing that were written within this
    difference of each other. All rows of the log meet `conditions`, after whose columns `number` has an index.
    """
    limits = list(conditions)
    if since is not None:
        limits.append(number >= _find_first(connection, number, at, since, conditions))
    if until is not None:
        limits.append(number < _find_first(connection, number, at, until, conditions))
    return limits


def _find_first(
    connection: Connection,
    number: ColumnElement[int],
    at: ColumnElement[float],
    time: float,
    conditions: tuple[ColumnElement[bool], ...],
) -> int:
    """Return the number of the first row at this time or later, by bisection; beyond the last row if there is none."""
    numbers = select(number, at).where(*conditions).limit(1)
    last = connection.execute(numbers.order_by(number.desc())).first()
    low, high = 0, 0 if last is None else last[0] + 1
    while low < high:
        middle = (low + high) // 2
        found = connection.execute(numbers.where(number >= middle).order_by(number)).first()
        if found is not None and found[1] < time:
            low = found[0] + 1
        else:
            high = middle
    return low
