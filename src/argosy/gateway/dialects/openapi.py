"""Description of the dialects' operations for the gateway's OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from argosy.gateway.dialects.conversation_handlers import (
    AddItemsRequest,
    CreateConversationRequest,
    UpdateConversationRequest,
)
from argosy.gateway.dialects.stored_lists import PageQuery
from argosy.gateway.dialects.stored_response_handlers import RetrieveQuery
from argosy.protocol import JSON_MEDIA_TYPE, OpenApiBuilder, path_parameter, query_parameters
from argosy.protocol.dialects import (
    NDJSON_CONTENT_TYPE,
    CohereEmbedRequest,
    CohereRerankRequest,
    CompactRequest,
    CountTokensRequest,
    MessagesRequest,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaModelRequest,
    ResponsesRequest,
)

DIALECT_BODIES = (
    CohereEmbedRequest,
    CohereRerankRequest,
    CompactRequest,
    CountTokensRequest,
    MessagesRequest,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    ResponsesRequest,
)
"""Bodies whose unknown fields are ignored by default."""
DIALECT_TYPES = (
    *DIALECT_BODIES,
    OllamaModelRequest,
    CreateConversationRequest,
    UpdateConversationRequest,
    AddItemsRequest,
)
_OBJECT = {"type": "object"}
_TEXT = {"type": "string"}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": _TEXT, "message": _TEXT},
        },
        "request_id": {"type": ["string", "null"]},
    },
}
_OLLAMA_ERROR = {"type": "object", "required": ["error"], "properties": {"error": _TEXT}}
_NOT_STORED = {"404": "It does not exist, belongs to another tenant, or the gateway has no store."}
_STORE_DOWN = {"503": "The store cannot be reached. Retry after `Retry-After` seconds."}


def add_dialect_operations(
    builder: OpenApiBuilder,
    *,
    generation: Mapping[str, str],
    utility: Mapping[str, str],
    listing: Mapping[str, str],
) -> None:
    """Add the operations of all dialects.

    Args:
        builder: The builder, which knows `DIALECT_TYPES`.
        generation: Descriptions of errors by status, of requests that generate.
        utility: The same, of other requests on a model.
        listing: The same, of lists.
    """
    events = {JSON_MEDIA_TYPE: _OBJECT, "text/event-stream": _TEXT}
    lines = {JSON_MEDIA_TYPE: _OBJECT, NDJSON_CONTENT_TYPE.decode(): _TEXT}
    whole = {JSON_MEDIA_TYPE: _OBJECT}
    messages = partial(builder.describe, error_schema=_ANTHROPIC_ERROR)
    ollama = partial(builder.describe, error_schema=_OLLAMA_ERROR)
    operations: list[tuple[str, str, dict[str, Any]]] = [
        (
            "/v1/responses",
            "POST",
            builder.describe("createResponse", events, generation, body=ResponsesRequest),
        ),
        (
            "/v1/responses/input_tokens",
            "POST",
            builder.describe("countResponseTokens", whole, utility, body=ResponsesRequest),
        ),
        (
            "/v1/responses/compact",
            "POST",
            builder.describe("compactResponse", whole, generation, body=CompactRequest),
        ),
        (
            "/v1/messages",
            "POST",
            messages("createMessage", events, generation, body=MessagesRequest),
        ),
        (
            "/v1/messages/count_tokens",
            "POST",
            messages("countMessageTokens", whole, utility, body=CountTokensRequest),
        ),
        ("/api/chat", "POST", ollama("ollamaChat", lines, generation, body=OllamaChatRequest)),
        (
            "/api/generate",
            "POST",
            ollama("ollamaGenerate", lines, generation, body=OllamaGenerateRequest),
        ),
        ("/api/embed", "POST", ollama("ollamaEmbed", whole, generation, body=OllamaEmbedRequest)),
        (
            "/api/embeddings",
            "POST",
            ollama("ollamaEmbeddings", whole, generation, body=OllamaEmbeddingsRequest),
        ),
        (
            "/v2/embed",
            "POST",
            builder.describe("cohereEmbed", whole, generation, body=CohereEmbedRequest),
        ),
        (
            "/v2/rerank",
            "POST",
            builder.describe("cohereRerank", whole, generation, body=CohereRerankRequest),
        ),
        ("/api/show", "POST", ollama("ollamaShow", whole, utility, body=OllamaModelRequest)),
        ("/api/tags", "GET", ollama("ollamaTags", whole, listing)),
        ("/api/ps", "GET", ollama("ollamaRunning", whole, listing)),
        ("/api/version", "GET", ollama("ollamaVersion", whole, {})),
    ]
    for path, method, operation in operations:
        builder.add(path, method, operation)
    _add_state_operations(builder, {**utility, **_NOT_STORED, **_STORE_DOWN}, events)


def _add_state_operations(
    builder: OpenApiBuilder, errors: Mapping[str, str], events: Mapping[str, Any]
) -> None:
    """Add the operations on stored responses and conversations."""
    whole = {JSON_MEDIA_TYPE: _OBJECT}
    response, conversation = "/v1/responses/{id}", "/v1/conversations/{id}"
    items, item = conversation + "/items", conversation + "/items/{item}"
    page = query_parameters(PageQuery)
    operations: list[tuple[str, str, str, dict[str, Any]]] = [
        (response, "DELETE", "deleteResponse", {}),
        (response + "/cancel", "POST", "cancelResponse", {}),
        (response + "/input_items", "GET", "listResponseInput", {"parameters": page}),
        (
            "/v1/conversations",
            "POST",
            "createConversation",
            {"body": CreateConversationRequest, "is_body_optional": True},
        ),
        (conversation, "GET", "getConversation", {}),
        (conversation, "POST", "updateConversation", {"body": UpdateConversationRequest}),
        (conversation, "DELETE", "deleteConversation", {}),
        (items, "GET", "listConversationItems", {"parameters": page}),
        (items, "POST", "addConversationItems", {"body": AddItemsRequest}),
        (item, "GET", "getConversationItem", {}),
        (item, "DELETE", "deleteConversationItem", {}),
    ]
    retrieval = [path_parameter("id"), *query_parameters(RetrieveQuery)]
    retrieved = builder.describe("getResponse", events, errors, parameters=retrieval)
    builder.add(response, "GET", retrieved)
    for path, method, name, details in operations:
        parameters = [path_parameter(part) for part in ("id", "item") if f"{{{part}}}" in path]
        parameters += details.pop("parameters", [])
        operation = builder.describe(name, whole, errors, parameters=parameters, **details)
        builder.add(path, method, operation)
