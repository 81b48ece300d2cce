"""What one request holds of its caller's limits: more of them while it streams, what it used at its end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from argosy.gateway.filters.limit_responses import RateLimitHeaders, explain_rejected
from argosy.gateway.request_context import UNANSWERED_STATUSES, FastPathBudget, RequestContext
from argosy.gateway.request_fields import DEFAULT_OUTPUT_TOKENS
from argosy.policy import (
    OutputLengthEstimator,
    QuotaLimit,
    QuotaRejection,
    QuotaUsage,
    Rates,
    Reservation,
    final_usage,
    running_usage,
)
from argosy.store import Clock, QuotaBackend, QuotaDemand

RESERVATION_STEP_TOKENS = 32
"""Output tokens that a stream holds ahead once it has passed what was expected."""


@dataclass(frozen=True, slots=True)
class LimitSet:
    """All limits that a caller's requests for a model come under."""

    meters: tuple[QuotaLimit, ...]
    fails_open: bool
    """It goes on while nobody can say how much is used."""
    caller_key: tuple[str, ...]
    rate_limit_headers: RateLimitHeaders


class DegradedModePolicy:
    """What is decided while the shared state cannot say how much is used, and how often it was."""

    def __init__(self, backend: QuotaBackend) -> None:
        self._backend = backend
        self.allowed = 0
        self.rejected = 0

    def decide(self, limit_set: LimitSet, wants: QuotaDemand, now: float) -> bool:
        """Whether a request, or a stream, goes on: as its project has it, within this gateway's share."""
        on = self.decide_continuation(limit_set, wants, now)
        self.allowed += on
        return on

    def decide_continuation(self, limit_set: LimitSet, wants: QuotaDemand, now: float) -> bool:
        """The same for a stream that has gone on before: it is counted only when it does so no longer."""
        on = limit_set.fails_open and self._backend.allow_degraded(wants, now)
        self.rejected += not on
        return on


class LimitFilterState(msgspec.Struct, eq=False):
    """A `Visit`."""

    backend: QuotaBackend
    degraded_mode: DegradedModePolicy
    clock: Clock
    estimates: OutputLengthEstimator
    limit_set: LimitSet
    context: RequestContext
    reservation: Reservation
    rates: Rates
    reserved_prompt_tokens: int
    """It is enough for so many tokens of the prompt,"""
    reserved_output_tokens: int
    """and for so many of the answer."""
    generated_tokens: int = 0
    """Tokens of the answer so far, whether its client gets them or leaves before it is whole."""
    continued_degraded: bool = False
    """While nobody could say how much is used."""
    exceeded_limit: QuotaRejection | None = None
    """The limit that has no more room."""

    def fast_path_budget(self) -> FastPathBudget:
        """As far as what is held is enough."""
        enough = self.context.delivered.prompt_tokens <= self.reserved_prompt_tokens
        return FastPathBudget(self.reserved_output_tokens if enough else 0)

    def on_tokens(self, chunk_times: Sequence[float]) -> str | None:  # noqa: ARG002 - limits go by the wall clock
        """Hold more when what was delivered passes what is held."""
        told = self.context.delivered
        self.generated_tokens = told.output_tokens
        if (
            told.output_tokens <= self.reserved_output_tokens
            and told.prompt_tokens <= self.reserved_prompt_tokens
        ):
            return None
        return self._extend_reservation()

    def on_complete(self) -> None:
        """Give back what was not used; of a request that was sent nowhere, or got nothing because of us, all.

        One that a replica found wrong was a request all the same.
        """
        told, context, now = self.context.delivered, self.context, self.clock()
        if self.exceeded_limit is not None and context.status == "stopped":
            context.trace.limits += explain_rejected([self.exceeded_limit])
        if not told.output_tokens and (
            context.status in UNANSWERED_STATUSES or not context.replica_name
        ):
            self.reservation.settle(QuotaUsage(requests=int(context.is_client_error)), now)
            return
        prompt, output = told.prompt_tokens, told.output_tokens
        cost = self.rates.cost_nano_dollars(prompt, told.cached_tokens, output)
        if not prompt and context.status in {"cancelled", "stopped"}:
            # It was being read, or soon would have been: to leave early, or allow little time, makes none of it free.
            prompt, output = self.reserved_prompt_tokens, self.generated_tokens
        self.reservation.settle(final_usage(prompt, output, cost), now)
        if context.status == "completed":
            length = told.output_tokens // context.fields.choice_count
            self.estimates.observe(self.limit_set.caller_key, length, DEFAULT_OUTPUT_TOKENS)

    def _extend_reservation(self) -> str | None:
        """Hold more, for a while ahead if there is room; the finish reason where there is none."""
        told, now = self.context.delivered, self.clock()
        prompt, output = told.prompt_tokens or self.reserved_prompt_tokens, told.output_tokens
        ahead = (
            self.reserved_output_tokens
            if output <= self.reserved_output_tokens
            else output + RESERVATION_STEP_TOKENS
        )
        for enough in (ahead, output):
            use = running_usage(self.rates, prompt, told.cached_tokens, enough)
            if self.reservation.extend(use, now) is None:
                self.reserved_prompt_tokens, self.reserved_output_tokens = prompt, enough
                return None
        wants = quota_demand(self.reservation.shortfall(use))
        if not self.backend.overdraw(wants, now) and self.backend.is_connected is False:
            decide = (
                self.degraded_mode.decide_continuation
                if self.continued_degraded
                else self.degraded_mode.decide
            )
            self.continued_degraded = decide(self.limit_set, wants, now)
        refusal = self.exceeded_limit = self.reservation.extend(use, now)
        if refusal is None:
            self.reserved_prompt_tokens, self.reserved_output_tokens = prompt, output
            return None
        self.reservation.force_extend(use, now)
        return "budget" if refusal.quota_limit.unit == "nano_dollars" else "limit"


def quota_demand(lacking: Iterable[tuple[QuotaLimit, int]]) -> QuotaDemand:
    """What the shared state is asked for."""
    return [(meter.meter, units) for meter, units in lacking]
