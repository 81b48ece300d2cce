"""Administration of the response cache: figures by rule, and purging at all gateways of a store."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from urllib.parse import parse_qs, urlencode

import msgspec
import structlog

from argosy.gateway.http_route import HttpRoute
from argosy.gateway.peer_connection import check_peer_token
from argosy.gateway.peer_gateways import PeerGateways
from argosy.gateway.principal import Principal
from argosy.gateway.proxy import ResponseCache, SemanticCache
from argosy.http_server import HttpExchange
from argosy.policy.paraphrase import interval
from argosy.protocol import ApiError
from argosy.store import StoreError

PEER_PURGE_PATH = "/peer/cache/purge"
ANSWERED = ("hit", "joined", "semantic")
"""Results of requests that the cache answers."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class CacheRuleView(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of a cache rule at this gateway since it started."""

    rule: str
    results: dict[str, int]
    """Requests by how the cache answered, as in the header `x-argosy-cache`."""
    hit_rate: float | None
    """Share of the requests that the cache answered, without those that bypass it."""
    saved_s: float
    """Time that the computation of the kept answers took, for each request that the cache answered."""
    questions: dict[str, int]
    """Lookups of the semantic cache by their result."""
    wrong_answers: tuple[float, float] | None
    """95 % interval of the share of answers that differed, among those that a dry run compared."""


class PurgeView(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a purge."""

    purged: int
    """Answers that were removed, from memory or Redis."""
    gateways: int
    """Gateways that have removed theirs."""
    unreachable: list[str]
    """Ids of gateways that could not be reached. Repeat the purge for them."""


class CacheAdmin:
    """Figures and purges of the caches of this gateway and its peers."""

    def __init__(
        self, cache: ResponseCache, semantic: SemanticCache, peers: PeerGateways | None
    ) -> None:
        self._cache = cache
        self._semantic = semantic
        self._peers = peers

    def describe_rules(self) -> list[CacheRuleView]:
        """Return the figures of each rule that has matched a request."""
        metrics = self._cache.metrics
        requests, questions = (
            _group(each.values()) for each in (metrics.cache_requests, metrics.semantic_lookups)
        )
        saved = {rule: value for (rule,), value in metrics.cache_saved_seconds.values()}
        views = []
        for rule, results in sorted(requests.items()):
            answered = sum(results[each] for each in ANSWERED)
            asked = answered + results["miss"]
            lookups = questions.get(rule, Counter())
            compared = lookups["agreed"] + lookups["differed"]
            views.append(
                CacheRuleView(
                    rule=rule,
                    results=dict(results),
                    hit_rate=answered / asked if asked else None,
                    saved_s=saved.get(rule, 0.0),
                    questions=dict(lookups),
                    wrong_answers=interval(lookups["differed"], compared) if compared else None,
                )
            )
        return views

    async def purge(
        self, tenant: tuple[str, str] | None, model: str | None, actor: str
    ) -> PurgeView:
        """Remove kept answers and questions here and at all other gateways of the store.

        Args:
            tenant: Organisation and project whose answers are removed. None for all.
            model: Name of the model whose answers are removed. None for all.
            actor: Name of the caller in the log.

        Raises:
            ApiError: 503 if Redis or the store cannot be reached.
        """
        purged, reached, unreachable = await self._purge_own(tenant, model), 1, list[str]()
        fields = {"model": model or ""}
        if tenant is not None:
            fields |= {"organisation": tenant[0], "project": tenant[1]}
        query = urlencode(fields)
        if self._peers is not None:
            try:
                others = await self._peers.list_others()
            except (StoreError, TimeoutError) as error:
                message = "The other gateways are unknown, because the store does not respond. Purge again."
                raise ApiError(503, "store_unavailable", message) from error
            path = f"{PEER_PURGE_PATH}?{query}"
            fetched = (self._peers.fetch(each, path, f"purge {query}", "POST") for each in others)
            for other, body in zip(others, await asyncio.gather(*fetched), strict=True):
                if body is None:
                    unreachable.append(other.id)
                else:
                    reached += 1
                    purged += int(body)
        log.info(
            "cache_purged",
            purged=purged,
            tenant=tenant,
            model=model,
            actor=actor,
            unreachable=unreachable,
        )
        return PurgeView(purged=purged, gateways=reached, unreachable=unreachable)

    async def _purge_own(self, tenant: tuple[str, str] | None, model: str | None) -> int:
        self._semantic.purge(tenant, model)
        return await self._cache.purge(tenant, model)

    def build_route(self, secret: str) -> HttpRoute:
        """Return the route for purges of other gateways, whose requests are signed with `secret`."""

        async def handle(exchange: HttpExchange, principal: Principal) -> None:
            del principal  # the signature authenticates the gateway
            query = exchange.query.decode("latin-1")
            check_peer_token(exchange, secret, f"purge {query}")
            fields = {name: values[0] for name, values in parse_qs(query).items()}
            tenant = None
            if "project" in fields:
                tenant = fields["organisation"], fields["project"]
            purged = await self._purge_own(tenant, fields.get("model"))
            await exchange.send_response(200, b"%d" % purged)

        return HttpRoute("POST", PEER_PURGE_PATH, handle, is_public=True)


def _group(values: Sequence[tuple[tuple[str, ...], float]]) -> dict[str, Counter[str]]:
    """Return values by rule and result."""
    grouped = dict[str, Counter[str]]()
    for (rule, result), value in values:
        grouped.setdefault(rule, Counter())[result] += int(value)
    return grouped
