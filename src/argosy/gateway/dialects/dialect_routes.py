"""Routes of the dialects, and the parts that their handlers share."""

from __future__ import annotations

from functools import partial

from argosy.gateway.dialects.anthropic_handlers import AnthropicHandlers
from argosy.gateway.dialects.background_responses import BackgroundResponses
from argosy.gateway.dialects.conversation_handlers import (
    CONVERSATIONS_PATH,
    CONVERSATIONS_PREFIX,
    ConversationHandlers,
)
from argosy.gateway.dialects.dialect import ANTHROPIC, OLLAMA, RESPONSES
from argosy.gateway.dialects.ollama_handlers import OllamaHandlers
from argosy.gateway.dialects.response_state import ResponseState
from argosy.gateway.dialects.responses_handlers import ResponsesHandlers
from argosy.gateway.dialects.responses_session import ResponsesSession
from argosy.gateway.dialects.stored_response_handlers import (
    RESPONSES_PREFIX,
    StoredResponseHandlers,
)
from argosy.gateway.http_route import ANY_METHOD, Handler, HttpRoute, PrefixRoute
from argosy.gateway.model_registry import ModelRouter

OLLAMA_PREFIX = "/api/"
_UNSUPPORTED_PATHS = ("push", "create", "copy", "delete")


class DialectRoutes:
    """Routes of the dialects.

    Args:
        models: The models.
        state: Stored responses and conversations.
        chat: Handler of chats.
        completion: Handler of text completions.
        embeddings: Handler of embeddings.
        tokenize: Handler of `/tokenize`.
        refuse_unknown_fields: Whether unknown fields are errors.
    """

    def __init__(
        self,
        models: ModelRouter,
        state: ResponseState,
        *,
        chat: Handler,
        completion: Handler,
        embeddings: Handler,
        tokenize: Handler,
        refuse_unknown_fields: bool,
    ) -> None:
        self.background = BackgroundResponses(state, chat)
        self.anthropic = AnthropicHandlers(
            models, chat, tokenize, refuse_unknown_fields=refuse_unknown_fields
        )
        stored = StoredResponseHandlers(state, self.background)
        responses = ResponsesHandlers(
            state,
            self.background,
            stored,
            chat,
            tokenize,
            refuse_unknown_fields=refuse_unknown_fields,
        )
        conversations = ConversationHandlers(state)
        ollama = OllamaHandlers(
            models, chat, completion, embeddings, refuse_unknown_fields=refuse_unknown_fields
        )
        stateful = partial(HttpRoute, dialect=RESPONSES)
        messages = partial(HttpRoute, dialect=ANTHROPIC)
        api = partial(HttpRoute, dialect=OLLAMA)
        self.routes = (
            stateful(
                "/v1/responses",
                "POST",
                responses.create,
                open_session=lambda: ResponsesSession(responses).handle,
            ),
            stateful("/v1/responses/input_tokens", "POST", responses.count_tokens),
            stateful("/v1/responses/compact", "POST", responses.compact),
            HttpRoute(CONVERSATIONS_PATH, "POST", conversations.create),
            messages("/v1/messages", "POST", self.anthropic.messages),
            messages("/v1/messages/count_tokens", "POST", self.anthropic.count_tokens),
            api("/", "GET", ollama.home, is_public=True),
            api("/api/version", "GET", ollama.version, is_public=True),
            api("/api/chat", "POST", ollama.chat),
            api("/api/generate", "POST", ollama.generate),
            api("/api/embed", "POST", ollama.embed),
            api("/api/embeddings", "POST", ollama.embeddings),
            api("/api/tags", "GET", ollama.tags),
            api("/api/ps", "GET", ollama.running),
            api("/api/show", "POST", ollama.show),
            api("/api/pull", "POST", ollama.pull),
            *(api(OLLAMA_PREFIX + name, ANY_METHOD, ollama.refuse) for name in _UNSUPPORTED_PATHS),
        )
        """Routes of single paths."""
        self.prefix_routes = (
            PrefixRoute(
                RESPONSES_PREFIX, HttpRoute(RESPONSES_PREFIX + "{id}", ANY_METHOD, stored.handle)
            ),
            PrefixRoute(
                CONVERSATIONS_PREFIX,
                HttpRoute(CONVERSATIONS_PREFIX + "{id}", ANY_METHOD, conversations.handle),
            ),
            PrefixRoute(
                OLLAMA_PREFIX + "blobs/",
                api(OLLAMA_PREFIX + "blobs/{digest}", ANY_METHOD, ollama.refuse),
            ),
        )
