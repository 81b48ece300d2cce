"""Handlers that create responses of OpenAI's Responses API: by request or event, in the background, and compactions."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec

from argosy.gateway.dialects.background_responses import (
    BackgroundResponses,
    EventLog,
    claim_background_key,
)
from argosy.gateway.dialects.dialect import (
    create_identity,
    name_ignored_fields,
    start_rendering,
    start_translation,
)
from argosy.gateway.dialects.response_state import ResponseState, item_owner
from argosy.gateway.dialects.stored_response_handlers import (
    StoredResponseHandlers,
    follow_events,
)
from argosy.gateway.filters import IDEMPOTENCY_KEY_HEADER
from argosy.gateway.http_route import Handler
from argosy.gateway.principal import Principal
from argosy.gateway.prompt_rendering import PromptReference
from argosy.http_server import HttpExchange
from argosy.policy import MemoryEntry, TenantMemory
from argosy.protocol import (
    ApiError,
    JsonObject,
    format_event,
    invalid_request,
    parse_body,
    parse_request_body,
)
from argosy.protocol.dialects import (
    ClientEvent,
    CompactRequest,
    ObjectTranslator,
    ResponsesOutput,
    ResponsesRequest,
    TranslatedRequest,
    assign_item_ids,
    encode_responses_error,
    list_references,
    normalize_input,
    parse_create_event,
    parse_responses_request,
    render_stored_events,
    resolve_references,
    translate_compact_request,
    translate_responses_request,
)
from argosy.store import StoredResponse

R = TypeVar("R", bound=ResponsesRequest)

_ENDED_NORMALLY = frozenset({"completed", "incomplete"})
_ITEM_ID_BYTES = 16


class ResponsesHandlers:
    """Handlers that run responses as chats, and store them.

    Args:
        state: Stored responses and conversations.
        background: Background responses.
        stored: Handlers of stored responses.
        chat: Handler of chats.
        tokenize: Handler of `/tokenize`.
        refuse_unknown_fields: Whether unknown fields are errors.
    """

    def __init__(
        self,
        state: ResponseState,
        background: BackgroundResponses,
        stored: StoredResponseHandlers,
        chat: Handler,
        tokenize: Handler,
        *,
        refuse_unknown_fields: bool,
    ) -> None:
        self._state = state
        self._stored = stored
        self._background = background
        self.memory = background.memory
        self._chat = chat
        self._tokenize = tokenize
        self._refuse_unknown = refuse_unknown_fields

    async def create(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /v1/responses`."""
        body = await exchange.read_body()
        request, ignored = await exchange.parse_body(
            body,
            partial(parse_responses_request, ResponsesRequest, refuse_unknown=self._refuse_unknown),
        )
        name_ignored_fields(exchange, ignored)
        if request.background:
            self._check_background(request)
        elif request.store and not self._state.has_store:
            name_ignored_fields(exchange, ("store",))
        request = await self._check_room(exchange, principal, request, len(body))
        translated, items, _ = await self._translate(exchange, principal, request)
        if request.background:
            await self._start_background(exchange, principal, request, translated, items)
            return

        async def save(response: dict[str, Any]) -> None:
            await self._save(exchange, principal, request, items, response)

        start_translation(exchange, translated, encode_responses_error, on_end=save)
        await self._chat(exchange, principal)

    async def create_in_session(
        self, exchange: HttpExchange, principal: Principal, last: SessionHistory
    ) -> None:
        """Handle the event `response.create` of a WebSocket.

        Args:
            exchange: The event.
            principal: Sender of the event.
            last: Items of the connection's last response, input and output with those that it continues. As in
                OpenAI's API, a response cannot be continued again if the attempt fails.
        """
        body = await exchange.read_body()
        request, _ = await exchange.parse_body(
            body, partial(parse_create_event, refuse_unknown=self._refuse_unknown)
        )
        request = await self._check_room(exchange, principal, request, len(body))
        translated, items, history = await self._translate(
            exchange, principal, request, last.pop(request.previous_response_id)
        )

        async def save(response: dict[str, Any]) -> None:
            if response["status"] in _ENDED_NORMALLY:
                last.keep(principal, response["id"], [*history, *items, *response["output"]])
            await self._save(exchange, principal, request, items, response)

        if request.generate is False:
            response = translated.output.describe_empty(
                create_identity(exchange, request.model or "")
            )
            async with self._state.reserve_request(exchange, principal):
                await save(response)
            await exchange.start_stream()
            await exchange.write(b"".join(render_stored_events(response)))
            await exchange.end_stream()
            return
        start_translation(exchange, translated, encode_responses_error, on_end=save)
        await self._chat(exchange, principal)

    async def count_tokens(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /v1/responses/input_tokens`."""
        body = await exchange.read_body()
        request, ignored = await exchange.parse_body(
            body,
            partial(parse_responses_request, ResponsesRequest, refuse_unknown=self._refuse_unknown),
        )
        translated, _, _ = await self._translate(exchange, principal, request)
        name_ignored_fields(exchange, (*ignored, *translated.ignored))
        counted = ("model", "messages", "tools", *PromptReference.__struct_fields__)
        fields = {
            name: translated.body[name] for name in counted if translated.body.get(name) is not None
        }
        translator = ObjectTranslator(
            lambda tokens: {"object": "response.input_tokens", "input_tokens": tokens["count"]},
            encode_responses_error,
        )
        exchange.translate(
            msgspec.json.encode(fields | {"add_generation_prompt": True}), translator
        )
        await self._tokenize(exchange, principal)

    async def compact(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /v1/responses/compact`: summarise a conversation into one encrypted item."""
        body = await exchange.read_body()
        request, ignored = await exchange.parse_body(
            body, partial(parse_request_body, CompactRequest, refuse_unknown=self._refuse_unknown)
        )
        name_ignored_fields(exchange, ignored)
        items, history = await self._load_input(
            exchange,
            principal,
            normalize_input(request.input),
            previous=request.previous_response_id,
        )
        cipher = await self._state.build_cipher(principal)
        identity = create_identity(exchange, request.model or "")
        translated = translate_compact_request(request, cipher, identity, items, history)
        start_rendering(exchange, translated, encode_responses_error)
        await self._chat(exchange, principal)

    # --- state -----------------------------------------------------------------------------------

    def _is_stored(self, request: ResponsesRequest) -> bool:
        return request.store is not False and self._state.has_store

    def _check_background(self, request: ResponsesRequest) -> None:
        if not self._is_stored(request):
            message = (
                "A background response is read from the store. Send 'store': true to a gateway with a store, "
                "or remove 'background'."
            )
            raise invalid_request(message, "background", "unsupported_parameter")
        self._background.check_capacity()

    async def _check_room(
        self, exchange: HttpExchange, principal: Principal, request: R, needed: int
    ) -> R:
        """Return the request, or one that stores nothing if the tenant stores too much and did not ask to store it.

        Raises:
            ApiError: 413 if the client asked for what needs room.
        """
        exchange.forbids_storage = request.store is False
        if not (self._is_stored(request) or request.conversation_id):
            return request
        try:
            await self._state.check_room(principal, needed)
        except ApiError as error:
            if error.status != 413 or (
                request.store or request.background or request.conversation_id
            ):
                raise
            name_ignored_fields(exchange, ("store",))
            return msgspec.structs.replace(request, store=False)
        return request

    async def _load_input(
        self,
        exchange: HttpExchange,
        principal: Principal,
        items: Sequence[JsonObject],
        *,
        previous: str | None,
        conversation: str | None = None,
        history: Sequence[JsonObject] | None = None,
    ) -> tuple[list[JsonObject], Sequence[JsonObject]]:
        """Return the new input items with an id each, and the items of earlier turns unless they are known."""
        references = list_references(items)
        stored: Mapping[str, JsonObject] = {}
        if references or (history is None and (previous or conversation)):
            # The chat counts the request, but nothing is read for one that it would refuse.
            async with self._state.reserve_request(exchange, principal, requests=0):
                if history is None and previous is not None:
                    history = await self._state.load_history(principal, previous)
                elif history is None and conversation is not None:
                    load = self._state.store.conversations.load_history
                    history = await self._state.call(load, item_owner(principal), conversation)
                stored = await self._state.find_items(principal, references)
        history = history or ()
        if references:
            items = resolve_references(items, history, stored)
        return assign_item_ids(items, new_item_id), history

    async def _translate(
        self,
        exchange: HttpExchange,
        principal: Principal,
        request: ResponsesRequest,
        history: Sequence[JsonObject] | None = None,
    ) -> tuple[TranslatedRequest[ResponsesOutput], list[JsonObject], Sequence[JsonObject]]:
        """Translate a request to a chat.

        Returns:
            The chat, the new input items, and the items of earlier turns, which are loaded if they are None.
        """
        items, history = await self._load_input(
            exchange,
            principal,
            request.input_items(),
            previous=request.previous_response_id,
            conversation=request.conversation_id,
            history=history,
        )
        cipher = await self._state.build_cipher(principal)
        translated = translate_responses_request(
            request, cipher, items, history, is_stored=self._is_stored(request)
        )
        return translated, items, history

    async def _save(
        self,
        exchange: HttpExchange,
        principal: Principal,
        request: ResponsesRequest,
        items: Sequence[JsonObject],
        response: dict[str, Any],
    ) -> None:
        """Store a response that has ended, and append its items to its conversation."""
        if self._is_stored(request):
            await self._state.save(exchange, principal, describe_stored(request, items, response))
        conversation = request.conversation_id
        if conversation is not None and response["status"] in _ENDED_NORMALLY:
            appended = [*items, *response["output"]]
            await self._state.append_items(exchange, principal, conversation, appended)

    async def _start_background(
        self,
        exchange: HttpExchange,
        principal: Principal,
        request: ResponsesRequest,
        translated: TranslatedRequest[ResponsesOutput],
        items: Sequence[JsonObject],
    ) -> None:
        """Store a response that runs, run it in the background, and answer with it or with its events."""
        event_log = EventLog()
        # The key is that of this request, and not of the chat that it starts.
        detached = exchange.detach(event_log, dropped_headers={IDEMPOTENCY_KEY_HEADER})
        body = msgspec.structs.replace(
            translated,
            body=translated.body | {"stream": True, "stream_options": {"include_usage": True}},
        )
        identity = create_identity(detached, request.model or "")
        response = translated.output.describe_start(identity)
        response_id = response["id"]
        state, owner = self._state, item_owner(principal)
        state.choose_filter(detached, principal, body.body)
        started = describe_stored(request, items, response, is_background=True)
        started = await state.redact_response(detached, started)
        claim = await claim_background_key(
            state.idempotency_store, exchange, principal, request, response_id
        )
        if isinstance(claim, str):
            exchange.extra_headers.append((b"idempotent-replayed", b"true"))
            await self._stored.send(exchange, principal, claim, is_stream=bool(request.stream))
            return

        async def finish(ended: dict[str, Any]) -> None:
            stored = await state.redact_response(detached, describe_stored(request, (), ended))
            parts = (owner, stored.id, stored.status, stored.body, stored.output)
            has_finished = await state.call(state.store.responses.finish, *parts)
            conversation = request.conversation_id
            if has_finished and conversation is not None and ended["status"] in _ENDED_NORMALLY:
                ended_items = [*items, *ended["output"]]
                await state.append_items(detached, principal, conversation, ended_items)

        is_started = False
        try:
            size_bytes = start_translation(
                detached, body, encode_responses_error, on_end=finish, identity=identity
            )
            self._background.reserve(response_id, principal, event_log, size_bytes)
            async with state.reserve_request(exchange, principal, requests=0):
                await state.call(state.store.responses.create, owner, started, state.retention_s)
            is_started = True
        finally:
            if not is_started:
                self._background.release(response_id)
            if claim is not None:
                claim.settle(is_started=is_started)
        self._background.start(detached, event_log, principal, started)
        if request.stream:
            await follow_events(exchange, event_log, first=0)
        else:
            queued = msgspec.json.encode(response | {"status": "queued"})
            await exchange.send_response(200, queued)


def describe_stored(
    request: ResponsesRequest,
    items: Sequence[JsonObject],
    response: dict[str, Any],
    *,
    is_background: bool = False,
) -> StoredResponse:
    """Return a response in the form in which it is stored."""
    return StoredResponse(
        id=response["id"],
        status=response["status"],
        previous=request.previous_response_id,
        body={name: value for name, value in response.items() if name not in {"output", "status"}},
        input=items,
        output=response.get("output", ()),
        is_background=is_background,
    )


def new_item_id() -> str:
    """Return random hexadecimal digits for an item's id."""
    return secrets.token_hex(_ITEM_ID_BYTES)


class SessionHistory:
    """Items of a connection's last response, so that the next one can continue it without a store.

    They are encoded, so that an idle connection keeps no more than it counts, and dropped if they are too many.
    """

    def __init__(self, memory: TenantMemory) -> None:
        self._memory = memory
        self._entry: MemoryEntry | None = None
        self._items = b""

    def keep(self, principal: Principal, response_id: str, items: list[JsonObject]) -> None:
        """Keep the items of a response instead of those of an earlier one."""
        self.clear()
        encoded = msgspec.json.encode(items)
        entry = MemoryEntry(principal.tenant, response_id, len(encoded), self._drop)
        if self._memory.add_cached(entry):
            self._entry, self._items = entry, encoded

    def pop(self, response_id: str | None) -> list[JsonObject] | None:
        """Return the items of a response and forget them, or None if they are not kept."""
        if self._entry is None or self._entry.key != response_id:
            return None
        items: list[JsonObject] = msgspec.json.decode(self._items)
        self.clear()
        return items

    def clear(self) -> None:
        """Forget the items."""
        if self._entry is not None:
            self._memory.remove(self._entry)
            self._drop(self._entry.key)

    def _drop(self, _: str) -> None:
        self._entry, self._items = None, b""


@contextmanager
def open_responses_session(responses: ResponsesHandlers) -> Iterator[Handler]:
    """Provide the handler of one connection's events, and forget their history at the end."""
    history = SessionHistory(responses.memory)

    async def handle(exchange: HttpExchange, principal: Principal) -> None:
        body = await exchange.read_body()
        event = await exchange.parse_body(body, partial(parse_body, ClientEvent))
        match event.type:
            case "response.create":
                await responses.create_in_session(exchange, principal, history)
            case "response.steer":
                await _send_event(exchange, _describe_refused_steering(event))
            case "response.processed":  # an acknowledgement of Codex
                await _send_event(exchange, b"")
            case kind:
                message = f"The event type {kind[:64]!r} is unknown. Send 'response.create'."
                raise invalid_request(message, "type")

    try:
        yield handle
    finally:
        history.clear()


async def _send_event(exchange: HttpExchange, data: bytes) -> None:
    await exchange.start_stream()
    if data:
        await exchange.write(format_event(data))
    await exchange.end_stream()


def _describe_refused_steering(event: ClientEvent) -> bytes:
    """Return the event that gives steering input back to the client, which sends it in a request of its own."""
    message = "Steering is not supported. Send the input in a 'response.create' event that continues the response."
    return msgspec.json.encode(
        {
            "type": "response.steer.failed",
            "sequence_number": 0,
            "error": {
                "type": "invalid_request_error",
                "code": "steering_not_supported",
                "message": message,
            },
            "steer": {"previous_response_id": event.previous_response_id, "input": event.input},
        }
    )
