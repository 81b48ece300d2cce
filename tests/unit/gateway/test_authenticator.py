"""Authenticator: API keys, networks, client addresses, local access without keys, brute force and authorization."""

from __future__ import annotations

from ipaddress import ip_address
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tests.support.account_fixtures import (
    ANN,
    ARCHIVED_PROJECT,
    BOB,
    NOW,
    OFFICE,
    SHARED,
    FakeConnection,
    bearer,
    make_key,
    make_snapshot,
    plaintext_key,
)
from tests.support.fake_clock import FakeClock

from argosy.deployment import AuthConfig
from argosy.gateway.auth import (
    Authenticator,
    ConnectionInfo,
    can_use_model,
    check_exposure,
    check_model_access,
    check_role,
    describe_key_command,
)
from argosy.gateway.auth.client_address import (
    client_address,
    is_in_networks,
    parse_address,
    parse_networks,
)
from argosy.gateway.auth.credential_index import CredentialIndex, TokenClaims
from argosy.gateway.principal import ANONYMOUS, Principal
from argosy.protocol import ApiError
from argosy.store import AccountSnapshot, Key, Project, Role, StoreConfig, User, open_store

KEY_A = plaintext_key("a")
KEY_B = plaintext_key("b")


def make_authenticator(
    *keys: Key,
    clock: FakeClock | None = None,
    steady_clock: FakeClock | None = None,
    **settings: object,
) -> Authenticator:
    config = AuthConfig(**settings)  # type: ignore[arg-type]
    clock = clock or FakeClock(NOW)
    return Authenticator(make_snapshot(*keys), config, clock, steady_clock=steady_clock or clock)


def rejection(authenticator: Authenticator, connection: ConnectionInfo) -> tuple[int, str]:
    """Return status and code of the error that `authenticate` raises."""
    with pytest.raises(ApiError) as caught:
        authenticator.authenticate(connection)
    return caught.value.status, caught.value.code


# --- keys ----------------------------------------------------------------------------------------


def test_key_authenticates_complete_principal() -> None:
    authenticator = make_authenticator(make_key("a", models=("big",), user=ANN.id, flags=("new",)))
    assert authenticator.authenticate(bearer(KEY_A)) == Principal(
        organisation="org_acme",
        project="proj_chat",
        key="key_a",
        user="user_ann",
        role="user",
        tier=0,
        weight=2.0,
        cache_domain="proj_chat",
        allowed_models=frozenset({"big"}),
        flags=frozenset({"beta", "new"}),
    )


def test_project_with_shared_cache_uses_cache_domain_of_organisation() -> None:
    authenticator = make_authenticator(make_key("a", SHARED))
    assert authenticator.authenticate(bearer(KEY_A)).cache_domain == "org_acme"


@pytest.mark.parametrize(
    "headers",
    [
        {b"authorization": b"Bearer KEY"},
        {b"authorization": b"bearer  KEY"},
        {b"x-api-key": b"KEY"},
        {b"api-key": b"KEY"},
        {b"authorization": b"Basic xyz", b"x-api-key": b"KEY"},
    ],
)
def test_key_is_accepted_in_common_headers(headers: dict[bytes, bytes]) -> None:
    sent = {name: value.replace(b"KEY", KEY_A.encode()) for name, value in headers.items()}
    connection = FakeConnection(sent, "203.0.113.9")
    assert make_authenticator(make_key("a")).authenticate(connection).key == "key_a"


@pytest.mark.parametrize("authorization", [b"Bearer ", b"Bearer", b"", b"Basic abc", b"KEY"])
def test_header_without_key_is_rejected_as_missing(authorization: bytes) -> None:
    connection = FakeConnection({b"authorization": authorization})
    assert rejection(make_authenticator(make_key("a")), connection) == (401, "missing_api_key")


@pytest.mark.parametrize("credential", [KEY_B, KEY_A + "x", "sk-argosy-0000000a", "é", "a.b.c"])
def test_unknown_key_is_rejected_from_localhost(credential: str) -> None:
    authenticator = make_authenticator(make_key("a"))
    assert rejection(authenticator, bearer(credential)) == (401, "invalid_api_key")


def test_key_expires_exactly_at_its_expiry() -> None:
    clock = FakeClock(NOW)
    authenticator = make_authenticator(make_key("a", expires_at=NOW + 10), clock=clock)
    assert authenticator.authenticate(bearer(KEY_A)).key == "key_a"
    clock.now = NOW + 10
    assert rejection(authenticator, bearer(KEY_A)) == (401, "expired_api_key")


def test_key_of_archived_project_or_disabled_user_is_rejected() -> None:
    authenticator = make_authenticator(make_key("a", ARCHIVED_PROJECT), make_key("b", user=BOB.id))
    assert rejection(authenticator, bearer(KEY_A)) == (401, "project_archived")
    assert rejection(authenticator, bearer(KEY_B)) == (401, "user_disabled")


def test_new_snapshot_takes_effect_immediately() -> None:
    authenticator = make_authenticator(make_key("a"))
    assert authenticator.authenticate(bearer(KEY_A)).key == "key_a"
    authenticator.apply_snapshot(make_snapshot(make_key("b")))
    assert rejection(authenticator, bearer(KEY_A)) == (401, "invalid_api_key")
    assert authenticator.authenticate(bearer(KEY_B)).key == "key_b"


def test_older_snapshot_does_not_replace_newer_one() -> None:
    newer = msgspec.structs.replace(make_snapshot(make_key("a")), read_at=2.0)
    older = msgspec.structs.replace(make_snapshot(make_key("b")), read_at=1.0)
    authenticator = Authenticator(newer, AuthConfig(), FakeClock(NOW))
    authenticator.apply_snapshot(older)
    assert authenticator.authenticate(bearer(KEY_A)).key == "key_a"


def test_rejection_never_reveals_key() -> None:
    authenticator = make_authenticator(make_key("a", expires_at=1.0))
    with capture_logs() as logs:
        for credential in (KEY_A, KEY_B):
            with pytest.raises(ApiError) as caught:
                authenticator.authenticate(bearer(credential))
            assert credential[18:] not in caught.value.message
    assert KEY_B[18:] not in str(logs)


# --- networks ------------------------------------------------------------------------------------


def test_networks_of_key_and_project_both_apply() -> None:
    authenticator = make_authenticator(
        make_key("a", OFFICE, networks=("10.1.0.0/16", "2001:db8::/32"))
    )
    for allowed in ("10.1.2.3", "::ffff:10.1.2.3"):
        assert authenticator.authenticate(bearer(KEY_A, allowed)).key == "key_a"
    for address in ("10.2.0.1", "2001:db8::1", "203.0.113.1", "unix", ""):
        assert rejection(authenticator, bearer(KEY_A, address)) == (403, "address_not_allowed")


def test_gateway_networks_are_checked_before_key() -> None:
    authenticator = make_authenticator(make_key("a"), allowed_networks=("192.0.2.0/24",))
    assert authenticator.authenticate(bearer(KEY_A, "192.0.2.7")).key == "key_a"
    unknown = plaintext_key("x")
    assert rejection(authenticator, bearer(unknown, "192.0.3.7")) == (403, "address_not_allowed")


# --- no keys -------------------------------------------------------------------------------------


@pytest.mark.parametrize("peer", ["127.0.0.1", "::1", "unix", "127.8.9.1"])
def test_local_connection_without_keys_is_anonymous(peer: str) -> None:
    authenticator = make_authenticator()
    assert authenticator.authenticate(FakeConnection(peer_address=peer)) is ANONYMOUS
    assert authenticator.authenticate(bearer("none", peer, host="localhost:8000")) is ANONYMOUS


@pytest.mark.parametrize(
    ("peer", "headers"),
    [
        ("192.168.1.5", {}),
        ("", {}),
        ("127.0.0.1", {b"x-forwarded-for": b"127.0.0.1"}),
        ("unix", {b"forwarded": b"for=203.0.113.1"}),
        ("127.0.0.1", {b"host": b"rebound.example:8000"}),
        ("127.0.0.1", {b"host": b"192.168.1.5:8000"}),
        ("127.0.0.1", {b"host": b"192.168.1.5:8000", b"origin": b"http://192.168.1.5:8000"}),
        ("unix", {b"host": b"203.0.113.5"}),
        ("127.0.0.1", {b"host": b"localhost:8000", b"origin": b"https://evil.example"}),
        ("127.0.0.1", {b"host": b"localhost:8000", b"origin": b"http://203.0.113.5"}),
        ("127.0.0.1", {b"host": b"localhost:8000", b"origin": b"null"}),
        ("127.0.0.1", {b"host": b""}),
        ("127.0.0.1", {b"host": b":8000"}),
        ("127.0.0.1", {b"host": b"[::1]evil.example"}),
        ("127.0.0.1", {b"host": b"[::1].evil.example:8000"}),
        ("127.0.0.1", {b"host": b"[::1"}),
        ("127.0.0.1", {b"host": b"127.0.0.1:8000:evil.example"}),
        ("127.0.0.1", {b"host": b"localhost:evil.example"}),
        ("127.0.0.1", {b"host": b"host.docker.internal:8000"}),
        ("127.0.0.1", {b"host": b"evil.example/.localhost"}),
        ("127.0.0.1", {b"host": b"localhost", b"origin": b"http://[::1]evil.example"}),
        ("127.0.0.1", {b"host": b"localhost", b"origin": b"ftp://localhost"}),
        ("127.0.0.1", {b"host": b"localhost", b"origin": b"http://localhost/evil.example"}),
    ],
)
def test_remote_connection_without_keys_is_rejected(peer: str, headers: dict[bytes, bytes]) -> None:
    assert rejection(make_authenticator(), FakeConnection(headers, peer)) == (401, "no_keys_yet")


@pytest.mark.parametrize(
    ("store", "command"),
    [
        (None, "argosy keys create, after adding `store: {}` to the gateway's settings"),
        (StoreConfig(), "argosy keys create"),
        (
            StoreConfig(url="postgresql://argosy:secret@database/argosy"),
            "argosy keys create --store URL, with the URL of the gateway's PostgreSQL store",
        ),
    ],
)
def test_anyone_may_read_how_a_key_is_created(store: StoreConfig | None, command: str) -> None:
    assert describe_key_command(store) == command


@pytest.mark.parametrize(
    "headers",
    [
        {b"host": b"127.0.0.1:8000"},
        {b"host": b"[::1]:8000"},
        {b"host": b"[::ffff:127.0.0.1]"},
        {b"host": b"LOCALHOST:8000"},
        {b"host": b"box.localhost"},
        {b"host": b"localhost:8000", b"origin": b"http://localhost:3000"},
        {b"host": b"0.0.0.0:8000", b"origin": b"http://0.0.0.0:8000"},
    ],
)
def test_local_host_and_origin_headers_are_accepted(headers: dict[bytes, bytes]) -> None:
    assert make_authenticator().authenticate(FakeConnection(headers)) is ANONYMOUS


def test_first_key_ends_anonymous_access() -> None:
    authenticator = make_authenticator()
    authenticator.authenticate(FakeConnection())
    authenticator.apply_snapshot(make_snapshot(make_key("a")))
    assert rejection(authenticator, FakeConnection()) == (401, "missing_api_key")


def test_revoking_last_key_does_not_restore_anonymous_access(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path / 'argosy.db'}")
    try:
        store.migrate()
        created = store.accounts.bootstrap(actor="test")
        assert created is not None
        store.accounts.revoke_key(created[0].id, actor="test")
        authenticator = Authenticator(store.load_snapshot(), AuthConfig())
        assert rejection(authenticator, FakeConnection()) == (401, "missing_api_key")
        check_exposure("0.0.0.0", AuthConfig(), store.load_snapshot())  # noqa: S104 - a key is required
    finally:
        store.close()


def test_auth_mode_overrides_existence_of_keys() -> None:
    required = make_authenticator(mode="required")
    assert rejection(required, FakeConnection()) == (401, "missing_api_key")
    disabled = make_authenticator(make_key("a"), mode="disabled")
    assert disabled.authenticate(FakeConnection()) is ANONYMOUS
    assert disabled.authenticate(bearer("wrong", "203.0.113.1")) == Principal()


@pytest.mark.parametrize(
    ("host", "keys", "mode", "rejected"),
    [
        ("127.0.0.1", (), "auto", False),
        ("localhost", (), "auto", False),
        ("::1", (), "auto", False),
        ("0.0.0.0", (), "auto", True),  # noqa: S104 - rejected
        ("::", (), "auto", True),
        ("", (), "auto", True),
        ("example.test", (), "auto", True),
        ("0.0.0.0", (make_key("a"),), "auto", False),  # noqa: S104 - a key is required
        ("0.0.0.0", (), "disabled", False),  # noqa: S104 - explicit setting
        ("0.0.0.0", (), "required", False),  # noqa: S104 - a key is required
    ],
)
def test_public_listener_without_keys_is_rejected(
    host: str, keys: tuple[Key, ...], mode: str, rejected: bool
) -> None:
    settings = AuthConfig(mode=mode)  # type: ignore[arg-type]
    if rejected:
        with pytest.raises(ValueError, match="argosy keys create"):
            check_exposure(host, settings, make_snapshot(*keys))
    else:
        check_exposure(host, settings, make_snapshot(*keys))


@pytest.mark.parametrize("field", ["allowed_networks", "trusted_proxies"])
def test_invalid_network_in_settings_is_named_in_error(field: str) -> None:
    settings: dict[str, Any] = {field: ("10.0.0.0/99",)}
    with pytest.raises(ValueError, match=r"10\.0\.0\.0/99"):
        make_authenticator(**settings)


# --- brute force ---------------------------------------------------------------------------------


def test_failed_attempts_are_throttled_and_valid_keys_are_not() -> None:
    clock = FakeClock(NOW)
    authenticator = make_authenticator(make_key("a"), clock=clock)
    with capture_logs() as logs:
        statuses = [
            rejection(authenticator, bearer(f"wrong-{n}", "203.0.113.1"))[0] for n in range(100)
        ]
    assert statuses == [401] * 20 + [429] * 80
    assert len(logs) == 1, "the log does not grow with the attempts"
    assert authenticator.authenticate(bearer(KEY_A, "203.0.113.1")).key == "key_a"
    assert rejection(authenticator, bearer("wrong", "203.0.113.2"))[0] == 401, "other address"
    clock.now += 30
    assert rejection(authenticator, bearer("wrong", "203.0.113.1"))[0] == 401


def test_clock_set_back_does_not_prolong_throttling() -> None:
    clock, steady = FakeClock(NOW), FakeClock(NOW)
    authenticator = make_authenticator(make_key("a"), clock=clock, steady_clock=steady)
    wrong = bearer("wrong", "203.0.113.1")
    assert [rejection(authenticator, wrong)[0] for _ in range(21)][-1] == 429
    clock.now -= 86_400
    assert rejection(authenticator, wrong)[0] == 429
    steady.now += 30
    assert rejection(authenticator, wrong)[0] == 401


def test_throttled_addresses_are_bounded_and_grouped_by_ipv6_prefix() -> None:
    authenticator = make_authenticator(make_key("a"))
    first = bearer("wrong", "203.0.113.1")
    assert [rejection(authenticator, first)[0] for _ in range(21)][-2:] == [401, 429]
    for n in range(6000):
        rejection(authenticator, bearer("wrong", f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}"))
    for n in range(30):
        last = rejection(authenticator, bearer("wrong", f"2001:db8:0:1::{n + 1:x}"))[0]
    assert last == 429, "addresses of one /64 count as one"
    assert rejection(authenticator, first)[0] == 401, "the oldest address is evicted first"
    unknown = [rejection(authenticator, bearer("wrong", ""))[0] for _ in range(21)]
    assert unknown == [401] * 20 + [429], "unknown addresses count as one"


# --- authorization -------------------------------------------------------------------------------


def test_higher_role_includes_lower_roles() -> None:
    roles: tuple[Role, ...] = ("user", "viewer", "operator", "admin")
    for rank, role in enumerate(roles):
        for required_rank, required in enumerate(roles):
            if rank >= required_rank:
                check_role(Principal(role=role), required)
                check_role(Principal(role=role, role_scope="gateway"), required, "gateway")
            else:
                with pytest.raises(ApiError, match="needs the role"):
                    check_role(Principal(role=role, role_scope="gateway"), required)


def test_organisation_role_does_not_grant_gateway_role() -> None:
    with pytest.raises(
        ApiError, match="role viewer of the whole gateway; yours is admin of your organisation only"
    ):
        check_role(Principal(role="admin"), "viewer", "gateway")
    with pytest.raises(ApiError, match="role user of the whole gateway"):
        check_role(Principal(), "user", "gateway")


def test_scoped_key_may_use_only_its_models() -> None:
    scoped = Principal(allowed_models=frozenset({"big"}))
    check_model_access(scoped, "big")
    check_model_access(scoped, "default", "big")
    assert can_use_model(Principal(), "anything")
    assert not can_use_model(scoped, "small")
    with pytest.raises(ApiError, match="It may use: big") as caught:
        check_model_access(scoped, "small")
    assert (caught.value.status, caught.value.code) == (403, "model_not_allowed")


@pytest.mark.parametrize("role", ["viewer", "operator"])
def test_operations_role_cannot_call_models(role: Role) -> None:
    with pytest.raises(ApiError, match="cannot call models"):
        check_model_access(Principal(role=role), "big")


# --- client addresses -----------------------------------------------------------------------------


TRUSTED = parse_networks(["10.0.0.0/8", "fd00::/8"])
PROXIES = st.sampled_from(["10.0.0.1", "10.9.8.7", "fd00::1"])
ADDRESSES = st.ip_addresses().filter(
    lambda address: not is_in_networks(parse_address(str(address)), TRUSTED)
)
HEADER_ENTRIES = st.binary(max_size=40).filter(lambda text: b"," not in text)


@given(peer=ADDRESSES, forwarded=st.binary())
def test_untrusted_peer_address_ignores_forwarded_header(peer: object, forwarded: bytes) -> None:
    assert client_address(str(peer), {b"x-forwarded-for": forwarded}, TRUSTED) == parse_address(
        str(peer)
    )


@given(
    peer=PROXIES,
    client=ADDRESSES,
    forwarded=st.lists(HEADER_ENTRIES, max_size=3),
    proxies=st.lists(PROXIES, max_size=3),
)
def test_first_trusted_proxy_names_client(
    peer: str, client: object, forwarded: list[bytes], proxies: list[str]
) -> None:
    hops = [*forwarded, str(client).encode(), *(proxy.encode() for proxy in proxies)]
    headers = {b"x-forwarded-for": b", ".join(hops)}
    assert client_address(peer, headers, TRUSTED) == parse_address(str(client))


@given(peer=PROXIES, proxies=st.lists(PROXIES))
def test_chain_of_trusted_proxies_ends_at_first_of_them(peer: str, proxies: list[str]) -> None:
    headers = {b"x-forwarded-for": ",".join(proxies).encode()}
    assert client_address(peer, headers, TRUSTED) == ip_address([*proxies[:1], peer][0])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("192.0.2.1", "192.0.2.1"),
        (" 192.0.2.1:80 ", "192.0.2.1"),
        ("2001:db8::1", "2001:db8::1"),
        ("[2001:db8::1]:80", "2001:db8::1"),
        ('"[2001:db8::1]"', "2001:db8::1"),
        ("fe80::1%eth0", "fe80::1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
    ],
)
def test_address_forms_are_parsed(text: str, expected: str) -> None:
    assert parse_address(text) == ip_address(expected)


@given(st.text())
def test_any_text_is_parsed_without_error(text: str) -> None:
    parse_address(text)


@pytest.mark.parametrize(
    ("network", "inside", "outside"),
    [
        ("::ffff:10.0.0.0/104", "10.1.2.3", "11.0.0.0"),
        ("::ffff:192.0.2.7", "::ffff:192.0.2.7", "192.0.2.8"),
        ("::ffff:0:0/96", "203.0.113.1", "2001:db8::1"),
        ("::/0", "2001:db8::1", "192.0.2.1"),
    ],
)
def test_network_matches_in_any_notation(network: str, inside: str, outside: str) -> None:
    networks = parse_networks([network])
    assert is_in_networks(parse_address(inside), networks)
    assert not is_in_networks(parse_address(outside), networks)


# --- ambiguous names in tokens --------------------------------------------------------------------


EMAIL = "ann@x.test"
CLAIMS = TokenClaims(subject="s", email="", organisation="", project="", role="user", expires_at=0)


def make_owners(renamed: dict[str, float], **created: float) -> AccountSnapshot:
    """Return a project `web` and a user of each organisation, by the times at which they were created and renamed."""
    ordered = sorted(created.items(), key=itemgetter(1))
    projects = [
        Project(id=f"p_{name}", organisation=name, name="web", created_at=at)
        for name, at in ordered
    ]
    users = [
        User(id=f"u_{name}", organisation=name, email=EMAIL, project=f"p_{name}", created_at=at)
        for name, at in ordered
    ]
    times = {f"{kind}_{name}": at for name, at in renamed.items() for kind in "pu"}
    return AccountSnapshot(projects=tuple(projects), users=tuple(users), renamed_at=times)


def resolve_organisation(snapshot: AccountSnapshot) -> str:
    """Return the organisation of a token with the project's name and of one with the email, which must agree."""
    index = CredentialIndex(snapshot)
    by_name, by_email = (
        index.find_by_claims(msgspec.structs.replace(CLAIMS, **claims)).principal.organisation
        for claims in ({"project": "web"}, {"email": EMAIL})
    )
    assert by_name == by_email
    return by_name


@pytest.mark.parametrize(
    ("renamed", "ours", "theirs", "winner"),
    [
        pytest.param({}, 1, 2, "ours", id="first-created"),
        pytest.param({}, 2, 1, "theirs", id="first-created-reversed"),
        pytest.param({"theirs": 9}, 5, 1, "ours", id="renamed-after-other-was-created"),
        pytest.param({"theirs": 3}, 5, 1, "theirs", id="renamed-before-other-was-created"),
        pytest.param({"ours": 7, "theirs": 8}, 1, 2, "ours", id="first-renamed"),
        pytest.param({"ours": 7, "theirs": 8}, 2, 1, "ours", id="first-renamed-created-later"),
        pytest.param({"theirs": 5}, 5, 1, "theirs", id="same-time-first-created"),
    ],
)
def test_first_owner_of_ambiguous_name_wins(
    renamed: dict[str, float], ours: float, theirs: float, winner: str
) -> None:
    """Otherwise an organisation could take another one's tokens with a rename."""
    assert resolve_organisation(make_owners(renamed, ours=ours, theirs=theirs)) == winner
