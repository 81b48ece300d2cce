"""W3C Trace Context of a request: which trace it belongs to, and the headers by which replicas continue it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b

import msgspec

_TRACEPARENT = re.compile(
    rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-[!-~]{0,64})?"
)
_TRACESTATE = re.compile(rb"[\t -~]{1,512}")
SERVER_SPAN, GENERATION_SPAN, QUEUE_SPAN = "server", "generation", "queue"


class TraceContext(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Trace of a request."""

    trace_id: str
    """32 hexadecimal digits."""
    caller_id: str = ""
    """Span of the client, 16 hexadecimal digits; empty if the trace begins here."""
    is_sampled: bool = False
    """Whether the client keeps the trace."""
    state: str = ""
    """The client's `tracestate`."""

    def upstream_headers(self, response_id: str, attempt: int) -> list[tuple[bytes, bytes]]:
        """Return the headers of an attempt, whose span is the parent of the replica's own.

        Args:
            response_id: Id of the response.
            attempt: Number of attempts before it.
        """
        span_id = compute_span_id(response_id, f"attempt {attempt}").hex()
        parent = f"00-{self.trace_id}-{span_id}-{'01' if self.is_sampled else '00'}"
        headers = [(b"traceparent", parent.encode())]
        if self.state:
            headers.append((b"tracestate", self.state.encode()))
        return headers


def read_trace_context(headers: Mapping[bytes, bytes], response_id: str) -> TraceContext:
    """Return the client's trace. Without a valid header, it is a new one with the digits of the response's id."""
    parent = headers.get(b"traceparent")
    match = _TRACEPARENT.fullmatch(parent) if parent else None
    if match is None:
        return TraceContext(response_id[-32:])
    state = headers.get(b"tracestate", b"")
    return TraceContext(
        match[2].decode(),
        match[3].decode(),
        is_sampled=bool(int(match[4], 16) & 1),
        state=state.decode() if _TRACESTATE.fullmatch(state) else "",
    )


def compute_span_id(response_id: str, name: str) -> bytes:
    """Return the id of a part of a request, which needs no memory of its own."""
    return blake2b(f"{response_id} {name}".encode(), digest_size=8).digest()
