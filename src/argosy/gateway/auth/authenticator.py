"""The caller of a request, found from its key, its token, or the place that it comes from."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from typing import TYPE_CHECKING, Protocol

import structlog

from argosy.gateway.auth.auth_config import AuthConfig
from argosy.gateway.auth.client_address import (
    Address,
    from_this_machine,
    origin,
    parse_networks,
    within,
)
from argosy.gateway.auth.credential_index import Book, Entry
from argosy.gateway.auth.failure_limiter import Failures
from argosy.gateway.principal import ANYONE, Caller
from argosy.protocol import ApiError
from argosy.store import Directory, SteadyClock, digest

if TYPE_CHECKING:
    from argosy.gateway.auth.auth_config import JwtConfig
    from argosy.gateway.auth.token_verifier import Tokens

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

HEADERS = (b"x-api-key", b"api-key")
"""Where a key may be besides `Authorization: Bearer`: as Anthropic's and Azure's clients send it."""


class Asking(Protocol):
    """What is looked at of a request."""

    @property
    def headers(self) -> Mapping[bytes, bytes]:
        """By name in lower case."""

    @property
    def peer(self) -> str:
        """Address of the other end; "unix" over a Unix socket; empty when nobody knows."""


class Identity:
    """Finds callers. Raises ValueError when the settings cannot be meant. Belongs to the event loop's thread."""

    def __init__(
        self,
        directory: Directory,
        settings: AuthConfig,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._steady = SteadyClock(clock)
        self._networks = parse_networks(settings.networks)
        self._trusted = parse_networks(settings.trusted_proxies)
        self._tokens = None if settings.jwt is None else _tokens(settings.jwt, clock)
        self._failures = Failures()
        self._updating = threading.Lock()
        self._read_at = directory.read_at
        self._book = Book(directory)

    def update(self, directory: Directory) -> None:
        """Go by this directory from now on, unless it was read before the one that is known. For any thread."""
        self.prepare(directory)()

    def prepare(self, directory: Directory) -> Callable[[], object]:
        """What does as `update` does, at once, and gives what was known: all work is done by then. For any thread."""
        book = Book(directory)

        def take() -> object:
            with self._updating:
                before = self._book
                if directory.read_at >= self._read_at:
                    self._read_at = directory.read_at
                    self._book = book
            return before

        return take

    def identify(self, asking: Asking) -> Caller:
        """The caller. Raises ApiError 401 or 403; 429 after many failures, 503 while signing keys are fetched."""
        if self._networks and not within(self._address(asking), self._networks):
            raise _misplaced(self._address(asking), "The gateway")
        if self._settings.mode == "off":
            return ANYONE if from_this_machine(asking.peer, asking.headers) else Caller()
        book = self._book
        credential = _credential(asking.headers)
        if credential:
            entry = book.by_digest(digest(credential)) or self._by_token(book, credential, asking)
            if entry is not None:
                return self._let_in(entry, asking)
        if _needs_no_key(self._settings, keyed=book.keyed):
            return _by_place(asking)
        if credential:
            message = "This API key is not known here; it may have been revoked. Check it, or get another."
            raise self._failed(ApiError(401, "invalid_api_key", message), asking)
        message = "Who asks? Send an API key as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
        raise ApiError(401, "missing_api_key", message)

    def _by_token(self, book: Book, credential: str, asking: Asking) -> Entry | None:
        """The entry of a token's bearer; None when it is no token or nobody's are taken."""
        if self._tokens is None or credential.count(".") != 2:
            return None
        claims = self._tokens.known(credential)
        if claims is None:
            try:
                claims = self._tokens.check(credential)
            except ApiError as error:
                raise self._failed(error, asking) from None
        return book.by_claims(claims)

    def _let_in(self, entry: Entry, asking: Asking) -> Caller:
        if entry.expires_at is not None and entry.expires_at <= self._clock():
            message = f"{entry.name} has expired. Use another, or ask for a new one."
            raise ApiError(401, "expired_api_key", message)
        if entry.networks:
            address = self._address(asking)
            for networks in entry.networks:
                if not within(address, networks):
                    raise _misplaced(address, entry.name or "The project")
        return entry.caller

    def _failed(self, error: ApiError, asking: Asking) -> ApiError:
        """Count a failure; what to answer. The first of an address is logged."""
        if error.status != 401:
            return error
        self._check_failures(asking)
        address = self._address(asking)
        if self._failures.note(address, self._steady()) == 1:
            log.warning("auth_failed", address=str(address), error=error.code)
        return error

    def _check_failures(self, asking: Asking) -> None:
        wait_s = self._failures.wait_s(self._address(asking), self._steady())
        if wait_s > 0:
            message = "Too many wrong keys from your address. Wait, and check the key."
            raise ApiError(429, "too_many_failures", message, retry_after_s=wait_s)

    def _address(self, asking: Asking) -> Address | None:
        return origin(asking.peer, asking.headers, self._trusted)


def check_exposure(host: str, settings: AuthConfig, directory: Directory) -> None:
    """Raise ValueError when listening at `host` would be open to others while nobody has a key."""
    if _needs_no_key(settings, keyed=directory.keyed) and not is_loopback(host):
        raise ValueError(
            f"there are no API keys yet, so listening on {host or 'all addresses'} is refused: make one "
            "(argosy keys create; a gateway's file needs `store: {}` to know it), listen on 127.0.0.1, or set "
            "auth.mode to off to let anyone in"
        )


def _tokens(config: JwtConfig, clock: Callable[[], float]) -> Tokens:
    from argosy.gateway.auth.token_verifier import Tokens  # its libraries take long to import

    return Tokens(config, clock)


def _needs_no_key(settings: AuthConfig, *, keyed: bool) -> bool:
    """Whether those on this machine need no key, since none was ever made."""
    return settings.mode == "auto" and not keyed and settings.jwt is None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens at `host`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _credential(headers: Mapping[bytes, bytes]) -> str:
    """The key or token that was sent; empty when there is none."""
    scheme, _, rest = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and rest.strip():
        return rest.strip().decode("latin-1")
    for name in HEADERS:
        if name in headers:
            return headers[name].strip().decode("latin-1")
    return ""


def _by_place(asking: Asking) -> Caller:
    """While there are no keys: whoever sits at this machine."""
    if from_this_machine(asking.peer, asking.headers):
        return ANYONE
    message = (
        "There are no API keys yet, so only this machine may ask, as localhost and through no proxy. "
        "Make one: argosy keys create."
    )
    raise ApiError(401, "no_keys_yet", message)


def _misplaced(address: Address | None, what: str) -> ApiError:
    shown = "an unknown address" if address is None else str(address)
    message = f"{what} may not be used from {shown}. Ask for the network to be allowed."
    return ApiError(403, "address_not_allowed", message)
