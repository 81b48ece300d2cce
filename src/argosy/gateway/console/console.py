"""Routes of the console: the document, the static files, sign-in, the event stream and the playground."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING

import msgspec

from argosy.gateway.console.browser_guard import SECURITY_HEADERS, BrowserGuard
from argosy.gateway.console.event_stream import ConsoleEvents
from argosy.gateway.console.oidc_sign_in import OidcSignIn
from argosy.gateway.console.sessions import ConsoleSessions, SignIn
from argosy.gateway.http_route import Handler, HttpRoute
from argosy.gateway.principal import Principal, PrincipalFields, describe_principal
from argosy.http_server import HttpExchange, check_json_content_type
from argosy.process import run_in_daemon_thread
from argosy.protocol import ApiError, parse_body

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

CONSOLE_PREFIX = "/console/"
PLAYGROUND_PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/models"),
    *("/v1/files", "/v1/files/{id}"),
)
"""Routes of the API that the playground and the page of files may call with a session."""

DOCUMENT = "index.html"
_MEDIA_TYPES = {
    ".css": b"text/css; charset=utf-8",
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
    ".txt": b"text/plain; charset=utf-8",
}
_encode = msgspec.json.Encoder().encode

ExchangeHandler = Callable[[HttpExchange], Awaitable[None]]


class SessionView(PrincipalFields, frozen=True, kw_only=True, tag_field="object", tag="session"):
    """Identity and role of the caller, by which the application chooses what it shows."""

    is_local: bool
    """Whether the gateway needs no key from this machine."""


class Console:
    """The console's routes.

    Args:
        guard: Checks hosts and origins.
        sessions: Signs in and authenticates.
        events: The event stream.
        key_command: How a key is created, for the sign-in page.
        oidc: Sign-in with an issuer.
    """

    def __init__(
        self,
        guard: BrowserGuard,
        sessions: ConsoleSessions,
        events: ConsoleEvents,
        key_command: str,
        oidc: OidcSignIn | None = None,
    ) -> None:
        self._key_command = key_command
        self._guard = guard
        self.sessions = sessions
        self.events = events
        self._oidc = oidc
        self._files: StaticFiles | None = None

    def build_routes(self, api_routes: Sequence[HttpRoute]) -> list[HttpRoute]:
        """Return the routes of the API with those of the console.

        Browsers get the console's document at `/`, where Ollama's clients get a greeting. The playground calls routes
        of the API below `CONSOLE_PREFIX`, by the session and from the console's own page only.
        """
        row = partial(HttpRoute, is_public=True, is_same_origin=True)
        page = partial(self._guarded, self._guard.check_host)
        data = partial(self._guarded, self._guard.check_data_request)
        sign_in = [("methods", self._list_sign_in_methods)]
        if self._oidc is not None:
            sign_in += [("start", self._oidc.start), ("callback", self._oidc.finish)]
        return [
            *(
                replace(route, handler=self._document_or(route.handler))
                if route.path == "/"
                else route
                for route in api_routes
            ),
            row("GET", CONSOLE_PREFIX + "static/{path...}", self._send_static_file),
            *(row("GET", f"{CONSOLE_PREFIX}sign-in/{step}", page(run)) for step, run in sign_in),
            row("GET", CONSOLE_PREFIX + "session", data(self._show_session)),
            row("POST", CONSOLE_PREFIX + "session", data(self._sign_in)),
            row("DELETE", CONSOLE_PREFIX + "session", data(self._sign_out)),
            row("GET", CONSOLE_PREFIX + "events", data(self._stream_events)),
            *(
                row(route.method, CONSOLE_PREFIX + route.path[1:], data(self._playground(route)))
                for route in api_routes
                if route.path in PLAYGROUND_PATHS
            ),
        ]

    # --- checks ----------------------------------------------------------------------------------

    def _guarded(self, check: Callable[[HttpExchange], None], run: ExchangeHandler) -> Handler:
        """Return the handler of a route after a check: a page, or data for the console's own page only."""

        async def handle(exchange: HttpExchange, principal: Principal) -> None:
            del principal  # sessions authenticate
            exchange.extra_headers += SECURITY_HEADERS
            check(exchange)
            await run(exchange)

        return handle

    # --- handlers --------------------------------------------------------------------------------

    def _document_or(self, other: Handler) -> Handler:
        async def handle(exchange: HttpExchange, principal: Principal) -> None:
            if b"text/html" in exchange.headers.get(b"accept", b""):
                self._guard.check_host(exchange)
                await self._send_file(exchange, DOCUMENT)
            else:
                await other(exchange, principal)

        return handle

    def _playground(self, route: HttpRoute) -> ExchangeHandler:
        async def run(exchange: HttpExchange) -> None:
            principal = await self.sessions.authenticate(exchange)
            exchange.path = route.path
            await route.handler(exchange, principal)

        return run

    async def _send_static_file(self, exchange: HttpExchange, principal: Principal) -> None:
        del principal  # the files are the same for all
        self._guard.check_host(exchange)
        await self._send_file(exchange, exchange.path_parameters["path"])

    async def _list_sign_in_methods(self, exchange: HttpExchange) -> None:
        exchange.extra_headers.append((b"cache-control", b"no-store"))
        methods = {"key_command": self._key_command, "oidc": self._oidc is not None}
        await exchange.send_response(200, _encode(methods))

    async def _stream_events(self, exchange: HttpExchange) -> None:
        principal = await self.sessions.authenticate(exchange)
        files = await self._load_files()
        await self.events.stream(exchange, principal, files.build_id)

    async def _show_session(self, exchange: HttpExchange) -> None:
        await _send_session(exchange, await self.sessions.authenticate(exchange))

    async def _sign_in(self, exchange: HttpExchange) -> None:
        check_json_content_type(exchange)
        body = parse_body(SignIn, await exchange.read_body())
        await _send_session(exchange, await self.sessions.sign_in(exchange, body.key.strip()))

    async def _sign_out(self, exchange: HttpExchange) -> None:
        await self.sessions.sign_out(exchange)
        await exchange.send_response(200, b"{}")

    async def _send_file(self, exchange: HttpExchange, path: str) -> None:
        """Answer with a file, or with 304 if the browser has it. Raises ApiError 404 if there is none."""
        file = (await self._load_files()).by_path.get(path)
        if file is None:
            path = exchange.path[:200]
            raise ApiError(404, "not_found", f"The console has no path {path!r}.")
        exchange.extra_headers += [
            *SECURITY_HEADERS,
            (b"etag", file.etag),
            (b"cache-control", b"no-cache"),
            (b"vary", b"accept-encoding"),
        ]
        if file.etag in exchange.headers.get(b"if-none-match", b""):
            await exchange.send_response(304, b"", file.media_type)
            return
        body = file.content
        if b"gzip" in exchange.headers.get(b"accept-encoding", b""):
            exchange.extra_headers.append((b"content-encoding", b"gzip"))
            body = file.compressed
        await exchange.send_response(200, body, file.media_type)

    async def _load_files(self) -> StaticFiles:
        if self._files is None:
            self._files = await run_in_daemon_thread(StaticFiles)
        return self._files


async def _send_session(exchange: HttpExchange, principal: Principal) -> None:
    view = SessionView(**describe_principal(principal), is_local=principal.is_anonymous)
    exchange.extra_headers.append((b"cache-control", b"no-store"))
    await exchange.send_response(200, _encode(view))


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file: its content, and the validator with which browsers ask whether it has changed."""

    content: bytes
    compressed: bytes
    media_type: bytes
    etag: bytes


class StaticFiles:
    """Files by their path below the folder `static`, with their compressed forms.

    Reading them all takes some milliseconds, so do it in a thread.
    """

    def __init__(self) -> None:
        root = resources.files("argosy.gateway.console") / "static"
        self.by_path = dict(_read_folder(root, ""))
        contents = b"".join(self.by_path[path].etag for path in sorted(self.by_path))
        self.build_id = hashlib.sha256(contents).hexdigest()[:12]
        """Identifies the version of all files. A page that was loaded from another one offers to reload."""


def _read_folder(folder: Traversable, prefix: str) -> list[tuple[str, StaticFile]]:
    found: list[tuple[str, StaticFile]] = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _read_folder(entry, f"{prefix}{entry.name}/")
            continue
        media_type = _MEDIA_TYPES.get(entry.name[entry.name.rfind(".") :])
        if media_type is not None:
            content = entry.read_bytes()
            etag = b'"%s"' % hashlib.sha256(content).hexdigest()[:20].encode()
            compressed = gzip.compress(content, mtime=0)
            found.append((prefix + entry.name, StaticFile(content, compressed, media_type, etag)))
    return found
