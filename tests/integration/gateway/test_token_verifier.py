"""JSON Web Tokens with real signatures: their principals, rejected tokens, and the keys of their issuer."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from structlog.testing import capture_logs
from tests.support.account_fixtures import (
    FakeConnection,
    bearer,
    make_snapshot,
    plaintext_key,
)
from tests.support.token_issuer import (
    EC_KEY,
    ED_KEY,
    FETCH_TIMEOUT_S,
    OTHER_RSA_KEY,
    RSA_KEY,
    WEAK_RSA_KEY,
    OffsetClock,
    PrivateKey,
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


def encode_part(value: dict[str, Any]) -> str:
    """Encode the header or the claims of a token."""
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


# --- principals ----------------------------------------------------------------------------------


ACME_CHAT = {"organisation": "acme", "project": "chat"}


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        pytest.param(
            {"email": "Ann@Acme.test"},
            {"user": "user_ann", "role": "operator", "key": "", "tier": 0}
            | {"organisation": "org_acme", "project": "proj_chat"},
            id="email-selects-user-with-role-and-project",
        ),
        pytest.param(
            {"sub": "user_ann", "project": "shared"},
            {"user": "user_ann", "project": "proj_shared"},
            id="claim-selects-project-of-users-organisation",
        ),
        pytest.param(
            ACME_CHAT | {"email": "new@acme.test", "groups": ["staff", "viewer", "operator"]},
            {"user": "new@acme.test", "organisation": "org_acme", "project": "proj_chat"}
            | {"role": "operator", "role_scope": "organisation"},
            id="claims-place-unknown-user",
        ),
        # A lone surrogate could be encoded neither in the trace nor in the metrics of the request.
        pytest.param(
            ACME_CHAT | {"sub": "a\ud800\0\nb"},
            {"user": "a???b", "organisation": "org_acme"},
            id="unprintable-characters-become-question-marks",
        ),
        pytest.param(
            {"sub": "user_eve", "groups": ["viewer"]},
            {"organisation": "org_zeta", "role": "admin", "role_scope": "gateway"}
            | {"cache_domain": "org_zeta"},
            id="gateway-role-of-user-takes-precedence",
        ),
        pytest.param(
            {"groups": ["admin"], "organisation": "acme"},
            {"project": "", "cache_domain": "org_acme"},
            id="cache-domain-without-project-is-organisations",
        ),
        pytest.param(
            {"email": "ann@acme.test", "organisation": "zeta", "project": "office"},
            {"user": "user_ann2"},
            id="shared-email-selects-user-of-claimed-organisation",
        ),
        pytest.param(
            {"email": "ann@acme.test"}, {"user": "user_ann"}, id="shared-email-selects-oldest-user"
        ),
        pytest.param(
            {"project": "shared"}, {"project": "proj_shared"}, id="shared-name-selects-oldest"
        ),
        pytest.param(
            {"project": "shared", "organisation": "zeta"},
            {"project": "proj_shared2"},
            id="shared-name-selects-project-of-claimed-organisation",
        ),
    ],
)
def test_claims_select_principal(
    issuer: TokenIssuer, claims: dict[str, Any], expected: dict[str, Any]
) -> None:
    authenticator = make_jwt_authenticator(issuer, role_claim="groups")
    principal = authenticate(authenticator, bearer(issuer.token(**claims), "10.0.0.1"))
    assert {name: getattr(principal, name) for name in expected} == expected


def test_project_claim_has_a_configured_name(issuer: TokenIssuer) -> None:
    authenticator = make_jwt_authenticator(issuer, project_claim="team")
    token = issuer.token(organisation="acme", team="chat")
    assert authenticate(authenticator, bearer(token)).project == "proj_chat"


def test_issuer_may_be_trusted_to_verify_all_emails(issuer: TokenIssuer) -> None:
    authenticator = make_jwt_authenticator(issuer, issuer_verifies_emails=True)
    token = issuer.token(email="ann@acme.test", email_verified=None)
    assert authenticate(authenticator, bearer(token)).user == "user_ann"
    token = issuer.token(email="ann@acme.test", email_verified=False)
    assert token_rejection(authenticator, token)[0] == 403


def test_role_claims_are_ignored_without_role_claim_setting(issuer: TokenIssuer) -> None:
    token = issuer.token(project="chat", role="admin", roles=["admin"])
    assert authenticate(make_jwt_authenticator(issuer), bearer(token)).role == "user"


@pytest.mark.parametrize(
    ("claims", "status", "text"),
    [
        ({"email": "bob@acme.test"}, 401, "disabled"),
        ({"sub": "user_bob"}, 401, "disabled"),
        ({"email": "ann@acme.test", "email_verified": False}, 403, "names no project"),
        ({"email": "ann@acme.test", "email_verified": None}, 403, "names no project"),
        ({"email": "eve@zeta.test", "organisation": "acme"}, 403, "names no project"),
        ({}, 403, "names no project"),
        ({"project": "nowhere"}, 403, "is unknown"),
        ({"project": "chat", "organisation": "nobody"}, 403, "is unknown"),
        ({"project": "chat", "organisation": "zeta"}, 403, "is unknown"),
        ({"sub": "user_ann", "project": "office"}, 403, "'office' is unknown. Check the token"),
        ({"project": "old"}, 401, "archived"),
        ({"project": ["chat"]}, 403, "names no project"),
        ({"project": "office"}, 403, "may not be used from"),
        ({"project": "chat", "groups": ["admin"]}, 403, "names no organisation to hold it in"),
        ({"organisation": "gone", "groups": ["admin"]}, 403, "is unknown"),
        ({"organisation": "elsewhere", "email": "ann@acme.test"}, 403, "is unknown"),
    ],
)
def test_token_without_valid_user_or_project_is_rejected(
    issuer: TokenIssuer, claims: dict[str, Any], status: int, text: str
) -> None:
    authenticator = make_jwt_authenticator(issuer, role_claim="groups")
    actual, message = token_rejection(authenticator, issuer.token(**claims))
    assert actual == status
    assert text in message


@pytest.mark.parametrize(
    ("signer", "key_id", "algorithm"),
    [(RSA_KEY, "rsa", "RS256"), (EC_KEY, "ec", "ES256"), (ED_KEY, "ed", "EdDSA")],
)
def test_asymmetric_algorithms_are_accepted(
    issuer: TokenIssuer, signer: PrivateKey, key_id: str, algorithm: str
) -> None:
    token = issuer.token(signer, key_id, algorithm, project="chat")
    assert authenticate(make_jwt_authenticator(issuer), bearer(token)).project == "proj_chat"


def test_api_keys_are_accepted_beside_tokens(issuer: TokenIssuer) -> None:
    assert authenticate(make_jwt_authenticator(issuer), bearer(plaintext_key("a"))).key == "key_a"


def test_jwt_setting_without_api_keys_ends_anonymous_access(issuer: TokenIssuer) -> None:
    config = JwtConfig(issuer=issuer.url, audience=("argosy",))
    authenticator = Authenticator(make_snapshot(), AuthConfig(jwt=config))
    with pytest.raises(ApiError) as caught:
        authenticator.authenticate(FakeConnection())
    assert caught.value.code == "missing_api_key"


# --- rejected tokens -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claims", "text"),
    [
        ({"exp": 1_000_000_000}, "expired"),
        ({"exp": None}, "lacks the claim 'exp'"),
        ({"nbf": 10_000_000_000}, "not valid yet"),
        ({"aud": "another"}, "another service"),
        ({"aud": None}, "lacks the claim 'aud'"),
        ({"iss": "https://elsewhere.test"}, "does not trust"),
        ({"iss": None}, "lacks the claim 'iss'"),
    ],
)
def test_invalid_claims_are_rejected(
    issuer: TokenIssuer, claims: dict[str, Any], text: str
) -> None:
    status, message = token_rejection(
        make_jwt_authenticator(issuer), issuer.token(project="chat", **claims)
    )
    assert status == 401
    assert text in message


def test_forged_tokens_are_rejected(issuer: TokenIssuer) -> None:
    authenticator = make_jwt_authenticator(issuer)
    valid = issuer.token(project="chat")
    head, body, signature = valid.split(".")
    changed = encode_part(
        jwt.decode(valid, options={"verify_signature": False}) | {"project": "shared"}
    )
    flipped = "A" if signature[10] != "A" else "B"
    forged = [
        f"{head}.{changed}.{signature}",
        f"{head}.{body}.{signature[:10]}{flipped}{signature[11:]}",
        f"{head}.{body}.",
        issuer.token(OTHER_RSA_KEY, project="chat"),
        issuer.token(EC_KEY, "rsa", "ES256", project="chat"),
        issuer.token(RSA_KEY, "ec", "RS256", project="chat"),
        *tokens_with_own_key(issuer),
    ]
    for _ in range(2):  # also when the valid one, which begins alike, was verified before
        assert {token_rejection(authenticator, token)[0] for token in forged} == {401}
        assert authenticate(authenticator, bearer(valid)).project == "proj_chat"


def tokens_with_own_key(issuer: TokenIssuer) -> list[str]:
    """Return tokens whose headers contain or locate the key that signs them."""
    jwk = public_jwk(OTHER_RSA_KEY, "rsa")
    claims = jwt.decode(issuer.token(project="chat"), options={"verify_signature": False})
    return [
        jwt.encode(claims, OTHER_RSA_KEY, "RS256", headers={"kid": "rsa"} | header)
        for header in (
            {"jwk": jwk},
            {"jku": "http://127.0.0.1:1/keys"},
            {"x5u": "http://127.0.0.1:1"},
        )
    ]


def test_hmac_with_public_key_as_secret_is_rejected(issuer: TokenIssuer) -> None:
    authenticator = make_jwt_authenticator(issuer)
    public = RSA_KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    jwk = json.dumps(public_jwk(RSA_KEY, "rsa")).encode()
    claims = jwt.decode(issuer.token(project="chat"), options={"verify_signature": False})
    head = {"alg": "HS256", "typ": "JWT", "kid": "rsa"}
    signed = f"{encode_part(head)}.{encode_part(claims)}"
    for secret in (public, jwk, b""):
        mac = jwt.get_algorithm_by_name("HS256").sign(signed.encode(), secret)
        token = f"{signed}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"
        status, message = token_rejection(authenticator, token)
        assert status == 401
        assert "algorithm" in message


@pytest.mark.parametrize("algorithm", ["none", "NONE", "", 7, None])
def test_unsigned_token_is_rejected(issuer: TokenIssuer, algorithm: object) -> None:
    claims = jwt.decode(issuer.token(project="chat"), options={"verify_signature": False})
    head = {"alg": algorithm, "typ": "JWT", "kid": "rsa"}
    assert (
        token_rejection(
            make_jwt_authenticator(issuer), f"{encode_part(head)}.{encode_part(claims)}."
        )[0]
        == 401
    )


def test_algorithms_setting_excludes_other_algorithms(issuer: TokenIssuer) -> None:
    authenticator = make_jwt_authenticator(issuer, algorithms=("ES256",))
    assert token_rejection(authenticator, issuer.token(project="chat"))[0] == 401


def test_weak_signing_key_is_rejected(issuer: TokenIssuer) -> None:
    issuer.keys.append(public_jwk(WEAK_RSA_KEY, "weak"))
    with pytest.warns(jwt.InsecureKeyLengthWarning):
        token = issuer.token(WEAK_RSA_KEY, "weak", project="chat")
    assert token_rejection(make_jwt_authenticator(issuer), token)[0] == 401


@pytest.mark.parametrize("token", ["..", "a.b.c", "é.é.é", "x" * 20_000 + ".y.z", "e30.e30.e30"])
def test_malformed_token_is_rejected(issuer: TokenIssuer, token: str) -> None:
    assert token_rejection(make_jwt_authenticator(issuer), token)[0] == 401


def test_key_is_accepted_only_for_its_published_algorithm(issuer: TokenIssuer) -> None:
    issuer.keys = [public_jwk(RSA_KEY, "rsa", alg="RS512")]
    authenticator = make_jwt_authenticator(issuer, algorithms=("RS256", "RS512"))
    authenticate(authenticator, bearer(issuer.token(project="chat", algorithm="RS512")))
    rejected = issuer.token(project="chat", algorithm="RS256")
    status, message = token_rejection(authenticator, rejected)
    assert status == 401
    assert "its key is for another algorithm" in message


def test_rejected_tokens_are_throttled_and_valid_tokens_are_not(issuer: TokenIssuer) -> None:
    """Otherwise a client with an expired token would keep all clients behind its proxy from signing in."""
    authenticator = make_jwt_authenticator(issuer)
    authenticate(authenticator, bearer(issuer.token(project="chat")))
    expired = issuer.token(project="chat", exp=time.time() - 100)
    statuses = [token_rejection(authenticator, expired)[0] for _ in range(30)]
    assert statuses == [401] * 20 + [429] * 10
    assert (
        authenticate(authenticator, bearer(issuer.token(project="chat", sub="new"))).user == "new"
    )
    assert token_rejection(authenticator, issuer.token(project="chat", aud="other"))[0] == 429


def test_too_long_token_is_rejected(issuer: TokenIssuer) -> None:
    authenticator = make_jwt_authenticator(issuer)
    authenticate(authenticator, bearer(issuer.token(project="chat", more="x" * 4096)))
    assert token_rejection(authenticator, issuer.token(project="chat", more="x" * 16_384))[0] == 401


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
    issuer: TokenIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the keys would never be fetched again, and a withdrawn key would be accepted until a restart."""
    with capture_logs() as logs:
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


def test_new_key_is_fetched_after_clock_is_set_back(issuer: TokenIssuer) -> None:
    """A machine that starts with a clock in another time zone sets it back by hours."""
    clock, steady_clock = OffsetClock(), OffsetClock()
    clock.offset_s = 2 * LATER_S
    authenticator = make_jwt_authenticator(issuer, clock, steady_clock)
    token = issuer.token(project="chat", exp=time.time() + 3 * LATER_S)
    authenticate(authenticator, bearer(token))
    clock.offset_s = 0.0
    authenticate(authenticator, bearer(token))
    issuer.keys.append(public_jwk(OTHER_RSA_KEY, "new"))
    steady_clock.offset_s = signing_keys.MIN_REFETCH_INTERVAL_S + 1.0
    new = issuer.token(OTHER_RSA_KEY, "new", project="chat")
    assert authenticate(authenticator, bearer(new)).project == "proj_chat"


def test_invalid_key_file_is_not_read_for_each_request(issuer: TokenIssuer, tmp_path: Path) -> None:
    with capture_logs() as logs:
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
    ("break_issuer", "settings", "text"),
    [
        (_publish_other_issuer, {}, "calls itself https://another.test"),
        (_respond_with_error, {}, "answered with status 500"),
        (_publish_huge_document, {}, "answered with more than"),
        (bool, {"jwks": "http://127.0.0.1:1/keys"}, "http://127.0.0.1:1/keys cannot be reached ("),
    ],
    ids=["other-issuer", "error", "huge", "unreachable"],
)
def test_keys_from_wrong_or_failing_issuer_are_not_used(
    issuer: TokenIssuer,
    break_issuer: Callable[[TokenIssuer], object],
    settings: dict[str, Any],
    text: str,
) -> None:
    break_issuer(issuer)
    with capture_logs() as logs:
        authenticator = make_jwt_authenticator(issuer, **settings)
        token, deadline = issuer.token(project="chat"), time.monotonic() + FETCH_TIMEOUT_S
        while not logs and time.monotonic() < deadline:
            assert _status(authenticator, token) == 503
        assert _status(authenticator, token) == 503
    assert [line["event"] for line in logs] == ["signing_keys_unavailable"]
    assert text in logs[0]["reason"]


# --- other sources -------------------------------------------------------------------------------


def test_changed_key_file_is_read_again(issuer: TokenIssuer, tmp_path: Path) -> None:
    clock = OffsetClock()
    file = tmp_path / "jwks.json"
    file.write_text(json.dumps({"keys": issuer.keys}))
    authenticator = make_jwt_authenticator(issuer, clock, jwks=str(file))
    stolen = issuer.token(project="chat")
    assert authenticator.authenticate(bearer(stolen)).project, "a file needs no fetch"
    by_url = make_jwt_authenticator(issuer, jwks=f"{issuer.url}/keys")
    assert authenticate(by_url, bearer(stolen)).project == "proj_chat"
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
    ("content", "settings", "text"),
    [
        ("{}", {}, "not a JSON Web Key Set"),
        ("nonsense", {}, "not a JSON Web Key Set"),
        ('{"keys": []}', {}, "no public key"),
        ('{"keys": [{"kty": ["RSA"]}]}', {}, "no public key"),
        ('{"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "x"}]}', {}, "no public key"),
        (None, {}, "set issuer to the issuer's URL"),
        (None, {"issuer": "acme"}, "set issuer to the issuer's URL"),
        (None, {"issuer": "acme", "jwks": "/no/such/file"}, "/no/such/file cannot be read"),
    ],
)
def test_settings_without_keys_are_rejected_at_start(
    tmp_path: Path, content: str | None, settings: dict[str, str], text: str
) -> None:
    if content is not None:
        file = tmp_path / "jwks.json"
        file.write_text(content)
        settings = {"jwks": str(file)}
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
