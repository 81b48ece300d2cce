"""The admin API as an ASGI application: who may, what was sent, the operation in a worker thread, its answer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl

import msgspec
import structlog
from starlette.routing import Route, Router

from argosy.gateway.admin import keys, limits_and_prices, reports, tenants
from argosy.gateway.admin.endpoints import AdminEndpoint, AdminEndpoints, AdminRequest, AdminScope
from argosy.gateway.admin.openapi import add_openapi_endpoint
from argosy.gateway.admin.organisation_limiter import OrganisationLimiter
from argosy.gateway.auth import Authenticator, check_role
from argosy.http_server import (
    EXCHANGE_KEY,
    AsgiApp,
    DisconnectedError,
    HttpExchange,
    Receive,
    Scope,
    Send,
    check_method,
)
from argosy.process import run_in_daemon_thread
from argosy.protocol import ApiError, invalid_request, parse_body, parse_query
from argosy.store import ConflictError, NotFoundError, Store, StoreError

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

_encode = msgspec.json.Encoder().encode

ENDPOINTS = add_openapi_endpoint(
    AdminEndpoints(
        [*tenants.endpoints, *keys.endpoints, *limits_and_prices.endpoints, *reports.endpoints]
    ),
    "/admin/openapi.json",
)


def build_admin_app(
    store: Store | None,
    authenticator: Authenticator,
    explain: Callable[[str, str | None], dict[str, Any] | None],
    on_accounts_changed: Callable[[], None],
) -> AsgiApp:
    """The application for /admin, to which requests are handed by `Exchange.hand_to`.

    `cards` tells what became of a request, by its id and the organisation that asks (None: the whole gateway).
    `changed` is called when accounts were changed; `identity` knows by then. Both are called on the event loop's
    thread. Refusals are raised as ApiError, for whoever handed over the exchange to answer.
    """
    desk, turns = AdminScope(store, explain), OrganisationLimiter()
    by_path: dict[str, dict[str, AdminEndpoint]] = {}
    for operation in ENDPOINTS:
        by_path.setdefault(operation.path, {})[operation.method] = operation
    routes = [
        Route(path, _PathHandler(methods, desk, turns, authenticator, on_accounts_changed))
        for path, methods in by_path.items()
    ]
    return Router(routes, redirect_slashes=False, default=_not_found)


class _PathHandler:
    """The operations at one path."""

    def __init__(
        self,
        endpoints: Mapping[str, AdminEndpoint],
        admin_scope: AdminScope,
        limiter: OrganisationLimiter,
        authenticator: Authenticator,
        on_accounts_changed: Callable[[], None],
    ) -> None:
        self._endpoints = endpoints
        self._admin_scope = admin_scope
        self._limiter = limiter
        self._authenticator = authenticator
        self._on_accounts_changed = on_accounts_changed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's
        exchange: HttpExchange = scope["state"][EXCHANGE_KEY]
        principal = self._authenticator.authenticate(exchange)
        operation = self._endpoints[check_method(exchange, self._endpoints)]
        check_role(principal, operation.role, operation.scope)
        body = operation.body_type
        call = AdminRequest(
            principal,
            _get_resource_id(scope),
            parse_query(operation.query_type, _parse_parameters(exchange.query)),
            None if body is None else parse_body(body, await exchange.read_body() or b"{}"),
        )
        answer = await self._run_endpoint(operation, call)
        if operation.method != "GET":
            await run_in_daemon_thread(self._refresh_accounts)
            self._on_accounts_changed()
        if isinstance(answer, Iterator):
            await self._stream_response(
                exchange, principal.organisation, answer, operation.media_type
            )
            return
        await exchange.send_response(200, answer if isinstance(answer, bytes) else _encode(answer))

    def _refresh_accounts(self) -> None:
        """Know callers by what was changed before it is answered: a new key works, a revoked one does not."""
        store = self._admin_scope.store
        if store is not None:
            with contextlib.suppress(StoreError):  # then it comes with the next look
                self._authenticator.apply_snapshot(store.load_snapshot())

    async def _run_endpoint(self, endpoint: AdminEndpoint, request: AdminRequest) -> Any:  # noqa: ANN401 - of the operation's type
        desk = self._admin_scope.for_principal(request.principal)
        with _translate_store_errors():
            if endpoint.is_nonblocking:
                return endpoint.handler(desk, request)
            return await self._limiter.run_in_thread(
                request.principal.organisation, endpoint.handler, desk, request
            )

    async def _stream_response(
        self, exchange: HttpExchange, organisation: str, pieces: Iterator[str], media_type: str
    ) -> None:
        """Send pieces as they are made, in a worker thread, no faster than the client takes them.

        Raises ApiError when there are no more of them to be had: the answer, which has begun, can only be cut off then.
        DisconnectedError when nobody waits for more.
        """
        await exchange.start_stream(content_type=media_type.encode())
        with _translate_store_errors():
            while (
                piece := await self._limiter.run_in_thread(organisation, next, pieces, None)
            ) is not None:
                if exchange.is_disconnected:
                    raise DisconnectedError
                await exchange.write(piece.encode())
        await exchange.end_stream()


@contextlib.contextmanager
def _translate_store_errors() -> Iterator[None]:
    """What operations refuse, as ApiErrors."""
    try:
        yield
    except StoreError as error:
        log.error("store_unavailable", reason=str(error))  # noqa: TRY400 - the reason says it all
        message = "The store cannot be used at the moment. The gateway's log says why."
        raise ApiError(503, "store_unavailable", message, retry_after_s=5.0) from error
    except NotFoundError as error:
        raise ApiError(404, "not_found", str(error)) from error
    except ConflictError as error:
        raise ApiError(409, "conflict", str(error)) from error
    except ValueError as error:
        raise ApiError(400, "invalid_value", str(error)) from error


def _parse_parameters(query: bytes) -> dict[str, str]:
    """What the URL asks for, by name. Raises ApiError 400."""
    found: dict[str, str] = {}
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if name in found:
            raise invalid_request(f"'{name[:100]}' is there twice. Give it once.", name[:100])
        if not value.isprintable():
            raise invalid_request(f"'{name[:100]}' takes printable text.", name[:100])
        found[name] = value
    return found


def _get_resource_id(scope: Scope) -> str:
    found: str = scope["path_params"].get("id", "")
    if not found.isprintable():
        raise ApiError(404, "not_found", "An id is printable text.")
    return found


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001 - ASGI's
    message = f"There is nothing at {scope['path'][:200]!r}. See /admin/openapi.json."
    raise ApiError(404, "not_found", message)
