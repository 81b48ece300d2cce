"""Decides at the end of a request whether its trace is exported."""

from __future__ import annotations

import math
from collections import Counter

from argosy.gateway.request_trace import RequestTrace
from argosy.gateway.trace_context import TraceContext

_RANDOM_RANGE = 1 << 56
TENANT_SHARE = 10
"""A tenant may take the bound divided by this."""


class TraceSampler:
    """Keeps the traces of failures and of callers that sample, and a share of all others, within a bound."""

    def __init__(self, ratio: float, max_traces_per_s: int) -> None:
        threshold = round((1 - ratio) * _RANDOM_RANGE)
        above_all = "g"
        self._threshold = f"{threshold:014x}" if threshold < _RANDOM_RANGE else above_all
        """A trace is kept if its last 14 digits are not below it. So all that see the trace sample alike."""
        self._state = _format_threshold(threshold)
        self._limit = max_traces_per_s
        self._tenant_limit = math.ceil(max_traces_per_s / TENANT_SHARE)
        self._second = 0
        self._kept: Counter[str] = Counter()
        """Traces of this second by tenant, and of all in ""."""

    def decide(self, trace: RequestTrace, context: TraceContext, now: float) -> str:
        """Return why a trace is kept: `error`, `attempts`, `caller` or `ratio`.

        Returns `unsampled` if it is not, and `tenant_bound` or `bound` if only a bound prevents it.
        """
        if trace.status in {"failed", "stopped"}:
            reason = "error"
        elif len(trace.attempts) + len(trace.earlier_attempts) > 1 or trace.pauses:
            reason = "attempts"
        elif context.is_sampled:
            reason = "caller"
        elif context.trace_id[-14:] >= self._threshold:
            reason = "ratio"
        else:
            return "unsampled"
        return self._bound(trace.principal.tenant, now) or reason

    def trace_state(self, context: TraceContext, reason: str) -> str:
        """Return the `tracestate` of a kept trace, with the share that traces kept by the ratio stand for."""
        others = [
            part for part in context.state.split(",") if part and not part.strip().startswith("ot=")
        ]
        return ",".join([self._state, *others] if reason == "ratio" else others)

    def _bound(self, tenant: str, now: float) -> str | None:
        if int(now) != self._second:
            self._second = int(now)
            self._kept.clear()
        if self._kept[""] >= self._limit:
            return "bound"
        if tenant and self._kept[tenant] >= self._tenant_limit:
            return "tenant_bound"
        self._kept[""] += 1
        if tenant:
            self._kept[tenant] += 1
        return None


def _format_threshold(threshold: int) -> str:
    digits = f"{min(threshold, _RANDOM_RANGE - 1):014x}".rstrip("0") or "0"
    return f"ot=th:{digits}"
