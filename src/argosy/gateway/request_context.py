"""State of one request to a model while it runs, and the protocol of the request filters that it passes."""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import structlog

from argosy.deployment import CascadeConfig, TruncationRule
from argosy.gateway.backends import (
    CHAT_PATH,
    COMPLETION_PATH,
    BackendAdapter,
    DeliveredOutput,
    cap_usage,
)
from argosy.gateway.content_session import ContentSession
from argosy.gateway.pool import Pool, ReplicaEndpoint, build_placement_request
from argosy.gateway.principal import Principal
from argosy.gateway.request_fields import RequestFields
from argosy.gateway.request_trace import RequestTrace
from argosy.http_server import HttpExchange
from argosy.policy import (
    BATCH_PERCENT,
    NO_CHARGE,
    Bill,
    Rates,
    RequestEnd,
    RequestStatus,
    compute_bill,
    start_deadline,
)
from argosy.policy.placement import PlacementRequest
from argosy.protocol import ApiError, EarlyStopReason, TaskName
from argosy.store import Adapter, UsageRecord, UsageSlot

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

QUALITY_ROUTE = "quality"
"""Route name in the ledger of requests for judges of samples and for scheduled golden sets."""
REFUSED_BY_REPLICA = "refused_by_replica"
REQUEST_TOO_LARGE = "request_too_large"
MODEL_VERSION_HEADER = b"x-argosy-version"
"""Response header with the version of the model that answers."""
UNLIMITED_TOKENS = 2**62
"""A token count that no stream reaches."""
CLIENT_ERROR_STATUSES = frozenset({400, 413, 422})
"""Statuses with which a replica blames the request itself. Other 4xx may concern the gateway's access to the
replica."""


GENERATE: frozenset[TaskName] = frozenset({"generate"})
OTHER_TEXT_FIELDS = ("suffix", "prediction", "documents")
"""Fields of generation requests with text beside the prompt."""


@dataclass(frozen=True, slots=True)
class ApiShape:
    """Differences between the APIs of models."""

    path: bytes
    prompt_fields: tuple[str, ...]
    """Names of the field with the prompt, the messages, the inputs or the documents."""
    id_prefix: str
    object_type: str = "list"
    """Value of `object` in responses. Stream chunks have `chunk_object_type`."""
    chunk_object_type: str = ""
    tasks: frozenset[TaskName] = GENERATE
    """Tasks of which a model needs one."""
    query_fields: tuple[str, ...] = ()
    """Names of the field with the query, which is computed with each document."""

    @property
    def generates(self) -> bool:
        """Whether responses are generated token by token."""
        return self.tasks is GENERATE

    @property
    def text_fields(self) -> tuple[str, ...]:
        """Names of the fields with text to which content rules apply, each once."""
        return tuple(dict.fromkeys((*self.prompt_fields, *self.query_fields, *OTHER_TEXT_FIELDS)))


CHAT = ApiShape(CHAT_PATH, ("messages",), "chatcmpl", "chat.completion", "chat.completion.chunk")
COMPLETION = ApiShape(COMPLETION_PATH, ("prompt",), "cmpl", "text_completion", "text_completion")
POOLING_FIELDS = ("input", "messages")
"""Names of the inputs of models that pool. vLLM also embeds and classifies chats."""
EMBEDDINGS = ApiShape(b"/v1/embeddings", POOLING_FIELDS, "embd", tasks=frozenset({"embed"}))
CLASSIFY = ApiShape(b"/classify", POOLING_FIELDS, "classify", tasks=frozenset({"classify"}))


class BatchLine(msgspec.Struct, eq=False):
    """Line of a batch while it runs, as a request without a client, and what is known of it at its end."""

    request_id: str
    """Id in the ledger, which is the same each time that the line runs."""
    tier: int
    record: UsageRecord | None = None
    """Its row of the ledger, at half the price; None if it was not admitted."""
    has_reached_replica: bool = False
    """Whether a replica processed it."""


class EndReason(enum.Enum):
    """Why a request ends although its response is not complete."""

    CLIENT_LEFT = "the client disconnected"
    SLOW_CLIENT = "the client did not read"
    """The gateway disconnected it."""
    STOPPED = "the response was ended early"
    """A limit, the deadline or the size of the response. The client has received the final events."""
    DEADLINE = "the deadline passed"
    """Before a replica had answered."""
    ESCALATED = "a larger model answers"
    """Only the attempt ends."""


CLIENT_GONE = frozenset({EndReason.CLIENT_LEFT, EndReason.SLOW_CLIENT})


class AssignedVersion(msgspec.Struct, frozen=True):
    """Version of a pool that the route of the pool selects for a request."""

    digest: str
    is_randomised: bool
    """Whether the hash assigned it, so that the request counts in the comparison of versions."""
    key: tuple[str, str]
    """The user or session that is assigned as one, by `sticky_key`."""


class RequestContext(msgspec.Struct, eq=False):
    """State of one generation request from admission to its last token, across all attempts."""

    exchange: HttpExchange
    fields: RequestFields
    api: ApiShape
    pool: Pool
    response_id: str
    """Generated id of the response. The ledger and explanations identify the request by it, since clients cannot choose
    it."""
    principal: Principal
    tier: int
    """Rank of the tier in which the request is queued."""
    batch_line: BatchLine | None = None
    """The line of a batch that the request is; None for others."""
    is_measured: bool = True
    """Whether it counts for objectives, series and comparisons, as all but the work for quality and batches do."""
    route_name: str = ""
    """Name of the route that selected the pool. Empty if no route matched."""
    route_reason: str = ""
    """Why it selected the pool."""
    has_fallbacks: bool = False
    """Whether another model may answer if this one cannot."""
    failed_models: tuple[str, ...] = ()
    """Models that could not answer the request, before a fallback."""
    assigned_version: AssignedVersion | None = None
    """Version that the request is assigned to. None if the pool has no rollouts."""
    adapter: Adapter | None = None
    """Adapter that answers, with its version as the digest. None if the model itself answers."""
    adapter_problem: str = ""
    """Why the last replica that lacks the adapter could not load it; empty if none has lacked it."""
    deadline: float = math.inf
    """Monotonic time at which the response ends with the tokens so far."""
    start_wait_s: float = 0.0
    """How long it may wait for the start of a model that is scaled to zero."""
    target_start_at: float = 0.0
    """Target start time for engines that schedule by priority, in seconds since the epoch. 0 until the first such
    attempt."""
    unsuitable_replicas: set[str] = msgspec.field(default_factory=set)
    """Names of replicas that do not enforce the request's constraint."""
    delivered: DeliveredOutput = msgspec.field(default_factory=DeliveredOutput)
    response_headers: list[tuple[bytes, bytes]] = msgspec.field(default_factory=list)
    """Headers of the response, including error responses."""
    trace: RequestTrace = msgspec.field(default_factory=RequestTrace)
    """Trace that `argosy explain` shows."""
    replica_name: str = ""
    """Name of the replica of the current or last attempt."""
    model_digest: str = ""
    """Digest of the adapter, or else of the model that this replica has verified."""
    placement: PlacementRequest | None = None
    """State of the request in placement. None until all filters have admitted it."""
    end_reason: EndReason | None = None
    """Why the gateway or the client ends the request before its response is complete. Set before its task is
    cancelled."""
    started_at: float = msgspec.field(default_factory=time.time)
    """Arrival time in seconds since the epoch. Every replica gets it as the response's creation time."""
    status: RequestStatus = "failed"
    error: ApiError | None = None
    """The error with which the request was refused or failed."""
    rates: Rates = NO_CHARGE
    """Prices per token, which the `LimitFilter` sets. Without a store nothing is charged."""
    bill: Bill = Bill()
    """Bill of the request, empty until it ends."""
    filters: list[RequestFilter] = msgspec.field(default_factory=list)
    """Filters that have admitted the request and are called for its tokens and its end."""
    covered_prompt_tokens: int = UNLIMITED_TOKENS
    """Prompt tokens that the reservation covers."""
    covered_output_tokens: int = UNLIMITED_TOKENS
    """Output tokens that the reservation covers. The stream may reach them before it is checked again."""
    usage_slot: UsageSlot | None = None
    """Row of the request in the usage log, which counts its tokens as they are delivered. None without a store."""
    token_intervals_s: list[float] = msgspec.field(default_factory=list)
    """Seconds between tokens that the `TelemetryFilter` has not recorded yet."""
    intervals_recorded_at: float = -math.inf
    """Monotonic time at which it last recorded them."""
    series_tokens: int = 0
    """Output tokens that the time series have counted."""
    take_back_stream: Callable[[], object] | None = None
    """Lets the event loop forward the stream, so that all of its tokens are counted. None unless the request runs."""
    is_copy: bool = False
    """Whether it is a copy for the comparison of versions. Its response is discarded, and only its own version may
    serve it."""
    cascade: CascadeConfig | None = None
    """When a larger model answers in place of this one; None if never."""
    max_cached_age_s: float = 0.0
    """Age of the oldest cached answer that a route permits. The cache rule may permit older ones."""
    follow_later_routes: Callable[[RequestContext, Any, Any], Awaitable[None]] | None = None
    """Lets the model of a later route answer, if the cache has no answer. Gets the request, relay and writer."""
    refusal: str = ""
    """Message with which a route refuses the request, unless the cache has an answer."""
    conversation: bytes = b""
    """Key of the conversation, for a route that is sticky."""
    is_sampled: bool = False
    """Whether the `TrafficSampler` reads it when it has ended."""
    draft: tuple[UsageRecord, Rates] | None = None
    """Ledger row and prices of the smaller model's answer, while the filters count it before the larger one answers."""
    content: ContentSession | None = None
    """Filters of the request's content; None if no content rule matches."""
    truncation: TruncationRule | None = None
    """How the chat becomes shorter if it is too long; None if the gateway does not shorten it."""
    replayed_request_id: str = ""
    """Id of the original request if the response is a replay for its idempotency key."""

    @property
    def model(self) -> str:
        """Public name of what answers: the adapter, or else the model."""
        return self.pool.model if self.adapter is None else self.adapter.name

    def become_line(self, line: BatchLine) -> None:
        """Run as a line of a batch, which may pause for long."""
        self.batch_line, self.is_measured = line, False
        self.response_id, self.tier, self.deadline = line.request_id, line.tier, math.inf

    def compute_priority(self, adapter: BackendAdapter) -> int:
        """Compute the `priority` field for a server of this kind. All attempts use the same target start time."""
        self.target_start_at = self.target_start_at or start_deadline(self.tier, time.time())
        return adapter.priority_sign * int(self.target_start_at)

    def start_placement(self) -> PlacementRequest:
        """Create the request's state in placement, whose attempts the trace shows."""
        self.placement = build_placement_request(
            self.response_id,
            self.fields,
            self.principal,
            self.pool.model,
            self.adapter,
            tier=self.tier,
            deadline=self.deadline,
            start_wait_s=self.start_wait_s,
            unsuitable=self.unsuitable_replicas,
        )
        self.placement.pauses = self.trace.pauses  # has those before a fallback
        self.trace.attempts = self.placement.records
        return self.placement

    def announce_version(self) -> None:
        """Name the version of the model that answers, in the trace and in the headers of a response without any yet."""
        version = self.trace.version = self.pool.version_label
        if version:
            headers = self.response_headers
            headers[:] = [header for header in headers if header[0] != MODEL_VERSION_HEADER]
            headers.append((MODEL_VERSION_HEADER, version.encode()))

    def move_to_pool(self, pool: Pool, reason: str) -> None:
        """Count the request for the pool of another version of its model, which takes it over."""
        taken_over = describe_takeover(pool, reason)
        reasons = (self.trace.route_reason, taken_over)
        self.trace.route_reason = "; ".join(filter(None, reasons))
        self._count_for(pool)
        self.announce_version()

    def fall_back(
        self, pool: Pool, route_name: str, reason: str, version: AssignedVersion | None
    ) -> None:
        """Let another model answer, because the client has received nothing. The filters are called next."""
        self.failed_models = (*self.failed_models, self.pool.model)
        self._count_for(pool)
        self.route_name, self.route_reason, self.assigned_version = route_name, reason, version
        self.replica_name = self.model_digest = ""
        self.status, self.error, self.placement = "failed", None, None
        self.series_tokens = 0
        self.trace.earlier_attempts += self.trace.attempts
        self.trace.attempts = []

    def _count_for(self, pool: Pool) -> None:
        self.pool.active_requests -= 1
        self.pool = pool
        pool.active_requests += 1

    @property
    def is_client_error(self) -> bool:
        """Whether a replica rejected the request as invalid or too large."""
        error = self.error
        codes = {REFUSED_BY_REPLICA, REQUEST_TOO_LARGE}
        return error is not None and error.code in codes and error.status in CLIENT_ERROR_STATUSES

    @property
    def final_status(self) -> RequestStatus:
        """Status of a delivered response, by the ends of its choices. A replica may have its own deadline."""
        return "stopped" if self.delivered.early_stops else "completed"

    def record_verdict(self, verdict: dict[str, Any]) -> None:
        """Record in the trace what a cascade decided about the smaller model's answer."""
        self.trace.routing[-1]["cascade"] = verdict

    def record_error(self, error: ApiError) -> None:
        """Record the error that the client receives."""
        self.error = error
        if error.status < 500 and self.status == "failed":
            self.status = "refused"

    def record_replica(self, replica: ReplicaEndpoint) -> None:
        """Record the replica of the current attempt."""
        self.replica_name = replica.name
        self.model_digest = replica.model_digest if self.adapter is None else self.adapter.digest

    def count_usage(self) -> None:
        """Count the delivered tokens in the usage log. A response in one piece counts as undelivered until it ends."""
        if self.usage_slot is not None and self.fields.stream:
            self.usage_slot.set_counts(self.delivered.usage)

    def close_bill(self, *, is_response_started: bool, is_output_sent: bool) -> None:
        """Compute the bill of the ended request, and forget output that did not reach the client.

        Args:
            is_response_started: Whether the client was sent the head of a response, or all of one.
            is_output_sent: Whether events of a stream were sent to the client.
        """
        reported, false_usage = self.delivered.usage, self.delivered.false_usage
        usage = cap_usage(reported, self.fields, lambda: self.pool.max_model_len)
        is_corrected = usage is not reported or false_usage is not None
        if is_corrected:
            log.warning(
                "usage_corrected",
                response=self.response_id,
                replica=self.replica_name,
                reported=list(false_usage or (reported.prompt_tokens, reported.output_tokens)),
                billed=[usage.prompt_tokens, usage.output_tokens],
            )
        end = RequestEnd(
            status=self.status,
            generated=reported,
            payable=usage if is_corrected else None,
            estimated_prompt_tokens=self.fields.estimated_prompt_tokens,
            is_response_started=is_response_started,
            is_output_sent=is_output_sent,
            is_dispatched=bool(self.replica_name),
            is_client_error=self.is_client_error,
        )
        is_line = self.batch_line is not None
        self.bill = compute_bill(end, self.rates, BATCH_PERCENT if is_line else 100)
        if not self.bill.has_reached_client:
            self.delivered.reset()


def describe_takeover(pool: Pool, reason: str) -> str:
    """Return the sentence for explanations that the pool of the stable version serves a request."""
    return f"version {pool.version_label} took over: {reason}"


class RequestFilter(Protocol):
    """A step that every generation request passes: telemetry, idempotency, limits, usage.

    What a filter keeps of a request is in the request's context.
    """

    async def on_request(self, context: RequestContext) -> bool:
        """Admit, answer or reject a request.

        Returns:
            Whether the filter needs the further calls for this request.

        Raises:
            ApiError: The request is rejected.
        """

    def on_tokens(
        self, context: RequestContext, chunk_times: Sequence[float]
    ) -> EarlyStopReason | None:
        """Record that output tokens were delivered.

        Called for every chunk of a stream that is not on the fast path, so it must be quick. The new counts are in
        `RequestContext.delivered`.

        Args:
            context: The request.
            chunk_times: Monotonic arrival time of each chunk since the last call.

        Returns:
            Why to end the response after these chunks, or None to continue.
        """

    async def on_fallback(self, context: RequestContext) -> None:
        """Count the request for a fallback model, after its first one could not answer.

        Raises:
            ApiError: The request is rejected for this model.
        """

    def on_complete(self, context: RequestContext) -> None:
        """Record that the request ended, with the outcome in `RequestContext.status`.

        Called once, last filter first.
        """


async def run_filters(filters: Sequence[RequestFilter], context: RequestContext) -> bool:
    """Run all filters on a request. Those that need further calls are in `context.filters` then.

    Returns:
        Whether all filters admitted the request. False if one of them has answered it.

    Raises:
        ApiError: A filter rejected the request.
    """
    for request_filter in filters:
        if await request_filter.on_request(context):
            context.filters.append(request_filter)
        elif context.exchange.response_complete:
            return False
    return True


def complete_filters(context: RequestContext) -> None:
    """Complete the filters, last first. An exception in one does not prevent the others."""
    while context.filters:
        try:
            context.filters.pop().on_complete(context)
        except Exception:
            log.exception("filter_cleanup_failed", model=context.pool.model)
