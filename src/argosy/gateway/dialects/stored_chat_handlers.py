"""Stored chat completions: chats with `store: true`, which are listed, read, described by metadata and deleted later.

They are records of the store of responses, within the same bound of bytes, and differ from responses by their ids.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Literal
from urllib.parse import parse_qsl

import msgspec
import structlog
from msgspec import Raw

from argosy.gateway.backends import MALFORMED_EVENT_ERRORS
from argosy.gateway.dialects.conversation_handlers import UpdateConversationRequest
from argosy.gateway.dialects.dialect import name_ignored_fields
from argosy.gateway.dialects.response_state import CHAT_ID_PREFIX, ResponseState, item_owner
from argosy.gateway.dialects.stored_response_handlers import ItemPageQuery, parse_query_string
from argosy.gateway.principal import Principal
from argosy.gateway.proxy import AggregatedChoice, CompletionHandlers
from argosy.gateway.request_context import CHAT
from argosy.gateway.request_fields import parse_raw_fields
from argosy.http_server import HttpExchange
from argosy.protocol import (
    EVENT_END,
    SSE_CONTENT_TYPE,
    ApiError,
    EventSplitter,
    convert_field,
    event_data,
    format_event,
    parse_body,
    parse_query,
)
from argosy.protocol.dialects import Metadata
from argosy.store import StoredResponse

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

MAX_COMPLETION_BYTES = 32 * 1024 * 1024
"""Bytes of a stream after which its completion is not stored."""
_REPEATED_FIELDS = (
    *("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed"),
    *("tools", "tool_choice", "response_format"),
)
"""Fields of the request that a stored completion repeats."""
_DONE = b"[DONE]"
_encode = msgspec.json.encode


class ChatPageQuery(ItemPageQuery, frozen=True, kw_only=True):
    """Query parameters of `GET /v1/chat/completions`, besides `metadata[KEY]`, and of a list of messages."""

    order: Literal["asc", "desc"] = "asc"
    model: str | None = None


class StoredChatHandlers:
    """Handlers of `/v1/chat/completions` and the paths below.

    Args:
        state: Stored responses.
        generation: Handlers of chats.
    """

    def __init__(self, state: ResponseState, generation: CompletionHandlers) -> None:
        self._state = state
        self._generation = generation

    async def create(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /v1/chat/completions`."""
        body = await exchange.read_body()
        if b'"store"' in body:
            fields = await exchange.parse_body(body, parse_raw_fields)
            if bytes(fields.get("store", b"")) == b"true":
                await self._prepare(exchange, principal, fields, len(body))
                body = await exchange.read_body()
        await self._generation.handle(exchange, principal, CHAT, body)

    async def _prepare(
        self, exchange: HttpExchange, principal: Principal, fields: dict[str, Raw], size: int
    ) -> None:
        """Replace a request by one without the fields about storing, and store the completion when it has ended.

        Raises:
            ApiError: 400 if the metadata is invalid. 413 if the tenant stores too much.
        """
        stored = {
            name: msgspec.json.decode(fields[name]) for name in _REPEATED_FIELDS if name in fields
        }
        metadata = msgspec.json.decode(fields.pop("metadata", Raw(b"null")))
        del fields["store"]
        body = _encode(fields)
        if not self._state.has_store:
            name_ignored_fields(exchange, ("store",))
        else:
            stored["metadata"] = convert_field(Metadata, metadata or {}, "metadata")
            await self._state.check_room(principal, size)
        completion_id = CHAT_ID_PREFIX + exchange.unique_id

        async def save(completion: dict[str, Any]) -> None:
            if not self._state.has_store:
                return
            messages = msgspec.json.decode(fields["messages"], type=list[dict[str, Any]])
            numbered = [
                message | {"id": f"{completion_id}-{number}"}
                for number, message in enumerate(messages)
            ]
            response = StoredResponse(
                id=completion_id,
                status="completed",
                body=stored | completion,
                input=numbered,
            )
            await self._state.save(exchange, principal, response)

        exchange.translate(body, _CompletionRecorder(completion_id, save))

    async def list_completions(self, exchange: HttpExchange, principal: Principal) -> None:
        """`GET /v1/chat/completions`."""
        parameters = parse_query_string(exchange)
        metadata = {
            name[len("metadata[") : -1]: value
            for name, value in parse_qsl(exchange.query.decode("latin-1"), keep_blank_values=True)
            if name.startswith("metadata[") and name.endswith("]")
        }
        page = parse_query(ChatPageQuery, parameters)
        bodies, has_more = await self._state.call(
            self._state.store.responses.list_bodies,
            *(item_owner(principal), CHAT_ID_PREFIX),
            matches=lambda body: (
                (page.model is None or body.get("model") == page.model)
                and body.get("metadata", {}).items() >= metadata.items()
            ),
            **page.store_options(),
        )
        await exchange.send_response(200, page.build_page(bodies, has_more=has_more))

    async def get(self, exchange: HttpExchange, principal: Principal) -> None:
        """`GET /v1/chat/completions/{id}`."""
        response = await self._call("get", exchange, principal)
        await exchange.send_response(200, _encode(response.body))

    async def update(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /v1/chat/completions/{id}`: replace the metadata."""
        body = await exchange.read_body()
        request = await exchange.parse_body(body, partial(parse_body, UpdateConversationRequest))
        self._state.choose_filter(exchange, principal)
        metadata = await self._state.redact(exchange, request.metadata or {})
        completion = await self._call("set_metadata", exchange, principal, metadata=metadata)
        await exchange.send_response(200, _encode(completion))

    async def delete(self, exchange: HttpExchange, principal: Principal) -> None:
        """`DELETE /v1/chat/completions/{id}`."""
        await self._call("delete", exchange, principal)
        deleted = {"object": "chat.completion.deleted", "deleted": True}
        completion_id = exchange.path_parameters["id"]
        await exchange.send_response(200, _encode({"id": completion_id, **deleted}))

    async def list_messages(self, exchange: HttpExchange, principal: Principal) -> None:
        """`GET /v1/chat/completions/{id}/messages`: the messages of the request."""
        page = parse_query(ChatPageQuery, parse_query_string(exchange))
        messages, has_more = await self._call(
            "list_input", exchange, principal, **page.store_options()
        )
        await exchange.send_response(200, page.build_page(messages, has_more=has_more))

    async def _call(
        self, method: str, exchange: HttpExchange, principal: Principal, **options: object
    ) -> Any:  # noqa: ANN401 - the result of the method
        """Call a method of the store with the completion in the path.

        Raises:
            ApiError: 404 if the completion does not exist.
        """
        completion_id = exchange.path_parameters["id"]
        if not completion_id.startswith(CHAT_ID_PREFIX):
            message = f"The chat completion {completion_id[:200]!r} is not stored."
            raise ApiError(404, "not_found", message)
        run = getattr(self._state.store.responses, method)
        return await self._state.call(run, item_owner(principal), completion_id, **options)


class _CompletionRecorder:
    """Translator that gives a completion its id, and records what the client receives of it until its end.

    Args:
        completion_id: The id.
        save: Stores the completion. The client receives the end of the response afterwards.
    """

    stream_content_type = SSE_CONTENT_TYPE

    def __init__(
        self, completion_id: str, save: Callable[[dict[str, Any]], Awaitable[None]]
    ) -> None:
        self._id = completion_id
        self._save = save
        self._splitter = EventSplitter()
        self._choices: defaultdict[int, AggregatedChoice] = defaultdict(AggregatedChoice)
        self._envelope: dict[str, Any] = {}
        self._recorded_bytes = 0
        self._last_event = b""
        """The event that ends the stream."""

    async def translate_response(self, status: int, body: bytes, request_id: str) -> bytes:
        """Store a whole completion. Errors stay as they are."""
        del request_id
        if status != 200:
            return body
        completion = msgspec.json.decode(body, type=dict[str, Any]) | {"id": self._id}
        await self._save(completion)
        return _encode(completion)

    def translate_events(self, events: bytes) -> bytes:
        """Record events. The one that ends the stream is withheld until `finish_stream`."""
        return b"".join(map(self._translate_event, self._splitter.feed(events)))

    def translate_comment(self, comment: bytes) -> bytes:
        """Return the comment unchanged."""
        return comment

    def translate_heartbeat(self, event: bytes) -> bytes:
        """Return the event unchanged."""
        return event

    async def finish_stream(self) -> bytes:
        """Store the completion, unless the stream has failed, and return the event that ends it."""
        if self._last_event and self._envelope and self._recorded_bytes <= MAX_COMPLETION_BYTES:
            try:
                completion = self._build_completion()
            except MALFORMED_EVENT_ERRORS as error:
                log.warning("response_not_stored", response=self._id, reason=str(error))
            else:
                await self._save(completion)
        return self._last_event

    def _translate_event(self, event: bytes) -> bytes:
        data = event_data(event)
        if data is None:
            return event + EVENT_END
        if data == _DONE:
            self._last_event = event + EVENT_END
            return b""
        self._recorded_bytes += len(data)
        try:
            chunk = msgspec.json.decode(data, type=dict[str, Any])
            self._record(chunk)
        except MALFORMED_EVENT_ERRORS as error:
            log.warning("response_not_stored", response=self._id, reason=str(error))
            self._recorded_bytes = MAX_COMPLETION_BYTES + 1
            return event + EVENT_END
        return (
            event + EVENT_END
            if chunk.get("id") == self._id
            else format_event(_encode(chunk | {"id": self._id}))
        )

    def _record(self, chunk: dict[str, Any]) -> None:
        if "choices" not in chunk or self._recorded_bytes > MAX_COMPLETION_BYTES:
            return
        self._envelope |= {
            name: value
            for name, value in chunk.items()
            if name not in {"choices", "object"} and value is not None
        }
        for choice in chunk["choices"]:
            unset = {"finish_reason": None, "stop_reason": None}
            self._choices[choice.get("index", 0)].add_chunk(unset | choice)

    def _build_completion(self) -> dict[str, Any]:
        choices = [self._choices[index].build_chat_choice(index) for index in sorted(self._choices)]
        fields = {"id": self._id, "object": "chat.completion", "choices": choices}
        return self._envelope | fields
