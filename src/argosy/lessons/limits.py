"""Lesson on limits: a limit of tokens per minute and a budget for the day, with a token bucket to compare with."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from argosy.lessons.lesson import LessonRun, count_of, describe_parameters, slider
from argosy.policy import (
    CalendarPeriod,
    QuotaLimit,
    QuotaRejection,
    QuotaUsage,
    Reservation,
    SlidingWindow,
    is_permanent,
    longest_rejection,
    reserve,
)

MIDNIGHT = 20_000 * 86_400
"""Seconds since the epoch at which the budget of the next day begins."""
DURATION_S = 180
MIDNIGHT_AFTER_S = 120
WINDOW_S = 60
PROMPT_TOKENS = 100
MAX_OUTPUT_TOKENS = 400
RESPONSE_S = 3
"""Time from the arrival of a request to the end of its response."""

Outcome = Literal["admitted", "rejected"]


class LimitsParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the lesson."""

    limit_tokens: Annotated[
        int, slider("Limit", 500, 6000, unit="tokens in any minute", step=100)
    ] = 2000
    budget_tokens: Annotated[
        int, slider("Budget", 500, 20000, unit="tokens each day", step=500)
    ] = 4000
    interval_s: Annotated[int, slider("A request arrives every", 1, 20, unit="s")] = 4
    used_percent: Annotated[
        int,
        slider(
            "Output, of the largest that was asked for", 0, 100, unit="% of 400 tokens", step=10
        ),
    ] = 50


class LimitsFrame(msgspec.Struct, frozen=True, kw_only=True):
    """State of limit, budget and bucket in a second."""

    second: int
    text: str
    outcome: Outcome | None
    """Outcome of the request that arrived in this second, if any."""
    window_tokens: int
    """Tokens that count against the limit, reserved ones included."""
    budget_tokens: int
    """Tokens that count against the budget of the day."""
    bucket_tokens: float
    """Tokens in a bucket that holds the limit, and is refilled by the limit each minute."""
    bucket_outcome: Outcome | None
    """Outcome of the request if there were only the bucket."""
    bucket_minute_tokens: int
    """Tokens that the bucket let through in the last minute."""


class _TokenBucket:
    """Token bucket, for comparison: it lets a whole burst through, and the refill of a minute besides."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._refilled_at = 0
        self.tokens = float(capacity)
        self._admitted: list[tuple[int, int]] = []

    def refill(self, now: int) -> None:
        """Add what has come in since the last call."""
        tokens = self.tokens + (now - self._refilled_at) * self._capacity / WINDOW_S
        self.tokens, self._refilled_at = min(float(self._capacity), tokens), now

    def try_take(self, tokens: int, now: int) -> bool:
        """Take tokens if the bucket has as many."""
        if tokens > self.tokens:
            return False
        self.tokens -= tokens
        self._admitted.append((now, tokens))
        return True

    def last_minute(self, now: int) -> int:
        """Return the tokens that were taken in the last minute."""
        return sum(tokens for at, tokens in self._admitted if at > now - WINDOW_S)


def run_limits(parameters: LimitsParameters) -> LessonRun[LimitsFrame]:
    """Simulate `DURATION_S` seconds around midnight."""
    begin = MIDNIGHT - MIDNIGHT_AFTER_S
    window = SlidingWindow(parameters.limit_tokens, WINDOW_S)
    budget = CalendarPeriod(parameters.budget_tokens, "day")
    limits = [
        QuotaLimit("project", "tokens", "minute", None, window),
        QuotaLimit("project", "tokens", "day", None, budget),
    ]
    output = MAX_OUTPUT_TOKENS * parameters.used_percent // 100
    used = _usage_of(output)
    bucket = _TokenBucket(parameters.limit_tokens)
    running: list[tuple[int, int, Reservation]] = []
    frames: list[LimitsFrame] = []
    number = 0
    for second in range(DURATION_S + 1):
        now, sentences = float(begin + second), []
        outcome: Outcome | None = None
        bucket_outcome: Outcome | None = None
        if second == MIDNIGHT_AFTER_S:
            sentences.append("A new day begins in UTC, so the budget is whole again.")
        while running and running[0][0] <= second:
            _, ending, reservation = running.pop(0)
            reservation.settle(used, now)
            sentences.append(
                f"Request {ending} ends. It used {used.tokens} tokens, and what it reserved besides is free again."
            )
        bucket.refill(second)
        if second % parameters.interval_s == 0:
            number += 1
            reserved = reserve(limits, _usage_of(MAX_OUTPUT_TOKENS), _usage_of(0), now)
            if isinstance(reserved, Reservation):
                outcome = "admitted"
                running.append((second + RESPONSE_S, number, reserved))
                held = reserved.holds[0].units
                sentences.append(f"Request {number} is admitted and reserves {held} tokens.")
            else:
                outcome = "rejected"
                sentences.append(_explain_rejection(number, longest_rejection(reserved)))
            bucket_outcome = "admitted" if bucket.try_take(used.tokens, second) else "rejected"
        window.remaining(now)
        budget.remaining(now)
        frames.append(
            LimitsFrame(
                second=second,
                text=" ".join(sentences) or "Nothing arrives.",
                outcome=outcome,
                window_tokens=window.used,
                budget_tokens=budget.used,
                bucket_tokens=bucket.tokens,
                bucket_outcome=bucket_outcome,
                bucket_minute_tokens=bucket.last_minute(second),
            )
        )
    return LessonRun(
        parameters=describe_parameters(parameters),
        frames=frames,
        result=_summarize(parameters, frames),
    )


def _usage_of(output_tokens: int) -> QuotaUsage:
    return QuotaUsage(
        requests=1,
        tokens=PROMPT_TOKENS + output_tokens,
        input_tokens=PROMPT_TOKENS,
        output_tokens=output_tokens,
    )


def _explain_rejection(number: int, rejection: QuotaRejection) -> str:
    limit = rejection.quota_limit
    name = "limit of a minute" if limit.window == "minute" else "budget of the day"
    text = (
        f"Request {number} is rejected with status 429: {rejection.used} of {rejection.limit} tokens of the {name} are "
        f"taken, and it needs {rejection.requested}."
    )
    if is_permanent(rejection):
        return f"{text} It never fits."
    return f"{text} Retry after {rejection.wait_s:.0f} s."


def _summarize(parameters: LimitsParameters, frames: list[LimitsFrame]) -> str:
    outcomes = [frame.outcome for frame in frames if frame.outcome]
    bucket_peak = max(frame.bucket_minute_tokens for frame in frames)
    return (
        f"{outcomes.count('admitted')} of {count_of(len(outcomes), 'request')} were admitted. At most "
        f"{max(frame.window_tokens for frame in frames)} tokens counted in any minute, and the limit is "
        f"{parameters.limit_tokens}. A token bucket of this size alone lets through up to {bucket_peak}."
    )
