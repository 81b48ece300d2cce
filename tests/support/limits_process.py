"""Limit filter in a process of its own that admits concurrent requests, prints their number and waits to be killed."""

from __future__ import annotations

import asyncio
import sys

import structlog

from argosy.gateway.filters import LimitFilter
from argosy.store.redis_quota_backend import RedisQuotaBackend
from tests.support.limit_harness import (
    is_admitted,
    make_limit,
    make_snapshot,
)

structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))


async def main(url: str, count: int) -> None:
    limits = LimitFilter(RedisQuotaBackend(url, timeout_s=10.0, gateway_ttl_s=1.0))
    limits.apply_snapshot(make_snapshot(make_limit("concurrency", 3)))
    await limits.start()
    admitted = sum([await is_admitted(limits) for _ in range(count)])
    print(admitted, flush=True)  # noqa: T201 - the parent process reads it
    await asyncio.Event().wait()


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
