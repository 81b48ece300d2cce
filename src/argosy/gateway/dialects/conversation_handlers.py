"""Handlers of conversations of the Responses API."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from argosy.gateway.dialects.response_state import ResponseState, item_owner
from argosy.gateway.dialects.responses_handlers import new_item_id
from argosy.gateway.dialects.stored_response_handlers import parse_page_query
from argosy.gateway.principal import Principal
from argosy.http_server import HttpExchange
from argosy.protocol import JsonObject, parse_body
from argosy.protocol.dialects import Metadata, assign_item_ids, normalize_input
from argosy.store import StoredConversation

_encode = msgspec.json.encode
_Items = Annotated[list[JsonObject], Meta(max_length=20)]


class CreateConversationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/conversations`."""

    items: _Items | None = None
    metadata: Metadata | None = None


class UpdateConversationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/conversations/{id}`."""

    metadata: Metadata | None


class AddItemsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/conversations/{id}/items`."""

    items: _Items


class ConversationHandlers:
    """Handlers of `/v1/conversations` and the paths below.

    Args:
        state: Stored conversations.
    """

    def __init__(self, state: ResponseState) -> None:
        self._state = state

    async def create(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /v1/conversations`."""
        body = await exchange.read_body() or b"{}"
        request = await exchange.parse_body(body, partial(parse_body, CreateConversationRequest))
        items = assign_item_ids(normalize_input(request.items), new_item_id)
        state = self._state
        state.choose_filter(exchange, principal)
        metadata, items = await state.redact(exchange, (request.metadata or {}, items))
        conversation = await state.call(
            state.store.conversations.create,
            *(item_owner(principal), metadata, items, state.retention_s),
        )
        await _send(exchange, _describe(conversation))

    async def get(self, exchange: HttpExchange, principal: Principal) -> None:
        """`GET /v1/conversations/{id}`."""
        await _send(exchange, _describe(await self._call("get", exchange, principal)))

    async def update(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /v1/conversations/{id}`."""
        body = await exchange.read_body()
        request = await exchange.parse_body(body, partial(parse_body, UpdateConversationRequest))
        self._state.choose_filter(exchange, principal)
        metadata = await self._state.redact(exchange, request.metadata or {})
        conversation = await self._call("set_metadata", exchange, principal, metadata)
        await _send(exchange, _describe(conversation))

    async def delete(self, exchange: HttpExchange, principal: Principal) -> None:
        """`DELETE /v1/conversations/{id}`."""
        await self._call("delete", exchange, principal)
        deleted = {"object": "conversation.deleted", "deleted": True}
        await _send(exchange, {"id": exchange.path_parameters["id"], **deleted})

    async def list_items(self, exchange: HttpExchange, principal: Principal) -> None:
        """`GET /v1/conversations/{id}/items`."""
        page = parse_page_query(exchange)
        items, has_more = await self._call(
            "list_items", exchange, principal, **page.store_options()
        )
        await exchange.send_response(200, page.build_page(items, has_more=has_more))

    async def add_items(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /v1/conversations/{id}/items`."""
        body = await exchange.read_body()
        request = await exchange.parse_body(body, partial(parse_body, AddItemsRequest))
        self._state.choose_filter(exchange, principal)
        items = await self._state.redact(
            exchange, assign_item_ids(normalize_input(request.items), new_item_id)
        )
        await self._call("append_items", exchange, principal, items, self._state.retention_s)
        added = {"data": items, "has_more": False}
        ids = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {}
        await _send(exchange, {"object": "list", **added, **ids})

    async def get_item(self, exchange: HttpExchange, principal: Principal) -> None:
        """`GET /v1/conversations/{id}/items/{item}`."""
        item_id = exchange.path_parameters["item"]
        await _send(exchange, await self._call("get_item", exchange, principal, item_id))

    async def delete_item(self, exchange: HttpExchange, principal: Principal) -> None:
        """`DELETE /v1/conversations/{id}/items/{item}`."""
        item_id = exchange.path_parameters["item"]
        conversation = await self._call("delete_item", exchange, principal, item_id)
        await _send(exchange, _describe(conversation))

    async def _call(
        self,
        method: str,
        exchange: HttpExchange,
        principal: Principal,
        *arguments: object,
        **options: object,
    ) -> Any:  # noqa: ANN401 - the result of the method
        """Call a method of the store of conversations with the sender and the conversation in the path.

        Raises:
            ApiError: 404 if the conversation does not exist.
        """
        run = getattr(self._state.store.conversations, method)
        conversation_id = exchange.path_parameters["id"]
        return await self._state.call(
            run, item_owner(principal), conversation_id, *arguments, **options
        )


def _describe(conversation: StoredConversation) -> dict[str, Any]:
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": int(conversation.created_at),
        "metadata": conversation.metadata,
    }


async def _send(exchange: HttpExchange, content: dict[str, Any]) -> None:
    await exchange.send_response(200, _encode(content))
