"""Handlers of Anthropic's Message Batches API (types of the SDK `anthropic` 2.12)."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from argosy.gateway.batches.batch_line import MESSAGES_PATH, LineFields
from argosy.gateway.batches.batch_state import BatchState
from argosy.gateway.dialects import item_owner, parse_query_string
from argosy.gateway.principal import Principal
from argosy.http_server import HttpExchange
from argosy.protocol import ApiError, invalid_request, parse_body, parse_query
from argosy.protocol.dialects import format_timestamp
from argosy.store import (
    ENDED_STATUSES,
    MAX_LINES,
    Batch,
    BatchDetails,
    BatchLine,
    ConflictError,
    EndedLine,
)

ID_PREFIX = "msgbatch_"
WINDOW_S = 24 * 3600.0
RESULTS_CONTENT_TYPE = b"application/x-jsonl"
_CustomId = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$(?!\n)")]
_encode = msgspec.json.encode


class MessageBatchRequest(msgspec.Struct, frozen=True):
    """Request of a message batch."""

    custom_id: _CustomId
    params: Raw


class CreateMessageBatchRequest(msgspec.Struct, frozen=True):
    """Body of `POST /v1/messages/batches`."""

    requests: Annotated[list[MessageBatchRequest], Meta(min_length=1, max_length=MAX_LINES)]


class MessageBatchPageQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Query parameters of the list."""

    before_id: str | None = None
    after_id: str | None = None
    limit: Annotated[int, Meta(ge=1, le=1000)] = 20


class MessageBatchHandlers:
    """Handlers of `/v1/messages/batches` and the paths below.

    Args:
        batches: Creates and cancels batches.
    """

    def __init__(self, batches: BatchState) -> None:
        self._batches = batches
        self._state = batches.state

    async def create(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /v1/messages/batches`."""
        _ = self._state.store  # 404 without one
        body = await exchange.read_body()
        lines = await exchange.parse_body(body, _parse_lines)
        models = self._batches.check_models((line.model for line in lines), principal)
        details = BatchDetails(path=MESSAGES_PATH, models=models)
        batch = await self._batches.create(
            *(exchange, principal, ID_PREFIX, details), window_s=WINDOW_S, request=body, lines=lines
        )
        await exchange.send_response(200, _encode(describe_message_batch(batch)))

    async def list_batches(self, exchange: HttpExchange, principal: Principal) -> None:
        """`GET /v1/messages/batches`."""
        query = parse_query(MessageBatchPageQuery, parse_query_string(exchange))
        if query.before_id is not None and query.after_id is not None:
            raise invalid_request("Send only one of 'before_id' and 'after_id'.", param="before_id")
        page, has_more = await self._state.call(
            self._state.store.batches.list_page,
            *(item_owner(principal), ID_PREFIX, query.limit),
            after=query.after_id,
            before=query.before_id,
        )
        described = {
            "data": [describe_message_batch(batch) for batch in page],
            "has_more": has_more,
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
        }
        await exchange.send_response(200, _encode(described))

    async def get(self, exchange: HttpExchange, principal: Principal) -> None:
        """`GET /v1/messages/batches/{id}`."""
        batch = await self._read(exchange, principal)
        await exchange.send_response(200, _encode(describe_message_batch(batch)))

    async def cancel(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /v1/messages/batches/{id}/cancel`."""
        batch = await self._batches.cancel(principal, _read_id(exchange))
        await exchange.send_response(200, _encode(describe_message_batch(batch)))

    async def delete(self, exchange: HttpExchange, principal: Principal) -> None:
        """`DELETE /v1/messages/batches/{id}`."""
        batch_id = _read_id(exchange)
        try:
            await self._state.call(
                self._state.store.batches.delete, item_owner(principal), batch_id
            )
        except ConflictError as error:
            raise ApiError(409, "conflict", str(error)) from error
        deleted = {"id": batch_id, "type": "message_batch_deleted"}
        await exchange.send_response(200, _encode(deleted))

    async def send_results(self, exchange: HttpExchange, principal: Principal) -> None:
        """`GET /v1/messages/batches/{id}/results`: a line of JSON for each request, in their order."""
        batch = await self._read(exchange, principal)
        if batch.status not in ENDED_STATUSES:
            message = "The batch has not ended. Its results follow then; see 'results_url'."
            raise ApiError(404, "not_found", message)
        read, start = self._state.store.batches.read_results, 0
        await exchange.start_stream(RESULTS_CONTENT_TYPE)
        while lines := await self._state.call(partial(read, batch.id, start)):
            for line in lines:
                await exchange.write(_encode(_describe_result(line)) + b"\n")
            start = lines[-1].line + 1
        await exchange.end_stream()

    async def _read(self, exchange: HttpExchange, principal: Principal) -> Batch:
        store = self._state.store
        return await self._state.call(store.batches.get, item_owner(principal), _read_id(exchange))


def _read_id(exchange: HttpExchange) -> str:
    """Return the id in the path. Raises ApiError (404) for an id of the other API's batches."""
    batch_id = exchange.path_parameters["id"]
    if not batch_id.startswith(ID_PREFIX):
        raise ApiError(404, "not_found", f"There is no batch {batch_id[:200]!r}.")
    return batch_id


def _parse_lines(body: bytes) -> list[BatchLine]:
    """Parse and check the requests of a batch.

    Raises:
        ApiError: 400 if one is invalid.
    """
    requests = parse_body(CreateMessageBatchRequest, body).requests
    known: set[str] = set()
    lines: list[BatchLine] = []
    for number, request in enumerate(requests):
        where = f"requests.{number}"
        if request.custom_id in known:
            message = (
                f"Two requests have the custom_id {request.custom_id!r}. Make each one unique."
            )
            raise invalid_request(message, param=f"{where}.custom_id")
        known.add(request.custom_id)
        try:
            fields = msgspec.json.decode(request.params, type=LineFields)
        except msgspec.ValidationError as error:
            raise invalid_request(str(error), param=f"{where}.params") from error
        if fields.stream:
            message = "Requests of a batch are not streamed. Remove 'stream'."
            raise invalid_request(message, param=f"{where}.params.stream")
        lines.append(BatchLine(number, request.custom_id, fields.model, bytes(request.params)))
    return lines


def describe_message_batch(batch: Batch) -> dict[str, Any]:
    """Return a batch as the API shows it. Its counts are those of requests that run until it ends."""
    details, has_ended = batch.details, batch.status in ENDED_STATUSES
    counts = {"processing": 0 if has_ended else batch.total}
    expired = batch.closed if batch.status == "expired" else 0
    ended = {
        "succeeded": batch.completed,
        "errored": batch.failed,
        "canceled": batch.closed - expired,
        "expired": expired,
    }
    counts |= {name: count if has_ended else 0 for name, count in ended.items()}
    processing = "canceling" if batch.status == "cancelling" else "in_progress"
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": "ended" if has_ended else processing,
        "request_counts": counts,
        "created_at": format_timestamp(batch.created_at),
        "expires_at": format_timestamp(batch.expires_at),
        "ended_at": _format_time(details.ended_at),
        "cancel_initiated_at": _format_time(details.cancelling_at),
        "archived_at": None,
        # Without a host, so that the client asks the address that it knows.
        "results_url": f"{MESSAGES_PATH}/batches/{batch.id}/results" if has_ended else None,
    }


def _format_time(seconds: float | None) -> str | None:
    return None if seconds is None else format_timestamp(seconds)


def _describe_result(line: EndedLine) -> dict[str, Any]:
    result: dict[str, Any]
    if line.body is None or line.status_code is None:
        result = {"type": "expired" if line.state == "expired" else "canceled"}
    elif line.status_code < 300:
        message = msgspec.json.decode(line.body, type=dict[str, Any])
        message.setdefault("usage", {})["service_tier"] = "batch"
        result = {"type": "succeeded", "message": message}
    else:
        result = {"type": "errored", "error": Raw(line.body)}
    return {"custom_id": line.custom_id, "result": result}
