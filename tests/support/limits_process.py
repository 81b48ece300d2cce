"""A gateway that runs as many requests as it is told, says how many were let in, and waits to be killed."""

from __future__ import annotations

import asyncio
import sys

import structlog

from argosy.store.redis_quota_backend import RedisQuotaBackend
from tests.support.limit_harness import Gate, directory, limit, refusal, request

structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))


async def main(url: str, count: int) -> None:
    stage = Gate(RedisQuotaBackend(url, timeout_s=10.0, gateway_ttl_s=1.0))
    stage.apply_snapshot(directory(limit("concurrency", 3)))
    await stage.start()
    running = [request() for _ in range(count)]
    let_in = [context for context in running if await refusal(stage, context) is None]
    print(len(let_in), flush=True)  # noqa: T201 - that is how it says so
    await asyncio.Event().wait()


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
