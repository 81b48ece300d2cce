"""The public keys that tokens are signed with: from a file or the network, fetched beside the event loop, kept."""

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

from argosy.gateway.auth.auth_config import JwtConfig
from argosy.protocol import ApiError

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

MAX_KEY_AGE_S = 3600.0
"""Keys are fetched again after this long, so that one that was withdrawn goes."""
MIN_REFETCH_INTERVAL_S = 60.0
"""A token with an unknown key has them fetched again, but not sooner than this after the last time."""
RETRY_INTERVAL_S = 5.0
"""The same, after a failure."""
FILE_REREAD_INTERVAL_S = 5.0
"""Age and pause of a file: reading it costs nothing, and whoever takes a key out of it means now."""
FETCH_TIMEOUT_S = 5.0
"""For one document: connecting, each pause of the other side, and all of it together."""
MAX_DOCUMENT_BYTES = 1 << 20
OPENID_DISCOVERY_PATH = "/.well-known/openid-configuration"


class _KeySet(msgspec.Struct):
    keys: list[dict[str, Any]]


class _ProviderMetadata(msgspec.Struct):
    issuer: str
    jwks_uri: str


@dataclass(frozen=True, slots=True)
class PublishedKeys:
    """What was fetched, and the keys made of it so far by id and algorithm."""

    jwks_by_id: dict[str, dict[str, Any]]
    parsed_keys: dict[tuple[str, str], jwt.PyJWK] = field(default_factory=dict)

    def find(self, key_id: str, algorithm: str) -> jwt.PyJWK | None:
        """The key for one algorithm: the one it is published for, else any that it can do.

        None when there is no such key. Raises ApiError 401 when it is of another kind.
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
            message = f"The token says {algorithm}, and its key is of another kind. Sign in again."
            raise ApiError(401, "invalid_token", message) from error
        return key


class SigningKeys:
    """Keys by id. Nothing here waits for the network: a fetch runs in a thread of its own.

    A file is read at once. Raises ValueError when the settings name no keys or the file has none.
    """

    def __init__(self, config: JwtConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self.published: PublishedKeys | None = None
        """Another one when the keys have changed."""
        self._fetch_lock = threading.Lock()
        self._next_fetch_at = 0.0
        """Before this time nothing is fetched on account of an unknown key."""
        self._stale_at = float("inf")
        self._last_fetch_failed = False
        """The last fetch: then nobody knows whether an unknown key is a new one."""
        if config.jwks is None and not _is_url(config.issuer or ""):
            raise ValueError(
                "auth.jwt: give the URL of an issuer, or the file or URL of its keys as jwks"
            )
        self._min_refetch_interval_s, self._max_age_s = MIN_REFETCH_INTERVAL_S, MAX_KEY_AGE_S
        if config.jwks is None or _is_url(config.jwks):
            self._start_fetch()
        else:
            self._min_refetch_interval_s = self._max_age_s = FILE_REREAD_INTERVAL_S
            self._on_fetched(_load_keys(config))

    def refresh_if_stale(self) -> None:
        """Have them fetched again if they are old."""
        if self._clock() >= self._stale_at:
            self._start_fetch()

    def find(self, key_id: str, algorithm: str) -> jwt.PyJWK:
        """The key with this id. Raises ApiError 401 when there is none, 503 while that is being found out."""
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
        except RuntimeError as error:  # no thread is left
            self._on_fetch_failed(error)
            self._fetch_lock.release()

    def _fetch(self) -> None:
        try:
            self._on_fetched(_load_keys(self._config))
        except Exception as error:  # noqa: BLE001 - whatever it is, they are tried again, and not with every request
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
    """Public keys for signatures, by id. Raises ValueError."""
    where = config.jwks
    if where is None:
        where = _discover_jwks_url(config.issuer or "")
    raw = _fetch_document(where) if _is_url(where) else _read_file(where)
    try:
        published = msgspec.json.decode(raw, type=_KeySet).keys
    except msgspec.DecodeError as error:
        raise ValueError(f"{where}: this is no JSON Web Key Set ({error})") from error
    keys = {
        str(key.get("kid", "")): key
        for key in published
        if key.get("kty") in ("RSA", "EC", "OKP") and key.get("use", "sig") == "sig"
    }
    if not keys:
        raise ValueError(f"{where}: there is no public key for signatures in it")
    return keys


def _discover_jwks_url(issuer: str) -> str:
    """Where the issuer's keys are, as it says itself."""
    try:
        found = msgspec.json.decode(
            _fetch_document(issuer.rstrip("/") + OPENID_DISCOVERY_PATH), type=_ProviderMetadata
        )
    except msgspec.DecodeError as error:
        raise ValueError(
            f"{issuer}{OPENID_DISCOVERY_PATH} does not say where its keys are ({error})"
        ) from error
    if found.issuer != issuer:
        raise ValueError(f"{issuer} calls itself {found.issuer}: write auth.jwt.issuer like that")
    if urlsplit(found.jwks_uri).scheme != "https" and urlsplit(issuer).scheme == "https":
        raise ValueError(f"{issuer} publishes its keys at {found.jwks_uri}, which is not https")
    return found.jwks_uri


def _fetch_document(url: str) -> bytes:
    """Its document. Raises ValueError, naming the URL; the environment's proxies are heeded."""
    try:
        return _download(url)
    except (OSError, ImportError, httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise ValueError(f"{url} cannot be reached ({error})") from error


def _download(url: str) -> bytes:
    with (
        httpx2.Client(timeout=FETCH_TIMEOUT_S) as client,
        client.stream("GET", url, headers={"accept": "application/json"}) as answer,
    ):
        if answer.status_code != 200:
            raise ValueError(f"{url} answered with status {answer.status_code}")
        body, deadline = b"", time.monotonic() + FETCH_TIMEOUT_S
        for piece in answer.iter_bytes():
            body += piece
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
