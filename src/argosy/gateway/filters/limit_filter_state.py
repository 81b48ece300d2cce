"""Reservation of one request, which is extended while the request streams and settled when it ends."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import msgspec

from argosy.gateway.filters.limit_responses import RateLimitHeaders, explain_rejected
from argosy.gateway.request_context import UNLIMITED_TOKENS, RequestContext
from argosy.gateway.request_fields import DEFAULT_OUTPUT_TOKENS
from argosy.policy import (
    OutputLengthEstimator,
    QuotaLimit,
    QuotaMeter,
    QuotaRejection,
    Rates,
    Reservation,
    running_usage,
)
from argosy.protocol import EarlyStopReason, TokenUsage
from argosy.store import Clock, QuotaBackend, QuotaDemand

RESERVATION_STEP_TOKENS = 32
"""Output tokens by which a reservation is extended after a stream has exceeded its estimated length."""


@dataclass(frozen=True, slots=True)
class LimitSet:
    """All limits that apply to a caller's requests for one model."""

    meters: tuple[QuotaLimit, ...]
    fails_open: bool
    """Whether requests are admitted while current usage is unknown, because the quota backend is unreachable."""
    caller_key: tuple[str, ...]
    has_budget: bool
    """Whether a limit counts dollars."""
    rate_limit_headers: RateLimitHeaders


class DegradedModePolicy:
    """Admission while the quota backend is unreachable, with counters of the decisions."""

    def __init__(self, backend: QuotaBackend) -> None:
        self._backend = backend
        self.allowed = 0
        self.rejected = 0

    def decide(
        self, limit_set: LimitSet, demand: QuotaDemand, now: float, *, is_continued: bool = False
    ) -> bool:
        """Return whether to admit a request, by its project's failure mode and within this gateway's share.

        Of a stream that was allowed before and goes on, only a rejection is counted.
        """
        is_allowed = limit_set.fails_open and self._backend.allow_degraded(demand, now)
        self.allowed += is_allowed and not is_continued
        self.rejected += not is_allowed
        return is_allowed


class LimitFilterState(msgspec.Struct, eq=False):
    """Reservation of one request. The tokens that it covers are in the request's context."""

    backend: QuotaBackend
    degraded_mode: DegradedModePolicy
    clock: Clock
    estimates: OutputLengthEstimator
    limit_set: LimitSet
    context: RequestContext
    reservation: Reservation
    rates: Rates
    expected_output_tokens: int
    """Output tokens that the request rarely exceeds."""
    continued_degraded: bool = False
    """Whether the stream was allowed to continue while current usage was unknown."""
    exceeded_limit: QuotaRejection | None = None
    """Limit that rejected the last extension."""

    def __post_init__(self) -> None:
        is_covered = self.reservation.covers_estimate
        self._set_covered(
            self.context.fields.estimated_prompt_tokens,
            self.expected_output_tokens if is_covered else 0,
        )

    def change_limits(self, limit_set: LimitSet, exceeded: Collection[QuotaMeter] = ()) -> None:
        """Apply the limits as they are now to the running request.

        The usage that is expected is reserved again if it fits. Otherwise the next tokens decide whether the request
        may continue.

        Args:
            limit_set: The limits.
            exceeded: Meters whose usage exceeds their limit since it changed.
        """
        context = self.context
        if context.take_back_stream is not None:
            context.take_back_stream()
        delivered, now = context.delivered, self.clock()
        usage = running_usage(self.rates, delivered.usage)
        prompt = delivered.prompt_tokens or context.fields.estimated_prompt_tokens
        minimum_tokens = TokenUsage(prompt, delivered.cached_tokens, delivered.output_tokens)
        minimum = running_usage(self.rates, minimum_tokens)
        self.limit_set = limit_set
        self.reservation.change_limits(limit_set.meters, usage, minimum, now, exceeded)
        # The concurrency slot of a new limit is in use already.
        self.backend.overdraw(quota_demand(self.reservation.shortfall(usage)), now)
        self.reservation.force_extend(usage, now)
        output = max(delivered.output_tokens, self.expected_output_tokens)
        expected = TokenUsage(prompt, delivered.cached_tokens, output)
        is_reserved = self.reservation.extend(running_usage(self.rates, expected), now) is None
        self._set_covered(prompt, output if is_reserved else delivered.output_tokens)

    def _set_covered(self, prompt_tokens: int, output_tokens: int) -> None:
        """Record what the reservation covers, which is everything where no limit applies."""
        context = self.context
        if self.reservation.holds:
            context.covered_prompt_tokens = prompt_tokens
            context.covered_output_tokens = output_tokens
        else:
            context.covered_prompt_tokens = context.covered_output_tokens = UNLIMITED_TOKENS

    def settle(self) -> None:
        """Settle the reservation with the usage that the request's bill counts."""
        context, bill = self.context, self.context.bill
        if self.exceeded_limit is not None and context.status == "stopped":
            context.trace.limits += explain_rejected([self.exceeded_limit])
        self.reservation.settle(bill.quota, self.clock())
        if context.status == "completed" and bill.quota.requests and context.fields.generates:
            output_length = bill.usage.output_tokens // context.fields.choice_count
            self.estimates.observe(self.limit_set.caller_key, output_length, DEFAULT_OUTPUT_TOKENS)

    def extend(self) -> EarlyStopReason | None:
        """Extend the reservation, ahead of the stream if possible, and return the reason to stop if that fails."""
        context, now = self.context, self.clock()
        delivered = context.delivered
        prompt = delivered.prompt_tokens or context.fields.estimated_prompt_tokens
        output = delivered.output_tokens
        ahead_tokens = context.covered_output_tokens
        if output > ahead_tokens:
            ahead_tokens = output + RESERVATION_STEP_TOKENS
        for reserved_output in (ahead_tokens, output):
            tokens = TokenUsage(prompt, delivered.cached_tokens, reserved_output)
            usage = running_usage(self.rates, tokens)
            if self.reservation.extend(usage, now) is None:
                self._set_covered(prompt, reserved_output)
                return None
        demand = quota_demand(self.reservation.shortfall(usage))
        if not self.backend.overdraw(demand, now) and self.backend.is_connected is False:
            self.continued_degraded = self.degraded_mode.decide(
                self.limit_set, demand, now, is_continued=self.continued_degraded
            )
        rejection = self.exceeded_limit = self.reservation.extend(usage, now)
        if rejection is None:
            self._set_covered(prompt, output)
            return None
        self.reservation.force_extend(usage, now)
        return "budget" if rejection.quota_limit.unit == "nano_dollars" else "limit"


def quota_demand(shortfalls: Iterable[tuple[QuotaLimit, int]]) -> QuotaDemand:
    """Return the units that the backend is asked for, per meter."""
    return [(meter.meter, units, units) for meter, units in shortfalls]
