"""Handlers of stored responses: retrieve, follow, cancel, delete, and list their input."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta

from argosy.gateway.dialects.background_responses import (
    COUNTED_BYTES,
    BackgroundResponses,
    EventLog,
)
from argosy.gateway.dialects.response_state import (
    ResponseState,
    check_response_id,
    item_owner,
)
from argosy.gateway.principal import Principal
from argosy.http_server import DisconnectedError, HttpExchange
from argosy.protocol import format_comment, invalid_request, parse_query
from argosy.protocol.dialects import render_end_event, render_stored_events
from argosy.store import RUNNING_STATUSES, StoredResponse

POLL_INTERVAL_S = 1.0
"""Interval at which a response that runs on another gateway is read from the store."""
KEEPALIVE_INTERVAL_S = 15.0
_KEEPALIVE = format_comment(b"keep-alive")
_encode = msgspec.json.encode


class ItemPageQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Query parameters of a list."""

    after: str | None = None
    """Id of the item after which the page starts."""
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"

    def store_options(self) -> dict[str, Any]:
        """Return the arguments of the store's methods."""
        return {"after": self.after, "limit": self.limit, "is_descending": self.order == "desc"}

    @staticmethod
    def build_page(page: Sequence[dict[str, Any]], *, has_more: bool) -> bytes:
        """Build the page of items that were read with `store_options`."""
        return msgspec.json.encode(
            {
                "object": "list",
                "data": page,
                "first_id": page[0]["id"] if page else None,
                "last_id": page[-1]["id"] if page else None,
                "has_more": has_more,
            }
        )


def parse_query_string(exchange: HttpExchange) -> dict[str, str]:
    """Return the query parameters, the last of each name. Clients repeat `include[]`, which has no effect."""
    return dict(parse_qsl(exchange.query.decode("latin-1"), keep_blank_values=True))


def parse_page_query(exchange: HttpExchange) -> ItemPageQuery:
    """Parse the query of a list.

    Raises:
        ApiError: 400 if a parameter is invalid.
    """
    return parse_query(ItemPageQuery, parse_query_string(exchange))


class RetrieveQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Query parameters of `GET /v1/responses/{id}`."""

    stream: bool = False
    starting_after: Annotated[int, Meta(ge=0)] | None = None
    """Sequence number of the last event that the client has."""


class StoredResponseHandlers:
    """Handlers of `/v1/responses/{id}` and the paths below.

    Args:
        state: Stored responses.
        background: Background responses.
    """

    def __init__(self, state: ResponseState, background: BackgroundResponses) -> None:
        self._state = state
        self._background = background

    async def _call(
        self, method: str, principal: Principal, response_id: str, **options: object
    ) -> Any:  # noqa: ANN401 - the result of the method
        """Call a method of the store of responses.

        Raises:
            ApiError: 404 if the response does not exist.
        """
        check_response_id(response_id)
        run = getattr(self._state.store.responses, method)
        return await self._state.call(run, item_owner(principal), response_id, **options)

    async def retrieve(self, exchange: HttpExchange, principal: Principal) -> None:
        """`GET /v1/responses/{id}`."""
        query = parse_query(RetrieveQuery, parse_query_string(exchange))
        first = 0 if query.starting_after is None else query.starting_after + 1
        response_id = exchange.path_parameters["id"]
        await self.send(exchange, principal, response_id, is_stream=query.stream, first=first)

    async def send(
        self,
        exchange: HttpExchange,
        principal: Principal,
        response_id: str,
        *,
        is_stream: bool,
        first: int = 0,
    ) -> None:
        """Send a stored response as it is now, or its events from number `first` on.

        Raises:
            ApiError: 404 if the response does not exist.
        """
        event_log = self._background.find_log(response_id) if is_stream else None
        while True:
            async with self._state.slots.hold(exchange, principal.tenant):
                response: StoredResponse = await self._call("get", principal, response_id)
                if not is_stream:
                    await exchange.send_response(200, _encode(response.render()))
                    return
                if event_log is None and response.status not in RUNNING_STATUSES:
                    await _send_stored_events(exchange, response, first)
                    return
                del response  # it may be large
            if event_log is not None:
                await follow_events(exchange, event_log, first)
                return
            await exchange.start_stream()  # of a response that runs on another gateway
            exchange.write_comment(_KEEPALIVE)
            await asyncio.sleep(POLL_INTERVAL_S)

    async def delete(self, exchange: HttpExchange, principal: Principal) -> None:
        """`DELETE /v1/responses/{id}`."""
        response_id = exchange.path_parameters["id"]
        await self._call("delete", principal, response_id)
        self._background.cancel(response_id)
        deleted: dict[str, Any] = {"id": response_id, "object": "response", "deleted": True}
        await exchange.send_response(200, _encode(deleted))

    async def cancel(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /v1/responses/{id}/cancel`."""
        response_id = exchange.path_parameters["id"]
        response = await self._call("get", principal, response_id)
        if not response.body.get("background"):
            message = (
                "Only background responses can be cancelled. Close the connection to cancel others."
            )
            raise invalid_request(message, "response_id")
        response = await self._call("cancel", principal, response_id)
        self._background.cancel(response_id)
        await exchange.send_response(200, _encode(response.render()))

    async def list_input(self, exchange: HttpExchange, principal: Principal) -> None:
        """`GET /v1/responses/{id}/input_items`."""
        page = parse_page_query(exchange)
        response_id = exchange.path_parameters["id"]
        items, has_more = await self._call(
            "list_input", principal, response_id, **page.store_options()
        )
        await exchange.send_response(200, page.build_page(items, has_more=has_more))


async def _send_stored_events(exchange: HttpExchange, response: StoredResponse, first: int) -> None:
    """Send the events of a response that has ended from number `first` on.

    The deltas of the first stream are not stored. A client that had some of them receives only the end.
    """
    ended = response.render()
    events = render_stored_events(ended) if first == 0 else [render_end_event(ended, first)]
    await exchange.start_stream()
    await exchange.write(b"".join(events))
    await exchange.end_stream()


async def follow_events(exchange: HttpExchange, event_log: EventLog, first: int) -> None:
    """Send the events of a background response from number `first` on, until it ends or the client disconnects.

    Raises:
        DisconnectedError: The client has disconnected. The response goes on.
    """
    await exchange.start_stream()
    position = first
    while True:
        try:
            async with asyncio.timeout(KEEPALIVE_INTERVAL_S):
                await event_log.wait_changed(position)
        except TimeoutError:
            exchange.write_comment(_KEEPALIVE)
        if exchange.is_disconnected:
            raise DisconnectedError
        events, size_bytes = [], 0
        while position < len(event_log.events) and size_bytes < COUNTED_BYTES:
            events.append(event_log.events[position])
            position, size_bytes = position + 1, size_bytes + len(events[-1])
        if events:
            await exchange.write(b"".join(events))
        if event_log.has_ended and position >= len(event_log.events):
            await exchange.end_stream()
            return
