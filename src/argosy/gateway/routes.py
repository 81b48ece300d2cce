"""The route table of the gateway: the APIs for models and the endpoints for operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial

import msgspec

from argosy.gateway.dialects import (
    VERSION_HEADER,
    AnthropicHandlers,
    BackgroundResponses,
    ResponseState,
    StoredChatHandlers,
    build_dialect_routes,
)
from argosy.gateway.filters import LimitFilter
from argosy.gateway.http_route import (
    ACCESS_ERRORS,
    GENERATION_ERRORS,
    UTILITY_ERRORS,
    Handler,
    HttpRoute,
)
from argosy.gateway.model_registry import ModelRouter
from argosy.gateway.operations import OperationsHandlers
from argosy.gateway.pooling_handlers import (
    POOLING,
    SCORE,
    PoolingHandlers,
)
from argosy.gateway.principal import Principal
from argosy.gateway.proxy import CompletionHandlers
from argosy.gateway.request_context import CLASSIFY, EMBEDDINGS
from argosy.gateway.utility_handlers import TOKENIZE_PATH, UtilityHandlers
from argosy.http_server import HttpExchange
from argosy.protocol import (
    TEXT_SCHEMA,
    Operation,
    json_operation,
    render_openapi,
    shared_operations,
)
from argosy.protocol.dialects import CohereEmbedRequest, CohereRerankRequest
from argosy.store import Role

_encode = msgspec.json.Encoder().encode
_OPERATIONS = shared_operations(
    GENERATION_ERRORS,
    UTILITY_ERRORS,
    listing=ACCESS_ERRORS,
    ready={"503": "A model has no available replica."},
    health={},
    operator=ACCESS_ERRORS,
)


class _TokenizerQuery(msgspec.Struct, frozen=True):
    model: str = ""


def build_routes(
    models: ModelRouter,
    generation: CompletionHandlers,
    operations: OperationsHandlers,
    state: ResponseState,
    background: BackgroundResponses,
    limits: LimitFilter | None = None,
    *,
    refuse_unknown_fields: bool,
) -> list[HttpRoute]:
    """Return the routes of the APIs for models and of the endpoints for operators."""
    utility = UtilityHandlers(models, limits, refuse_unknown_fields=refuse_unknown_fields)
    tokenize: Handler = partial(utility.tokenize, path=TOKENIZE_PATH)
    anthropic = AnthropicHandlers(
        models,
        generation.chat_completions,
        tokenize,
        refuse_unknown_fields=refuse_unknown_fields,
    )

    async def list_models(exchange: HttpExchange, principal: Principal) -> None:
        if VERSION_HEADER in exchange.headers:
            await anthropic.list_models(exchange, principal)
        else:
            await exchange.send_response(200, _encode(models.list_models(principal)))

    async def get_model(exchange: HttpExchange, principal: Principal) -> None:
        name = exchange.path_parameters["model"]
        if VERSION_HEADER in exchange.headers:
            await anthropic.get_model(exchange, principal, name)
        else:
            await exchange.send_response(200, _encode(models.get_model(name, principal)))

    chats = StoredChatHandlers(state, generation)
    return [
        _shared_row(
            "POST",
            "/v1/chat/completions",
            chats.create,
            open_session=lambda: nullcontext(chats.create),
        ),
        _shared_row("POST", "/v1/completions", generation.completions),
        _shared_row("GET", "/v1/models", list_models),
        _shared_row("GET", "/v1/models/{model...}", get_model),
        _shared_row("POST", "/tokenize", utility.tokenize),
        _shared_row("POST", "/detokenize", utility.tokenize),
        *_build_operator_routes(operations, utility),
        *_build_pooling_routes(generation, refuse_unknown_fields=refuse_unknown_fields),
        *build_dialect_routes(
            models,
            state,
            background,
            anthropic,
            chats,
            chat=generation.chat_completions,
            completion=generation.completions,
            embeddings=partial(generation.handle, api=EMBEDDINGS),
            tokenize=tokenize,
            tokenizer_info=utility.tokenizer_info,
            refuse_unknown_fields=refuse_unknown_fields,
        ),
    ]


def add_openapi_route(routes: Sequence[HttpRoute]) -> list[HttpRoute]:
    """Return the routes, and one for the OpenAPI document of all of them."""

    @cache
    def render() -> bytes:
        return render_gateway_openapi(all_routes)

    async def send_document(exchange: HttpExchange, principal: Principal) -> None:
        del principal  # the document is the same for all
        await exchange.send_response(200, render())

    all_routes = [*routes, _shared_row("GET", "/openapi.json", send_document)]
    return all_routes


def render_gateway_openapi(routes: Sequence[HttpRoute]) -> bytes:
    """Return the OpenAPI document of the routes as JSON."""
    return render_openapi(
        "Argosy gateway",
        "The APIs of OpenAI, Anthropic and Ollama for all models, and those for operators.",
        [(route.path, route.method, route.operation) for route in routes if route.operation],
        has_keys=True,
    )


def _shared_row(
    method: str,
    path: str,
    handler: Handler,
    *,
    is_public: bool = False,
    role: Role | None = None,
    open_session: Callable[[], AbstractContextManager[Handler]] | None = None,
) -> HttpRoute:
    """Return the row of a path that replicas have too."""
    return HttpRoute(
        method,
        path,
        handler,
        _OPERATIONS[path],
        is_public=is_public,
        role=role,
        scope="organisation" if role is None else "gateway",
        open_session=open_session,
    )


def _build_operator_routes(
    operations: OperationsHandlers, utility: UtilityHandlers
) -> list[HttpRoute]:
    replica_metrics = Operation(
        "replicaMetrics",
        {"text/plain": TEXT_SCHEMA},
        ACCESS_ERRORS | {"404": "No replica has this name."},
    )
    tokenizer_info = json_operation(
        "tokenizerInfo", {"type": "object"}, UTILITY_ERRORS, query=_TokenizerQuery
    )
    return [
        _shared_row("GET", "/health", operations.health, is_public=True),
        _shared_row("GET", "/ready", operations.ready, is_public=True),
        _shared_row("GET", "/version", operations.version, is_public=True),
        # Labels name the tenants of all organisations.
        _shared_row("GET", "/metrics", operations.metrics, role="viewer"),
        HttpRoute(
            "GET",
            "/replicas/{name...}/metrics",
            utility.replica_metrics,
            replica_metrics,
            role="viewer",
            scope="gateway",
        ),
        HttpRoute("GET", "/tokenizer_info", utility.tokenizer_info, tokenizer_info),
    ]


def _build_pooling_routes(
    generation: CompletionHandlers, *, refuse_unknown_fields: bool
) -> list[HttpRoute]:
    translated = PoolingHandlers(generation, refuse_unknown_fields=refuse_unknown_fields)
    shapes = {
        "/v1/embeddings": EMBEDDINGS,
        "/pooling": POOLING,
        "/classify": CLASSIFY,
        "/score": SCORE,
        "/v1/score": SCORE,
    }
    handlers: dict[str, Handler] = {
        **{path: partial(generation.handle, api=shape) for path, shape in shapes.items()},
        "/rerank": translated.rerank,
        "/v1/rerank": translated.rerank,
    }
    embed = json_operation("cohereEmbed", {"type": "object"}, GENERATION_ERRORS, CohereEmbedRequest)
    rerank = json_operation(
        "cohereRerank", {"type": "object"}, GENERATION_ERRORS, CohereRerankRequest
    )
    return [
        *(_shared_row("POST", path, handler) for path, handler in handlers.items()),
        HttpRoute("POST", "/v2/embed", translated.cohere_embed, embed),
        HttpRoute("POST", "/v2/rerank", translated.cohere_rerank, rerank),
    ]
