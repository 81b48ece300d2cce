"""Handlers of conversations of the Responses API."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from argosy.gateway.dialects.response_state import ResponseState, item_owner
from argosy.gateway.dialects.responses_handlers import new_item_id
from argosy.gateway.dialects.stored_lists import parse_page_query
from argosy.gateway.principal import Principal
from argosy.http_server import HttpExchange, check_method, not_found_error
from argosy.protocol import JsonObject, parse_body
from argosy.protocol.dialects import Metadata, assign_item_ids, normalize_input
from argosy.store import ItemOwner, StoredConversation

CONVERSATIONS_PATH = "/v1/conversations"
CONVERSATIONS_PREFIX = CONVERSATIONS_PATH + "/"
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
        request = parse_body(CreateConversationRequest, await exchange.read_body() or b"{}")
        items = assign_item_ids(normalize_input(request.items), new_item_id)
        state = self._state
        conversation = await state.call(
            state.store.conversations.create,
            *(item_owner(principal), request.metadata or {}, items, state.retention_s),
        )
        await _send(exchange, _describe(conversation))

    async def handle(self, exchange: HttpExchange, principal: Principal) -> None:
        """Handle a request for one conversation.

        Raises:
            ApiError: 404 if the path or the conversation does not exist, 405 for another method.
        """
        path = exchange.path.removeprefix(CONVERSATIONS_PREFIX).split("/")
        owner = item_owner(principal)
        match path:
            case [conversation_id]:
                await self._handle_conversation(exchange, owner, conversation_id)
            case [conversation_id, "items"]:
                await self._handle_items(exchange, owner, conversation_id)
            case [conversation_id, "items", item_id]:
                await self._handle_item(exchange, owner, conversation_id, item_id)
            case _:
                raise not_found_error(exchange.path, lambda _: False)

    async def _handle_conversation(
        self, exchange: HttpExchange, owner: ItemOwner, conversation_id: str
    ) -> None:
        call, conversations = self._state.call, self._state.store.conversations
        match check_method(exchange, ("GET", "POST", "DELETE")):
            case "GET":
                conversation = await call(conversations.get, owner, conversation_id)
                await _send(exchange, _describe(conversation))
            case "POST":
                request = parse_body(UpdateConversationRequest, await exchange.read_body())
                conversation = await call(
                    conversations.set_metadata, owner, conversation_id, request.metadata or {}
                )
                await _send(exchange, _describe(conversation))
            case _:
                await call(conversations.delete, owner, conversation_id)
                deleted = {"object": "conversation.deleted", "deleted": True}
                await _send(exchange, {"id": conversation_id, **deleted})

    async def _handle_items(
        self, exchange: HttpExchange, owner: ItemOwner, conversation_id: str
    ) -> None:
        call, conversations = self._state.call, self._state.store.conversations
        if check_method(exchange, ("GET", "POST")) == "GET":
            page = parse_page_query(exchange)
            items = await call(
                conversations.list_items, owner, conversation_id, **page.store_options()
            )
            await exchange.send_response(200, page.build_page(items))
            return
        request = parse_body(AddItemsRequest, await exchange.read_body())
        items = assign_item_ids(normalize_input(request.items), new_item_id)
        await call(
            conversations.append_items, owner, conversation_id, items, self._state.retention_s
        )
        added = {"data": items, "has_more": False}
        ids = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {}
        await _send(exchange, {"object": "list", **added, **ids})

    async def _handle_item(
        self, exchange: HttpExchange, owner: ItemOwner, conversation_id: str, item_id: str
    ) -> None:
        call, conversations = self._state.call, self._state.store.conversations
        if check_method(exchange, ("GET", "DELETE")) == "GET":
            item = await call(conversations.get_item, owner, conversation_id, item_id)
            await _send(exchange, item)
        else:
            conversation = await call(conversations.delete_item, owner, conversation_id, item_id)
            await _send(exchange, _describe(conversation))


def _describe(conversation: StoredConversation) -> dict[str, Any]:
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": int(conversation.created_at),
        "metadata": conversation.metadata,
    }


async def _send(exchange: HttpExchange, content: dict[str, Any]) -> None:
    await exchange.send_response(200, _encode(content))
