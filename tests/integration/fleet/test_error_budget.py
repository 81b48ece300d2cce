"""Error budget of a model, from the requests in a real ledger."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from tests.support.migrated_store import open_migrated_store
from tests.support.usage_rows import usage_row

from argosy.fleet.control.error_budget import (
    MIN_REQUESTS,
    READ_INTERVAL_S,
    WINDOW_S,
    ErrorBudgetReader,
)

NOW = 1_764_230_000.0


async def test_budget_counts_recent_failures_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_migrated_store(f"sqlite:///{tmp_path}/store.db")) as store:

        def add(
            prefix: str, count: int, status: str, *, model: str = "chat", age_s: float = 9.0
        ) -> None:
            rows = [
                usage_row(f"{prefix}-{number}", ended_at=NOW - age_s, model=model, status=status)
                for number in range(count)
            ]
            store.ledger.add_records(rows)

        reader = ErrorBudgetReader(store.ledger)
        add("done", MIN_REQUESTS - 4, "completed")
        assert await reader.read("chat", 0.05, NOW) is None
        add("failed", 3, "failed")
        add("lost", 1, "interrupted")
        add("refused", 50, "refused")
        add("other", 70, "failed", model="other")
        add("old", 70, "failed", age_s=WINDOW_S + 1.0)
        assert await reader.read("chat", 0.05, NOW + 1.0) is None, "read again too soon"
        later = NOW + READ_INTERVAL_S
        assert await reader.read("chat", 0.05, later) == pytest.approx(0.2)
        assert await reader.read("chat", None, later) is None
        monkeypatch.setattr("argosy.fleet.control.error_budget.MAX_RECORDS", 60)
        assert await reader.read("chat", 0.05, later + READ_INTERVAL_S) is None
