"""Short questions to a server, which need no more than its answer."""

from __future__ import annotations

import time

from argosy.gateway.upstream.upstream import Upstream
from argosy.gateway.upstream.upstream_response import UpstreamResponse

MAX_FETCHED_BYTES = 4 * 1024 * 1024
"""Of an answer: lists of hosted APIs have a megabyte."""


async def fetch_path(
    upstream: Upstream, path: bytes, *headers: tuple[bytes, bytes]
) -> tuple[int, bytes]:
    """Status and body of what a server has there. Raises UpstreamError."""
    return await fetch_response(upstream, upstream.build_request(b"GET", path, b"", [*headers]))


async def fetch_response(upstream: Upstream, request: bytes) -> tuple[int, bytes]:
    """Status and body of its answer. Raises UpstreamError."""
    attempt = UpstreamResponse(time.monotonic, MAX_FETCHED_BYTES)
    try:
        await attempt.send(upstream, request)
        return await attempt.status, await attempt.read_body()
    except BaseException:
        attempt.abort("nobody waits for its answer any more")
        raise
