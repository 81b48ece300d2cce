"""Error budget of a model, from the requests in a real ledger."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from tests.support.migrated_store import open_migrated_store
from tests.support.usage_rows import usage_row

from argosy.fleet.control.rollout_evidence import (
    BUDGET_INTERVAL_S,
    BUDGET_WINDOW_S,
    MIN_BUDGET_REQUESTS,
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
        add("done", MIN_BUDGET_REQUESTS - 4, "completed")
        assert await reader.read("chat", 0.05, NOW) is None
        add("failed", 3, "failed")
        add("lost", 1, "interrupted")
        add("refused", 50, "refused")
        add("other", 70, "failed", model="other")
        add("old", 70, "failed", age_s=BUDGET_WINDOW_S + 1.0)
        assert await reader.read("chat", 0.05, NOW + 1.0) is None, "read again too soon"
        later = NOW + BUDGET_INTERVAL_S
        assert await reader.read("chat", 0.05, later) == pytest.approx(0.2)
        assert await reader.read("chat", None, later) is None
        monkeypatch.setattr("argosy.fleet.control.rollout_evidence.MAX_BUDGET_RECORDS", 60)
        assert await reader.read("chat", 0.05, later + BUDGET_INTERVAL_S) is None
