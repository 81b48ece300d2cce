"""Public keys that verify token signatures, loaded from a file or fetched in a background thread, and cached."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import jwt
import msgspec
import structlog

from argosy.deployment import JwtConfig
from argosy.protocol import ApiError
from argosy.proxies import direct_mounts

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

MAX_KEY_AGE_S = 3600.0
"""Age after which keys are fetched again, so that withdrawn keys are removed."""
MIN_REFETCH_INTERVAL_S = 60.0
"""Minimum interval between fetches caused by tokens with unknown keys."""
RETRY_INTERVAL_S = 5.0
"""The same interval after a failed fetch."""
FILE_REREAD_INTERVAL_S = 5.0
"""The same two values for a file. Reading is cheap, and a key removed from the file should be rejected quickly."""
FETCH_TIMEOUT_S = 5.0
"""Timeout of one document: for connecting, for each read, and for the whole document."""
MAX_DOCUMENT_BYTES = 1 << 20
OPENID_DISCOVERY_PATH = "/.well-known/openid-configuration"


class _KeySet(msgspec.Struct):
    keys: list[dict[str, Any]]


class ProviderMetadata(msgspec.Struct):
    """Discovery document of an OpenID Connect issuer."""

    issuer: str
    jwks_uri: str
    authorization_endpoint: str = ""
    token_endpoint: str = ""


@dataclass(frozen=True, slots=True)
class PublishedKeys:
    """Fetched key set, and the keys parsed from it so far by id and algorithm."""

    jwks_by_id: dict[str, dict[str, Any]]
    parsed_keys: dict[tuple[str, str], jwt.PyJWK] = field(default_factory=dict)

    def find(self, key_id: str, algorithm: str) -> jwt.PyJWK | None:
        """Return the key with this id for one algorithm, or None if the id is unknown.

        Raises:
            ApiError: 401 if the key is for another algorithm.
        """
        key = self.parsed_keys.get((key_id, algorithm))
        if key is not None:
            return key
        data = self.jwks_by_id.get(key_id)
        if data is None:
            return None
        try:
            if data.get("alg", algorithm) != algorithm:
                raise jwt.InvalidAlgorithmError
            key = self.parsed_keys[key_id, algorithm] = jwt.PyJWK(data, algorithm)
        except jwt.PyJWTError as error:
            message = f"The token is signed with {algorithm}, but its key is for another algorithm. Sign in again."
            raise ApiError(401, "invalid_token", message) from error
        return key


class SigningKeys:
    """Signing keys by id. No method waits for the network, since fetches run in a thread.

    A file is read in the constructor.

    Raises:
        ValueError: The settings name no keys, or the file contains none.
    """

    def __init__(self, config: JwtConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self.published: PublishedKeys | None = None
        """Keys of the last successful fetch. A new object if and only if the keys have changed."""
        self._fetch_lock = threading.Lock()
        self._next_fetch_at = 0.0
        """Earliest time of a fetch caused by an unknown key."""
        self._stale_at = float("inf")
        self._last_fetch_failed = False
        """Whether the last fetch failed. Unknown keys may then be new ones."""
        if config.jwks is None and not _is_url(config.issuer or ""):
            raise ValueError(
                "auth.jwt: set issuer to the issuer's URL, or jwks to the file or URL of its keys"
            )
        self._min_refetch_interval_s, self._max_age_s = MIN_REFETCH_INTERVAL_S, MAX_KEY_AGE_S
        if config.jwks is None or _is_url(config.jwks):
            self._start_fetch()
        else:
            self._min_refetch_interval_s = self._max_age_s = FILE_REREAD_INTERVAL_S
            self._on_fetched(_load_keys(config))

    def refresh_if_stale(self) -> None:
        """Start to fetch the keys again if they are old."""
        if self._clock() >= self._stale_at:
            self._start_fetch()

    def find(self, key_id: str, algorithm: str) -> jwt.PyJWK:
        """Return the key with this id.

        Raises:
            ApiError: 401 if the issuer does not publish the key. 503 while the keys are being fetched.
        """
        now = self._clock()
        self.refresh_if_stale()
        fetching, published = self._fetch_lock.locked(), self.published
        key = None if published is None else published.find(key_id, algorithm)
        if key is not None:
            return key
        if now >= self._next_fetch_at:
            fetching = True
            self._start_fetch()
        if published is None or fetching or self._last_fetch_failed:
            message = "The issuer's keys are being fetched. Try again in a moment."
            raise ApiError(503, "signing_keys_missing", message, retry_after_s=1.0)
        message = "The token is signed with a key that its issuer does not publish. Sign in again."
        raise ApiError(401, "invalid_token", message)

    def _start_fetch(self) -> None:
        if not self._fetch_lock.acquire(blocking=False):
            return
        try:
            threading.Thread(target=self._fetch, name="signing-keys", daemon=True).start()
        except RuntimeError as error:  # the process cannot start another thread
            self._on_fetch_failed(error)
            self._fetch_lock.release()

    def _fetch(self) -> None:
        try:
            self._on_fetched(_load_keys(self._config))
        except Exception as error:  # noqa: BLE001 - any error schedules the next fetch, or each request would start one
            self._on_fetch_failed(error)
        finally:
            self._fetch_lock.release()

    def _on_fetch_failed(self, error: Exception) -> None:
        self._stale_at = self._next_fetch_at = self._clock() + RETRY_INTERVAL_S
        self._last_fetch_failed = True
        log.warning("signing_keys_unavailable", reason=str(error))

    def _on_fetched(self, keys: dict[str, dict[str, Any]]) -> None:
        now = self._clock()
        self._next_fetch_at, self._stale_at = (
            now + self._min_refetch_interval_s,
            now + self._max_age_s,
        )
        self._last_fetch_failed = False
        if self.published is None or keys != self.published.jwks_by_id:
            self.published = PublishedKeys(keys)


def _load_keys(config: JwtConfig) -> dict[str, dict[str, Any]]:
    """Load the public signature keys by id.

    Raises:
        ValueError: The keys cannot be loaded; the message names their file or URL.
    """
    location = config.jwks
    if location is None:
        location = discover_provider(config.issuer or "").jwks_uri
    raw = _fetch_document(location) if _is_url(location) else _read_file(location)
    try:
        published = msgspec.json.decode(raw, type=_KeySet).keys
    except msgspec.DecodeError as error:
        raise ValueError(f"{location}: not a JSON Web Key Set ({error})") from error
    keys = {
        str(key.get("kid", "")): key
        for key in published
        if key.get("kty") in ("RSA", "EC", "OKP") and key.get("use", "sig") == "sig"
    }
    if not keys:
        raise ValueError(f"{location}: contains no public key for signatures")
    return keys


def discover_provider(issuer: str) -> ProviderMetadata:
    """Fetch and check the issuer's OpenID Connect discovery document. Blocks.

    Raises:
        ValueError: The document cannot be fetched, or is not that of the issuer.
    """
    try:
        metadata = msgspec.json.decode(
            _fetch_document(issuer.rstrip("/") + OPENID_DISCOVERY_PATH), type=ProviderMetadata
        )
    except msgspec.DecodeError as error:
        raise ValueError(
            f"{issuer}{OPENID_DISCOVERY_PATH} contains no URL of its keys ({error})"
        ) from error
    if metadata.issuer != issuer:
        raise ValueError(
            f"{issuer} calls itself {metadata.issuer}; set auth.jwt.issuer to this value"
        )
    for url in (metadata.jwks_uri, metadata.authorization_endpoint, metadata.token_endpoint):
        if url and urlsplit(url).scheme != "https" and urlsplit(issuer).scheme == "https":
            raise ValueError(f"{issuer} publishes the address {url}, which is not https")
    return metadata


def _fetch_document(url: str) -> bytes:
    """Download a document, through the proxies that the environment sets for servers outside.

    Raises:
        ValueError: The download failed; the message names the URL.
    """
    try:
        return _download(url)
    except (OSError, ImportError, httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise ValueError(f"{url} cannot be reached ({error})") from error


def _download(url: str) -> bytes:
    with (
        httpx2.Client(timeout=FETCH_TIMEOUT_S, mounts=direct_mounts(url)) as client,
        client.stream("GET", url, headers={"accept": "application/json"}) as response,
    ):
        if response.status_code != 200:
            raise ValueError(f"{url} answered with status {response.status_code}")
        body, deadline = b"", time.monotonic() + FETCH_TIMEOUT_S
        for chunk in response.iter_bytes():
            body += chunk
            if time.monotonic() > deadline:
                raise ValueError(f"{url} took longer than {FETCH_TIMEOUT_S:g} s to answer")
            if len(body) > MAX_DOCUMENT_BYTES:
                raise ValueError(f"{url} answered with more than {MAX_DOCUMENT_BYTES} bytes")
        return body


def _read_file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"auth.jwt.jwks: {path} cannot be read ({error.strerror})") from error


def _is_url(location: str) -> bool:
    return location.startswith(("http://", "https://"))
