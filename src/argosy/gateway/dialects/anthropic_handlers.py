"""Handlers of Anthropic's Messages API."""

from __future__ import annotations

from functools import partial

import msgspec

from argosy.gateway.dialects.dialect import (
    name_ignored_fields,
    start_translation,
)
from argosy.gateway.http_route import Handler
from argosy.gateway.model_registry import ModelRouter
from argosy.gateway.principal import Principal
from argosy.http_server import HttpExchange
from argosy.protocol import ModelCard
from argosy.protocol.dialects import (
    ObjectTranslator,
    encode_anthropic_error,
    format_timestamp,
    translate_count_tokens_request,
    translate_messages_request,
)

VERSION_HEADER = b"anthropic-version"
"""Header of all requests of Anthropic's clients, by which `/v1/models` answers in their shape."""


class AnthropicHandlers:
    """Handlers that run messages as chats.

    Args:
        models: The models.
        chat: Handler of chats.
        tokenize: Handler of `/tokenize`.
        refuse_unknown_fields: Whether unknown fields are errors.
    """

    def __init__(
        self, models: ModelRouter, chat: Handler, tokenize: Handler, *, refuse_unknown_fields: bool
    ) -> None:
        self._models = models
        self._chat = chat
        self._tokenize = tokenize
        self._refuse_unknown = refuse_unknown_fields

    async def messages(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /v1/messages`."""
        body = await exchange.read_body()
        request = await exchange.parse_body(
            body, partial(translate_messages_request, refuse_unknown=self._refuse_unknown)
        )
        start_translation(exchange, request, encode_anthropic_error)
        await self._chat(exchange, principal)

    async def count_tokens(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /v1/messages/count_tokens`."""
        body = await exchange.read_body()
        request, ignored = await exchange.parse_body(
            body, partial(translate_count_tokens_request, refuse_unknown=self._refuse_unknown)
        )
        name_ignored_fields(exchange, ignored)
        translator = ObjectTranslator(
            lambda tokens: {"input_tokens": tokens["count"]}, encode_anthropic_error
        )
        exchange.translate(msgspec.json.encode(request), translator)
        await self._tokenize(exchange, principal)

    async def list_models(self, exchange: HttpExchange, principal: Principal) -> None:
        """`GET /v1/models` for Anthropic's clients."""
        models = self._models.list_models(principal)
        page = {
            "data": [_describe_model(card) for card in models.data],
            "has_more": False,
            "first_id": models.first_id,
            "last_id": models.last_id,
        }
        await exchange.send_response(200, msgspec.json.encode(page))

    async def get_model(self, exchange: HttpExchange, principal: Principal, name: str) -> None:
        """`GET /v1/models/{model}` for Anthropic's clients."""
        card = self._models.get_model(name, principal)
        await exchange.send_response(200, msgspec.json.encode(_describe_model(card)))


def _describe_model(card: ModelCard) -> dict[str, object]:
    return {
        "type": "model",
        "id": card.id,
        "display_name": card.id,
        "created_at": format_timestamp(card.created),
        "lifecycle": "active",
        "max_input_tokens": card.max_model_len,
        "max_tokens": card.max_model_len,
    }
