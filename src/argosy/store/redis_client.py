"""Redis client for shared state, with short timeouts and without retries, and helpers for its users."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError

CONNECT_TIMEOUT_S = 0.5
"""Minimum connect timeout, used if the reply timeout is shorter."""
MAX_CONNECTIONS = 8
CANCEL_RETRY_INTERVAL_S = 0.05
KEY_PREFIX = "{argosy}:"
"""Prefix of all keys. The braces are a hash tag that keeps them on one node of a cluster."""


def create_redis_client(url: str, password: str | None, timeout_s: float) -> Redis:
    """Create a client with at most `MAX_CONNECTIONS` connections.

    `timeout_s` limits the wait for each reply and for a free connection.

    Raises:
        ValueError: The URL is not a Redis URL.
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
            "The Redis URL is not valid (it may contain a password, so it is not shown). "
            "Write redis://HOST:PORT/0, rediss://HOST:PORT/0 or unix:///PATH."
        )
        raise ValueError(message) from error
    return Redis.from_pool(pool)


def describe_error(error: Exception) -> str:
    """Describe a Redis error for the log, with what to change for a wrong password."""
    if AuthenticationError in (type(error), type(error.__cause__)):
        return "Redis rejects the password. Check the variable that limits.password_env names."
    return f"{type(error).__name__}: {error}"


async def cancel_task(task: asyncio.Task[Any]) -> None:
    """Cancel a task that uses Redis and wait for its end.

    The cancellation is repeated until the task ends. redis-py sends with `asyncio.wait_for`, which before Python 3.12
    loses a cancellation if the awaited operation completes at the same moment.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_RETRY_INTERVAL_S)
