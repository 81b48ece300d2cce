"""Handlers of models that pool: embeddings, classification, scores and reranking, in the shapes of several APIs.

Each request passes the same filters, queue and placement as a generation. Its response is sent in one piece.
"""

from __future__ import annotations

from functools import partial

from argosy.gateway.dialects import start_rendering
from argosy.gateway.principal import Principal
from argosy.gateway.proxy import CompletionHandlers
from argosy.gateway.request_context import EMBEDDINGS, POOLING_FIELDS, ApiShape
from argosy.http_server import HttpExchange
from argosy.protocol.dialects import (
    is_tei_request,
    translate_cohere_embed,
    translate_cohere_rerank,
    translate_tei_rerank,
)

POOLING = ApiShape(
    b"/pooling", POOLING_FIELDS, "pool", tasks=frozenset({"embed", "token_embed", "classify"})
)
SCORE = ApiShape(
    b"/score",
    ("text_2", "documents", "items", "data_2"),
    "score",
    tasks=frozenset({"score"}),
    query_fields=("text_1", "queries", "data_1"),
)
RERANK = ApiShape(
    b"/v1/rerank",
    ("documents",),
    "rerank",
    tasks=frozenset({"score"}),
    query_fields=("query",),
)


class PoolingHandlers:
    """Handlers of APIs whose requests need a translation for models that pool."""

    def __init__(self, generation: CompletionHandlers, *, refuse_unknown_fields: bool) -> None:
        self._run = generation.handle
        self._refuse_unknown = refuse_unknown_fields

    async def rerank(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /rerank`, in the shape of Jina, Cohere's v1 API and vLLM, or of text-embeddings-inference."""
        body = await exchange.read_body()
        if await exchange.parse_body(body, is_tei_request):
            request = await exchange.parse_body(
                body, partial(translate_tei_rerank, refuse_unknown=self._refuse_unknown)
            )
            start_rendering(exchange, request)
            await self._run(exchange, principal, RERANK)
        else:
            await self._run(exchange, principal, RERANK, body)

    async def cohere_rerank(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /v2/rerank`."""
        body = await exchange.read_body()
        request = await exchange.parse_body(
            body, partial(translate_cohere_rerank, refuse_unknown=self._refuse_unknown)
        )
        start_rendering(exchange, request)
        await self._run(exchange, principal, RERANK)

    async def cohere_embed(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /v2/embed`."""
        body = await exchange.read_body()
        request = await exchange.parse_body(
            body, partial(translate_cohere_embed, refuse_unknown=self._refuse_unknown)
        )
        start_rendering(exchange, request)
        await self._run(exchange, principal, EMBEDDINGS)
