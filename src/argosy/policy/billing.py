"""Bill of a request: its cost, and the usage that counts against its limits, by the way it ended.

- Completed, or ended in another way after output was sent: the client pays for all tokens, and all count.
- Cancelled or stopped before output was sent, at a replica: nothing is paid, and all tokens count.
- Rejected by a replica as invalid: nothing is paid, and one request without tokens counts.
- Any other end: nothing is paid, and nothing counts.

A response in one piece is output only once it is sent. Tokens are counted as the replica reports them, else estimated.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from argosy.policy.reservation import QuotaUsage, Rates, final_usage
from argosy.protocol import NO_TOKENS, TokenUsage

RequestStatus = Literal["completed", "cancelled", "failed", "stopped", "refused"]
"""How a request ended.

- `completed`: the client received the whole response.
- `cancelled`: the client disconnected.
- `failed`: an error of the fleet.
- `stopped`: a limit or the deadline ended the response early.
- `refused`: the request was rejected, because of its content or for now.
"""
BATCH_PERCENT = 50
"""Price of the lines of batches, in percent of the price of other requests."""
_ERROR_STATUSES = frozenset[RequestStatus]({"failed", "refused"})
"""Statuses of requests whose client receives an error."""


class RequestEnd(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """End of a request, as far as its bill depends on it."""

    status: RequestStatus
    generated: TokenUsage = NO_TOKENS
    """Tokens of the prompt and of the response so far, whether or not the client received them."""
    estimated_prompt_tokens: int = 0
    """Used if the request ended before its prompt was counted."""
    is_response_started: bool
    """Whether the client was sent the head of a response, or all of one."""
    is_output_sent: bool
    """Whether events of a stream were sent to the client."""
    is_dispatched: bool
    """Whether a replica was selected for the request."""
    is_client_error: bool = False
    """Whether a replica rejected the request as invalid."""
    payable: TokenUsage | None = None
    """The usage that the client pays for, if the replica reported one that cannot be true."""


class Bill(msgspec.Struct, frozen=True, gc=False):
    """Bill of one request."""

    usage: TokenUsage = NO_TOKENS
    """Tokens that the client pays for. The ledger, the metrics and the trace have the same numbers."""
    nano_dollars: int = 0
    quota: QuotaUsage = QuotaUsage()
    """Usage that counts against the limits."""
    is_capped: bool = False
    """Whether the replica reported more tokens than the request can have had, or none of a text that is there."""
    has_reached_client: bool = False
    """Whether the client may have received some of the response. An error is not a response."""


def compute_bill(end: RequestEnd, rates: Rates, percent: int = 100) -> Bill:
    """Compute the bill of a request that has ended. A prompt alone is paid for only if its response is complete.

    The cost is `percent` of that at the rates, rounded down.
    """
    has_reached_client = end.is_response_started and (
        end.is_output_sent or end.status not in _ERROR_STATUSES
    )
    is_paid = end.status == "completed" or end.generated.output_tokens > 0
    usage = (end.payable or end.generated) if has_reached_client and is_paid else NO_TOKENS
    nano_dollars = rates.cost_nano_dollars(usage) * percent // 100
    quota = _counted_usage(end, usage, nano_dollars)
    return Bill(usage, nano_dollars, quota, end.payable is not None, has_reached_client)


def _counted_usage(end: RequestEnd, billed: TokenUsage, nano_dollars: int) -> QuotaUsage:
    """Return the usage that counts against the limits.

    Tokens that the client did not wait for count, because disconnects and short deadlines must not make work unlimited.
    """
    if billed == NO_TOKENS and (end.status in _ERROR_STATUSES or not end.is_dispatched):
        return QuotaUsage(requests=int(end.is_client_error))
    if billed.prompt_tokens or end.status not in {"cancelled", "stopped"}:
        if end.payable is not None and billed != NO_TOKENS:
            # The limits count what a replica delivers although the client's own limit is lower.
            billed = msgspec.structs.replace(billed, output_tokens=end.generated.output_tokens)
        return final_usage(billed, nano_dollars)
    prompt_tokens = end.generated.prompt_tokens or end.estimated_prompt_tokens
    generated = TokenUsage(prompt_tokens, 0, end.generated.output_tokens)
    return final_usage(generated, nano_dollars)
