"""What callers are told of their limits: refusals, rate-limit headers, and the arithmetic for explanations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from functools import lru_cache

from argosy.gateway.request_trace import LimitLine
from argosy.policy import Counter, Meter, Refusal, Reservation, never, worst
from argosy.protocol import ApiError

SOON_S = 1.0
"""When to come back where nobody knows."""
_BY_LENGTH = frozenset({"tokens", "input_tokens", "output_tokens", "nano_dollars"})

_COUNTED = {"requests": {"requests"}, "tokens": {"tokens", "input_tokens", "output_tokens"}}


def refused(refusals: Sequence[Refusal]) -> ApiError:
    """The answer to a request that does not fit into these limits."""
    refusal = worst(refusals)
    limit, unit = _limit(refusal.meter, refusal.limit), refusal.meter.unit
    asked, used = _amount(unit, refusal.asked), _amount(unit, refusal.used)
    if never(refusal):
        shorter = unit in _BY_LENGTH and refusal.limit > 0
        remedy = "Send a shorter prompt, or have it raised." if shorter else "Have it raised."
        message = f"This request needs {asked}, and never fits into {limit}. {remedy}"
        return ApiError(413, "request_too_large", message)
    wait_s = refusal.wait_s or SOON_S
    if unit == "nano_dollars":
        message = (
            f"There is no room in {limit}: {used} is used, and this request may cost {asked}. "
            f"Try again in {duration(wait_s)}, or have the budget raised."
        )
        return ApiError(429, "insufficient_quota", message, retry_after_s=wait_s)
    if unit == "concurrency":
        message = f"There is no room in {limit}: {used} run. Try again when one of them has ended."
    else:
        message = (
            f"There is no room in {limit}: {used} are used, and this request asks for {asked}. "
            f"Try again in {duration(wait_s)}."
        )
    return ApiError(429, "rate_limit_exceeded", message, retry_after_s=wait_s)


def unavailable() -> ApiError:
    """The answer where limits must not be passed, and nobody can say how much is used."""
    message = (
        "How much of the limits is used cannot be told at the moment, and this project is set to refuse then. "
        "Try again shortly."
    )
    return ApiError(503, "limits_unavailable", message, retry_after_s=SOON_S)


class Headers:
    """`x-ratelimit-*` of those of some limits on requests, and on tokens, that have the least left."""

    def __init__(self, meters: Sequence[Meter]) -> None:
        kinds = [
            (_names(kind), [meter.counter for meter in meters if meter.unit in units])
            for kind, units in _COUNTED.items()
        ]
        self._told = [(names, counters) for names, counters in kinds if counters]

    def __call__(self, now: float) -> list[tuple[bytes, bytes]]:
        """As they are now."""
        told: list[tuple[bytes, bytes]] = []
        for (limit, remaining, reset), counters in self._told:
            tightest = counters[0] if len(counters) == 1 else min(counters, key=_left)
            told += (
                (limit, b"%d" % tightest.limit),
                (remaining, b"%d" % max(0, tightest.limit - tightest.used)),
                (reset, duration(tightest.reset_s(now)).encode()),
            )
        return told


def _left(counter: Counter) -> int:
    return counter.limit - counter.used


def _names(kind: str) -> tuple[bytes, bytes, bytes]:
    limit, remaining, reset = (
        f"x-ratelimit-{what}-{kind}".encode() for what in ("limit", "remaining", "reset")
    )
    return limit, remaining, reset


def let_in(reservation: Reservation) -> list[LimitLine]:
    """The arithmetic of a request that fits."""
    return [
        LimitLine(
            (meter := hold.meter).owner,
            meter.unit,
            meter.window,
            meter.model,
            meter.counter.limit,
            hold.before,
            hold.units,
        )
        for hold in reservation.holds
    ]


def kept_out(refusals: Sequence[Refusal]) -> list[LimitLine]:
    """The arithmetic of one that does not: the limits that stand in its way."""
    return [
        LimitLine(
            r.meter.owner,
            r.meter.unit,
            r.meter.window,
            r.meter.model,
            r.limit,
            r.used,
            r.asked,
            None if math.isinf(r.wait_s) else r.wait_s,
            fits=False,
        )
        for r in refusals
    ]


def duration(seconds: float) -> str:
    """As OpenAI writes it: 60ms, 1.2s, 1m30s, 2h5m0s. Never less than it is."""
    if seconds < 1.0:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < 60.0:
        return f"{math.ceil(seconds * 10) / 10:g}s"
    return _long(math.ceil(seconds))


@lru_cache(maxsize=64)
def _long(seconds: int) -> str:
    """A window is free again after about its length, whoever asks."""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"


def _limit(meter: Meter, limit: int) -> str:
    what = "budget" if meter.unit == "nano_dollars" else "limit"
    span = f" per {meter.window}" if meter.window else " at a time"
    model = f" for {meter.model!r}" if meter.model else ""
    return f"the {meter.owner}'s {what} of {_amount(meter.unit, limit)}{span}{model}"


def _amount(unit: str, units: int) -> str:
    if unit == "nano_dollars":
        return f"${Decimal(units).scaleb(-9).normalize():f}"
    noun = "requests" if unit == "concurrency" else unit.replace("_", " ")
    return f"{units} {noun[:-1] if units == 1 else noun}"
