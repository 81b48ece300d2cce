"""Runs of the pinned prompts of rollouts, one at a time for each pool."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import structlog

from argosy.fleet.control.pinned_prompts import CheckResult
from argosy.policy.rollout import CheckStatus

RETRY_INTERVAL_S = 2.0
"""Interval at which a check without a result is repeated."""
_PENDING = CheckResult(CheckStatus.PENDING, "")

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.fleet")


@dataclass(slots=True)
class _Check:
    rollout: str
    task: asyncio.Task[CheckResult]
    started_at: float


class RolloutChecks:
    """Checks of candidates. Not thread-safe: use it from one event loop.

    Args:
        wake: Set when a check has a result.
    """

    def __init__(self, wake: asyncio.Event) -> None:
        self._wake = wake
        self._checks: dict[str, _Check] = {}
        """Latest check of each pool, by its name."""

    def result(self, pool: str, rollout: str) -> CheckResult:
        """Return the latest result for a rollout. A check that failed to run has none."""
        check = self._checks.get(pool)
        if check is None or check.rollout != rollout or not check.task.done():
            return _PENDING
        if check.task.cancelled() or check.task.exception() is not None:
            return _PENDING
        return check.task.result()

    def run(self, pool: str, rollout: str, send: Callable[[], Awaitable[CheckResult]]) -> None:
        """Run a check unless one runs, or has a result other than pending."""
        check, now = self._checks.get(pool), time.monotonic()
        if check is not None and check.rollout == rollout:
            is_recent = now - check.started_at < RETRY_INTERVAL_S
            if not check.task.done() or is_recent:
                return
            if self.result(pool, rollout).status is not CheckStatus.PENDING:
                return
        elif check is not None:
            check.task.cancel()
        task = asyncio.ensure_future(send())
        task.add_done_callback(partial(self._on_task_ended, pool))
        self._checks[pool] = _Check(rollout, task, now)

    def _on_task_ended(self, pool: str, task: asyncio.Task[CheckResult]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.error("rollout_check_failed", pool=pool, reason=repr(task.exception()))
        self._wake.set()

    def forget(self, pool: str) -> None:
        """End the checks of a pool."""
        check = self._checks.pop(pool, None)
        if check is not None:
            check.task.cancel()

    async def close(self) -> None:
        """End all checks."""
        tasks = [check.task for check in self._checks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
