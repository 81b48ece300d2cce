"""Sessions of the console: sign-in with an API key, and authentication by the session's cookie."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from functools import partial

import msgspec
import structlog

from argosy.gateway.auth import Authenticator, AuthFailureLimiter, TokenClaims, has_credential
from argosy.gateway.console.browser_guard import BrowserGuard
from argosy.gateway.principal import Principal
from argosy.http_server import HttpExchange
from argosy.process import run_in_daemon_thread
from argosy.protocol import ApiError
from argosy.store import ConsoleSession, ConsoleSessionStore, StoreError, hash_key

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

SECURE_COOKIE, INSECURE_COOKIE = "__Host-argosy", "argosy-insecure"
"""Cookie names. Browsers accept the first only over secure connections, from this host, for the whole host."""
MAX_SIGN_IN_FAILURES = 5
SIGN_IN_WINDOW_S = 60.0
MAX_CONCURRENT_LOOKUPS = 2
"""Sessions that are looked up in the store at a time, so that a flood of requests leaves connections to others."""

MAX_KNOWN_SESSIONS = 1000
"""Sessions that a gateway remembers for the time in which the store cannot be used."""
UNSTORED_LIFETIME_S = 3600.0
"""Lifetime of a session that the store could not take."""


class ConsoleSessions:
    """Authenticates requests to the console and the admin API. Use it from one event loop.

    While the store cannot be used, the sessions that this gateway has seen last go on, and new ones are in its memory.

    Args:
        store: Sessions, or None without a store, when no key exists and sign-in fails.
        authenticator: Keys, tokens, and clients that need none.
        guard: Checks requests that carry a cookie.
    """

    def __init__(
        self, store: ConsoleSessionStore | None, authenticator: Authenticator, guard: BrowserGuard
    ) -> None:
        self._store = store
        self._authenticator = authenticator
        self._guard = guard
        self._failures = AuthFailureLimiter(MAX_SIGN_IN_FAILURES, SIGN_IN_WINDOW_S)
        self._lookup_slots = asyncio.Semaphore(MAX_CONCURRENT_LOOKUPS)
        self._known: OrderedDict[bytes, ConsoleSession] = OrderedDict()
        """Sessions by the digests of their ids, the one that was used last at the end."""

    async def authenticate(self, exchange: HttpExchange) -> Principal:
        """Return the principal of a request: of its key or token, else of its session, else of a keyless local client.

        The session is looked up each time, so it ends at once when it is deleted or its key is revoked.

        Raises:
            ApiError: 401, 403 or 421 if the request is not accepted. 503 if the store cannot be read.
        """
        if not self._read_session_id(exchange) or has_credential(exchange.headers):
            return self._authenticator.authenticate(exchange)
        self._guard.check_data_request(exchange)
        principal = self.resolve(await self.find_session(exchange), exchange)
        if principal is None:
            message = "Your session has ended. Sign in again."
            raise ApiError(401, "session_ended", message)
        return principal

    async def find_session(
        self, exchange: HttpExchange, *, is_use: bool = True
    ) -> ConsoleSession | None:
        """Return the session that authenticates a request. None if it has ended, or the request carries a key or token.

        Args:
            exchange: The request.
            is_use: Whether this counts as use of the session, so that it does not end as idle.

        Raises:
            ApiError: 503 if the store cannot be read, and this gateway does not know the session.
        """
        session_id = self._read_session_id(exchange)
        if not session_id or self._store is None or has_credential(exchange.headers):
            return None
        find = partial(self._store.find, session_id, is_use=is_use)
        digest = hash_key(session_id)
        try:
            async with self._lookup_slots:
                session = await run_in_daemon_thread(find)
        except StoreError as error:
            session = self._known.get(digest)
            if session is None or session.expires_at <= time.time():
                raise _store_unavailable(error) from error
            return session
        self._known.pop(digest, None)
        if session is not None:
            self._remember(session)
        return session

    async def open_for_claims(self, exchange: HttpExchange, claims: TokenClaims) -> None:
        """Open a session for the bearer of a verified token, and set its cookie on the response.

        Raises:
            ApiError: 401 or 403 if the bearer is not accepted.
        """
        self._guard.check_sign_in(exchange)
        self._authenticator.authenticate_claims(claims, exchange)
        await self._open(exchange, claims=msgspec.json.encode(claims))

    async def _open(
        self,
        exchange: HttpExchange,
        *,
        key_digest: bytes | None = None,
        claims: bytes | None = None,
    ) -> None:
        """Open a session in the place of the browser's present one, so that no earlier id becomes valid for it."""
        if self._store is None:
            raise ApiError(404, "no_store", "Sessions need a store. Add 'store' to the settings.")
        create = partial(self._store.create, key_digest=key_digest, claims=claims)
        try:
            await self._end_current(exchange)
            session_id = await run_in_daemon_thread(create)
        except StoreError as error:
            log.warning("console_session_unstored", reason=str(error))
            session_id, now = secrets.token_urlsafe(32), time.time()
            session = ConsoleSession(
                digest=hash_key(session_id),
                key_digest=key_digest,
                claims=claims,
                created_at=now,
                last_used_at=now,
                expires_at=now + UNSTORED_LIFETIME_S,
            )
            self._remember(session)
        self._set_cookie(exchange, session_id)

    def _remember(self, session: ConsoleSession) -> None:
        self._known[session.digest] = session
        if len(self._known) > MAX_KNOWN_SESSIONS:
            self._known.popitem(last=False)

    def resolve(self, session: ConsoleSession | None, exchange: HttpExchange) -> Principal | None:
        """Return the present principal of a request: of its session, else of its key or of a keyless local client.

        Does not read the store. None if the credential is no longer accepted.

        Raises:
            ApiError: 403 if it is not accepted from the client's address. 429 and 503 as `Authenticator.authenticate`.
        """
        try:
            if session is None:
                return self._authenticator.authenticate(exchange)
            if session.key_digest is not None:
                return self._authenticator.authenticate_digest(session.key_digest, exchange)
            if session.claims is not None:
                claims = msgspec.json.decode(session.claims, type=TokenClaims)
                return self._authenticator.authenticate_claims(claims, exchange)
        except ApiError as error:
            if error.status != 401:
                raise
        return None

    async def sign_in(self, exchange: HttpExchange, key: str) -> Principal:
        """Open a session for an API key, and set its cookie on the response.

        Raises:
            ApiError: 401 for a key that is not accepted, whatever the reason. 429 after too many wrong keys.
        """
        self._guard.check_sign_in(exchange)
        address, now = self._authenticator.client_address(exchange), time.monotonic()
        wait_s = self._failures.retry_after_s(address, now)
        if wait_s > 0:
            message = "Too many wrong keys from your address. Wait, then check the key."
            raise ApiError(429, "too_many_failures", message, retry_after_s=wait_s)
        digest = hash_key(key)
        try:
            principal = self._authenticator.authenticate_digest(digest, exchange)
        except ApiError as error:
            if error.status != 401:
                raise
            principal = None
        if principal is None or self._store is None:
            if self._failures.record_failure(address, now) == 1:
                log.warning("console_sign_in_failed", address=str(address))
            message = "This key is not accepted. Check it, or ask an administrator for another."
            raise ApiError(401, "invalid_api_key", message)
        await self._open(exchange, key_digest=digest)
        return principal

    async def sign_out(self, exchange: HttpExchange) -> None:
        """End the session of the request and remove its cookie."""
        try:
            await self._end_current(exchange)
        except StoreError as error:
            raise _store_unavailable(error) from error
        self._set_cookie(exchange, "")

    async def _end_current(self, exchange: HttpExchange) -> None:
        session_id = self._read_session_id(exchange)
        self._known.pop(hash_key(session_id), None)
        if session_id and self._store is not None:
            await run_in_daemon_thread(self._store.delete, session_id)

    def _read_session_id(self, exchange: HttpExchange) -> str:
        """Return the session id that the browser sent, or an empty string."""
        return read_cookie(exchange, self._cookie_name(exchange))

    def _set_cookie(self, exchange: HttpExchange, session_id: str) -> None:
        name = self._cookie_name(exchange)
        attributes = "Path=/; HttpOnly; SameSite=Strict"
        if name == SECURE_COOKIE:
            attributes += "; Secure"
        if not session_id:
            attributes += "; Max-Age=0"
        exchange.extra_headers.append(
            (b"set-cookie", f"{name}={session_id}; {attributes}".encode())
        )

    def _cookie_name(self, exchange: HttpExchange) -> str:
        return SECURE_COOKIE if self._guard.is_secure(exchange) else INSECURE_COOKIE


def read_cookie(exchange: HttpExchange, name: str) -> str:
    """Return the value of a cookie, or an empty string without it.

    `SimpleCookie` would drop all cookies after one that it cannot parse, such as those of other services of this host.
    """
    for pair in exchange.get_header(b"cookie").split(";"):
        found, _, value = pair.strip().partition("=")
        if found == name:
            return value
    return ""


class SignIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a sign-in."""

    key: str


def _store_unavailable(error: StoreError) -> ApiError:
    log.error("store_unavailable", reason=str(error))
    message = "The store is not available at the moment. The gateway's log has the reason. Try again later."
    return ApiError(503, "store_unavailable", message, retry_after_s=5.0)
