"""Windows of a schedule: days, time zones, midnight and daylight saving."""

from __future__ import annotations

from datetime import UTC, datetime, time

import msgspec
import pytest

from argosy.policy.autoscaling import ScheduleWindow

OFFICE = ScheduleWindow(
    min_replicas=5,
    start=time(8),
    end=time(18),
    days=("mon", "fri"),
    timezone="Europe/Berlin",
)
NIGHT = ScheduleWindow(min_replicas=2, start=time(22), end=time(6), days=("sun",))
ALWAYS = ScheduleWindow(min_replicas=1, start=time(0), end=time(0))


@pytest.mark.parametrize(
    ("window", "at", "lead_s", "expected"),
    [
        (OFFICE, "2026-11-27T07:00", 0, True),  # Friday, 8:00 in Berlin
        (OFFICE, "2026-11-27T06:59", 0, False),
        (OFFICE, "2026-11-27T06:59", 120, True),
        (OFFICE, "2026-11-27T16:59", 0, True),
        (OFFICE, "2026-11-27T17:00", 120, False),
        (OFFICE, "2026-11-26T12:00", 0, False),
        (OFFICE, "2026-07-03T06:00", 0, True),  # summer time
        (OFFICE, "2026-07-03T05:59", 0, False),
        (NIGHT, "2026-11-29T22:00", 0, True),
        (NIGHT, "2026-11-30T05:59", 0, True),
        (NIGHT, "2026-11-30T06:00", 0, False),
        (NIGHT, "2026-11-30T22:00", 0, False),
        (NIGHT, "2026-11-28T23:00", 86400, True),
        (ALWAYS, "2026-11-30T12:00", 0, True),
    ],
)
def test_window_is_open(window: ScheduleWindow, at: str, lead_s: float, *, expected: bool) -> None:
    now = datetime.fromisoformat(at).replace(tzinfo=UTC).timestamp()
    assert window.is_open(now, lead_s) is expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"timezone": "Europe/Atlantis"}, "Unknown time zone Europe/Atlantis"),
        ({"timezone": "../etc/passwd"}, "Unknown time zone"),
        ({"min_replicas": -1}, "0 or more"),
        ({"days": []}, "without days"),
        ({"start": "08:00:00Z"}, "local times"),
    ],
)
def test_invalid_window_is_refused(changes: dict[str, object], message: str) -> None:
    fields = {"min_replicas": 1, "start": "08:00:00", "end": "18:00:00", **changes}
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(fields, ScheduleWindow)
