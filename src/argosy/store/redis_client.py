"""Redis, as all that is shared there is reached: what does not come soon is given up, and nothing is tried again."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError

CONNECT_TIMEOUT_S = 0.5
"""Longest that a connection may take where an answer may take less."""
MAX_CONNECTIONS = 8
CANCEL_RETRY_INTERVAL_S = 0.05
KEY_PREFIX = "{argosy}:"
"""Of all keys; the braces keep them on one node of a cluster."""


def create_redis_client(url: str, password: str | None, timeout_s: float) -> Redis:
    """A client that waits so long for each answer, and for a connection to be free: there are few.

    Raises ValueError when it is no URL of a Redis.
    """
    try:
        pool = BlockingConnectionPool.from_url(
            url,
            password=password,
            max_connections=MAX_CONNECTIONS,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=max(CONNECT_TIMEOUT_S, timeout_s),
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError as error:
        message = (
            "This is no URL of a Redis (it may have a password, so it is not shown): "
            "write redis://HOST:PORT/0, rediss://HOST:PORT/0 or unix:///PATH."
        )
        raise ValueError(message) from error
    return Redis.from_pool(pool)


def describe_error(error: Exception) -> str:
    """Why Redis could not be asked, for the log, and what to change where that is plain."""
    if AuthenticationError in (type(error), type(error.__cause__)):
        return "it takes no such password: limits.password_env names the variable that has it"
    return f"{type(error).__name__}: {error}"


async def cancel_task(task: asyncio.Task[Any]) -> None:
    """End a task that asks Redis.

    It is told until it has ended: redis-py sends by `wait_for`, which before Python 3.12 loses it when what it waits
    for is done at that moment.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_RETRY_INTERVAL_S)
