"""One generation request on its way: what was asked, by whom, where it has been, what the client was given."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import msgspec
import structlog

from argosy.gateway.backends import CHAT_PATH, COMPLETION_PATH, BackendAdapter, DeliveredOutput
from argosy.gateway.pool import Pool, ReplicaEndpoint, RoutingDecision
from argosy.gateway.principal import Principal
from argosy.gateway.request_fields import RequestFields
from argosy.gateway.request_trace import AttemptTrace, RequestTrace
from argosy.http_server import HttpExchange
from argosy.policy import Rates, start_deadline
from argosy.protocol import ApiError

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

RequestStatus = Literal["completed", "cancelled", "failed", "stopped", "refused"]
"""How a request ended: as it should; the client left; it could not be answered; a limit or its deadline ended it; it
was not to be answered, as it is or now."""
REFUSED_BY_REPLICA = "refused_by_replica"
REQUEST_TOO_LARGE = "request_too_large"
CLIENT_ERROR_STATUSES = frozenset({400, 413, 422})
"""Statuses by which a replica says so of a request; others may be of how it is asked by the fleet."""
UNANSWERED_STATUSES = frozenset[RequestStatus]({"failed", "refused"})


@dataclass(frozen=True, slots=True)
class ApiShape:
    """What tells one generation API from another."""

    path: bytes
    prompt_field: str
    id_prefix: str
    object_type: str
    """What its answers are called, and its streams' chunks."""
    chunk_object_type: str


CHAT = ApiShape(CHAT_PATH, "messages", "chatcmpl", "chat.completion", "chat.completion.chunk")
COMPLETION = ApiShape(COMPLETION_PATH, "prompt", "cmpl", "text_completion", "text_completion")


class RequestContext(msgspec.Struct, eq=False):
    """One request's way over the replicas."""

    exchange: HttpExchange
    fields: RequestFields
    api: ApiShape
    pool: Pool
    response_id: str
    """The answer's, which no client can choose; it names the request in the ledger and in explanations."""
    principal: Principal
    tier: int
    """The rank that it waits in."""
    route_name: str = ""
    """Name of the one that decided which pool answers; empty: none did."""
    deadline: float = math.inf
    """When its answer ends with what there is, on the monotonic clock."""
    target_start_at: float = 0.0
    """When an engine that goes by dates is to begin with it, in seconds since the epoch, once it was sent to one."""
    failed_replicas: set[str] = msgspec.field(default_factory=set)
    """Replicas that failed it since it last got on."""
    incompatible_replicas: set[str] = msgspec.field(default_factory=set)
    """Replicas that cannot go on where the answer was when they were asked."""
    failed_attempts: int = 0
    error_responses: int = 0
    """Failures that were answers: of a replica that lives."""
    replica_losses: int = 0
    """Replicas that were lost while they had it, but for what it won meanwhile. It may be what they die of."""
    failing_since: float | None = None
    delivered: DeliveredOutput = msgspec.field(default_factory=DeliveredOutput)
    response_headers: list[tuple[bytes, bytes]] = msgspec.field(default_factory=list)
    """Headers of the answer, whatever it will be, refusals included."""
    trace: RequestTrace = msgspec.field(default_factory=RequestTrace)
    """What `argosy explain` shows."""
    replica_name: str = ""
    """The one that it was at last."""
    decision: RoutingDecision | None = None
    """Why it went there."""
    attempt_trace: AttemptTrace | None = None
    """The attempt there."""
    started_at: float = msgspec.field(default_factory=time.time)
    """When it came, in seconds since the epoch; every replica is told, as the answer's time."""
    status: RequestStatus = "failed"
    error: ApiError | None = None
    """Why it was refused or failed."""
    rates: Rates | None = None
    """What it pays for a token: as the first stage found that goes by prices, so that all charge the same."""
    cost_nano_dollars: int = 0
    """What it cost, once the ledger has said so."""
    replayed_request_id: str = ""
    """The request that got its answer first, where it got one that was kept."""

    @property
    def prompt_digest(self) -> bytes:
        """The same for the same prompt of the same tenant: of a long one its length and its end count."""
        prompt = self.fields.raw_prompt
        whose = f"{self.principal.tenant}\0{self.api.prompt_field} {len(prompt)}\0".encode()
        return hashlib.blake2b(whose + prompt[-MAX_DIGESTED_BYTES:], digest_size=16).digest()

    def compute_priority(self, adapter: BackendAdapter) -> int:
        """What its body is to say of its urgency to a server of this kind, wherever it goes."""
        self.target_start_at = self.target_start_at or start_deadline(self.tier, time.time())
        return adapter.priority_sign * int(self.target_start_at)

    def record_dispatch(self, decision: RoutingDecision, now: float) -> ReplicaEndpoint:
        """Note that it goes to this replica now."""
        self.set_current_attempt(decision, self.record_attempt(decision, now))
        return decision.replica

    def record_attempt(
        self, decision: RoutingDecision, now: float, *, is_hedge: bool = False
    ) -> AttemptTrace:
        """Note that this replica is asked now; `hedge`: while another is."""
        replica, told = decision.replica, self.delivered.output_tokens
        replica.on_request_sent(decision.uncached_tokens)
        return self.trace.begin_attempt(replica.name, now, told, decision.costs, is_hedge=is_hedge)

    def set_current_attempt(self, decision: RoutingDecision, attempt_trace: AttemptTrace) -> None:
        """Note whose answer it gets, as far as is known."""
        self.decision, self.attempt_trace = decision, attempt_trace
        self.replica_name = decision.replica.name

    @property
    def is_client_error(self) -> bool:
        """Whether replicas that looked at it found fault with it, or were asked for too much."""
        error = self.error
        found = {REFUSED_BY_REPLICA, REQUEST_TOO_LARGE}
        return error is not None and error.code in found and error.status in CLIENT_ERROR_STATUSES

    @property
    def final_status(self) -> RequestStatus:
        """How an answer that is there ended, as its replica says: that may have a deadline for it, too."""
        return "stopped" if "timeout" in self.delivered.finish_reasons.values() else "completed"

    def record_error(self, error: ApiError) -> None:
        """Note that this is its answer."""
        self.error = error
        if error.status < 500 and self.status == "failed":
            self.status = "refused"

    def record_progress(self, tokens: int) -> None:
        """So many tokens of the answer came, at least one."""
        self.failed_replicas.clear()
        self.failed_attempts = self.error_responses = 0
        self.replica_losses = max(0, self.replica_losses - tokens // TOKENS_PER_LOSS)
        self.failing_since = None


MAX_DIGESTED_BYTES = 64 * 1024
TOKENS_PER_LOSS = 4
"""Tokens that make up for one replica that was lost: else a request could cost one for each token."""
UNLIMITED_TOKENS = 2**62
"""More tokens than any stream has."""


class FastPathBudget(NamedTuple):
    """How far a stream may go on by itself: who lets it go is told of its pieces later, many at a time."""

    max_output_tokens: int = UNLIMITED_TOKENS
    """Output tokens that it may have."""
    token_counter_address: int | None = None
    """Address of a word that has to count them at once."""


class FilterState(Protocol):
    """One request's, at a stage that has let it in."""

    def on_tokens(self, chunk_times: Sequence[float]) -> str | None:
        """More was delivered, as the journey's `delivered` tells, in pieces that came at `times` (monotonic clock).

        Called for each piece of a stream that is not on its own, so it must be quick. A finish reason ends the answer
        here, once what came has been passed on.
        """

    def fast_path_budget(self) -> FastPathBudget:
        """How far the stream may go on before this is told of it."""

    def on_complete(self) -> None:
        """The request has ended, as the journey's `status` tells. Called once, last stage first."""


class RequestFilter(Protocol):
    """Something that every request passes: limits, the ledger, the record for explanations."""

    async def on_request(self, context: RequestContext) -> FilterState | None:
        """Let the request in, answer it, or raise ApiError to refuse it. None: it need not be told how that goes on."""


async def run_filters(
    filters: Sequence[RequestFilter], filter_states: list[FilterState], context: RequestContext
) -> bool:
    """Pass all stages; whether they let it in: one may have answered it.

    `visits` gets those to be told more, also when one refuses. Raises ApiError then.
    """
    for stage in filters:
        visit = await stage.on_request(context)
        if visit is not None:
            filter_states.append(visit)
        elif context.exchange.response_complete:
            return False
    return True


def complete_filters(filter_states: list[FilterState], context: RequestContext) -> None:
    """End the visits, last first; one that fails keeps none of the others."""
    while filter_states:
        try:
            filter_states.pop().on_complete()
        except Exception:
            log.exception("filter_cleanup_failed", model=context.pool.model)
