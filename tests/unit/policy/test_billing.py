"""Billing: the client pays for what it received, each token once, and limits count the work that a request caused."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import QuotaUsage, Rates, RequestEnd, RequestStatus, compute_bill
from argosy.protocol import NO_TOKENS, TokenUsage

NANO = st.integers(0, 10**7)
COUNT = st.integers(0, 10**7)


@given(st.builds(Rates, NANO, NANO, NANO), COUNT, COUNT, COUNT, COUNT)
def test_every_token_is_charged_once(
    rates: Rates, uncached: int, cached: int, output: int, extra: int
) -> None:
    cost = rates.cost_nano_dollars(TokenUsage(uncached + cached, cached, output))
    assert cost == uncached * rates.input + cached * rates.cached_input + output * rates.output
    assert (
        rates.cost_nano_dollars(TokenUsage(uncached + cached, cached, output + extra))
        == cost + extra * rates.output
    )
    all_cached = TokenUsage(uncached, uncached + extra)
    assert rates.cost_nano_dollars(all_cached) == uncached * rates.cached_input


RATES = Rates(5, 1, 20)
ALL = TokenUsage(10, 4, 3)
PROMPT_ONLY = TokenUsage(10, 4, 0)
ESTIMATE = 12


@dataclass(frozen=True)
class Case:
    """A way in which a request ends, and its bill."""

    name: str
    status: RequestStatus
    generated: TokenUsage
    paid: TokenUsage
    counted: QuotaUsage
    started: bool = True
    sent: bool = True
    dispatched: bool = True
    client_error: bool = False


def counted(prompt: int, output: int, cost: int) -> QuotaUsage:
    return QuotaUsage(1, prompt + output, prompt, output, cost)


PAID = counted(10, 3, 6 * 5 + 4 * 1 + 3 * 20)
FREE = QuotaUsage()
CASES = [
    Case("completed", "completed", ALL, ALL, PAID),
    Case("completed in one piece", "completed", ALL, ALL, PAID, sent=False),
    Case("completed without output", "completed", PROMPT_ONLY, PROMPT_ONLY, counted(10, 0, 34)),
    Case("replayed", "completed", NO_TOKENS, NO_TOKENS, FREE, dispatched=False),
    Case("stopped by a limit", "stopped", ALL, ALL, PAID),
    Case("stopped in one piece", "stopped", ALL, ALL, PAID, sent=False),
    Case("stopped without output", "stopped", PROMPT_ONLY, NO_TOKENS, counted(10, 0, 0)),
    Case("deadline at silent replica", "stopped", NO_TOKENS, NO_TOKENS, counted(12, 0, 0), False),
    Case("deadline in queue", "stopped", NO_TOKENS, NO_TOKENS, FREE, False, False, False),
    Case("disconnect after output", "cancelled", ALL, ALL, PAID),
    Case("disconnect after role", "cancelled", PROMPT_ONLY, NO_TOKENS, counted(10, 0, 0)),
    Case("disconnect at silent replica", "cancelled", NO_TOKENS, NO_TOKENS, counted(12, 0, 0)),
    Case("disconnect before piece", "cancelled", ALL, NO_TOKENS, counted(10, 3, 0), False, False),
    Case("disconnect in queue", "cancelled", NO_TOKENS, NO_TOKENS, FREE, False, False, False),
    Case("failed before response", "failed", NO_TOKENS, NO_TOKENS, FREE, False, False),
    Case("failed after role", "failed", PROMPT_ONLY, NO_TOKENS, FREE),
    Case("failed after output", "failed", ALL, ALL, PAID),
    Case("failed with output held back", "failed", ALL, NO_TOKENS, FREE, sent=False),
    Case("failed before piece", "failed", ALL, NO_TOKENS, FREE, False, False),
    Case("no replica", "failed", NO_TOKENS, NO_TOKENS, FREE, False, False, False),
    Case("rejected by limit", "refused", NO_TOKENS, NO_TOKENS, FREE, False, False, False),
    Case(
        "rejected by replica",
        "refused",
        PROMPT_ONLY,
        NO_TOKENS,
        QuotaUsage(requests=1),
        False,
        False,
        client_error=True,
    ),
]


def make_end(case: Case) -> RequestEnd:
    return RequestEnd(
        status=case.status,
        generated=case.generated,
        estimated_prompt_tokens=ESTIMATE,
        is_response_started=case.started,
        is_output_sent=case.sent,
        is_dispatched=case.dispatched,
        is_client_error=case.client_error,
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bill_follows_from_end_of_request(case: Case) -> None:
    cost = RATES.cost_nano_dollars(case.paid)
    bill = compute_bill(make_end(case), RATES)
    assert (bill.usage, bill.nano_dollars, bill.quota) == (case.paid, cost, case.counted)


def test_client_never_pays_for_more_than_counts_against_its_limits() -> None:
    """Holds for all combinations of facts, also for those that no request has."""
    flags = (False, True)
    for case, started, sent, dispatched, client_error in itertools.product(
        CASES, flags, flags, flags, flags
    ):
        end = msgspec.structs.replace(
            make_end(case),
            is_response_started=started,
            is_output_sent=sent,
            is_dispatched=dispatched,
            is_client_error=client_error,
        )
        bill = compute_bill(end, RATES)
        assert bill.usage in {NO_TOKENS, end.generated}
        assert bill.nano_dollars == RATES.cost_nano_dollars(bill.usage) == bill.quota.nano_dollars
        assert bill.usage.prompt_tokens <= bill.quota.input_tokens
        assert bill.usage.output_tokens <= bill.quota.output_tokens <= end.generated.output_tokens
        assert bill.quota.concurrency == 0
        assert bill.has_reached_client or bill.usage == NO_TOKENS
