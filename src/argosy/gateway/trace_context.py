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
_RANDOM_BITS = 56


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

    @property
    def random_value(self) -> int:
        """The last 56 bits of the trace id, by which all that see the trace sample alike."""
        return int(self.trace_id[-_RANDOM_BITS // 4 :], 16)

    def upstream_headers(self, response_id: str, attempt: int) -> list[tuple[bytes, bytes]]:
        """Return the headers of an attempt, whose span is the parent of the replica's own.

        Args:
            response_id: Id of the response.
            attempt: Number of attempts before it.
        """
        span_id = compute_span_id(response_id, f"attempt {attempt}").hex()
        parent = f"00-{self.trace_id}-{span_id}-{self.is_sampled:02x}"
        headers = [(b"traceparent", parent.encode())]
        return [*headers, (b"tracestate", self.state.encode())] if self.state else headers


def read_trace_context(headers: Mapping[bytes, bytes], response_id: str) -> TraceContext:
    """Return the client's trace, or a new one if its header is missing or invalid."""
    match = _TRACEPARENT.fullmatch(headers.get(b"traceparent", b""))
    if match is None:
        return TraceContext(blake2b(response_id.encode(), digest_size=16).hexdigest())
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
