"""Routes of the dialects: the APIs of OpenAI's responses and conversations, of Anthropic and of Ollama."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

from argosy.gateway.dialects.anthropic_handlers import AnthropicHandlers
from argosy.gateway.dialects.background_responses import BackgroundResponses
from argosy.gateway.dialects.conversation_handlers import (
    AddItemsRequest,
    ConversationHandlers,
    CreateConversationRequest,
    UpdateConversationRequest,
)
from argosy.gateway.dialects.dialect import ANTHROPIC, OLLAMA, RESPONSES
from argosy.gateway.dialects.file_handlers import (
    FILE_FORM,
    PART_FORM,
    CompleteUploadRequest,
    CreateUploadRequest,
    FileHandlers,
    FilePageQuery,
)
from argosy.gateway.dialects.ollama_handlers import ModelHandler, OllamaHandlers
from argosy.gateway.dialects.response_state import ResponseState
from argosy.gateway.dialects.responses_handlers import ResponsesHandlers, open_responses_session
from argosy.gateway.dialects.stored_chat_handlers import ChatPageQuery, StoredChatHandlers
from argosy.gateway.dialects.stored_response_handlers import (
    ItemPageQuery,
    RetrieveQuery,
    StoredResponseHandlers,
)
from argosy.gateway.http_route import (
    ACCESS_ERRORS,
    GENERATION_ERRORS,
    UTILITY_ERRORS,
    Handler,
    HttpRoute,
)
from argosy.gateway.model_registry import ModelRouter
from argosy.gateway.principal import Principal
from argosy.http_server import ANY_METHOD, HttpExchange
from argosy.protocol import EVENTS_MEDIA_TYPE, Operation, json_operation
from argosy.protocol.dialects import (
    NDJSON_CONTENT_TYPE,
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

_Reserve = Callable[[HttpExchange, Principal], AbstractAsyncContextManager[None]]
_OBJECT = {"type": "object"}
_TEXT = {"type": "string"}
ANTHROPIC_ERROR = {
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
_STATE_ERRORS = UTILITY_ERRORS | {
    "404": "It does not exist, belongs to another tenant, or the gateway has no store.",
    "503": "The store cannot be reached. Retry after `Retry-After` seconds.",
}
_FILE_ERRORS = _STATE_ERRORS | {
    "409": "The file is in use.",
    "501": "The gateway has no place for contents of files.",
    "507": "There is no space for the file.",
}
_UNSUPPORTED_PATHS = ("push", "create", "copy", "delete")


def build_dialect_routes(
    models: ModelRouter,
    state: ResponseState,
    background: BackgroundResponses,
    anthropic: AnthropicHandlers,
    chats: StoredChatHandlers,
    *,
    chat: Handler,
    completion: Handler,
    embeddings: Handler,
    tokenize: Handler,
    tokenizer_info: ModelHandler,
    refuse_unknown_fields: bool,
) -> list[HttpRoute]:
    """Return the routes of all dialects.

    Args:
        models: The models.
        state: Stored responses and conversations.
        background: Background responses.
        anthropic: Handlers of Anthropic's API.
        chats: Handlers of stored chat completions.
        chat: Handler of chats.
        completion: Handler of text completions.
        embeddings: Handler of embeddings.
        tokenize: Handler of `/tokenize`.
        tokenizer_info: Handler of `/tokenizer_info`, which is given the model's name.
        refuse_unknown_fields: Whether unknown fields are errors.
    """
    stored = StoredResponseHandlers(state, background)
    responses = ResponsesHandlers(
        state, background, stored, chat, tokenize, refuse_unknown_fields=refuse_unknown_fields
    )
    ollama = OllamaHandlers(
        models,
        chat,
        completion,
        embeddings,
        tokenizer_info,
        refuse_unknown_fields=refuse_unknown_fields,
    )
    return [
        *_build_responses_routes(responses),
        *_build_state_routes(state, stored, ConversationHandlers(state), chats),
        *_build_file_routes(state, FileHandlers(state)),
        *_build_anthropic_routes(anthropic),
        *_build_ollama_routes(ollama),
    ]


def _build_responses_routes(responses: ResponsesHandlers) -> list[HttpRoute]:
    row = partial(HttpRoute, "POST", dialect=RESPONSES)
    return [
        row(
            "/v1/responses",
            responses.create,
            json_operation(
                "createResponse",
                _OBJECT,
                GENERATION_ERRORS,
                ResponsesRequest,
                stream=EVENTS_MEDIA_TYPE,
            ),
            open_session=lambda: open_responses_session(responses),
        ),
        row(
            "/v1/responses/input_tokens",
            responses.count_tokens,
            json_operation("countResponseTokens", _OBJECT, UTILITY_ERRORS, ResponsesRequest),
        ),
        row(
            "/v1/responses/compact",
            responses.compact,
            json_operation("compactResponse", _OBJECT, GENERATION_ERRORS, CompactRequest),
        ),
    ]


def _build_state_routes(
    state: ResponseState,
    stored: StoredResponseHandlers,
    conversations: ConversationHandlers,
    chats: StoredChatHandlers,
) -> list[HttpRoute]:
    """Return the routes of stored responses, conversations and chats. Requests count against the limits of requests."""
    describe = partial(json_operation, response=_OBJECT, errors=_STATE_ERRORS)
    response, conversation = "/v1/responses/{id}", "/v1/conversations/{id}"
    items, item = f"{conversation}/items", f"{conversation}/items/{{item}}"
    retrieve = describe("getResponse", stream=EVENTS_MEDIA_TYPE, query=RetrieveQuery)
    list_input = describe("listResponseInput", query=ItemPageQuery)
    create = describe("createConversation", body=CreateConversationRequest, is_body_optional=True)
    update = describe("updateConversation", body=UpdateConversationRequest)
    list_items = describe("listConversationItems", query=ItemPageQuery)
    add_items = describe("addConversationItems", body=AddItemsRequest)
    completion = "/v1/chat/completions/{id}"
    update_chat = describe("updateChat", body=UpdateConversationRequest)
    list_messages = describe("listChatMessages", query=ChatPageQuery)
    rows: list[tuple[str, str, Handler, Operation]] = [
        ("GET", response, stored.retrieve, retrieve),
        ("DELETE", response, stored.delete, describe("deleteResponse")),
        ("POST", f"{response}/cancel", stored.cancel, describe("cancelResponse")),
        ("GET", f"{response}/input_items", stored.list_input, list_input),
        ("POST", "/v1/conversations", conversations.create, create),
        ("GET", conversation, conversations.get, describe("getConversation")),
        ("POST", conversation, conversations.update, update),
        ("DELETE", conversation, conversations.delete, describe("deleteConversation")),
        ("GET", items, conversations.list_items, list_items),
        ("POST", items, conversations.add_items, add_items),
        ("GET", item, conversations.get_item, describe("getConversationItem")),
        ("DELETE", item, conversations.delete_item, describe("deleteConversationItem")),
        (
            "GET",
            "/v1/chat/completions",
            chats.list_completions,
            describe("listChats", query=ChatPageQuery),
        ),
        ("GET", completion, chats.get, describe("getChat")),
        ("POST", completion, chats.update, update_chat),
        ("DELETE", completion, chats.delete, describe("deleteChat")),
        ("GET", f"{completion}/messages", chats.list_messages, list_messages),
    ]

    def limit(handler: Handler) -> Handler:
        # A stream of events may last, so its handler takes slots itself.
        reserve = state.count_request if handler == stored.retrieve else state.reserve_request
        return _reserve_first(reserve, handler)

    return [HttpRoute(method, path, limit(handler), each) for method, path, handler, each in rows]


def _reserve_first(reserve: _Reserve, handler: Handler) -> Handler:
    async def handle(exchange: HttpExchange, principal: Principal) -> None:
        async with reserve(exchange, principal):
            await handler(exchange, principal)

    return handle


def _build_file_routes(state: ResponseState, files: FileHandlers) -> list[HttpRoute]:
    """Return the routes of files and uploads. Requests count against the limits of requests."""
    describe = partial(json_operation, response=_OBJECT, errors=_FILE_ERRORS)
    form = partial(describe, body_media_type="multipart/form-data")
    file, upload = "/v1/files/{id}", "/v1/uploads/{id}"
    content = {"application/octet-stream": _TEXT}
    ranges = {"416": "The file ends before the range."}
    rows: list[tuple[str, str, Handler, Operation]] = [
        ("POST", "/v1/files", files.create, form("createFile", body=FILE_FORM)),
        ("GET", "/v1/files", files.list_files, describe("listFiles", query=FilePageQuery)),
        ("GET", file, files.get, describe("getFile")),
        ("DELETE", file, files.delete, describe("deleteFile")),
        (
            "GET",
            f"{file}/content",
            files.download,
            Operation("downloadFile", content, _FILE_ERRORS | ranges),
        ),
        (
            "POST",
            "/v1/uploads",
            files.create_upload,
            describe("createUpload", body=CreateUploadRequest),
        ),
        ("POST", f"{upload}/parts", files.add_part, form("addUploadPart", body=PART_FORM)),
        (
            "POST",
            f"{upload}/complete",
            files.complete_upload,
            describe("completeUpload", body=CompleteUploadRequest),
        ),
        ("POST", f"{upload}/cancel", files.cancel_upload, describe("cancelUpload")),
    ]
    return [
        HttpRoute(method, path, _reserve_first(state.count_request, handler), operation)
        for method, path, handler, operation in rows
    ]


def _build_anthropic_routes(anthropic: AnthropicHandlers) -> list[HttpRoute]:
    row = partial(HttpRoute, "POST", dialect=ANTHROPIC)
    operation = partial(json_operation, error_schema=ANTHROPIC_ERROR)
    return [
        row(
            "/v1/messages",
            anthropic.messages,
            operation(
                "createMessage",
                _OBJECT,
                GENERATION_ERRORS,
                MessagesRequest,
                stream=EVENTS_MEDIA_TYPE,
            ),
        ),
        row(
            "/v1/messages/count_tokens",
            anthropic.count_tokens,
            operation("countMessageTokens", _OBJECT, UTILITY_ERRORS, CountTokensRequest),
        ),
    ]


def _build_ollama_routes(ollama: OllamaHandlers) -> list[HttpRoute]:
    def row(
        method: str, path: str, handler: Handler, operation: Operation | None = None
    ) -> HttpRoute:
        is_public = path in {"/", "/api/version"}
        return HttpRoute(method, path, handler, operation, is_public=is_public, dialect=OLLAMA)

    describe = partial(json_operation, error_schema=_OLLAMA_ERROR)
    generates = partial(describe, response=_OBJECT, errors=GENERATION_ERRORS)
    streams = partial(generates, stream=NDJSON_CONTENT_TYPE.decode())
    lists = partial(describe, response=_OBJECT, errors=ACCESS_ERRORS)
    return [
        row("GET", "/", ollama.home),
        row("GET", "/api/version", ollama.version, describe("ollamaVersion", _OBJECT, {})),
        row("POST", "/api/chat", ollama.chat, streams("ollamaChat", body=OllamaChatRequest)),
        row(
            "POST",
            "/api/generate",
            ollama.generate,
            streams("ollamaGenerate", body=OllamaGenerateRequest),
        ),
        row("POST", "/api/embed", ollama.embed, generates("ollamaEmbed", body=OllamaEmbedRequest)),
        row(
            "POST",
            "/api/embeddings",
            ollama.embeddings,
            generates("ollamaEmbeddings", body=OllamaEmbeddingsRequest),
        ),
        row("GET", "/api/tags", ollama.tags, lists("ollamaTags")),
        row("GET", "/api/ps", ollama.running, lists("ollamaRunning")),
        row(
            "POST",
            "/api/show",
            ollama.show,
            describe("ollamaShow", _OBJECT, UTILITY_ERRORS, OllamaModelRequest),
        ),
        row("POST", "/api/pull", ollama.pull),
        row("GET", "/api/blobs/{digest...}", ollama.find_blob),
        row("POST", "/api/blobs/{digest...}", ollama.refuse),
        *(row(ANY_METHOD, f"/api/{path}", ollama.refuse) for path in _UNSUPPORTED_PATHS),
    ]
