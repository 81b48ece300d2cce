"""Handlers of OpenAI's Batch API (types of the SDK `openai` 3.52)."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from argosy.gateway.batches.batch_line import BATCH_PATHS, MESSAGES_PATH
from argosy.gateway.batches.batch_state import BatchState
from argosy.gateway.dialects import ExpiresAfter, item_owner, parse_query_string
from argosy.gateway.principal import Principal
from argosy.http_server import HttpExchange
from argosy.protocol import ApiError, invalid_request, parse_body, parse_query
from argosy.protocol.dialects import Metadata
from argosy.store import ENDED_STATUSES, Batch, BatchDetails, BatchError

ID_PREFIX = "batch_"
MAX_FILE_BYTES = 200 * 1024 * 1024
MIN_WINDOW_S, MAX_WINDOW_S = 30 * 60, 7 * 86_400
_UNITS_S = {"m": 60, "h": 3600, "d": 86_400}
_WINDOW = re.compile(r"(\d{1,6})([mhd])", re.ASCII)
_encode = msgspec.json.encode


class CreateBatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchPageQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Query parameters of the list."""

    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 20


class BatchHandlers:
    """Handlers of `/v1/batches` and the paths below.

    Args:
        batches: Creates and cancels batches.
    """

    def __init__(self, batches: BatchState) -> None:
        self._batches = batches
        self._state = batches.state

    async def create(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /v1/batches`."""
        store = self._state.store
        body = await exchange.read_body()
        request = await exchange.parse_body(body, partial(parse_body, CreateBatchRequest))
        if request.endpoint not in BATCH_PATHS or request.endpoint == MESSAGES_PATH:
            allowed = ", ".join(path for path in BATCH_PATHS if path != MESSAGES_PATH)
            message = f"Batches are for the endpoints {allowed}."
            raise invalid_request(message, param="endpoint")
        window_s = _parse_window(request.completion_window)
        file = await self._state.call(store.files.get, item_owner(principal), request.input_file_id)
        if file.purpose != "batch":
            message = f"The file has the purpose {file.purpose!r}. Upload it with 'batch'."
            raise invalid_request(message, param="input_file_id")
        if file.size > MAX_FILE_BYTES:
            message = (
                f"The file has {file.size} bytes, and a batch at most {MAX_FILE_BYTES}. Divide it."
            )
            raise invalid_request(message, param="input_file_id")
        expires_after = request.output_expires_after
        details = BatchDetails(
            path=request.endpoint,
            completion_window=request.completion_window,
            input_file=file.id,
            output_expires_after_s=None if expires_after is None else expires_after.seconds,
            metadata=request.metadata,
        )
        batch = await self._batches.create(
            *(exchange, principal, ID_PREFIX, details), window_s=window_s, request=body
        )
        await exchange.send_response(200, _encode(describe_batch(batch)))

    async def list_batches(self, exchange: HttpExchange, principal: Principal) -> None:
        """`GET /v1/batches`."""
        query = parse_query(BatchPageQuery, parse_query_string(exchange))
        page, has_more = await self._state.call(
            self._state.store.batches.list_page,
            *(item_owner(principal), ID_PREFIX, query.limit),
            after=query.after,
        )
        described = {
            "object": "list",
            "data": [describe_batch(batch) for batch in page],
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
            "has_more": has_more,
        }
        await exchange.send_response(200, _encode(described))

    async def get(self, exchange: HttpExchange, principal: Principal) -> None:
        """`GET /v1/batches/{id}`."""
        batch = await self._state.call(
            self._state.store.batches.get, item_owner(principal), _read_id(exchange)
        )
        await exchange.send_response(200, _encode(describe_batch(batch)))

    async def cancel(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /v1/batches/{id}/cancel`."""
        batch = await self._batches.cancel(principal, _read_id(exchange))
        await exchange.send_response(200, _encode(describe_batch(batch)))


def _read_id(exchange: HttpExchange) -> str:
    """Return the id in the path. Raises ApiError (404) for an id of the other API's batches."""
    batch_id = exchange.path_parameters["id"]
    if not batch_id.startswith(ID_PREFIX):
        raise ApiError(404, "not_found", f"There is no batch {batch_id[:200]!r}.")
    return batch_id


def _parse_window(text: str) -> float:
    """Return the seconds of a completion window such as `24h`. Raises ApiError (400)."""
    parsed = _WINDOW.fullmatch(text)
    seconds = int(parsed[1]) * _UNITS_S[parsed[2]] if parsed else 0
    if not MIN_WINDOW_S <= seconds <= MAX_WINDOW_S:
        message = "The completion window is a time from 30m to 7d, such as 24h."
        raise invalid_request(message, param="completion_window")
    return seconds


def describe_batch(batch: Batch) -> dict[str, Any]:
    """Return a batch as the API shows it."""
    details = batch.details
    ended_at = {
        f"{status}_at": _whole(details.ended_at) if batch.status == status else None
        for status in ENDED_STATUSES
    }
    errors = [_describe_error(error) for error in details.errors]
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": details.path,
        "model": details.models[0] if len(details.models) == 1 else None,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": details.input_file,
        "completion_window": details.completion_window,
        "status": batch.status,
        "output_file_id": details.output_file or None,
        "error_file_id": details.error_file or None,
        "created_at": int(batch.created_at),
        "in_progress_at": _whole(details.in_progress_at),
        "expires_at": int(batch.expires_at),
        "finalizing_at": _whole(details.finalizing_at),
        "cancelling_at": _whole(details.cancelling_at),
        **ended_at,
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed,
        },
        "usage": {
            "input_tokens": batch.input_tokens,
            "input_tokens_details": {"cached_tokens": batch.cached_tokens},
            "output_tokens": batch.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": batch.input_tokens + batch.output_tokens,
        },
        "metadata": details.metadata,
    }


def _describe_error(error: BatchError) -> dict[str, Any]:
    return {"code": error.code, "line": error.line, "message": error.message, "param": error.param}


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)
