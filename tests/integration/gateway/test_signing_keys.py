"""Signing keys of an issuer: fetching, rotation, failed fetches, key files and settings."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tests.support.account_fixtures import bearer, make_snapshot
from tests.support.token_issuer import (
    FETCH_TIMEOUT_S,
    OTHER_RSA_KEY,
    OffsetClock,
    TokenIssuer,
    authenticate,
    make_jwt_authenticator,
    public_jwk,
    run_issuer,
    token_rejection,
    wait_for_rejection,
)

from argosy.deployment import AuthConfig, JwtConfig
from argosy.gateway.auth import Authenticator, signing_keys
from argosy.protocol import ApiError

LATER_S = 3700.0


@pytest.fixture
def issuer() -> Iterator[TokenIssuer]:
    with run_issuer() as running:
        yield running


# --- fetched keys --------------------------------------------------------------------------------


def test_verified_token_is_accepted_until_expiry_while_issuer_is_down(issuer: TokenIssuer) -> None:
    authenticator = make_jwt_authenticator(issuer, leeway_s=0.0)
    token = issuer.token(project="chat", exp=time.time() + 2.0)
    authenticate(authenticator, bearer(token))
    issuer.is_broken = True
    assert authenticate(authenticator, bearer(token)).project == "proj_chat"
    assert wait_for_rejection(authenticator, token) == (
        401,
        "The token has expired. Sign in again.",
    )


@pytest.mark.parametrize("expiry", [1e308, 10**400])
def test_huge_expiry_is_accepted(issuer: TokenIssuer, expiry: float) -> None:
    token = issuer.token(project="chat", exp=expiry)
    authenticator = make_jwt_authenticator(issuer)
    for _ in range(2):
        assert authenticate(authenticator, bearer(token)).project == "proj_chat"


def test_rotated_key_is_fetched_and_withdrawn_key_is_rejected(issuer: TokenIssuer) -> None:
    clock = OffsetClock()
    authenticator = make_jwt_authenticator(issuer, clock)
    old = issuer.token(project="chat", exp=time.time() + 7200)
    authenticate(authenticator, bearer(old))
    issuer.keys = [public_jwk(OTHER_RSA_KEY, "new")]
    new = issuer.token(OTHER_RSA_KEY, "new", project="chat")
    assert token_rejection(authenticator, new)[0] == 401, "keys are not fetched again so soon"
    clock.offset_s = 61.0
    assert authenticate(authenticator, bearer(new)).project == "proj_chat"
    assert token_rejection(authenticator, old)[0] == 401


def test_withdrawn_key_is_rejected_without_token_of_new_key(
    issuer: TokenIssuer,
) -> None:
    clock = OffsetClock()
    authenticator = make_jwt_authenticator(issuer, clock)
    stolen = issuer.token(project="chat", exp=time.time() + 86_400)
    authenticate(authenticator, bearer(stolen))
    issuer.keys = [public_jwk(OTHER_RSA_KEY, "new")]
    clock.offset_s = 3_700.0
    assert wait_for_rejection(authenticator, stolen)[0] == 401


def test_fetch_that_never_ends_times_out_and_is_repeated(
    issuer: TokenIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise no other fetch would start, and a withdrawn key would be accepted forever."""
    monkeypatch.setattr(signing_keys, "FETCH_TIMEOUT_S", 0.2)
    issuer.keys_never_end = True
    clock = OffsetClock()
    authenticator = make_jwt_authenticator(issuer, clock)
    token = issuer.token(project="chat", exp=time.time() + 86_400)
    deadline = time.monotonic() + FETCH_TIMEOUT_S
    while issuer.num_key_requests < 2 and time.monotonic() < deadline:
        with pytest.raises(ApiError) as caught:
            authenticator.authenticate(bearer(token))
        assert caught.value.status == 503
        clock.offset_s += 6.0
        time.sleep(0.05)
    assert issuer.num_key_requests == 2
    issuer.keys_never_end = False
    clock.offset_s += 6.0
    assert authenticate(authenticator, bearer(token)).project == "proj_chat"


def test_many_tokens_with_unknown_keys_cause_one_fetch(issuer: TokenIssuer) -> None:
    clock = OffsetClock()
    authenticator = make_jwt_authenticator(issuer, clock)
    authenticate(authenticator, bearer(issuer.token(project="chat")))
    assert issuer.num_key_requests == 1
    clock.offset_s = 61.0
    for n in range(300):
        with pytest.raises(ApiError):
            authenticate(
                authenticator,
                bearer(issuer.token(key_id=f"unknown-{n}"), f"10.0.{n % 7}.{n % 251}"),
            )
    assert issuer.num_key_requests == 2


def test_failed_fetch_is_repeated_and_causes_no_rejection(
    issuer: TokenIssuer,
) -> None:
    issuer.is_broken = True
    clock = OffsetClock()
    authenticator = make_jwt_authenticator(issuer, clock)
    token = issuer.token(project="chat")
    with pytest.raises(ApiError) as caught:
        authenticator.authenticate(bearer(token))
    assert caught.value.status == 503
    issuer.is_broken = False
    clock.offset_s = 6.0
    assert authenticate(authenticator, bearer(token)).project == "proj_chat"


def test_unreadable_certificate_authorities_count_as_failed_fetch(
    issuer: TokenIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise every request would start another fetch."""
    monkeypatch.setenv("SSL_CERT_FILE", "/nonexistent.pem")
    deadline = time.monotonic() + FETCH_TIMEOUT_S
    with capture_logs() as logs:
        authenticator = make_jwt_authenticator(issuer, jwks="https://localhost:1/keys")
        attempts = 0
        while attempts < 20 or (not logs and time.monotonic() < deadline):
            attempts += 1
            with pytest.raises(ApiError) as caught:
                authenticator.authenticate(bearer(issuer.token()))
            assert caught.value.status == 503
            time.sleep(0.01)
    assert [line["event"] for line in logs] == ["signing_keys_unavailable"]


# --- failed fetches ------------------------------------------------------------------------------


def test_fetch_without_free_thread_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the keys would never be fetched again, and a withdrawn key would be accepted until a restart."""
    with run_issuer() as issuer, capture_logs() as logs:
        clock = OffsetClock()
        authenticator = make_jwt_authenticator(issuer, clock)
        stolen = issuer.token(project="chat", exp=time.time() + 2 * LATER_S)
        authenticate(authenticator, bearer(stolen))
        issuer.keys = [public_jwk(OTHER_RSA_KEY, "new")]
        clock.offset_s = LATER_S
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", _fail_to_start)
            assert authenticator.authenticate(bearer(stolen)).project == "proj_chat"
        clock.offset_s += 6.0
        assert wait_for_rejection(authenticator, stolen)[0] == 401
    assert [line["event"] for line in logs][:1] == ["signing_keys_unavailable"]


def test_new_key_is_fetched_after_clock_is_set_back() -> None:
    """A machine that starts with a clock in another time zone sets it back by hours."""
    with run_issuer() as issuer:
        clock = OffsetClock()
        clock.offset_s = 2 * LATER_S
        authenticator = make_jwt_authenticator(issuer, clock)
        token = issuer.token(project="chat", exp=time.time() + 3 * LATER_S)
        authenticate(authenticator, bearer(token))
        clock.offset_s = 0.0
        authenticate(authenticator, bearer(token))
        issuer.keys.append(public_jwk(OTHER_RSA_KEY, "new"))
        clock.offset_s = signing_keys.MIN_REFETCH_INTERVAL_S + 1.0
        new = issuer.token(OTHER_RSA_KEY, "new", project="chat")
        assert authenticate(authenticator, bearer(new)).project == "proj_chat"


def test_invalid_key_file_is_not_read_for_each_request(tmp_path: Path) -> None:
    with run_issuer() as issuer, capture_logs() as logs:
        file, clock = tmp_path / "jwks.json", OffsetClock()
        file.write_text(json.dumps({"keys": issuer.keys}))
        authenticator = make_jwt_authenticator(issuer, clock, jwks=str(file))
        token = issuer.token(project="chat")
        file.write_text('{"more": ' + "[" * 100_000)
        clock.offset_s = 6.0
        deadline = time.monotonic() + FETCH_TIMEOUT_S
        while not logs and time.monotonic() < deadline:
            authenticate(authenticator, bearer(token))
        for _ in range(20):
            assert authenticate(authenticator, bearer(token)).project == "proj_chat"
            time.sleep(0.01)
    assert [line["event"] for line in logs] == ["signing_keys_unavailable"]


def _publish_other_issuer(issuer: TokenIssuer) -> None:
    issuer.published_issuer = "https://another.test"


def _respond_with_error(issuer: TokenIssuer) -> None:
    issuer.status = 500


def _publish_huge_document(issuer: TokenIssuer) -> None:
    issuer.keys.append({"kty": "oct", "k": "x" * signing_keys.MAX_DOCUMENT_BYTES})


@pytest.mark.parametrize(
    ("break_issuer", "text"),
    [
        (_publish_other_issuer, "calls itself https://another.test"),
        (_respond_with_error, "answered with status 500"),
        (_publish_huge_document, "answered with more than"),
    ],
)
def test_keys_from_wrong_or_failing_issuer_are_not_used(
    break_issuer: Callable[[TokenIssuer], None], text: str
) -> None:
    with run_issuer() as issuer, capture_logs() as logs:
        break_issuer(issuer)
        authenticator = make_jwt_authenticator(issuer)
        token, deadline = issuer.token(project="chat"), time.monotonic() + FETCH_TIMEOUT_S
        while not logs and time.monotonic() < deadline:
            assert _status(authenticator, token) == 503
        assert _status(authenticator, token) == 503
    assert [line["event"] for line in logs] == ["signing_keys_unavailable"]
    assert text in logs[0]["reason"]


def test_unreachable_url_is_named_in_log() -> None:
    url = "http://127.0.0.1:1/keys"
    with run_issuer() as issuer, capture_logs() as logs:
        authenticator = make_jwt_authenticator(issuer, jwks=url)
        token, deadline = issuer.token(project="chat"), time.monotonic() + FETCH_TIMEOUT_S
        while not logs and time.monotonic() < deadline:
            assert _status(authenticator, token) == 503
    assert logs[0]["reason"].startswith(f"{url} cannot be reached (")


# --- other sources -------------------------------------------------------------------------------


def test_keys_are_loaded_from_jwks_url_or_file(issuer: TokenIssuer, tmp_path: Path) -> None:
    token = issuer.token(project="chat")
    by_url = make_jwt_authenticator(issuer, jwks=f"{issuer.url}/keys")
    assert authenticate(by_url, bearer(token)).project == "proj_chat"
    file = tmp_path / "jwks.json"
    file.write_text(json.dumps({"keys": issuer.keys}))
    by_file = make_jwt_authenticator(issuer, jwks=str(file))
    assert by_file.authenticate(bearer(token)).project == "proj_chat", "a file needs no fetch"


def test_changed_key_file_is_read_again(issuer: TokenIssuer, tmp_path: Path) -> None:
    clock = OffsetClock()
    file = tmp_path / "jwks.json"
    file.write_text(json.dumps({"keys": issuer.keys}))
    authenticator = make_jwt_authenticator(issuer, clock, jwks=str(file))
    stolen = issuer.token(project="chat")
    authenticate(authenticator, bearer(stolen))
    file.write_text(json.dumps({"keys": [public_jwk(OTHER_RSA_KEY, "new")]}))
    clock.offset_s = 6.0
    assert wait_for_rejection(authenticator, stolen)[0] == 401
    new = issuer.token(OTHER_RSA_KEY, "new", project="chat")
    assert authenticate(authenticator, bearer(new)).project == "proj_chat"
    file.unlink()
    clock.offset_s = 12.0
    assert authenticate(authenticator, bearer(new)).project == "proj_chat", (
        "a deleted file keeps the last keys"
    )


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{}", "not a JSON Web Key Set"),
        ("nonsense", "not a JSON Web Key Set"),
        ('{"keys": []}', "no public key"),
        ('{"keys": [{"kty": ["RSA"]}]}', "no public key"),
        ('{"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "x"}]}', "no public key"),
    ],
)
def test_key_file_without_keys_is_rejected_at_start(
    tmp_path: Path, content: str, text: str
) -> None:
    file = tmp_path / "jwks.json"
    file.write_text(content)
    config = JwtConfig(jwks=str(file), audience=("argosy",))
    with pytest.raises(ValueError, match=text):
        Authenticator(make_snapshot(), AuthConfig(jwt=config))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "set issuer to the issuer's URL"),
        ({"issuer": "acme"}, "set issuer to the issuer's URL"),
        ({"issuer": "acme", "jwks": "/no/such/file"}, "/no/such/file cannot be read"),
    ],
)
def test_settings_without_keys_are_rejected(settings: dict[str, str], text: str) -> None:
    config = JwtConfig(audience=("argosy",), **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=text):
        Authenticator(make_snapshot(), AuthConfig(jwt=config))


def _status(authenticator: Authenticator, token: str) -> int:
    with pytest.raises(ApiError) as caught:
        authenticator.authenticate(bearer(token))
    return caught.value.status


def _fail_to_start(thread: threading.Thread) -> None:
    del thread
    raise RuntimeError("can't start new thread")
