"""Short requests to a server whose caller needs only the status and the body."""

from __future__ import annotations

import time

from argosy.gateway.upstream.upstream import Upstream
from argosy.gateway.upstream.upstream_response import UpstreamResponse

MAX_FETCHED_BYTES = 4 * 1024 * 1024
"""Maximum size of a response in bytes. The model lists of hosted APIs have about one megabyte."""


async def fetch_path(
    upstream: Upstream, path: bytes, *headers: tuple[bytes, bytes]
) -> tuple[int, bytes]:
    """Send a GET request and return status and body. Raises UpstreamError."""
    return await fetch_response(upstream, upstream.build_request(b"GET", path, b"", [*headers]))


async def fetch_response(upstream: Upstream, request: bytes) -> tuple[int, bytes]:
    """Send an encoded request and return status and body. Raises UpstreamError."""
    response = UpstreamResponse(time.monotonic, MAX_FETCHED_BYTES)
    try:
        await response.send(upstream, request)
        return await response.status, await response.read_body()
    except BaseException:
        response.abort("the request was cancelled")
        raise
