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
    IpAddress,
    client_address,
    is_in_networks,
    is_local_request,
    parse_networks,
)
from argosy.gateway.auth.credential_index import CredentialEntry, CredentialIndex
from argosy.gateway.auth.failure_limiter import AuthFailureLimiter
from argosy.gateway.principal import ANONYMOUS, Principal
from argosy.protocol import ApiError
from argosy.store import AccountSnapshot, SteadyClock, hash_key

if TYPE_CHECKING:
    from argosy.gateway.auth.auth_config import JwtConfig
    from argosy.gateway.auth.token_verifier import TokenVerifier

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

API_KEY_HEADERS = (b"x-api-key", b"api-key")
"""Where a key may be besides `Authorization: Bearer`: as Anthropic's and Azure's clients send it."""


class ConnectionInfo(Protocol):
    """What is looked at of a request."""

    @property
    def headers(self) -> Mapping[bytes, bytes]:
        """By name in lower case."""

    @property
    def peer_address(self) -> str:
        """Address of the other end; "unix" over a Unix socket; empty when nobody knows."""


class Authenticator:
    """Finds callers. Raises ValueError when the settings cannot be meant. Belongs to the event loop's thread."""

    def __init__(
        self,
        snapshot: AccountSnapshot,
        settings: AuthConfig,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._steady_clock = SteadyClock(clock)
        self._networks = parse_networks(settings.allowed_networks)
        self._trusted_proxies = parse_networks(settings.trusted_proxies)
        self._token_verifier = (
            None if settings.jwt is None else _build_token_verifier(settings.jwt, clock)
        )
        self._failure_limiter = AuthFailureLimiter()
        self._update_lock = threading.Lock()
        self._snapshot_read_at = snapshot.read_at
        self._credentials = CredentialIndex(snapshot)

    def apply_snapshot(self, snapshot: AccountSnapshot) -> None:
        """Go by this directory from now on, unless it was read before the one that is known. For any thread."""
        self.prepare_snapshot(snapshot)()

    def prepare_snapshot(self, snapshot: AccountSnapshot) -> Callable[[], object]:
        """What does as `update` does, at once, and gives what was known: all work is done by then. For any thread."""
        book = CredentialIndex(snapshot)

        def take() -> object:
            with self._update_lock:
                before = self._credentials
                if snapshot.read_at >= self._snapshot_read_at:
                    self._snapshot_read_at = snapshot.read_at
                    self._credentials = book
            return before

        return take

    def authenticate(self, connection: ConnectionInfo) -> Principal:
        """The caller. Raises ApiError 401 or 403; 429 after many failures, 503 while signing keys are fetched."""
        if self._networks and not is_in_networks(self._client_address(connection), self._networks):
            raise _address_not_allowed(self._client_address(connection), "The gateway")
        if self._settings.mode == "disabled":
            return (
                ANONYMOUS
                if is_local_request(connection.peer_address, connection.headers)
                else Principal()
            )
        book = self._credentials
        credential = _extract_credential(connection.headers)
        if credential:
            entry = book.find_by_digest(hash_key(credential)) or self._find_by_token(
                book, credential, connection
            )
            if entry is not None:
                return self._check_entry(entry, connection)
        if _allows_keyless_access(self._settings, requires_keys=book.requires_keys):
            return _authenticate_local(connection)
        if credential:
            message = "This API key is not known here; it may have been revoked. Check it, or get another."
            raise self._record_failure(ApiError(401, "invalid_api_key", message), connection)
        message = "Who asks? Send an API key as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
        raise ApiError(401, "missing_api_key", message)

    def _find_by_token(
        self, credentials: CredentialIndex, credential: str, connection: ConnectionInfo
    ) -> CredentialEntry | None:
        """The entry of a token's bearer; None when it is no token or nobody's are taken."""
        if self._token_verifier is None or credential.count(".") != 2:
            return None
        claims = self._token_verifier.cached_claims(credential)
        if claims is None:
            try:
                claims = self._token_verifier.verify(credential)
            except ApiError as error:
                raise self._record_failure(error, connection) from None
        return credentials.find_by_claims(claims)

    def _check_entry(self, entry: CredentialEntry, connection: ConnectionInfo) -> Principal:
        if entry.expires_at is not None and entry.expires_at <= self._clock():
            message = f"{entry.display_name} has expired. Use another, or ask for a new one."
            raise ApiError(401, "expired_api_key", message)
        if entry.allowed_networks:
            address = self._client_address(connection)
            for networks in entry.allowed_networks:
                if not is_in_networks(address, networks):
                    raise _address_not_allowed(address, entry.display_name or "The project")
        return entry.principal

    def _record_failure(self, error: ApiError, connection: ConnectionInfo) -> ApiError:
        """Count a failure; what to answer. The first of an address is logged."""
        if error.status != 401:
            return error
        self._check_failure_limit(connection)
        address = self._client_address(connection)
        if self._failure_limiter.record_failure(address, self._steady_clock()) == 1:
            log.warning("auth_failed", address=str(address), error=error.code)
        return error

    def _check_failure_limit(self, connection: ConnectionInfo) -> None:
        wait_s = self._failure_limiter.retry_after_s(
            self._client_address(connection), self._steady_clock()
        )
        if wait_s > 0:
            message = "Too many wrong keys from your address. Wait, and check the key."
            raise ApiError(429, "too_many_failures", message, retry_after_s=wait_s)

    def _client_address(self, connection: ConnectionInfo) -> IpAddress | None:
        return client_address(connection.peer_address, connection.headers, self._trusted_proxies)


def check_exposure(host: str, settings: AuthConfig, snapshot: AccountSnapshot) -> None:
    """Raise ValueError when listening at `host` would be open to others while nobody has a key."""
    if _allows_keyless_access(settings, requires_keys=snapshot.requires_keys) and not is_loopback(
        host
    ):
        raise ValueError(
            f"there are no API keys yet, so listening on {host or 'all addresses'} is refused: make one "
            "(argosy keys create; a gateway's file needs `store: {}` to know it), listen on 127.0.0.1, or set "
            "auth.mode to off to let anyone in"
        )


def _build_token_verifier(config: JwtConfig, clock: Callable[[], float]) -> TokenVerifier:
    from argosy.gateway.auth.token_verifier import (
        TokenVerifier,  # its libraries take long to import
    )

    return TokenVerifier(config, clock)


def _allows_keyless_access(settings: AuthConfig, *, requires_keys: bool) -> bool:
    """Whether those on this machine need no key, since none was ever made."""
    return settings.mode == "auto" and not requires_keys and settings.jwt is None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens at `host`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _extract_credential(headers: Mapping[bytes, bytes]) -> str:
    """The key or token that was sent; empty when there is none."""
    scheme, _, rest = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and rest.strip():
        return rest.strip().decode("latin-1")
    for name in API_KEY_HEADERS:
        if name in headers:
            return headers[name].strip().decode("latin-1")
    return ""


def _authenticate_local(connection: ConnectionInfo) -> Principal:
    """While there are no keys: whoever sits at this machine."""
    if is_local_request(connection.peer_address, connection.headers):
        return ANONYMOUS
    message = (
        "There are no API keys yet, so only this machine may ask, as localhost and through no proxy. "
        "Make one: argosy keys create."
    )
    raise ApiError(401, "no_keys_yet", message)


def _address_not_allowed(address: IpAddress | None, what: str) -> ApiError:
    shown = "an unknown address" if address is None else str(address)
    message = f"{what} may not be used from {shown}. Ask for the network to be allowed."
    return ApiError(403, "address_not_allowed", message)
