"""Rows of the ledger for tests."""

from __future__ import annotations

from typing import Any

from argosy.store import UsageRecord


def usage_row(request: str, **fields: Any) -> UsageRecord:  # noqa: ANN401 - whatever a row has
    """A row of one second and a few tokens, unless `fields` say otherwise."""
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
