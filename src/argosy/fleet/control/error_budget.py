"""Remaining error budget of a model, by how its recent requests ended."""

from __future__ import annotations

from argosy.process import run_in_daemon_thread
from argosy.store import Ledger

WINDOW_S = 86_400.0
MAX_RECORDS = 50_000
"""Records of the ledger that are read, which bounds the work for busy fleets."""
MIN_REQUESTS = 100
"""Fewer requests of the model say nothing about its budget."""
READ_INTERVAL_S = 60.0
_FAILURES = ("failed", "interrupted")
_SERVED = ("completed", "cancelled", "stopped", *_FAILURES)


class ErrorBudgetReader:
    """Reads budgets from the ledger at an interval. Not thread-safe: use it from one event loop.

    Args:
        ledger: Source of the requests.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._budgets: dict[str, tuple[float, float | None]] = {}
        """Time of reading and remaining budget of each model."""

    async def read(self, model: str, max_miss_rate: float | None, now: float) -> float | None:
        """Return the remaining part of the error budget, from 1 to below 0; None if it is not known.

        Requests count that ended in the last 24 h, at most `MAX_RECORDS` of all models. A request that failed, or ended
        with its gateway, is a miss. The ledger has no latencies, so slow requests do not count.

        Args:
            model: Public name of the model.
            max_miss_rate: Part of the requests that may miss the objectives. None if none is declared.
            now: Seconds since the epoch.

        Raises:
            StoreError: The store cannot be used.
        """
        if max_miss_rate is None:
            return None
        read_at, budget = self._budgets.get(model, (float("-inf"), None))
        if now - read_at >= READ_INTERVAL_S:
            counts = await run_in_daemon_thread(
                self._ledger.count_recent, model, now - WINDOW_S, MAX_RECORDS
            )
            requests = sum(counts.get(status, 0) for status in _SERVED)
            misses = sum(counts.get(status, 0) for status in _FAILURES)
            budget = None if requests < MIN_REQUESTS else 1.0 - misses / (max_miss_rate * requests)
            self._budgets[model] = now, budget
        return budget
