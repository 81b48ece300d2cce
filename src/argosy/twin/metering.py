"""Limits and bills of a simulated gateway: requests reserve, and what they have used is billed when they end.

The decisions are those of `argosy.policy`. Beside them, all that was admitted is counted once more, so that a limit
that admits too much is found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from argosy.bench import RequestRow
from argosy.policy import (
    NO_CHARGE,
    Bill,
    ConcurrencyMeter,
    QuotaLimit,
    Rates,
    RequestEnd,
    RequestStatus,
    SlidingWindow,
    compute_bill,
    reserve,
    running_usage,
)
from argosy.protocol import TokenUsage
from argosy.twin.active_request import ActiveRequest
from argosy.twin.simulation import Simulation, require
from argosy.twin.workload import Tenant

RATES = Rates(150, 15, 600)
WINDOW_S = 60.0


class LedgerRow(msgspec.Struct, frozen=True):
    """Row of a request that has ended."""

    number: int
    status: RequestStatus
    bill: Bill
    delivered_tokens: int


class _Admissions:
    """Requests of a tenant that were admitted, as its limits should have counted them."""

    def __init__(self) -> None:
        self.running = 0
        self.recent: deque[tuple[float, int]] = deque()
        """Time and number of the requests of the last minute."""
        self.tokens: dict[int, int] = {}
        """Tokens of these requests by number: those that are expected, and later those that are counted."""

    def count_tokens(self, now: float) -> int:
        """Return the tokens of the last minute."""
        while self.recent and self.recent[0][0] <= now - WINDOW_S:
            del self.tokens[self.recent.popleft()[1]]
        return sum(self.tokens.values())


class Metering:
    """Limits of all tenants, and the ledger.

    Args:
        simulation: Clock.
        tenants: Tenants with their limits.
    """

    def __init__(self, simulation: Simulation, tenants: Iterable[Tenant]) -> None:
        self.ledger: dict[int, LedgerRow] = {}
        self.rows: list[RequestRow] = []
        self.limits = {tenant.name: _build_limits(tenant) for tenant in tenants}
        self._simulation = simulation
        self._admissions = {name: _Admissions() for name, limits in self.limits.items() if limits}

    def admit(self, request: ActiveRequest) -> bool:
        """Reserve the usage of a request. Return whether its tenant's limits have room for it."""
        tenant, prompt, now = request.tenant, len(request.prompt), self._simulation.now
        expected = running_usage(NO_CHARGE, TokenUsage(prompt, 0, request.planned.output_tokens))
        minimum = running_usage(NO_CHARGE, TokenUsage(prompt, 0, 0))
        reservation = reserve(self.limits[tenant.name], expected, minimum, now)
        if isinstance(reservation, list):
            return False
        request.reservation = reservation
        admissions = self._admissions.get(tenant.name)
        if admissions is not None:
            number = request.planned.number
            admissions.running += 1
            admissions.recent.append((now, number))
            admissions.tokens[number] = expected.tokens
            running, tokens = admissions.running, admissions.count_tokens(now)
            most = tenant.concurrency
            require(
                most is None or running <= most,
                f"{running} requests of {tenant.name} run, above its limit of {most}",
            )
            most = tenant.tokens_per_minute
            require(
                most is None or tokens <= most or not reservation.covers_estimate,
                f"{tenant.name} may use {tokens} tokens in a minute, above its limit of {most}",
            )
        return True

    def settle(self, request: ActiveRequest, status: RequestStatus, reason: str) -> None:
        """Bill a request that has ended."""
        planned, now = request.planned, self._simulation.now
        tokens, delivered = len(request.prompt), request.delivered
        bill = compute_bill(
            RequestEnd(
                status=status,
                generated=TokenUsage(tokens, request.cached_tokens, delivered),
                estimated_prompt_tokens=tokens,
                is_response_started=delivered > 0,
                is_output_sent=delivered > 0,
                is_dispatched=request.num_calls > 0,
            ),
            RATES,
        )
        if request.reservation is not None:
            request.reservation.settle(bill.quota, now)
            admissions = self._admissions.get(request.tenant.name)
            if admissions is not None:
                admissions.running -= 1
                if planned.number in admissions.tokens:
                    admissions.tokens[planned.number] = bill.quota.tokens
        billed, name = bill.usage.output_tokens, request.placement.id
        require(planned.number not in self.ledger, f"{name} ended twice")
        self.ledger[planned.number] = LedgerRow(planned.number, status, bill, delivered)
        require(billed == delivered, f"{name} got {delivered} tokens and is billed {billed}")
        require(
            status != "completed" or delivered == planned.output_tokens,
            f"{name} is complete with {delivered} of {planned.output_tokens} tokens",
        )
        self.rows.append(_build_row(request, status, reason, self._simulation.elapsed_s))


def _build_limits(tenant: Tenant) -> list[QuotaLimit]:
    limits = []
    if tenant.tokens_per_minute is not None:
        window = SlidingWindow(tenant.tokens_per_minute, WINDOW_S)
        limits.append(QuotaLimit("organisation", "tokens", "minute", None, window))
    if tenant.concurrency is not None:
        meter = ConcurrencyMeter(tenant.concurrency)
        limits.append(QuotaLimit("organisation", "concurrency", "", None, meter))
    return limits


def _build_row(
    request: ActiveRequest, status: RequestStatus, reason: str, ended_s: float
) -> RequestRow:
    """Return the measurements of a request as the benchmark has them, with the first and the last token only."""
    planned, first = request.planned, request.first_token_s
    is_ok = status == "completed"
    end_s = request.last_token_s if is_ok else ended_s
    return RequestRow(
        index=planned.number,
        session=planned.number,
        turn=0 if planned.after is None else 1,
        phase="measured",
        outcome="ok" if is_ok else "cancelled" if status == "cancelled" else "error",
        error="" if is_ok else reason,
        scheduled_s=request.arrived_s,
        sent_s=request.arrived_s,
        end_s=end_s,
        chunks_s=[] if first is None else [first, end_s],
        planned_input=len(request.prompt),
        planned_output=planned.output_tokens,
        input_tokens=len(request.prompt),
        cached_tokens=request.cached_tokens,
        output_tokens=request.delivered,
        counted_by_server=True,
    )
