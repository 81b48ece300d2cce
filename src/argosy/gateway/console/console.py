"""Handler of the console's routes: the document, the static files, sign-in, the event stream and the playground."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from argosy.gateway.console.browser_guard import SECURITY_HEADERS, BrowserGuard
from argosy.gateway.console.event_stream import ConsoleEvents
from argosy.gateway.console.oidc_sign_in import OidcSignIn
from argosy.gateway.console.sessions import ConsoleSessions, SignIn
from argosy.gateway.console.static_files import DOCUMENT, StaticFiles, send_file
from argosy.gateway.http_route import HttpRoute
from argosy.gateway.principal import Principal
from argosy.http_server import HttpExchange, check_json_content_type, check_method
from argosy.process import run_in_daemon_thread
from argosy.protocol import ApiError, parse_body
from argosy.store import Role, RoleScope

CONSOLE_PREFIX = "/console/"
STATIC_PREFIX = CONSOLE_PREFIX + "static/"
SIGN_IN_PREFIX = CONSOLE_PREFIX + "sign-in/"
PLAYGROUND_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models")
"""Routes of the API that the playground may call with a session."""
_encode = msgspec.json.Encoder().encode


class SessionView(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="session"):
    """Identity and role of the caller, by which the application chooses what it shows."""

    role: Role
    scope: RoleScope
    organisation: str | None
    project: str | None
    key: str | None
    user: str | None
    is_local: bool
    """Whether the gateway needs no key from this machine."""


class Console:
    """The console's routes.

    Args:
        guard: Checks hosts and origins.
        sessions: Signs in and authenticates.
        events: The event stream.
        oidc: Sign-in with an issuer.
    """

    def __init__(
        self,
        guard: BrowserGuard,
        sessions: ConsoleSessions,
        events: ConsoleEvents,
        oidc: OidcSignIn | None = None,
    ) -> None:
        self._guard = guard
        self.sessions = sessions
        self.events = events
        self.playground: Mapping[str, HttpRoute] = {}
        """Routes of `PLAYGROUND_PATHS`, which the application that serves the console sets."""
        self._oidc = oidc
        self._files: StaticFiles | None = None

    async def send_document(self, exchange: HttpExchange, principal: Principal) -> None:
        """`GET /`: the page that loads the application."""
        del principal  # the page is the same for all
        self._guard.check_host(exchange)
        await self._send_file(exchange, DOCUMENT)

    async def handle(self, exchange: HttpExchange, principal: Principal) -> None:
        """Handle a request below `CONSOLE_PREFIX`.

        Raises:
            ApiError: The browser may not send the request, it is not authenticated, or the path does not exist.
        """
        del principal  # sessions authenticate
        if exchange.path.startswith(STATIC_PREFIX):
            self._guard.check_host(exchange)
            check_method(exchange, ("GET",))
            await self._send_file(exchange, exchange.path.removeprefix(STATIC_PREFIX))
            return
        exchange.extra_headers += SECURITY_HEADERS
        if exchange.path.startswith(SIGN_IN_PREFIX):
            self._guard.check_host(exchange)
            await self._handle_sign_in(exchange, exchange.path.removeprefix(SIGN_IN_PREFIX))
            return
        self._guard.check_data_request(exchange)
        path = "/" + exchange.path.removeprefix(CONSOLE_PREFIX)
        if path == "/session":
            await self._handle_session(exchange)
        elif path == "/events":
            check_method(exchange, ("GET",))
            principal = await self.sessions.authenticate(exchange)
            files = await self._load_files()
            await self.events.stream(exchange, principal, files.build_id)
        elif path in self.playground:
            route = self.playground[path]
            check_method(exchange, (route.method,))
            principal = await self.sessions.authenticate(exchange)
            exchange.path = path
            await route.handler(exchange, principal)
        else:
            raise _not_found_error(exchange.path)

    async def _handle_sign_in(self, exchange: HttpExchange, step: str) -> None:
        """Answer the flow's routes, which browsers open as pages, and whether there is such a flow."""
        check_method(exchange, ("GET",))
        if step == "methods":
            exchange.extra_headers.append((b"cache-control", b"no-store"))
            await exchange.send_response(
                200, _encode({"key": True, "oidc": self._oidc is not None})
            )
        elif step == "start" and self._oidc is not None:
            await self._oidc.start(exchange)
        elif step == "callback" and self._oidc is not None:
            await self._oidc.finish(exchange)
        else:
            raise _not_found_error(exchange.path)

    async def _handle_session(self, exchange: HttpExchange) -> None:
        method = check_method(exchange, ("GET", "POST", "DELETE"))
        if method == "DELETE":
            await self.sessions.sign_out(exchange)
            await exchange.send_response(200, b"{}")
            return
        if method == "POST":
            check_json_content_type(exchange)
            body = parse_body(SignIn, await exchange.read_body())
            principal = await self.sessions.sign_in(exchange, body.key.strip())
        else:
            principal = await self.sessions.authenticate(exchange)
        view = SessionView(
            role=principal.role,
            scope=principal.role_scope,
            organisation=principal.organisation or None,
            project=principal.project or None,
            key=principal.key or None,
            user=principal.user or None,
            is_local=principal.is_anonymous,
        )
        exchange.extra_headers.append((b"cache-control", b"no-store"))
        await exchange.send_response(200, _encode(view))

    async def _send_file(self, exchange: HttpExchange, path: str) -> None:
        file = (await self._load_files()).find(path)
        if file is None:
            raise _not_found_error(exchange.path)
        exchange.extra_headers += SECURITY_HEADERS
        await send_file(exchange, file)

    async def _load_files(self) -> StaticFiles:
        if self._files is None:
            self._files = await run_in_daemon_thread(StaticFiles)
        return self._files


def _not_found_error(path: str) -> ApiError:
    return ApiError(404, "not_found", f"The console has no path {path[:200]!r}.")
