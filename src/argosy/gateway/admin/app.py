"""ASGI application of the admin API: authenticates, parses the request, runs the endpoint, sends the response."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl

import structlog
from starlette.routing import Route, Router

from argosy.deployment import FleetControl, GatewayConfig
from argosy.gateway.admin import (
    fleet,
    keys,
    lessons,
    limits_and_prices,
    replicas,
    reports,
    routing,
    series,
    settings,
    tenants,
)
from argosy.gateway.admin.answer_encoding import send_answer
from argosy.gateway.admin.call_limiter import AdminCallLimiter
from argosy.gateway.admin.endpoints import AdminEndpoint, AdminEndpoints, AdminRequest, AdminScope
from argosy.gateway.admin.openapi import add_openapi_endpoint
from argosy.gateway.auth import Authenticator, check_role
from argosy.gateway.console import ConsoleSessions
from argosy.gateway.loop_monitor import LoopMonitor
from argosy.gateway.model_registry import ReplicaAdmin
from argosy.gateway.principal import Principal
from argosy.gateway.proxy import RoutingPreviewer
from argosy.gateway.replica_logs import ReplicaLogs
from argosy.gateway.series_queries import SeriesQueries
from argosy.http_server import (
    EXCHANGE_KEY,
    AsgiApp,
    DisconnectedError,
    HttpExchange,
    Receive,
    Scope,
    Send,
    check_json_content_type,
    check_method,
    check_same_origin,
)
from argosy.process import run_in_daemon_thread
from argosy.protocol import ApiError, invalid_request, parse_body, parse_query
from argosy.store import (
    ConflictError,
    NotFoundError,
    QueryTimeoutError,
    Store,
    StoreError,
    limit_query_time,
)

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

ENDPOINTS = add_openapi_endpoint(
    AdminEndpoints(
        [
            *tenants.endpoints,
            *keys.endpoints,
            *limits_and_prices.endpoints,
            *replicas.endpoints,
            *routing.endpoints,
            *fleet.endpoints,
            *reports.endpoints,
            *series.endpoints,
            *settings.endpoints,
            *lessons.endpoints,
        ]
    ),
    "/admin/openapi.json",
)


def build_admin_app(
    store: Store | None,
    authenticator: Authenticator,
    explain: Callable[[str, str | None], Awaitable[dict[str, Any] | None]],
    on_accounts_changed: Callable[[], None],
    replica_admin: ReplicaAdmin | None = None,
    *,
    fleet_control: FleetControl | None = None,
    series_queries: SeriesQueries | None = None,
    sessions: ConsoleSessions | None = None,
    config: GatewayConfig | None = None,
    loop_monitor: LoopMonitor | None = None,
    replica_logs: ReplicaLogs | None = None,
    previewer: RoutingPreviewer | None = None,
) -> AsgiApp:
    """Build the application for /admin, which serves requests that `HttpExchange` forwards.

    Rejections are raised as ApiError, to be answered by the code that forwarded the exchange.

    Args:
        store: Accounts, ledger and audit log. Without it most endpoints answer 404.
        authenticator: Identifies callers. Account changes are applied to it before they are answered.
        explain: Returns the explanation of a request by its id and the caller's organisation (None for the whole
            gateway). Called on the event loop's thread.
        on_accounts_changed: Called on the event loop's thread after accounts changed and the authenticator is updated.
        replica_admin: Pools and replicas.
        fleet_control: Control of the declared fleet that the gateway belongs to.
        series_queries: Time series.
        sessions: Sessions of the console. Without them callers need a key or token.
        config: The gateway's settings, to be shown to operators.
        loop_monitor: While it reports an overload, reads wait for each other.
        replica_logs: Logs of the replicas of the gateway's fleet.
        previewer: Previews of routing.
    """
    limiter = AdminCallLimiter(loop_monitor)
    admin_scope = AdminScope(
        store,
        replica_admin,
        explain,
        limiter,
        fleet_control=fleet_control,
        series_queries=series_queries,
        config=config,
        fleet_logs=replica_logs,
        previewer=previewer,
        authenticator=authenticator,
    )
    by_path: dict[str, dict[str, AdminEndpoint]] = {}
    for endpoint in ENDPOINTS:
        by_path.setdefault(endpoint.path, {})[endpoint.method] = endpoint
    routes = [
        Route(
            path,
            _PathHandler(
                endpoints, admin_scope, limiter, authenticator, on_accounts_changed, sessions
            ),
        )
        for path, endpoints in by_path.items()
    ]
    return Router(routes, redirect_slashes=False, default=_not_found)


class _PathHandler:
    """ASGI handler of the endpoints at one path."""

    def __init__(
        self,
        endpoints: Mapping[str, AdminEndpoint],
        admin_scope: AdminScope,
        limiter: AdminCallLimiter,
        authenticator: Authenticator,
        on_accounts_changed: Callable[[], None],
        sessions: ConsoleSessions | None,
    ) -> None:
        self._endpoints = endpoints
        self._admin_scope = admin_scope
        self._limiter = limiter
        self._authenticator = authenticator
        self._on_accounts_changed = on_accounts_changed
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's
        exchange: HttpExchange = scope["state"][EXCHANGE_KEY]
        principal = (
            self._authenticator.authenticate(exchange)
            if self._sessions is None
            else await self._sessions.authenticate(exchange)
        )
        endpoint = self._endpoints[check_method(exchange, self._endpoints)]
        check_role(principal, endpoint.role, endpoint.scope)
        if endpoint.method != "GET" or principal.is_anonymous:
            check_same_origin(exchange)
        request = AdminRequest(
            principal,
            _get_resource_id(scope),
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
            return await self._run_endpoint(endpoint, request)
        is_change = not endpoint.is_safe
        async with self._limiter.slot(request.principal, is_change=is_change):
            if exchange.is_disconnected:
                raise DisconnectedError
            response = await self._run_endpoint(endpoint, request)
            if is_change:
                await run_in_daemon_thread(self._refresh_accounts)
                self._on_accounts_changed()
        return response

    def _refresh_accounts(self) -> None:
        """Apply account changes to the authenticator before they are answered, so that a new key works at once."""
        store = self._admin_scope.store
        if store is not None:
            with contextlib.suppress(StoreError):  # the next periodic refresh applies it
                self._authenticator.apply_snapshot(store.load_snapshot())

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


def _get_resource_id(scope: Scope) -> str:
    resource_id: str = scope["path_params"].get("id", "")
    if not resource_id.isprintable():
        raise ApiError(404, "not_found", "No resource has this id. Ids are printable text.")
    return resource_id


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001 - ASGI's
    message = f"The admin API has no path {scope['path'][:200]!r}. See /admin/openapi.json."
    raise ApiError(404, "not_found", message)
