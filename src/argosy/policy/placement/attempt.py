"""Attempts of a request at replicas, and the record of each attempt that explanations show."""

from __future__ import annotations

import enum
from heapq import nsmallest
from operator import attrgetter

import msgspec

from argosy.policy.placement.replica import PlacementReplica
from argosy.policy.prefix_cache_index import CacheHitReport, PromptTokensReport
from argosy.policy.routing import RoutingCandidate, RoutingCost

MAX_CANDIDATES = 16
"""Maximum candidates kept per attempt, cheapest first."""


class AttemptRecord(msgspec.Struct, gc=False, array_like=True):
    """Record of an attempt at a replica, in times of the core's clock."""

    replica: str
    chosen_at: float
    """When the replica was selected."""
    delivered_tokens: int = 0
    """Output tokens that the client already had, so the position at which a stream was resumed."""
    candidate_costs: tuple[RoutingCost, ...] = ()
    """Estimated cost of each replica that could have been selected."""
    sent_at: float | None = None
    first_token_at: float | None = None
    """When the attempt's first token arrived."""
    ended_at: float | None = None
    outcome: str = "running"
    reason: str = ""
    is_hedge: bool = False
    """Whether the attempt was started while another was still silent."""
    uncached_tokens: int = 0
    """Prompt tokens that the replica had to compute, as estimated when it was selected."""
    in_flight: int = 0
    """Requests on the replica, with this one, when it was selected."""


_cost_of = attrgetter("cost")


def kept_costs(candidates: list[RoutingCandidate]) -> tuple[RoutingCost, ...]:
    """Return the costs of the cheapest candidates, in their order, as many as a record keeps."""
    costs = tuple(map(_cost_of, candidates))
    if len(costs) <= MAX_CANDIDATES:
        return costs
    return tuple(nsmallest(MAX_CANDIDATES, costs, key=attrgetter("total_s")))


class AttemptMode(enum.Enum):
    """Why an attempt is made."""

    FIRST = "first"
    HEDGE = "hedge"
    """Another attempt of the request is silent and still runs."""
    RETRY = "retry"
    """The earlier attempts ended without output."""
    RESUME = "resume"
    """The client has output of an earlier attempt."""


class AttemptEnding(enum.Enum):
    """How an attempt ended, as its driver saw it."""

    COMPLETED = "completed"
    """The response is complete, or is an error response that the client receives as it is."""
    LOST = "lost"
    """The replica could not be reached, broke off or stayed silent."""
    REFUSED = "refused"
    """The replica answered with something that is not a response to the request."""
    UNSUITABLE = "unsuitable"
    """The replica cannot resume the response at its position, or does not enforce the request's constraint."""
    PAUSED = "paused"
    """The driver stopped the stream at its last delivered token, because of a `Pause`."""


class Attempt(msgspec.Struct, eq=False):
    """Attempt that runs."""

    replica: PlacementReplica
    chosen: RoutingCandidate
    """The replica as it compared with others when it was selected."""
    mode: AttemptMode
    record: AttemptRecord
    was_breaker_closed: bool
    """Whether the replica's circuit breaker was closed when the attempt started."""
    slots: int = 1
    """Slots that it takes at the replica."""
    kv_tokens: int = 0
    """Tokens that it is expected to hold in the KV cache of the replica."""
    may_be_hedged: bool = False
    """Whether a second attempt starts if this one stays silent."""
    is_stream: bool = False
    """Whether tokens of the response arrive one after the other, so that it can be paused."""
    is_pausing: bool = False
    """Whether the driver has to pause it."""
    is_ended: bool = False

    def record_first_token(
        self,
        received_at: float,
        uncached_tokens: int | None = None,
        cache_report: CacheHitReport | PromptTokensReport | None = None,
        *,
        is_resumed: bool = False,
    ) -> None:
        """Record the first token: the end of the prefill, and what the replica had in its cache.

        Args:
            received_at: When the token arrived.
            uncached_tokens: Tokens of the prompt that the replica computed, if it reports them.
            cache_report: What the replica reports about its cache.
            is_resumed: Whether the stream continues an earlier one, so that its delay says nothing about the prompt.
        """
        if self.is_ended:
            return
        replica, record, estimated_tokens = self.replica, self.record, self.chosen.uncached_tokens
        record.first_token_at = received_at
        replica.on_prefill_done(estimated_tokens, record.chosen_at)
        if record.sent_at is None or is_resumed:
            return
        replica.on_first_token(
            received_at - record.sent_at,
            estimated_tokens if uncached_tokens is None else uncached_tokens,
            received_at,
        )
        if isinstance(cache_report, CacheHitReport):
            replica.prefix_index.on_cache_hit_report(cache_report)
        elif cache_report is not None:
            replica.prefix_index.on_prompt_tokens_report(cache_report)
