"""What callers are told of their limits: refusals, rate-limit headers, and the arithmetic for explanations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from functools import lru_cache

from argosy.gateway.request_trace import LimitTrace
from argosy.policy import (
    QuotaLimit,
    QuotaMeter,
    QuotaRejection,
    Reservation,
    is_permanent,
    longest_rejection,
)
from argosy.protocol import ApiError

DEFAULT_RETRY_AFTER_S = 1.0
"""When to come back where nobody knows."""
_LENGTH_UNITS = frozenset({"tokens", "input_tokens", "output_tokens", "nano_dollars"})

_HEADER_UNITS = {"requests": {"requests"}, "tokens": {"tokens", "input_tokens", "output_tokens"}}


def rate_limit_error(refusals: Sequence[QuotaRejection]) -> ApiError:
    """The answer to a request that does not fit into these limits."""
    refusal = longest_rejection(refusals)
    limit, unit = _describe_limit(refusal.quota_limit, refusal.limit), refusal.quota_limit.unit
    asked, used = _format_amount(unit, refusal.requested), _format_amount(unit, refusal.used)
    if is_permanent(refusal):
        shorter = unit in _LENGTH_UNITS and refusal.limit > 0
        remedy = "Send a shorter prompt, or have it raised." if shorter else "Have it raised."
        message = f"This request needs {asked}, and never fits into {limit}. {remedy}"
        return ApiError(413, "request_too_large", message)
    wait_s = refusal.wait_s or DEFAULT_RETRY_AFTER_S
    if unit == "nano_dollars":
        message = (
            f"There is no room in {limit}: {used} is used, and this request may cost {asked}. "
            f"Try again in {format_duration(wait_s)}, or have the budget raised."
        )
        return ApiError(429, "insufficient_quota", message, retry_after_s=wait_s)
    if unit == "concurrency":
        message = f"There is no room in {limit}: {used} run. Try again when one of them has ended."
    else:
        message = (
            f"There is no room in {limit}: {used} are used, and this request asks for {asked}. "
            f"Try again in {format_duration(wait_s)}."
        )
    return ApiError(429, "rate_limit_exceeded", message, retry_after_s=wait_s)


def limits_unavailable_error() -> ApiError:
    """The answer where limits must not be passed, and nobody can say how much is used."""
    message = (
        "How much of the limits is used cannot be told at the moment, and this project is set to refuse then. "
        "Try again shortly."
    )
    return ApiError(503, "limits_unavailable", message, retry_after_s=DEFAULT_RETRY_AFTER_S)


class RateLimitHeaders:
    """`x-ratelimit-*` of those of some limits on requests, and on tokens, that have the least left."""

    def __init__(self, meters: Sequence[QuotaLimit]) -> None:
        kinds = [
            (_header_names(kind), [meter.meter for meter in meters if meter.unit in units])
            for kind, units in _HEADER_UNITS.items()
        ]
        self._counters_by_header = [(names, counters) for names, counters in kinds if counters]

    def __call__(self, now: float) -> list[tuple[bytes, bytes]]:
        """As they are now."""
        told: list[tuple[bytes, bytes]] = []
        for (limit, remaining, reset), counters in self._counters_by_header:
            tightest = counters[0] if len(counters) == 1 else min(counters, key=_remaining)
            told += (
                (limit, b"%d" % tightest.limit),
                (remaining, b"%d" % max(0, tightest.limit - tightest.used)),
                (reset, format_duration(tightest.reset_s(now)).encode()),
            )
        return told


def _remaining(counter: QuotaMeter) -> int:
    return counter.limit - counter.used


def _header_names(kind: str) -> tuple[bytes, bytes, bytes]:
    limit, remaining, reset = (
        f"x-ratelimit-{what}-{kind}".encode() for what in ("limit", "remaining", "reset")
    )
    return limit, remaining, reset


def explain_admitted(reservation: Reservation) -> list[LimitTrace]:
    """The arithmetic of a request that fits."""
    return [
        LimitTrace(
            (meter := hold.quota_limit).owner_kind,
            meter.unit,
            meter.window,
            meter.model,
            meter.meter.limit,
            hold.used_before,
            hold.units,
        )
        for hold in reservation.holds
    ]


def explain_rejected(refusals: Sequence[QuotaRejection]) -> list[LimitTrace]:
    """The arithmetic of one that does not: the limits that stand in its way."""
    return [
        LimitTrace(
            r.quota_limit.owner_kind,
            r.quota_limit.unit,
            r.quota_limit.window,
            r.quota_limit.model,
            r.limit,
            r.used,
            r.requested,
            None if math.isinf(r.wait_s) else r.wait_s,
            fits=False,
        )
        for r in refusals
    ]


def format_duration(seconds: float) -> str:
    """As OpenAI writes it: 60ms, 1.2s, 1m30s, 2h5m0s. Never less than it is."""
    if seconds < 1.0:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < 60.0:
        return f"{math.ceil(seconds * 10) / 10:g}s"
    return _format_long_duration(math.ceil(seconds))


@lru_cache(maxsize=64)
def _format_long_duration(seconds: int) -> str:
    """A window is free again after about its length, whoever asks."""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"


def _describe_limit(meter: QuotaLimit, limit: int) -> str:
    what = "budget" if meter.unit == "nano_dollars" else "limit"
    span = f" per {meter.window}" if meter.window else " at a time"
    model = f" for {meter.model!r}" if meter.model else ""
    return f"the {meter.owner_kind}'s {what} of {_format_amount(meter.unit, limit)}{span}{model}"


def _format_amount(unit: str, units: int) -> str:
    if unit == "nano_dollars":
        return f"${Decimal(units).scaleb(-9).normalize():f}"
    noun = "requests" if unit == "concurrency" else unit.replace("_", " ")
    return f"{units} {noun[:-1] if units == 1 else noun}"
