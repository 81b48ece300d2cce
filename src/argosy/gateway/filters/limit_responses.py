"""Responses about limits: rejections, rate limit headers, and the entries of a request's trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from functools import lru_cache
from itertools import starmap
from operator import attrgetter

from argosy.gateway.request_fields import MAX_ESTIMATED_OUTPUT_TOKENS, RequestFields
from argosy.gateway.request_trace import LimitTrace
from argosy.policy import (
    NO_CHARGE,
    QuotaLimit,
    QuotaMeter,
    QuotaRejection,
    Rates,
    Reservation,
    is_permanent,
    longest_rejection,
)
from argosy.protocol import ApiError

DEFAULT_RETRY_AFTER_S = 1.0
"""Suggested delay before a retry if the wait is unknown."""
_LENGTH_UNITS = frozenset({"tokens", "input_tokens", "output_tokens", "nano_dollars"})

_admitted_fields = attrgetter(
    "quota_limit.owner_kind",
    "quota_limit.unit",
    "quota_limit.window",
    "quota_limit.model",
    "quota_limit.meter.limit",
    "used_before",
    "units",
)
"""Returns the fields of the `LimitTrace` of a hold."""
_HEADER_UNITS = {"requests": {"requests"}, "tokens": {"tokens", "input_tokens", "output_tokens"}}


def rate_limit_error(
    rejections: Sequence[QuotaRejection],
    fields: RequestFields | None = None,
    rates: Rates = NO_CHARGE,
) -> ApiError:
    """Build the error for a request that does not fit these limits.

    Args:
        rejections: The limits that reject it.
        fields: The request, if another token limit of it may pass.
        rates: Its prices.
    """
    rejection = longest_rejection(rejections)
    limit, unit = (
        _describe_limit(rejection.quota_limit, rejection.limit),
        rejection.quota_limit.unit,
    )
    requested, used = (
        _format_amount(unit, rejection.requested),
        _format_amount(unit, rejection.used),
    )
    passing_tokens = 0 if fields is None else _find_passing_tokens(rejections, fields, rates)
    advice = f" 'max_tokens' of at most {passing_tokens} passes now." if passing_tokens > 0 else ""
    if is_permanent(rejection):
        shorter = unit in _LENGTH_UNITS and rejection.limit > 0
        remedy = (
            "Send a shorter prompt or have the limit raised."
            if shorter
            else "Have the limit raised."
        )
        message = f"This request needs {requested} and can never fit {limit}. {remedy}{advice}"
        return ApiError(413, "request_too_large", message)
    wait_s = rejection.wait_s or DEFAULT_RETRY_AFTER_S
    if unit == "nano_dollars":
        retry, holders = f"in {format_duration(wait_s)}, or have the budget raised", ""
        if not rejection.wait_s:
            retry, holders = "when one of them has ended", " or held by running requests"
        message = (
            f"This request exceeds {limit}. Used{holders}: {used}. "
            f"Possible cost of this request: {requested}. Try again {retry}.{advice}"
        )
        return ApiError(429, "insufficient_quota", message, retry_after_s=wait_s)
    if unit == "concurrency":
        message = f"This request exceeds {limit}. Running: {used}. Try again when one has ended."
    else:
        message = (
            f"This request exceeds {limit}. Used: {used}. Needed: {requested}. "
            f"Try again in {format_duration(wait_s)}.{advice}"
        )
    return ApiError(429, "rate_limit_exceeded", message, retry_after_s=wait_s)


def _find_passing_tokens(
    rejections: Sequence[QuotaRejection], fields: RequestFields, rates: Rates
) -> int:
    """Return the largest `max_tokens` with which a request passes the limits that reject it; 0 if none does."""
    prompt = fields.estimated_prompt_tokens
    units_by_token = {
        "tokens": (prompt, 1),
        "output_tokens": (0, 1),
        "nano_dollars": (prompt * rates.input, rates.output),
    }
    passing_tokens = fields.max_output_tokens or MAX_ESTIMATED_OUTPUT_TOKENS
    for rejection in rejections:
        prompt_units, output_units = units_by_token.get(rejection.quota_limit.unit, (0, 0))
        room = rejection.limit - rejection.used - prompt_units
        if room <= 0 or not output_units:
            return 0
        passing_tokens = min(passing_tokens, room // (output_units * fields.choice_count))
    return passing_tokens if fields.generates else 0


def limits_unavailable_error() -> ApiError:
    """Build the error for a request whose limits' usage is unknown, in a project that fails closed."""
    message = (
        "The usage of the limits is unknown at the moment, and this project then rejects requests. "
        "Try again shortly."
    )
    return ApiError(503, "limits_unavailable", message, retry_after_s=DEFAULT_RETRY_AFTER_S)


class RateLimitHeaders:
    """`x-ratelimit-*` headers of the limit with the least remaining units, one for requests and one for tokens."""

    def __init__(self, meters: Sequence[QuotaLimit]) -> None:
        kinds = [
            (_header_names(kind), [meter.meter for meter in meters if meter.unit in units])
            for kind, units in _HEADER_UNITS.items()
        ]
        self._counters_by_header = [(names, counters) for names, counters in kinds if counters]

    def __call__(self, now: float) -> list[tuple[bytes, bytes]]:
        """Return the headers at this time."""
        headers: list[tuple[bytes, bytes]] = []
        for (limit, remaining, reset), counters in self._counters_by_header:
            tightest = counters[0] if len(counters) == 1 else min(counters, key=_remaining)
            headers += (
                (limit, b"%d" % tightest.limit),
                (remaining, b"%d" % max(0, tightest.limit - tightest.used)),
                (reset, format_duration(tightest.reset_s(now)).encode()),
            )
        return headers


def _remaining(counter: QuotaMeter) -> int:
    return counter.limit - counter.used


def _header_names(kind: str) -> tuple[bytes, bytes, bytes]:
    limit, remaining, reset = (
        f"x-ratelimit-{field}-{kind}".encode() for field in ("limit", "remaining", "reset")
    )
    return limit, remaining, reset


def explain_admitted(reservation: Reservation) -> list[LimitTrace]:
    """Return the trace entries of an admitted request."""
    return list(starmap(LimitTrace, map(_admitted_fields, reservation.holds)))


def explain_rejected(rejections: Sequence[QuotaRejection]) -> list[LimitTrace]:
    """Return the trace entries of a rejected request, for the limits that reject it."""
    return [
        LimitTrace(
            rejection.quota_limit.owner_kind,
            rejection.quota_limit.unit,
            rejection.quota_limit.window,
            rejection.quota_limit.model,
            rejection.limit,
            rejection.used,
            rejection.requested,
            None if math.isinf(rejection.wait_s) else rejection.wait_s,
            fits=False,
        )
        for rejection in rejections
    ]


def format_duration(seconds: float) -> str:
    """Format a duration as OpenAI does: 60ms, 1.2s, 1m30s, 2h5m0s. Rounds up."""
    if seconds < 1.0:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < 60.0:
        return f"{math.ceil(seconds * 10) / 10:g}s"
    return _format_long_duration(math.ceil(seconds))


@lru_cache(maxsize=64)
def _format_long_duration(seconds: int) -> str:
    """Cached, since the reset time of an unused window is its length for every caller."""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"


def _describe_limit(meter: QuotaLimit, limit: int) -> str:
    noun = "budget" if meter.unit == "nano_dollars" else "limit"
    span = f" per {meter.window}" if meter.window else " at a time"
    model = f" for {meter.model!r}" if meter.model else ""
    return f"the {meter.owner_kind}'s {noun} of {_format_amount(meter.unit, limit)}{span}{model}"


def _format_amount(unit: str, units: int) -> str:
    if unit == "nano_dollars":
        return f"${Decimal(units).scaleb(-9).normalize():f}"
    noun = "requests" if unit == "concurrency" else unit.replace("_", " ")
    return f"{units} {noun[:-1] if units == 1 else noun}"
