"""Authenticator that maps a request's API key, token or address to a principal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from typing import TYPE_CHECKING, Protocol

import structlog

from argosy.deployment import AuthConfig
from argosy.gateway.auth.client_address import (
    IpAddress,
    client_address,
    is_in_networks,
    is_local_request,
    parse_networks,
)
from argosy.gateway.auth.credential_index import CredentialEntry, CredentialIndex, TokenClaims
from argosy.gateway.principal import ANONYMOUS, Principal
from argosy.protocol import ApiError
from argosy.store import (
    AccountSnapshot,
    Clock,
    StoreConfig,
    default_store_url,
    hash_key,
    steady_clock,
)

if TYPE_CHECKING:
    from argosy.gateway.auth.token_verifier import TokenVerifier

API_KEY_HEADERS = (b"x-api-key", b"api-key")
"""Headers for keys besides `Authorization: Bearer`, as used by Anthropic's and Azure's clients."""
MAX_FAILURES = 20
"""Failures per window after which an address is blocked. Valid keys and tokens are accepted even then."""
FAILURE_WINDOW_S = 30.0
MAX_TRACKED_ADDRESSES = 4096
"""Maximum number of addresses with a counter. Beyond it, the oldest counter is dropped."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class ConnectionInfo(Protocol):
    """Headers and peer address of a request."""

    @property
    def headers(self) -> Mapping[bytes, bytes]:
        """Header values by lower-case name."""

    @property
    def peer_address(self) -> str:
        """Address of the peer; "unix" over a Unix socket, and empty if unknown."""


class Authenticator:
    """Authenticates requests. Only `apply_snapshot`, `prepare_snapshot` and its result are thread-safe.

    Raises:
        ValueError: A setting is invalid.
    """

    def __init__(
        self,
        snapshot: AccountSnapshot,
        settings: AuthConfig,
        clock: Callable[[], float] = time.time,
        key_command: str = "argosy keys create",
        steady_clock: Clock = steady_clock,
    ) -> None:
        self._settings = settings
        self._key_command = key_command
        self._clock = clock
        self._steady_clock = steady_clock
        self._networks = parse_networks(settings.allowed_networks)
        self._trusted_proxies = parse_networks(settings.trusted_proxies)
        self._token_verifier: TokenVerifier | None = None
        if settings.jwt is not None:
            # Imported here, since PyJWT and its dependencies take long to import.
            from argosy.gateway.auth.token_verifier import TokenVerifier

            self._token_verifier = TokenVerifier(settings.jwt, clock, steady_clock)
        self._failure_limiter = AuthFailureLimiter()
        self._update_lock = threading.Lock()
        self._snapshot_read_at = snapshot.read_at
        self._credentials = CredentialIndex(snapshot)

    def apply_snapshot(self, snapshot: AccountSnapshot) -> None:
        """Use this snapshot, unless it is older than the current one. Thread-safe."""
        self.prepare_snapshot(snapshot)()

    def prepare_snapshot(self, snapshot: AccountSnapshot) -> Callable[[], object]:
        """Index a snapshot and return a function that applies it as `apply_snapshot` does. Thread-safe.

        The returned function only swaps references. It returns the previous index, so that the caller decides where the
        old objects are freed.
        """
        index = CredentialIndex(snapshot)

        def swap_index() -> object:
            with self._update_lock:
                previous = self._credentials
                if snapshot.read_at >= self._snapshot_read_at:
                    self._snapshot_read_at = snapshot.read_at
                    self._credentials = index
            return previous

        return swap_index

    def is_trusted_proxy(self, address: IpAddress) -> bool:
        """Return whether the settings trust an address as a proxy."""
        return is_in_networks(address, self._trusted_proxies)

    def authenticate(self, connection: ConnectionInfo) -> Principal:
        """Return the principal of a request.

        Raises:
            ApiError: 401 or 403 if the request is not accepted. 429 after too many failures from the client's address.
                503 while the signing keys are being fetched.
        """
        self._check_networks(connection)
        if self._settings.mode == "disabled":
            return (
                ANONYMOUS
                if is_local_request(connection.peer_address, connection.headers)
                else Principal()
            )
        index = self._credentials
        credential = _extract_credential(connection.headers)
        if credential:
            entry = index.find_by_digest(hash_key(credential)) or self._find_by_token(
                index, credential, connection
            )
            if entry is not None:
                return self._check_entry(entry, connection)
        if _allows_keyless_access(self._settings, requires_keys=index.requires_keys):
            return _authenticate_local(connection, self._key_command)
        if credential:
            message = (
                "This API key is unknown. It may have been revoked. Check it or create another."
            )
            raise self._record_failure(ApiError(401, "invalid_api_key", message), connection)
        message = "No API key was sent. Send an API key as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
        raise ApiError(401, "missing_api_key", message)

    def authenticate_digest(self, digest: bytes, connection: ConnectionInfo) -> Principal | None:
        """Return the principal of the key with this digest, or None if there is no such key any more.

        Raises:
            ApiError: 401 or 403 if the key is not accepted.
        """
        self._check_networks(connection)
        entry = self._credentials.find_by_digest(digest)
        return None if entry is None else self._check_entry(entry, connection)

    def find_principal(self, *, key: str | None, project: str | None) -> Principal | None:
        """Return the principal of a key or a project by its id, or None if there is none. It is not authenticated.

        Raises:
            ApiError: 401 if the project is archived or the key's user is disabled.
        """
        index = self._credentials
        entry = None
        if key is not None:
            entry = index.find_by_key_id(key)
        elif project is not None:
            entry = index.find_by_project(project)
        return None if entry is None else entry.principal

    def authenticate_claims(self, claims: TokenClaims, connection: ConnectionInfo) -> Principal:
        """Return the principal of the bearer of a token that was verified before.

        Raises:
            ApiError: 401 or 403 if the bearer is not accepted any more.
        """
        self._check_networks(connection)
        return self._check_entry(self._credentials.find_by_claims(claims), connection)

    def verify_id_token(self, token: str, connection: ConnectionInfo, nonce: str) -> TokenClaims:
        """Return the claims of a token that the issuer sent for a sign-in with this nonce.

        Raises:
            ApiError: 401 if the token is not accepted. 503 while the signing keys are being fetched.
        """
        if self._token_verifier is None:
            raise ApiError(401, "invalid_token", "The settings trust no issuer. Set auth.jwt.")
        try:
            return self._token_verifier.verify_nonce(token, nonce)
        except ApiError as error:
            raise self._record_failure(error, connection) from None

    def client_address(self, connection: ConnectionInfo) -> IpAddress | None:
        """Return the client's address, as trusted proxies report it; None if it is unknown."""
        return client_address(connection.peer_address, connection.headers, self._trusted_proxies)

    def _check_networks(self, connection: ConnectionInfo) -> None:
        if self._networks and not is_in_networks(self.client_address(connection), self._networks):
            raise _address_not_allowed(self.client_address(connection), "The gateway")

    def _find_by_token(
        self, credentials: CredentialIndex, credential: str, connection: ConnectionInfo
    ) -> CredentialEntry | None:
        """Return the entry of a token's bearer, or None if the credential is no token or tokens are not configured."""
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
            message = f"{entry.display_name} has expired. Use another key or create a new one."
            raise ApiError(401, "expired_api_key", message)
        if entry.allowed_networks:
            address = self.client_address(connection)
            for networks in entry.allowed_networks:
                if not is_in_networks(address, networks):
                    raise _address_not_allowed(address, entry.display_name or "The project")
        return entry.principal

    def _record_failure(self, error: ApiError, connection: ConnectionInfo) -> ApiError:
        """Count a failed attempt, log the first one of an address, and return the error to raise."""
        if error.status != 401:
            return error
        self._check_failure_limit(connection)
        address = self.client_address(connection)
        if self._failure_limiter.record_failure(address, self._steady_clock()) == 1:
            log.warning("auth_failed", address=str(address), error=error.code)
        return error

    def _check_failure_limit(self, connection: ConnectionInfo) -> None:
        wait_s = self._failure_limiter.retry_after_s(
            self.client_address(connection), self._steady_clock()
        )
        if wait_s > 0:
            message = "Too many failed authentications from your address. Wait, then check the key."
            raise ApiError(429, "too_many_failures", message, retry_after_s=wait_s)


def check_exposure(host: str, settings: AuthConfig, snapshot: AccountSnapshot) -> None:
    """Check that the gateway does not accept requests from other machines without API keys.

    Raises:
        ValueError: No key exists and `host` is not a loopback address.
    """
    if _allows_keyless_access(settings, requires_keys=snapshot.requires_keys) and not is_loopback(
        host
    ):
        raise ValueError(
            f"there are no API keys yet, so the gateway does not listen on {host or 'all addresses'}: create a key "
            "(argosy keys create; a gateway's configuration needs `store: {}` to use it), listen on 127.0.0.1, or set "
            "auth.mode to disabled to accept all requests"
        )


def _allows_keyless_access(settings: AuthConfig, *, requires_keys: bool) -> bool:
    """Return whether local clients need no key, because no key was ever created."""
    return settings.mode == "auto" and not requires_keys and settings.jwt is None


def is_loopback(host: str) -> bool:
    """Return whether a socket that listens on `host` is reachable from this machine only."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def has_credential(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a request carries an API key or a token, which browsers never add by themselves."""
    return bool(_extract_credential(headers))


def _extract_credential(headers: Mapping[bytes, bytes]) -> str:
    """Return the API key or token that was sent, or an empty string if there is none."""
    scheme, _, rest = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and rest.strip():
        return rest.strip().decode("latin-1")
    for name in API_KEY_HEADERS:
        if name in headers:
            return headers[name].strip().decode("latin-1")
    return ""


def describe_key_command(store: StoreConfig | None) -> str:
    """Return how a key for a gateway is created. Everyone may read it, so it does not contain the store's URL."""
    if store is None:
        return "argosy keys create, after adding `store: {}` to the gateway's settings"
    if store.url is None or store.url == default_store_url():
        return "argosy keys create"
    kind = "PostgreSQL" if store.url.startswith("postgresql") else "SQLite"
    return f"argosy keys create --store URL, with the URL of the gateway's {kind} store"


def _authenticate_local(connection: ConnectionInfo, key_command: str) -> Principal:
    """Return the anonymous principal for a local client while no API key exists.

    Raises:
        ApiError: 401 if the client is not local.
    """
    if is_local_request(connection.peer_address, connection.headers):
        return ANONYMOUS
    message = (
        "There are no API keys yet, so only this machine may send requests, as localhost and through no proxy. "
        f"Create a key: {key_command}."
    )
    raise ApiError(401, "no_keys_yet", message)


def _address_not_allowed(address: IpAddress | None, subject: str) -> ApiError:
    address_text = "an unknown address" if address is None else str(address)
    message = (
        f"{subject} may not be used from {address_text}. Ask an administrator to allow the network."
    )
    return ApiError(403, "address_not_allowed", message)


class AuthFailureLimiter:
    """Counts failed attempts per address in windows that begin with the first failure.

    The limit slows down guessing and keeps the log short.
    """

    def __init__(
        self, max_failures: int = MAX_FAILURES, window_s: float = FAILURE_WINDOW_S
    ) -> None:
        self._max_failures = max_failures
        self._window_s = window_s
        self._counts: dict[str, tuple[int, float]] = {}
        """Failures and the end of the window by source, oldest first."""

    def record_failure(self, address: IpAddress | None, now: float) -> int:
        """Count a failure and return the number of failures in the window."""
        source = _source_key(address)
        count, until = self._counts.get(source, (0, 0.0))
        if until <= now:
            self._counts.pop(source, None)
            count, until = 0, now + self._window_s
            if len(self._counts) >= MAX_TRACKED_ADDRESSES:
                del self._counts[next(iter(self._counts))]
        self._counts[source] = (count + 1, until)
        return count + 1

    def retry_after_s(self, address: IpAddress | None, now: float) -> float:
        """Return the seconds until the address may fail again, or 0 if it may now."""
        count, until = self._counts.get(_source_key(address), (0, 0.0))
        return max(0.0, until - now) if count >= self._max_failures else 0.0


def _source_key(address: IpAddress | None) -> str:
    """Return the counter key: an IPv4 address or an IPv6 /64 network, since a client usually has the whole /64."""
    if address is None:
        return ""
    return str(address) if address.version == 4 else address.exploded[:19]
