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
from argosy.gateway.admin.endpoints import Call, Desk, Operation, Operations
from argosy.gateway.admin.openapi import add_document
from argosy.gateway.admin.organisation_limiter import Turns
from argosy.gateway.auth import Identity, check_role
from argosy.http_server import (
    EXCHANGE,
    App,
    DisconnectedError,
    Exchange,
    Receive,
    Scope,
    Send,
    check_method,
)
from argosy.process import aside
from argosy.protocol import ApiError, invalid, parse, parse_query
from argosy.store import ConflictError, NotFoundError, Store, StoreError

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

_encode = msgspec.json.Encoder().encode

OPERATIONS = add_document(
    Operations([*tenants.api, *keys.api, *limits_and_prices.api, *reports.api]),
    "/admin/openapi.json",
)


def build_admin(
    store: Store | None,
    identity: Identity,
    cards: Callable[[str, str | None], dict[str, Any] | None],
    changed: Callable[[], None],
) -> App:
    """The application for /admin, to which requests are handed by `Exchange.hand_to`.

    `cards` tells what became of a request, by its id and the organisation that asks (None: the whole gateway).
    `changed` is called when accounts were changed; `identity` knows by then. Both are called on the event loop's
    thread. Refusals are raised as ApiError, for whoever handed over the exchange to answer.
    """
    desk, turns = Desk(store, cards), Turns()
    by_path: dict[str, dict[str, Operation]] = {}
    for operation in OPERATIONS:
        by_path.setdefault(operation.path, {})[operation.method] = operation
    routes = [
        Route(path, _Endpoint(methods, desk, turns, identity, changed))
        for path, methods in by_path.items()
    ]
    return Router(routes, redirect_slashes=False, default=_nothing_here)


class _Endpoint:
    """The operations at one path."""

    def __init__(
        self,
        methods: Mapping[str, Operation],
        desk: Desk,
        turns: Turns,
        identity: Identity,
        changed: Callable[[], None],
    ) -> None:
        self._methods = methods
        self._desk = desk
        self._turns = turns
        self._identity = identity
        self._changed = changed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's
        exchange: Exchange = scope["state"][EXCHANGE]
        caller = self._identity.identify(exchange)
        operation = self._methods[check_method(exchange, self._methods)]
        check_role(caller, operation.role, operation.scope)
        body = operation.body
        call = Call(
            caller,
            _id(scope),
            parse_query(operation.query, _parameters(exchange.query)),
            None if body is None else parse(body, await exchange.body() or b"{}"),
        )
        answer = await self._run(operation, call)
        if operation.method != "GET":
            await aside(self._refresh)
            self._changed()
        if isinstance(answer, Iterator):
            await self._stream(exchange, caller.organisation, answer, operation.media_type)
            return
        await exchange.answer(200, answer if isinstance(answer, bytes) else _encode(answer))

    def _refresh(self) -> None:
        """Know callers by what was changed before it is answered: a new key works, a revoked one does not."""
        store = self._desk.store
        if store is not None:
            with contextlib.suppress(StoreError):  # then it comes with the next look
                self._identity.update(store.directory())

    async def _run(self, operation: Operation, call: Call) -> Any:  # noqa: ANN401 - of the operation's type
        desk = self._desk.of(call.caller)
        with _refusals():
            if operation.quick:
                return operation.run(desk, call)
            return await self._turns.aside(call.caller.organisation, operation.run, desk, call)

    async def _stream(
        self, exchange: Exchange, organisation: str, pieces: Iterator[str], media_type: str
    ) -> None:
        """Send pieces as they are made, in a worker thread, no faster than the client takes them.

        Raises ApiError when there are no more of them to be had: the answer, which has begun, can only be cut off then.
        DisconnectedError when nobody waits for more.
        """
        await exchange.start_stream(content_type=media_type.encode())
        with _refusals():
            while (piece := await self._turns.aside(organisation, next, pieces, None)) is not None:
                if exchange.gone:
                    raise DisconnectedError
                await exchange.write(piece.encode())
        await exchange.end_stream()


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
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


def _parameters(query: bytes) -> dict[str, str]:
    """What the URL asks for, by name. Raises ApiError 400."""
    found: dict[str, str] = {}
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if name in found:
            raise invalid(f"'{name[:100]}' is there twice. Give it once.", name[:100])
        if not value.isprintable():
            raise invalid(f"'{name[:100]}' takes printable text.", name[:100])
        found[name] = value
    return found


def _id(scope: Scope) -> str:
    found: str = scope["path_params"].get("id", "")
    if not found.isprintable():
        raise ApiError(404, "not_found", "An id is printable text.")
    return found


async def _nothing_here(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001 - ASGI's
    message = f"There is nothing at {scope['path'][:200]!r}. See /admin/openapi.json."
    raise ApiError(404, "not_found", message)
