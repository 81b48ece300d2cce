"""Who is let in by key or by place, as what, and what the others are told."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
from structlog.testing import capture_logs
from tests.support.account_fixtures import (
    ANN,
    BOB,
    NOW,
    OFFICE,
    OLD,
    SHARED,
    Request,
    bearer,
    directory,
    key,
    plain,
)

from argosy.gateway.auth import (
    AuthConfig,
    Authenticator,
    ConnectionInfo,
    can_use_model,
    check_exposure,
    check_model_access,
    check_role,
)
from argosy.gateway.principal import ANONYMOUS, Principal
from argosy.http_server import HttpExchange
from argosy.http_server.http_exchange import TRANSPORT_KEY
from argosy.protocol import ApiError
from argosy.store import AccountSnapshot, Key, Role, open_store


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def identity(*keys: Key, clock: Clock | None = None, **settings: object) -> Authenticator:
    return Authenticator(directory(*keys), AuthConfig(**settings), clock or Clock())  # type: ignore[arg-type]


def refusal(who: Authenticator, request: Request) -> tuple[int, str]:
    with pytest.raises(ApiError) as caught:
        who.authenticate(request)
    return caught.value.status, caught.value.code


# --- keys ----------------------------------------------------------------------------------------


def test_a_key_says_for_whom_it_is_in_full() -> None:
    who = identity(key("a", models=("big",), user=ANN.id))
    assert who.authenticate(bearer(plain("a"))) == Principal(
        organisation="org_acme",
        project="proj_chat",
        key="key_a",
        user="user_ann",
        role="user",
        tier=0,
        weight=2.0,
        cache_domain="proj_chat",
        allowed_models=frozenset({"big"}),
    )


def test_projects_that_share_their_cache_have_the_domain_of_their_organisation() -> None:
    who = identity(key("a", SHARED))
    assert who.authenticate(bearer(plain("a"))).cache_domain == "org_acme"


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
def test_a_key_may_be_in_any_header_that_clients_use(headers: dict[bytes, bytes]) -> None:
    sent = {name: value.replace(b"KEY", plain("a").encode()) for name, value in headers.items()}
    assert identity(key("a")).authenticate(Request(sent, "203.0.113.9")).key == "key_a"


@pytest.mark.parametrize("sent", [b"Bearer ", b"Bearer", b"", b"Basic abc", b"KEY"])
def test_no_key_is_told_how_to_send_one(sent: bytes) -> None:
    request = Request({b"authorization": sent})
    assert refusal(identity(key("a")), request) == (401, "missing_api_key")


@pytest.mark.parametrize(
    "wrong", [plain("b"), plain("a") + "x", "sk-argosy-0000000a", "é", "a.b.c"]
)
def test_a_wrong_key_is_refused_also_on_this_machine(wrong: str) -> None:
    assert refusal(identity(key("a")), bearer(wrong)) == (401, "invalid_api_key")


def test_a_key_expires_at_its_second() -> None:
    clock = Clock()
    who = identity(key("a", expires_at=NOW + 10), clock=clock)
    assert who.authenticate(bearer(plain("a"))).key == "key_a"
    clock.now = NOW + 10
    assert refusal(who, bearer(plain("a"))) == (401, "expired_api_key")


def test_keys_of_what_has_ended_are_refused() -> None:
    who = identity(key("a", OLD), key("b", user=BOB.id))
    assert refusal(who, bearer(plain("a"))) == (401, "project_archived")
    assert refusal(who, bearer(plain("b"))) == (401, "user_disabled")


def test_an_update_counts_at_once() -> None:
    who = identity(key("a"))
    assert who.authenticate(bearer(plain("a"))).key == "key_a"
    who.apply_snapshot(directory(key("b")))
    assert refusal(who, bearer(plain("a"))) == (401, "invalid_api_key")
    assert who.authenticate(bearer(plain("b"))).key == "key_b"


def test_an_older_directory_does_not_undo_a_newer_one() -> None:
    who = Authenticator(
        msgspec.structs.replace(directory(key("a")), read_at=2.0), AuthConfig(), Clock()
    )
    who.apply_snapshot(msgspec.structs.replace(directory(key("b")), read_at=1.0))
    assert who.authenticate(bearer(plain("a"))).key == "key_a"


def test_no_refusal_tells_the_key() -> None:
    who = identity(key("a", expires_at=1.0))
    with capture_logs() as logs:
        for credential in (plain("a"), plain("b")):
            with pytest.raises(ApiError) as caught:
                who.authenticate(bearer(credential))
            assert credential[18:] not in caught.value.message
    assert plain("b")[18:] not in str(logs)


# --- networks ------------------------------------------------------------------------------------


def test_a_key_and_its_project_both_limit_where_it_may_be_used() -> None:
    who = identity(key("a", OFFICE, networks=("10.1.0.0/16", "2001:db8::/32")))
    assert who.authenticate(bearer(plain("a"), "10.1.2.3")).key == "key_a"
    assert who.authenticate(bearer(plain("a"), "::ffff:10.1.2.3")).key == "key_a"
    for elsewhere in ("10.2.0.1", "2001:db8::1", "203.0.113.1", "unix", ""):
        assert refusal(who, bearer(plain("a"), elsewhere)) == (403, "address_not_allowed")


def test_the_gateways_own_networks_come_first() -> None:
    who = identity(key("a"), allowed_networks=("192.0.2.0/24",))
    assert who.authenticate(bearer(plain("a"), "192.0.2.7")).key == "key_a"
    assert refusal(who, bearer(plain("x"), "192.0.3.7")) == (403, "address_not_allowed")


def test_forwarded_addresses_are_believed_from_trusted_proxies_only() -> None:
    allowed = key("a", networks=("198.51.100.0/24",))
    who = identity(allowed, trusted_proxies=("10.0.0.0/8", "127.0.0.1"))

    def let_in(peer: str, forwarded: str) -> bool:
        try:
            return bool(who.authenticate(bearer(plain("a"), peer, x_forwarded_for=forwarded)).key)
        except ApiError:
            return False

    assert let_in("10.0.0.1", "198.51.100.7")
    assert let_in("unix", "198.51.100.7:4711")
    assert let_in("10.0.0.1", "203.0.113.9, 198.51.100.7, 10.9.9.9")
    assert not let_in("203.0.113.1", "198.51.100.7"), "a stranger's word"
    assert not let_in("10.0.0.1", "198.51.100.7, 203.0.113.9"), "the client wrote the first one"
    assert not let_in("10.0.0.1", "198.51.100.7, nonsense")
    assert not let_in("10.0.0.1", "")


# --- no keys -------------------------------------------------------------------------------------


@pytest.mark.parametrize("peer", ["127.0.0.1", "::1", "unix", "127.8.9.1"])
def test_one_person_on_their_own_machine_needs_no_key(peer: str) -> None:
    assert identity().authenticate(Request(peer_address=peer)) is ANONYMOUS
    assert identity().authenticate(bearer("none", peer, host="localhost:8000")) is ANONYMOUS


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
    ],
)
def test_without_keys_nobody_else_is_let_in(peer: str, headers: dict[bytes, bytes]) -> None:
    assert refusal(identity(), Request(headers, peer)) == (401, "no_keys_yet")


@pytest.mark.parametrize(
    "headers",
    [
        {b"host": b"127.0.0.1:8000"},
        {b"host": b"[::1]:8000"},
        {b"host": b"box.localhost"},
        {b"host": b"localhost:8000", b"origin": b"http://localhost:3000"},
        {b"host": b"0.0.0.0:8000", b"origin": b"http://0.0.0.0:8000"},
    ],
)
def test_pages_and_programs_of_this_machine_are_let_in(headers: dict[bytes, bytes]) -> None:
    assert identity().authenticate(Request(headers)) is ANONYMOUS


@pytest.mark.parametrize(
    ("client", "server", "peer"),
    [
        (("203.0.113.1", 5000), ("127.0.0.1", 80), "203.0.113.1"),
        (None, ("/run/argosy.sock", None), "unix"),
        (None, ("127.0.0.1", 80), ""),
        (None, None, ""),
    ],
)
def test_a_client_that_has_gone_is_no_local_one(client: object, server: object, peer: str) -> None:
    scope = {
        "client": client,
        "server": server,
        "state": {TRANSPORT_KEY: Mock()},
        "http_version": "1.1",
        "method": "GET",
        "path": "/",
        "query_string": b"",
        "headers": [],
    }
    exchange = HttpExchange(scope, None, None, None)  # type: ignore[arg-type] # nothing is read or sent
    assert exchange.peer_address == peer
    assert (peer == "unix") == _is_let_in(exchange)


def _is_let_in(asking: ConnectionInfo) -> bool:
    try:
        return identity().authenticate(asking) is ANONYMOUS
    except ApiError:
        return False


def test_the_first_key_closes_the_door() -> None:
    who = identity()
    who.authenticate(Request())
    who.apply_snapshot(directory(key("a")))
    assert refusal(who, Request()) == (401, "missing_api_key")


def test_revoking_the_last_key_does_not_open_it_again(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path / 'argosy.db'}")
    try:
        store.migrate()
        made = store.accounts.bootstrap(actor="test")
        assert made is not None
        store.accounts.revoke_key(made[0].id, actor="test")
        who = Authenticator(store.load_snapshot(), AuthConfig())
        assert refusal(who, Request()) == (401, "missing_api_key")
        check_exposure("0.0.0.0", AuthConfig(), store.load_snapshot())  # noqa: S104 - nobody gets in
    finally:
        store.close()


def test_modes_that_are_asked_for_by_name() -> None:
    assert refusal(identity(mode="required"), Request()) == (401, "missing_api_key")
    everybody = identity(key("a"), mode="disabled")
    assert everybody.authenticate(Request()) is ANONYMOUS
    assert everybody.authenticate(bearer("wrong", "203.0.113.1")) == Principal()


@pytest.mark.parametrize(
    ("host", "keys", "mode", "refused"),
    [
        ("127.0.0.1", (), "auto", False),
        ("localhost", (), "auto", False),
        ("::1", (), "auto", False),
        ("0.0.0.0", (), "auto", True),  # noqa: S104 - what is refused
        ("::", (), "auto", True),
        ("", (), "auto", True),
        ("example.test", (), "auto", True),
        ("0.0.0.0", (key("a"),), "auto", False),  # noqa: S104 - with a key
        ("0.0.0.0", (), "disabled", False),  # noqa: S104 - asked for
        ("0.0.0.0", (), "required", False),  # noqa: S104 - nobody gets in
    ],
)
def test_listening_to_others_without_keys_is_refused(
    host: str, keys: tuple[Key, ...], mode: str, refused: bool
) -> None:
    settings = AuthConfig(mode=mode)  # type: ignore[arg-type]
    if refused:
        with pytest.raises(ValueError, match="argosy keys create"):
            check_exposure(host, settings, directory(*keys))
    else:
        check_exposure(host, settings, directory(*keys))


@pytest.mark.parametrize("field", ["allowed_networks", "trusted_proxies"])
def test_a_bad_network_in_the_settings_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=r"10\.0\.0\.0/99"):
        Authenticator(directory(), AuthConfig(**{field: ("10.0.0.0/99",)}))  # type: ignore[arg-type]


# --- guessing ------------------------------------------------------------------------------------


def test_many_wrong_keys_have_to_wait_and_right_ones_never() -> None:
    clock = Clock()
    who = identity(key("a"), clock=clock)
    with capture_logs() as logs:
        answers = [refusal(who, bearer(f"wrong-{n}", "203.0.113.1"))[0] for n in range(100)]
    assert answers == [401] * 20 + [429] * 80
    assert len(logs) == 1, "the log does not grow with the attempts"
    assert who.authenticate(bearer(plain("a"), "203.0.113.1")).key == "key_a"
    assert refusal(who, bearer("wrong", "203.0.113.2"))[0] == 401, "others are not punished"
    clock.now += 30
    assert refusal(who, bearer("wrong", "203.0.113.1"))[0] == 401


def test_nobody_waits_longer_because_the_system_clock_was_set_back() -> None:
    clock = Clock()
    who, wrong = identity(key("a"), clock=clock), bearer("wrong", "203.0.113.1")
    assert [refusal(who, wrong)[0] for _ in range(21)][-1] == 429
    clock.now -= 86_400
    assert refusal(who, wrong)[0] == 429
    clock.now += 30
    assert refusal(who, wrong)[0] == 401


def test_an_attacker_with_many_addresses_takes_no_memory() -> None:
    who = identity(key("a"))
    first = bearer("wrong", "203.0.113.1")
    assert [refusal(who, first)[0] for _ in range(21)][-2:] == [401, 429]
    for n in range(6000):
        refusal(who, bearer("wrong", f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}"))
    for n in range(30):
        last = refusal(who, bearer("wrong", f"2001:db8:0:1::{n + 1:x}"))[0]
    assert last == 429, "addresses of one /64 count as one"
    assert refusal(who, first)[0] == 401, "the oldest is forgotten first"


def test_callers_whose_address_nobody_knows_count_as_one() -> None:
    who = identity(key("a"))
    assert [refusal(who, bearer("wrong", ""))[0] for _ in range(21)] == [401] * 20 + [429]


# --- what callers may do -------------------------------------------------------------------------


def test_roles_are_ranked() -> None:
    roles: tuple[Role, ...] = ("user", "viewer", "operator", "admin")
    for rank, role in enumerate(roles):
        for least, wanted in enumerate(roles):
            if rank >= least:
                check_role(Principal(role=role), wanted)
                check_role(Principal(role=role, role_scope="gateway"), wanted, "gateway")
            else:
                with pytest.raises(ApiError, match="needs the role"):
                    check_role(Principal(role=role, role_scope="gateway"), wanted)


def test_a_role_in_an_organisation_is_none_in_the_whole_gateway() -> None:
    with pytest.raises(
        ApiError, match="role viewer of the whole gateway; yours is admin of your organisation only"
    ):
        check_role(Principal(role="admin"), "viewer", "gateway")
    check_role(Principal(), "user", "gateway")


def test_a_key_asks_only_the_models_it_names() -> None:
    scoped = Principal(allowed_models=frozenset({"big"}))
    check_model_access(scoped, "big")
    check_model_access(scoped, "default", "big")
    assert can_use_model(Principal(), "anything")
    assert not can_use_model(scoped, "small")
    with pytest.raises(ApiError, match="It may use: big") as caught:
        check_model_access(scoped, "small")
    assert (caught.value.status, caught.value.code) == (403, "model_not_allowed")


@pytest.mark.parametrize("role", ["viewer", "operator"])
def test_who_only_runs_the_fleet_asks_no_models(role: str) -> None:
    with pytest.raises(ApiError, match="cannot call models"):
        check_model_access(Principal(role=role), "big")  # type: ignore[arg-type]


def test_an_empty_directory_is_enough() -> None:
    assert Authenticator(AccountSnapshot(), AuthConfig()).authenticate(Request()) is ANONYMOUS
