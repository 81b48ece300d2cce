"""JSON Web Tokens of a real issuer: who they let in, which are refused, and keys that change."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from structlog.testing import capture_logs
from tests.support.account_fixtures import Request, bearer, directory, key, plain
from tests.support.token_issuer import (
    EC_KEY,
    ED_KEY,
    OTHER_RSA_KEY,
    RSA_KEY,
    WEAK_RSA_KEY,
    Issuer,
    PrivateKey,
    issuer,
    public_jwk,
)

from argosy.gateway.auth import AuthConfig, Authenticator, JwtConfig, signing_keys
from argosy.gateway.principal import Principal
from argosy.protocol import ApiError

DEADLINE_S = 20.0


class Clock:
    """The time, plus what a test adds."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


@pytest.fixture
def issuing() -> Iterator[Issuer]:
    with issuer() as running:
        yield running


def trusting(issuing: Issuer, clock: Clock | None = None, **settings: Any) -> Authenticator:  # noqa: ANN401 - of the settings' types
    """An identity that takes this issuer's tokens."""
    usual: dict[str, Any] = {"issuer": issuing.url, "audience": ("argosy",)}
    config = JwtConfig(**usual | settings)
    return Authenticator(directory(key("a")), AuthConfig(jwt=config), clock or Clock())


def identify(who: Authenticator, request: Request) -> Principal:
    """As a client does that tries again while keys are being fetched."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return who.authenticate(request)
        except ApiError as error:
            if error.retry_after_s != 1.0 or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def refusal(who: Authenticator, token: str) -> tuple[int, str]:
    with pytest.raises(ApiError) as caught:
        identify(who, bearer(token))
    return caught.value.status, caught.value.message


def until_refused(who: Authenticator, token: str, deadline: float) -> int:
    """The status with which it is at last."""
    while time.monotonic() < deadline:
        try:
            identify(who, bearer(token))
        except ApiError as error:
            return error.status
        time.sleep(0.01)
    return 200


def encoded(value: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


# --- who is let in -------------------------------------------------------------------------------


def test_a_user_is_found_by_email_and_has_their_role_and_project(issuing: Issuer) -> None:
    principal = identify(trusting(issuing), bearer(issuing.token(email="Ann@Acme.test")))
    assert (principal.user, principal.role, principal.key) == ("user_ann", "operator", "")
    assert (principal.organisation, principal.project, principal.tier) == (
        "org_acme",
        "proj_chat",
        0,
    )


def test_a_user_is_found_by_subject_and_may_choose_a_project_of_their_own(issuing: Issuer) -> None:
    who = trusting(issuing)
    token = issuing.token(sub="user_ann", project="shared")
    assert identify(who, bearer(token)).project == "proj_shared"
    elsewhere = issuing.token(sub="user_ann", project="office")
    assert refusal(who, elsewhere) == (
        403,
        "The token's project 'office' is unknown. Check the token.",
    )


def test_whoever_is_no_user_is_placed_by_the_claims(issuing: Issuer) -> None:
    who = trusting(issuing, role_claim="groups", project_claim="team")
    token = issuing.token(
        email="new@acme.test",
        organisation="acme",
        team="chat",
        groups=["staff", "viewer", "operator"],
    )
    principal = identify(who, bearer(token))
    assert principal.user == "new@acme.test"
    assert (principal.organisation, principal.project) == ("org_acme", "proj_chat")
    assert (principal.role, principal.role_scope) == ("operator", "organisation")


def test_what_cannot_be_written_down_of_a_claim_is_a_question_mark(issuing: Issuer) -> None:
    """Half a character in a subject kept requests from ending: in no explanation, and in no metric."""
    who = trusting(issuing)
    token = issuing.token(sub="a\ud800\0\nb", organisation="acme", project="chat")
    principal = identify(who, bearer(token))
    assert principal.user == "a???b"
    assert principal.organisation == "org_acme"


def test_roles_of_the_whole_gateway_are_those_of_users(issuing: Issuer) -> None:
    who = trusting(issuing, role_claim="groups")
    principal = identify(who, bearer(issuing.token(sub="user_eve", groups=["viewer"])))
    assert (principal.organisation, principal.role, principal.role_scope) == (
        "org_zeta",
        "admin",
        "gateway",
    )


def test_who_has_no_project_shares_cached_prompts_with_no_other_organisation(
    issuing: Issuer,
) -> None:
    who = trusting(issuing, role_claim="groups")
    token = issuing.token(groups=["admin"], organisation="acme")
    assert (identify(who, bearer(token)).project, identify(who, bearer(token)).cache_domain) == (
        "",
        "org_acme",
    )
    assert identify(who, bearer(issuing.token(sub="user_eve"))).cache_domain == "org_zeta"


def test_of_users_with_one_email_the_token_says_which_or_it_is_the_first(issuing: Issuer) -> None:
    who = trusting(issuing)
    token = issuing.token(email="ann@acme.test", organisation="zeta", project="office")
    assert identify(who, bearer(token, "10.0.0.1")).user == "user_ann2"
    assert identify(who, bearer(issuing.token(email="ann@acme.test"))).user == "user_ann"


def test_nobody_takes_a_project_from_tokens_by_giving_another_its_name(issuing: Issuer) -> None:
    who = trusting(issuing)
    assert identify(who, bearer(issuing.token(project="shared"))).project == "proj_shared"
    other = issuing.token(project="shared", organisation="zeta")
    assert identify(who, bearer(other)).project == "proj_shared2"


def test_roles_are_not_believed_unless_a_claim_is_named(issuing: Issuer) -> None:
    token = issuing.token(project="chat", role="admin", roles=["admin"])
    assert identify(trusting(issuing), bearer(token)).role == "user"


@pytest.mark.parametrize(
    ("claims", "status", "said"),
    [
        ({"email": "bob@acme.test"}, 401, "disabled"),
        ({"sub": "user_bob"}, 401, "disabled"),
        ({"email": "ann@acme.test", "email_verified": False}, 403, "names no project"),
        ({"email": "eve@zeta.test", "organisation": "acme"}, 403, "names no project"),
        ({}, 403, "names no project"),
        ({"project": "nowhere"}, 403, "is unknown"),
        ({"project": "chat", "organisation": "nobody"}, 403, "is unknown"),
        ({"project": "chat", "organisation": "zeta"}, 403, "is unknown"),
        ({"project": "old"}, 401, "archived"),
        ({"project": ["chat"]}, 403, "names no project"),
        ({"project": "office"}, 403, "may not be used from"),
        ({"project": "chat", "groups": ["admin"]}, 403, "names no organisation to hold it in"),
        ({"organisation": "gone", "groups": ["admin"]}, 403, "is unknown"),
        ({"organisation": "elsewhere", "email": "ann@acme.test"}, 403, "is unknown"),
    ],
)
def test_who_has_no_place_here(
    issuing: Issuer, claims: dict[str, Any], status: int, said: str
) -> None:
    told = refusal(trusting(issuing, role_claim="groups"), issuing.token(**claims))
    assert told[0] == status
    assert said in told[1]


@pytest.mark.parametrize(
    ("signer", "key_id", "algorithm"),
    [(RSA_KEY, "rsa", "RS256"), (EC_KEY, "ec", "ES256"), (ED_KEY, "ed", "EdDSA")],
)
def test_every_usual_algorithm(
    issuing: Issuer, signer: PrivateKey, key_id: str, algorithm: str
) -> None:
    token = issuing.token(signer, key_id, algorithm, project="chat")
    assert identify(trusting(issuing), bearer(token)).project == "proj_chat"


def test_keys_work_beside_tokens(issuing: Issuer) -> None:
    assert identify(trusting(issuing), bearer(plain("a"))).key == "key_a"


def test_tokens_are_taken_with_no_keys_at_all_and_then_nobody_is_anyone(issuing: Issuer) -> None:
    config = JwtConfig(issuer=issuing.url, audience=("argosy",))
    who = Authenticator(directory(), AuthConfig(jwt=config))
    with pytest.raises(ApiError) as caught:
        who.authenticate(Request())
    assert caught.value.code == "missing_api_key"


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claims", "said"),
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
def test_claims_are_checked(issuing: Issuer, claims: dict[str, Any], said: str) -> None:
    status, message = refusal(trusting(issuing), issuing.token(project="chat", **claims))
    assert status == 401
    assert said in message


def test_signatures_are_checked(issuing: Issuer) -> None:
    who = trusting(issuing)
    good = issuing.token(project="chat")
    head, body, signature = good.split(".")
    richer = encoded(jwt.decode(good, options={"verify_signature": False}) | {"project": "shared"})
    flipped = "A" if signature[10] != "A" else "B"
    forged = [
        f"{head}.{richer}.{signature}",
        f"{head}.{body}.{signature[:10]}{flipped}{signature[11:]}",
        f"{head}.{body}.",
        issuing.token(OTHER_RSA_KEY, project="chat"),
        issuing.token(EC_KEY, "rsa", "ES256", project="chat"),
        issuing.token(RSA_KEY, "ec", "RS256", project="chat"),
        *brought_along(issuing),
    ]
    assert {refusal(who, token)[0] for token in forged} == {401}
    assert identify(who, bearer(good)).project == "proj_chat"


def brought_along(issuing: Issuer) -> list[str]:
    """Tokens that tell where to find the key that they are signed with."""
    own = public_jwk(OTHER_RSA_KEY, "rsa")
    claims = jwt.decode(issuing.token(project="chat"), options={"verify_signature": False})
    return [
        jwt.encode(claims, OTHER_RSA_KEY, "RS256", headers={"kid": "rsa"} | header)
        for header in (
            {"jwk": own},
            {"jku": "http://127.0.0.1:1/keys"},
            {"x5u": "http://127.0.0.1:1"},
        )
    ]


def test_a_public_key_is_no_shared_secret(issuing: Issuer) -> None:
    who = trusting(issuing)
    public = RSA_KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    jwk = json.dumps(public_jwk(RSA_KEY, "rsa")).encode()
    claims = jwt.decode(issuing.token(project="chat"), options={"verify_signature": False})
    head = {"alg": "HS256", "typ": "JWT", "kid": "rsa"}
    signed = f"{encoded(head)}.{encoded(claims)}"
    for secret in (public, jwk, b""):
        mac = jwt.get_algorithm_by_name("HS256").sign(signed.encode(), secret)
        token = f"{signed}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"
        status, message = refusal(who, token)
        assert status == 401
        assert "algorithm" in message


@pytest.mark.parametrize("algorithm", ["none", "NONE", "", 7, None])
def test_an_unsigned_token_is_worth_nothing(issuing: Issuer, algorithm: object) -> None:
    claims = jwt.decode(issuing.token(project="chat"), options={"verify_signature": False})
    head = {"alg": algorithm, "typ": "JWT", "kid": "rsa"}
    assert refusal(trusting(issuing), f"{encoded(head)}.{encoded(claims)}.")[0] == 401


def test_algorithms_can_be_narrowed(issuing: Issuer) -> None:
    who = trusting(issuing, algorithms=("ES256",))
    assert refusal(who, issuing.token(project="chat"))[0] == 401


def test_weak_keys_are_refused(issuing: Issuer) -> None:
    issuing.keys.append(public_jwk(WEAK_RSA_KEY, "weak"))
    with pytest.warns(jwt.InsecureKeyLengthWarning):
        token = issuing.token(WEAK_RSA_KEY, "weak", project="chat")
    assert refusal(trusting(issuing), token)[0] == 401


@pytest.mark.parametrize("junk", ["..", "a.b.c", "é.é.é", "x" * 20_000 + ".y.z", "e30.e30.e30"])
def test_junk_is_refused(issuing: Issuer, junk: str) -> None:
    assert refusal(trusting(issuing), junk)[0] == 401


# --- keys of the issuer --------------------------------------------------------------------------


def test_a_good_token_lasts_until_it_expires_whatever_the_issuer_does(issuing: Issuer) -> None:
    who = trusting(issuing, leeway_s=0.0)
    expiry = time.time() + 2.0
    token = issuing.token(project="chat", exp=expiry)
    identify(who, bearer(token))
    issuing.broken = True
    assert identify(who, bearer(token)).project == "proj_chat"
    time.sleep(max(0.0, expiry - time.time()))
    assert refusal(who, token) == (401, "The token has expired. Sign in again.")


@pytest.mark.parametrize("expires", [1e308, 10**400])
def test_a_token_may_last_for_ever(issuing: Issuer, expires: float) -> None:
    token = issuing.token(project="chat", exp=expires)
    who = trusting(issuing)
    for _ in range(2):
        assert identify(who, bearer(token)).project == "proj_chat"


def test_rotated_keys_are_found_and_withdrawn_ones_forgotten(issuing: Issuer) -> None:
    clock = Clock()
    who = trusting(issuing, clock)
    old = issuing.token(project="chat", exp=time.time() + 7200)
    identify(who, bearer(old))
    issuing.keys = [public_jwk(OTHER_RSA_KEY, "new")]
    new = issuing.token(OTHER_RSA_KEY, "new", project="chat")
    assert refusal(who, new)[0] == 401, "asked again too soon after the last time"
    clock.ahead = 61.0
    assert identify(who, bearer(new)).project == "proj_chat"
    assert refusal(who, old)[0] == 401


def test_tokens_of_a_withdrawn_key_are_refused_though_nobody_brings_another(
    issuing: Issuer,
) -> None:
    clock = Clock()
    who = trusting(issuing, clock)
    stolen = issuing.token(project="chat", exp=time.time() + 86_400)
    identify(who, bearer(stolen))
    issuing.keys = [public_jwk(OTHER_RSA_KEY, "new")]
    clock.ahead = 3_700.0
    assert until_refused(who, stolen, time.monotonic() + DEADLINE_S) == 401


def test_keys_that_come_too_slowly_are_given_up(
    issuing: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the fetch would never end, and no other would begin: a withdrawn key would be good for ever."""
    monkeypatch.setattr(signing_keys, "FETCH_TIMEOUT_S", 0.2)
    issuing.drips = True
    clock = Clock()
    who = trusting(issuing, clock)
    token = issuing.token(project="chat", exp=time.time() + 86_400)
    deadline = time.monotonic() + DEADLINE_S
    while issuing.asked < 2 and time.monotonic() < deadline:
        with pytest.raises(ApiError) as caught:
            who.authenticate(bearer(token))
        assert caught.value.status == 503
        clock.ahead += 6.0
        time.sleep(0.05)
    assert issuing.asked == 2
    issuing.drips = False
    clock.ahead += 6.0
    assert identify(who, bearer(token)).project == "proj_chat"


def test_a_flood_of_unknown_keys_asks_the_issuer_once(issuing: Issuer) -> None:
    clock = Clock()
    who = trusting(issuing, clock)
    identify(who, bearer(issuing.token(project="chat")))
    assert issuing.asked == 1
    clock.ahead = 61.0
    for n in range(300):
        with pytest.raises(ApiError):
            identify(who, bearer(issuing.token(key_id=f"unknown-{n}"), f"10.0.{n % 7}.{n % 251}"))
    assert issuing.asked == 2


def test_an_issuer_that_is_down_is_asked_again_and_nobody_is_refused_for_it(
    issuing: Issuer,
) -> None:
    issuing.broken = True
    clock = Clock()
    who = trusting(issuing, clock)
    token = issuing.token(project="chat")
    with pytest.raises(ApiError) as caught:
        who.authenticate(bearer(token))
    assert caught.value.status == 503
    issuing.broken = False
    clock.ahead = 6.0
    assert identify(who, bearer(token)).project == "proj_chat"


def test_what_the_system_refuses_is_a_failure_like_others(
    issuing: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor is left, or the authorities cannot be read: else every request would begin another fetch."""
    monkeypatch.setenv("SSL_CERT_FILE", "/nonexistent.pem")
    deadline = time.monotonic() + DEADLINE_S
    with capture_logs() as logs:
        who = trusting(issuing, jwks="https://localhost:1/keys")
        asked = 0
        while asked < 20 or (not logs and time.monotonic() < deadline):
            asked += 1
            with pytest.raises(ApiError) as caught:
                who.authenticate(bearer(issuing.token()))
            assert caught.value.status == 503
            time.sleep(0.01)
    assert [line["event"] for line in logs] == ["signing_keys_unavailable"]


def test_keys_can_come_from_a_file_or_a_url_of_their_own(issuing: Issuer, tmp_path: Path) -> None:
    token = issuing.token(project="chat")
    by_url = trusting(issuing, jwks=f"{issuing.url}/keys")
    assert identify(by_url, bearer(token)).project == "proj_chat"
    file = tmp_path / "jwks.json"
    file.write_text(json.dumps({"keys": issuing.keys}))
    by_file = trusting(issuing, jwks=str(file))
    assert by_file.authenticate(bearer(token)).project == "proj_chat", "at once: nothing to fetch"


def test_a_file_of_keys_that_has_changed_is_taken_in_soon(issuing: Issuer, tmp_path: Path) -> None:
    clock = Clock()
    file = tmp_path / "jwks.json"
    file.write_text(json.dumps({"keys": issuing.keys}))
    who = trusting(issuing, clock, jwks=str(file))
    stolen = issuing.token(project="chat")
    identify(who, bearer(stolen))
    file.write_text(json.dumps({"keys": [public_jwk(OTHER_RSA_KEY, "new")]}))
    clock.ahead = 6.0
    assert until_refused(who, stolen, time.monotonic() + DEADLINE_S) == 401
    new = issuing.token(OTHER_RSA_KEY, "new", project="chat")
    assert identify(who, bearer(new)).project == "proj_chat"
    file.unlink()
    clock.ahead = 12.0
    assert identify(who, bearer(new)).project == "proj_chat", "as long as there is nothing else"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "not a JSON Web Key Set"),
        ("nonsense", "not a JSON Web Key Set"),
        ('{"keys": []}', "no public key"),
        ('{"keys": [{"kty": ["RSA"]}]}', "no public key"),
        ('{"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "x"}]}', "no public key"),
    ],
)
def test_a_file_without_keys_is_refused_at_the_start(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "jwks.json"
    file.write_text(text)
    config = JwtConfig(jwks=str(file), audience=("argosy",))
    with pytest.raises(ValueError, match=said):
        Authenticator(directory(), AuthConfig(jwt=config))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "set issuer to the issuer's URL"),
        ({"issuer": "acme"}, "set issuer to the issuer's URL"),
        ({"issuer": "acme", "jwks": "/no/such/file"}, "/no/such/file cannot be read"),
    ],
)
def test_settings_without_keys_are_refused(settings: dict[str, str], said: str) -> None:
    config = JwtConfig(audience=("argosy",), **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=said):
        Authenticator(directory(), AuthConfig(jwt=config))
