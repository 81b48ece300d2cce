"""Ended request, as the series and the detection of changes count it."""

from __future__ import annotations

import msgspec


class RequestSample(msgspec.Struct, gc=False):
    """Ended request, as the series count it."""

    model: str
    tenant: str
    replica: str
    """Name of the last replica; empty if the request was never sent to one."""
    outcome: str
    """`completed`, or the counter in which it counts as well: `refused`, `limited`, `failed` or `cancelled`."""
    duration_s: float
    ttft_s: float | None
    queue_s: float | None
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    """Output tokens that were not recorded with `record_output` while the request ran."""
    cost_nano_dollars: int
    total_output_tokens: int = 0
    version: str = ""
    """Digest of the version of the pool that answered; empty without rollouts."""
    finish_reason: str = ""
    """Why the first choice ended."""
