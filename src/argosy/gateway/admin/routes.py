"""Routes of the admin API: each parses the request, runs its endpoint within limits, and sends the response."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any
from urllib.parse import parse_qsl

import structlog

from argosy.gateway.admin import (
    adapters,
    alerts,
    caches,
    costs,
    flags,
    fleet,
    incidents,
    limits_and_prices,
    objectives,
    prefix_doctor,
    prompts,
    quality,
    replicas,
    reports,
    routing,
    settings,
    simulations,
    tenants,
)
from argosy.gateway.admin.answer_encoding import send_answer
from argosy.gateway.admin.endpoints import AdminEndpoint, AdminEndpoints, AdminRequest, AdminScope
from argosy.gateway.auth import Authenticator
from argosy.gateway.gateway_part import do_nothing
from argosy.gateway.http_route import HttpRoute
from argosy.gateway.principal import Principal
from argosy.http_server import DisconnectedError, HttpExchange, check_json_content_type
from argosy.process import run_in_daemon_thread
from argosy.protocol import ApiError, invalid_request, parse_body, parse_query, render_openapi
from argosy.store import (
    ConflictError,
    NotFoundError,
    QueryTimeoutError,
    StoreError,
    limit_query_time,
)

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

DISCONNECT_POLL_S = 0.5


def list_endpoints() -> list[AdminEndpoint]:
    """Return all endpoints, among them that of the OpenAPI document."""
    built = AdminEndpoints()

    @cache
    def render_document() -> bytes:
        return render_openapi(
            "Argosy admin API",
            "Tenants, keys, limits, prices, usage, the audit log and explanations of requests.",
            [(endpoint.path, endpoint.method, endpoint.describe()) for endpoint in endpoints],
            has_keys=True,
        )

    @built.register("GET", "/admin/openapi.json", "user", is_nonblocking=True)
    def get_openapi_document(scope: AdminScope, request: AdminRequest) -> bytes:  # noqa: ARG001 - the same for all
        """Get this OpenAPI document."""
        return render_document()

    endpoints = [
        *tenants.endpoints,
        *limits_and_prices.endpoints,
        *adapters.endpoints,
        *prompts.endpoints,
        *quality.endpoints,
        *flags.endpoints,
        *alerts.endpoints,
        *replicas.endpoints,
        *caches.endpoints,
        *routing.endpoints,
        *prefix_doctor.endpoints,
        *fleet.endpoints,
        *incidents.endpoints,
        *objectives.endpoints,
        *reports.endpoints,
        *costs.endpoints,
        *settings.endpoints,
        *simulations.endpoints,
        *built,
    ]
    return endpoints


def build_admin_routes(
    admin_scope: AdminScope,
    authenticator: Authenticator,
    on_accounts_changed: Callable[[], object] = lambda: None,
) -> list[HttpRoute]:
    """Return the routes of the admin API.

    Args:
        admin_scope: What the endpoints work on. Without what an endpoint needs it answers 404.
        authenticator: Account changes are applied to it before they are answered.
        on_accounts_changed: Called on the event loop's thread after accounts changed and the authenticator is updated.
    """
    caller = _EndpointCaller(admin_scope, authenticator, on_accounts_changed)
    return [
        HttpRoute(
            endpoint.method,
            endpoint.path,
            partial(caller.handle, endpoint),
            endpoint.describe(),
            role=endpoint.role,
            scope=endpoint.scope,
            is_same_origin=True,
        )
        for endpoint in list_endpoints()
    ]


class _EndpointCaller:
    """Calls endpoints with parsed requests, in worker threads and within the limits of concurrent calls."""

    def __init__(
        self,
        admin_scope: AdminScope,
        authenticator: Authenticator,
        on_accounts_changed: Callable[[], object],
    ) -> None:
        self._admin_scope = admin_scope
        self._limiter = admin_scope.limiter
        self._authenticator = authenticator
        self._on_accounts_changed = on_accounts_changed

    async def handle(
        self, endpoint: AdminEndpoint, exchange: HttpExchange, principal: Principal
    ) -> None:
        """Answer a request of a caller who has the endpoint's role."""
        request = AdminRequest(
            principal,
            _get_resource_id(exchange),
            parse_query(endpoint.query_type, _parse_parameters(exchange.query)),
            None if endpoint.body_type is None else await _read_body(exchange, endpoint.body_type),
        )
        response = await self._answer(exchange, endpoint, request)
        if isinstance(response, Iterator):
            await self._stream_response(exchange, endpoint, principal, response)
            return
        await send_answer(exchange, response)

    async def _answer(
        self, exchange: HttpExchange, endpoint: AdminEndpoint, request: AdminRequest
    ) -> Any:  # noqa: ANN401 - the endpoint's response type
        """Run the endpoint once the caller has a slot.

        Raises:
            ApiError: The endpoint failed, or too many calls run.
            DisconnectedError: The client disconnected while it waited.
        """
        if endpoint.is_long_poll:
            return await self._wait_for_endpoint(exchange, endpoint, request)
        is_change = not endpoint.is_safe
        async with self._limiter.slot(request.principal, is_change=is_change):
            if exchange.is_disconnected:
                raise DisconnectedError
            response = await self._run_endpoint(endpoint, request)
            if is_change:
                apply_registries = await run_in_daemon_thread(self._refresh_accounts)
                apply_registries()
                self._on_accounts_changed()
        return response

    async def _wait_for_endpoint(
        self, exchange: HttpExchange, endpoint: AdminEndpoint, request: AdminRequest
    ) -> Any:  # noqa: ANN401 - the endpoint's response type
        """Run an endpoint that may take long, until the client disconnects."""
        task = asyncio.ensure_future(self._run_endpoint(endpoint, request))
        try:
            while not (await asyncio.wait({task}, timeout=DISCONNECT_POLL_S))[0]:
                if exchange.is_disconnected:
                    raise DisconnectedError
            return task.result()
        finally:
            task.cancel()

    def _refresh_accounts(self) -> Callable[[], object]:
        """Apply account changes to the authenticator before they are answered, so that a new key works at once.

        Returns:
            A function that applies changes of adapters and prompts. Call it on the event loop.
        """
        store = self._admin_scope.store
        if store is not None:
            with contextlib.suppress(StoreError):  # the next periodic refresh applies it
                snapshot = store.load_snapshot()
                self._authenticator.apply_snapshot(snapshot)
                return self._admin_scope.replicas.models.prepare_registries(snapshot)
        return do_nothing

    async def _run_endpoint(self, endpoint: AdminEndpoint, request: AdminRequest) -> Any:  # noqa: ANN401 - the endpoint's response type
        admin_scope = self._admin_scope.for_principal(request.principal)
        with _translate_store_errors(), limit_query_time(endpoint.query_time_limit_s):
            if endpoint.is_nonblocking:
                response = endpoint.handler(admin_scope, request)
                return await response if inspect.isawaitable(response) else response
            return await run_in_daemon_thread(endpoint.handler, admin_scope, request)

    async def _stream_response(
        self,
        exchange: HttpExchange,
        endpoint: AdminEndpoint,
        principal: Principal,
        pieces: Iterator[str],
    ) -> None:
        """Stream the response as a worker thread produces pieces, no faster than the client reads.

        Raises:
            ApiError: Producing pieces failed. The response has begun, so the connection can only be closed.
            DisconnectedError: The client disconnected.
        """
        await exchange.start_stream(content_type=endpoint.media_type.encode())
        with _translate_store_errors(), limit_query_time(endpoint.query_time_limit_s):
            while not exchange.is_disconnected:
                async with self._limiter.slot(principal, max_wait_s=None):
                    piece = await run_in_daemon_thread(next, pieces, None)
                if piece is None:
                    await exchange.end_stream()
                    return
                await exchange.write(piece.encode())
        raise DisconnectedError


@contextlib.contextmanager
def _translate_store_errors() -> Iterator[None]:
    """Raise errors of endpoints as ApiErrors."""
    try:
        yield
    except QueryTimeoutError as error:
        raise ApiError(503, "query_timeout", str(error), retry_after_s=5.0) from error
    except StoreError as error:
        log.error("store_unavailable", reason=str(error))  # noqa: TRY400 - the reason suffices
        message = "The store is not available at the moment. The gateway's log has the reason. Try again later."
        raise ApiError(503, "store_unavailable", message, retry_after_s=5.0) from error
    except NotFoundError as error:
        raise ApiError(404, "not_found", str(error)) from error
    except ConflictError as error:
        raise ApiError(409, "conflict", str(error)) from error
    except ValueError as error:
        raise ApiError(400, "invalid_value", str(error)) from error


async def _read_body(exchange: HttpExchange, body_type: type) -> Any:  # noqa: ANN401 - the endpoint's body type
    """Read and parse the body. An empty body stands for an empty object. Raises ApiError."""
    body = await exchange.read_body()
    if body:
        check_json_content_type(exchange)
    return parse_body(body_type, body or b"{}")


def _parse_parameters(query: bytes) -> dict[str, str]:
    """Parse the query string into parameters by name. Raises ApiError 400."""
    parameters: dict[str, str] = {}
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if name in parameters:
            raise invalid_request(
                f"The parameter '{name[:100]}' occurs twice. Give it once.", name[:100]
            )
        if not value.isprintable():
            raise invalid_request(
                f"The parameter '{name[:100]}' must be printable text.", name[:100]
            )
        parameters[name] = value
    return parameters


def _get_resource_id(exchange: HttpExchange) -> str:
    resource_id = exchange.path_parameters.get("id", "")
    if not resource_id.isprintable():
        raise ApiError(404, "not_found", "No resource has this id. Ids are printable text.")
    return resource_id
