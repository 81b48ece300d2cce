"""Check of a new version with golden sets, before it gets any traffic."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import httpx2

from argosy.deployment import GoldenSetCheck
from argosy.fleet.control.pinned_prompts import ANSWER_TIMEOUT_S, CheckResult
from argosy.fleet.control.replica_monitor import open_replica_client
from argosy.policy import LOWEST_TIER
from argosy.policy.quality import QualityComparison, QualityVerdict
from argosy.policy.rollout import CheckStatus
from argosy.process import run_in_daemon_thread
from argosy.quality import (
    GoldenSet,
    GoldenSetRun,
    ModelClient,
    QualityRunError,
    SendRequest,
    decode_set,
    describe_comparison,
)
from argosy.store import NotFoundError, Quality, QualitySet

CONCURRENCY = 4
"""Items at a time. The stable replica also serves users."""
_HEADERS = {"x-argosy-tier": str(LOWEST_TIER)}
_STATUSES = {
    QualityVerdict.WORSE: CheckStatus.FAILED,
    QualityVerdict.NOT_WORSE: CheckStatus.PASSED,
    QualityVerdict.UNDECIDED: CheckStatus.INCONCLUSIVE,
}


async def check_quality(
    quality: Quality,
    checks: Sequence[GoldenSetCheck],
    stable_url: str | None,
    candidate_urls: Sequence[str],
    model: str,
) -> CheckResult:
    """Compare the answers of replicas of both versions on each golden set. The first that does not pass ends the check.

    Args:
        quality: Golden sets of the store.
        checks: Declared sets. Without any the check passes.
        stable_url: A replica of the stable version; None if none is ready.
        candidate_urls: Replicas of the candidate, which take turns.
        model: Name of the model at the replicas.

    Raises:
        StoreError: The store cannot be read.
    """
    if not checks:
        return CheckResult(CheckStatus.PASSED, "")
    if stable_url is None or not candidate_urls:
        return CheckResult(CheckStatus.PENDING, "no replica of the stable version is ready")
    passed = []
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(open_replica_client(url, ANSWER_TIMEOUT_S))
            for url in (stable_url, *candidate_urls)
        ]
        for check in checks:
            try:
                found, golden = await run_in_daemon_thread(partial(_read_set, quality, check.set))
                run = GoldenSetRun(
                    golden,
                    ModelClient(model, _build_sender(clients[1:])),
                    ModelClient(model, _build_sender(clients[:1])),
                    margin=check.margin,
                    concurrency=CONCURRENCY,
                )
                comparison = (await run.run()).summary.comparison
            except (NotFoundError, ValueError) as error:
                reason = f"golden set {check.set}: {error}"
                return CheckResult(CheckStatus.INCONCLUSIVE, reason)
            except (QualityRunError, httpx2.HTTPError, OSError) as error:
                return CheckResult(CheckStatus.PENDING, f"golden set {check.set}: {error}")
            result = _judge(found, check, comparison)
            if result.status is not CheckStatus.PASSED:
                return result
            passed.append(result.reason)
    return CheckResult(CheckStatus.PASSED, "; ".join(passed))


def _judge(
    found: QualitySet, check: GoldenSetCheck, comparison: QualityComparison | None
) -> CheckResult:
    assert comparison is not None  # noqa: S101 - there is a baseline
    reason = f"golden set {found.reference}: {describe_comparison(comparison)}"
    if check.max_loss is not None and -comparison.difference > check.max_loss:
        reason += f" The loss exceeds max_loss, {100 * check.max_loss:g} points."
        return CheckResult(CheckStatus.FAILED, reason)
    return CheckResult(_STATUSES[comparison.verdict], reason)


def _read_set(quality: Quality, reference: str) -> tuple[QualitySet, GoldenSet]:
    """Return a set that can gate. Raises NotFoundError or ValueError, which say why there is none."""
    found = quality.find_set(reference)
    golden = decode_set(quality.read_content(found))
    if golden.has_rubrics:
        raise ValueError(
            "it has rubrics, and a judge does not gate a rollout; use other assertions"
        )
    return found, golden


def _build_sender(clients: Sequence[httpx2.AsyncClient]) -> SendRequest:
    turns = itertools.cycle(clients)

    async def send(body: dict[str, Any]) -> tuple[int, bytes]:
        response = await next(turns).post("/v1/chat/completions", json=body, headers=_HEADERS)
        return response.status_code, response.content

    return send
