"""Routes of the batch APIs."""

from __future__ import annotations

from functools import partial

from argosy.gateway.batches.batch_state import BatchState
from argosy.gateway.batches.message_batches import (
    RESULTS_CONTENT_TYPE,
    CreateMessageBatchRequest,
    MessageBatchHandlers,
    MessageBatchPageQuery,
)
from argosy.gateway.batches.openai_batches import (
    BatchHandlers,
    BatchPageQuery,
    CreateBatchRequest,
)
from argosy.gateway.dialects import ANTHROPIC, ANTHROPIC_ERROR, ResponseState
from argosy.gateway.http_route import UTILITY_ERRORS, Handler, HttpRoute
from argosy.gateway.model_registry import ModelRouter
from argosy.gateway.principal import Principal
from argosy.http_server import HttpExchange
from argosy.protocol import TEXT_SCHEMA, Operation, json_operation

_OBJECT = {"type": "object"}
_ERRORS = UTILITY_ERRORS | {
    "404": "It does not exist, belongs to another tenant, or the gateway has no store.",
    "409": "The batch has ended already, or not yet.",
    "422": "The idempotency key was used with another request.",
    "503": "The store cannot be reached. Retry after `Retry-After` seconds.",
}


def build_batch_routes(state: ResponseState, models: ModelRouter) -> list[HttpRoute]:
    """Return the routes of all batch APIs. Requests count against the limits of requests."""
    batches = BatchState(state, models)
    openai, messages = BatchHandlers(batches), MessageBatchHandlers(batches)
    describe_openai = partial(json_operation, response=_OBJECT, errors=_ERRORS)
    describe = partial(describe_openai, error_schema=ANTHROPIC_ERROR)
    results = Operation(
        "messageBatchResults",
        {RESULTS_CONTENT_TYPE.decode(): TEXT_SCHEMA},
        _ERRORS,
        error_schema=ANTHROPIC_ERROR,
    )
    path = "/v1/messages/batches"
    batch = f"{path}/{{id}}"
    create = describe("createMessageBatch", body=CreateMessageBatchRequest)
    list_batches = describe("listMessageBatches", query=MessageBatchPageQuery)
    openai_rows: list[tuple[str, str, Handler, Operation]] = [
        (
            "POST",
            "/v1/batches",
            openai.create,
            describe_openai("createBatch", body=CreateBatchRequest),
        ),
        (
            "GET",
            "/v1/batches",
            openai.list_batches,
            describe_openai("listBatches", query=BatchPageQuery),
        ),
        ("GET", "/v1/batches/{id}", openai.get, describe_openai("getBatch")),
        ("POST", "/v1/batches/{id}/cancel", openai.cancel, describe_openai("cancelBatch")),
    ]
    rows: list[tuple[str, str, Handler, Operation]] = [
        ("POST", path, messages.create, create),
        ("GET", path, messages.list_batches, list_batches),
        ("GET", batch, messages.get, describe("getMessageBatch")),
        ("DELETE", batch, messages.delete, describe("deleteMessageBatch")),
        ("POST", f"{batch}/cancel", messages.cancel, describe("cancelMessageBatch")),
        ("GET", f"{batch}/results", messages.send_results, results),
    ]

    def limit(handler: Handler) -> Handler:
        async def handle(exchange: HttpExchange, principal: Principal) -> None:
            async with state.reserve_request(exchange, principal):
                await handler(exchange, principal)

        return handle

    return [
        HttpRoute(method, route, limit(handler), operation, dialect=dialect)
        for dialect, dialect_rows in ((None, openai_rows), (ANTHROPIC, rows))
        for method, route, handler, operation in dialect_rows
    ]
