"""Short questions to a server, which need no more than its answer."""

from __future__ import annotations

import time

from argosy.gateway.upstream.upstream import Upstream
from argosy.gateway.upstream.upstream_response import Attempt

LARGEST_BYTES = 4 * 1024 * 1024
"""Of an answer: lists of hosted APIs have a megabyte."""


async def get(upstream: Upstream, path: bytes, *headers: tuple[bytes, bytes]) -> tuple[int, bytes]:
    """Status and body of what a server has there. Raises UpstreamError."""
    return await answer_to(upstream, upstream.request(b"GET", path, b"", [*headers]))


async def answer_to(upstream: Upstream, request: bytes) -> tuple[int, bytes]:
    """Status and body of its answer. Raises UpstreamError."""
    attempt = Attempt(time.monotonic, LARGEST_BYTES)
    try:
        await attempt.send(upstream, request)
        return await attempt.head, await attempt.whole()
    except BaseException:
        attempt.abandon("nobody waits for its answer any more")
        raise
