"""Usage records for tests."""

from __future__ import annotations

from typing import Any

from argosy.store import UsageRecord


def usage_row(request: str, **fields: Any) -> UsageRecord:  # noqa: ANN401 - any field of the record
    """Return a completed record of one second and 13 tokens, in which `fields` override the defaults."""
    ended_at = fields.pop("ended_at", 1_763_750_000.0)
    defaults: dict[str, Any] = {
        "organisation": "org_a",
        "project": "proj_a",
        "key": "key_a",
        "user": "user_a",
        "model": "m",
        "asked": "m",
        "route": "",
        "replica": "r1",
        "started_at": ended_at - 1,
        "status": "completed",
        "input_tokens": 10,
        "cached_tokens": 4,
        "output_tokens": 3,
        "nano_dollars": 700,
    }
    return UsageRecord(request=request, ended_at=ended_at, **{**defaults, **fields})
