"""Preview of routing: which model, version and replica a request would get now, and why. It changes nothing."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Literal, cast

import msgspec
from msgspec.structs import replace

from argosy.deployment import ColdStartConfig
from argosy.gateway.model_registry import ModelRouter, RouteTarget
from argosy.gateway.model_routes import SESSION_HEADER
from argosy.gateway.pool import Pool, build_placement_request
from argosy.gateway.principal import TIERS, Principal
from argosy.gateway.proxy.adapter_loading import find_replicas_without_adapters
from argosy.gateway.proxy.constraint_check import (
    check_prompt,
    check_task,
    find_unsupporting_replicas,
)
from argosy.gateway.proxy.placement_driver import PlacementDriver
from argosy.gateway.proxy.refusal_errors import build_arrival_error
from argosy.gateway.proxy.start_wait import find_start_wait_s
from argosy.gateway.request_context import CHAT, COMPLETION, ApiShape, describe_takeover
from argosy.gateway.request_fields import (
    RequestFields,
    parse_raw_fields,
    parse_request_fields,
)
from argosy.policy import RoutingCandidate
from argosy.policy.placement import PlacementPreview, PlacementRequest, explain_exclusion
from argosy.protocol import ApiError

MAX_CANDIDATES = 64
"""Maximum candidates of an answer, cheapest first."""
MAX_EXCLUDED = 100
"""Maximum excluded replicas of an answer."""
TIE_S = 1e-9
"""Difference of two costs up to which the random number decides."""

CostTerm = Literal["queue_s", "prefill_s", "decode_s", "memory_s", "stale_s", "adapter_s"]
TERM_REASONS: dict[CostTerm, str] = {
    "queue_s": "fewer prompt tokens wait there",
    "prefill_s": "less of the prompt has to be computed there",
    "decode_s": "it generates tokens faster",
    "memory_s": "its KV cache has more room",
    "stale_s": "its load report is fresh",
    "adapter_s": "it has the adapter",
}
"""Why a replica is cheaper than another one, by the term of the cost that differs most."""


class CandidatePreview(msgspec.Struct, frozen=True, kw_only=True):
    """Replica that may get the request, with its estimated cost by part in seconds."""

    replica: str
    cached_tokens: int
    """Tokens of the prompt that the replica probably has cached."""
    uncached_tokens: int
    """Tokens of the prompt that it would have to compute."""
    queue_s: float
    prefill_s: float
    decode_s: float
    memory_s: float
    stale_s: float
    adapter_s: float
    weight: float
    """Weight of the replica, by which the sum is divided."""
    total_s: float
    in_flight: int
    """Running requests of this gateway."""


class ExcludedReplica(msgspec.Struct, frozen=True, kw_only=True):
    """Replica that would not get the request."""

    replica: str
    reason: str


class PreviewError(msgspec.Struct, frozen=True, kw_only=True):
    """Error with which the request would be refused."""

    status: int
    code: str
    message: str


class RoutingPreview(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="routing.preview"
):
    """Preview of what would happen to a request now."""

    outcome: Literal["placed", "queued", "refused"]
    sentence: str
    """The outcome and its main reason, for people."""
    requested_model: str
    model: str = ""
    """Model that would answer."""
    version: str = ""
    """Beginning of the digest of the version that would answer; empty without rollouts."""
    route: str = ""
    """Name of the route that selects the model; empty if none does."""
    route_reason: str = ""
    """Why the route, the weights or the rollout select this model and version."""
    tenant: str
    tier: str
    prompt_tokens: int
    """Tokens of the prompt, estimated as for a request."""
    output_tokens: int = 0
    """Expected output tokens."""
    policy: str = ""
    """Routing policy of the pool."""
    replica: str | None = None
    """Replica that would get the request."""
    tied_candidates: int = 0
    """Candidates that cost as little as this one, with it. A random number decides among them."""
    candidates: list[CandidatePreview] = []
    """Cheapest candidates."""
    candidate_count: int = 0
    excluded: list[ExcludedReplica] = []
    """Replicas that would not be compared, with the reason."""
    excluded_count: int = 0
    queued_ahead: int = 0
    """Requests that wait in the same and higher tiers."""
    wait_s: float | None = None
    """Estimated wait; None if it does not wait, or no replica is ready."""
    error: PreviewError | None = None


class RoutingPreviewer:
    """Previews requests with the code that routes and places them. Not thread-safe: use it from one event loop.

    Args:
        models: Models and their pools.
        driver: Driver of the placement core.
        cold_start: How long requests may wait for the start of a model.
        clock: Returns monotonic time.
    """

    def __init__(
        self,
        models: ModelRouter,
        driver: PlacementDriver,
        cold_start: ColdStartConfig,
        clock: Callable[[], float],
    ) -> None:
        self._models = models
        self._driver = driver
        self._cold_start = cold_start
        self._clock = clock

    def preview(
        self, body: bytes, principal: Principal, headers: Mapping[bytes, bytes]
    ) -> RoutingPreview:
        """Return what would happen to a chat or text completion.

        Args:
            body: Body of the request. With `messages` it is a chat.
            principal: Its sender.
            headers: Its headers, by lower-case name.

        Raises:
            ApiError: The body is malformed.
        """
        api, fields = _parse_fields(body, principal, headers)
        if not fields.model:
            fields = replace(fields, model=self._models.find_only_model(principal, api.tasks))
        tier = min(principal.tier + fields.priority, len(TIERS) - 1)
        preview = RoutingPreview(
            outcome="refused",
            sentence="",
            requested_model=fields.model,
            tenant=principal.tenant,
            tier=TIERS[tier],
            prompt_tokens=fields.estimated_prompt_tokens,
        )
        try:
            # Requests that name neither a user nor a session are divided by their ids.
            target = self._models.find_target(
                fields.model, principal, headers, fields, secrets.token_hex(8)
            )
            check_task(target.pool, fields.model, api)
            check_prompt(target.pool, fields)
            unsuitable = find_unsupporting_replicas(target.pool, fields, api.path)
            if target.adapter is not None:
                unsuitable |= find_replicas_without_adapters(target.pool)
        except ApiError as error:
            return _refuse(preview, error)
        request = build_placement_request(
            "preview",
            fields,
            principal,
            target.pool.model,
            target.adapter,
            tier=tier,
            deadline=math.inf,
            start_wait_s=find_start_wait_s(headers, self._cold_start, is_stream=fields.stream),
            unsuitable=unsuitable,
        )
        return self._place(preview, request, target)

    def _place(
        self, preview: RoutingPreview, request: PlacementRequest, target: RouteTarget
    ) -> RoutingPreview:
        """Complete a preview by what placement would do."""
        now = self._clock()
        placement = self._driver.preview(request, target.pool)
        pool, taken_over = cast("Pool", placement.pool), ""
        if placement.takeover_reason:
            taken_over = describe_takeover(pool, placement.takeover_reason)
        candidates = [] if placement.selection is None else placement.selection.candidates
        compared = {each.load.name for each in candidates}
        excluded = [
            ExcludedReplica(replica=replica.name, reason=reason)
            for replica in pool.replicas.values()
            if (reason := explain_exclusion(pool, replica, request, compared, now))
        ]
        preview = replace(
            preview,
            model=pool.model,
            version=pool.version_label,
            route=target.route_name,
            route_reason="; ".join(filter(None, (target.reason, taken_over))),
            output_tokens=pool.expected_output_tokens(request),
            policy=pool.routing_policy,
            candidates=[
                _to_candidate(each, request)
                for each in sorted(candidates, key=attrgetter("cost.total_s"))[:MAX_CANDIDATES]
            ],
            candidate_count=len(candidates),
            excluded=excluded[:MAX_EXCLUDED],
            excluded_count=len(excluded),
            queued_ahead=placement.queued_ahead,
        )
        if placement.refusal is not None:
            return _refuse(preview, build_arrival_error(*placement.refusal, pool, now))
        if placement.selection is None:
            wait_s = pool.estimate_wait_s(placement.queued_ahead, request.tier, now)
            sentence = _describe_wait(placement.queued_ahead, wait_s)
            return replace(preview, outcome="queued", sentence=sentence, wait_s=wait_s)
        return _choose(preview, placement)


def _parse_fields(
    body: bytes, principal: Principal, headers: Mapping[bytes, bytes]
) -> tuple[ApiShape, RequestFields]:
    """Parse the body of a chat or text completion. Raises ApiError."""
    api = CHAT if "messages" in parse_raw_fields(body) else COMPLETION
    session_id = headers.get(SESSION_HEADER, b"").decode("latin-1")
    fields = parse_request_fields(body, api.prompt_fields[0], principal.cache_domain, session_id)
    return api, fields


def _to_candidate(candidate: RoutingCandidate, request: PlacementRequest) -> CandidatePreview:
    cost = candidate.cost
    terms = {name: getattr(cost, name) for name in cost.__struct_fields__}
    return CandidatePreview(
        cached_tokens=max(0, request.prompt_tokens - candidate.uncached_tokens),
        uncached_tokens=candidate.uncached_tokens,
        total_s=cost.total_s,
        in_flight=candidate.load.in_flight,
        **terms,
    )


def _refuse(preview: RoutingPreview, error: ApiError) -> RoutingPreview:
    return replace(
        preview,
        outcome="refused",
        sentence=f"It would be refused: {error.message}",
        error=PreviewError(status=error.status, code=error.code, message=error.message),
    )


def _describe_wait(queued_ahead: int, wait_s: float | None) -> str:
    others = "request" if queued_ahead == 1 else "requests"
    ahead = f" behind {queued_ahead} other {others}" if queued_ahead else ""
    when = "" if wait_s is None else f", for about {wait_s:.2g} s"
    return f"It would wait in the queue{ahead}{when}, because no replica can take it now."


def _choose(preview: RoutingPreview, placement: PlacementPreview) -> RoutingPreview:
    """Complete a preview by the selected replica, and the reason why it is selected."""
    selection = placement.selection
    assert selection is not None  # noqa: S101 - checked by the caller
    chosen = selection.chosen
    others = [each for each in selection.candidates if each is not chosen]
    tied = [each for each in others if abs(each.cost.total_s - chosen.cost.total_s) <= TIE_S]
    return replace(
        preview,
        outcome="placed",
        sentence=f"{chosen.load.name} would get it{_describe_choice(preview, chosen, others, len(tied))}.",
        replica=chosen.load.name,
        tied_candidates=1 + len(tied),
    )


def _describe_choice(
    preview: RoutingPreview, chosen: RoutingCandidate, others: list[RoutingCandidate], num_tied: int
) -> str:
    if not others and not preview.excluded_count:
        return f": the {'version' if preview.version else 'model'} has no other replica"
    if not others:
        return ": no other replica can take it now"
    if preview.policy != "least-cost":
        return f", selected by the policy {preview.policy} among {len(others) + 1} replicas"
    if num_tied:
        return f", drawn among {num_tied + 1} replicas that cost equally little"
    second = min(others, key=attrgetter("cost.total_s"))
    saved_s = second.cost.total_s - chosen.cost.total_s
    reason = "its weight is higher"
    differences = {
        term: getattr(second.cost, term) - getattr(chosen.cost, term) for term in TERM_REASONS
    }
    term = max(differences, key=lambda name: differences[name])
    if differences[term] > 0.0:
        reason = TERM_REASONS[term]
    return f": it costs {_format_s(saved_s)} less than {second.load.name}, mainly because {reason}"


def _format_s(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1.0 else f"{seconds * 1000:.3g} ms"
