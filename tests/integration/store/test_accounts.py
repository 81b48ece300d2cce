"""Account rules on both databases: fields, rejected values, unique names, keys, limits and organisation scopes."""

from __future__ import annotations

import string
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from tests.integration.store.conftest import ACTOR, RULES, START
from tests.support.fake_clock import FakeClock

from argosy.store import (
    Adapter,
    ConflictError,
    Key,
    Limit,
    NotFoundError,
    Organisation,
    OwnerKind,
    Price,
    Project,
    Prompt,
    Store,
    User,
    hash_key,
)
from argosy.store.records import AccountRecord
from argosy.store.validation import MAX_RECORDS_PER_ORGANISATION

OWNER_KINDS: tuple[OwnerKind, ...] = ("organisation", "project", "user", "key")

# --- organisations, projects and users -----------------------------------------------------------


def test_created_records_are_stored_and_listed(store: Store, organisation: Organisation) -> None:
    accounts, terms = store.accounts, store.limits_and_prices
    options: dict[str, Any] = {"tier": "premium", "share_cache": True}
    options |= {"quota_failure_mode": "closed", "weight": 2.0}
    project = accounts.create_project(
        organisation.id,
        " search ",
        networks=["10.0.0.7", "2001:db8::1/32"],
        flags=["new", " old", "new"],
        actor=ACTOR,
        **options,
    )
    assert project == Project(
        id=project.id,
        organisation=organisation.id,
        name="search",
        networks=("10.0.0.7/32", "2001:db8::/32"),
        flags=("new", "old"),
        created_at=START,
        **options,
    )
    user = accounts.create_user(
        organisation.id, "Ann@Example.com", role="viewer", project=project.id, actor=ACTOR
    )
    assert user.email == "ann@example.com"
    key, _ = accounts.create_key(
        project.id,
        "laptop",
        user=user.id,
        role="operator",
        models=["m", "n", "m"],
        networks=("10.0.0.0/8",),
        flags=["beta"],
        expires_at=START + 5,
        actor=ACTOR,
    )
    assert (key.models, key.networks, key.role) == (("m", "n"), ("10.0.0.0/8",), "operator")
    assert key.flags == ("beta",)
    limit = terms.set_limit("key", key.id, "tokens", 2**62, window="minute", model="m", actor=ACTOR)
    price = terms.set_price(
        Price(model="m", tier="free", input=3, cached_input=1, output=9, since=7.5), actor=ACTOR
    )
    assert accounts.get_organisation(organisation.id) == organisation
    assert accounts.get_project(project.id) == project
    assert accounts.get_user(user.id) == user
    assert accounts.get_key(key.id) == key
    snapshot = store.load_snapshot()
    assert store.is_current(snapshot)
    assert list(snapshot.organisations) == accounts.list_organisations() == [organisation]
    assert list(snapshot.projects) == accounts.list_projects(organisation.id) == [project]
    assert list(snapshot.users) == accounts.list_users(organisation.id) == [user]
    assert list(snapshot.keys) == accounts.list_keys(project.id) == [key]
    assert list(snapshot.limits) == terms.list_limits("key", key.id) == [limit]
    assert list(snapshot.prices) == terms.list_prices("m") == [price]
    assert [*accounts.list_projects("org_other"), *terms.list_prices("n")] == []


def test_changed_fields_are_stored(store: Store, project: Project, user: User) -> None:
    accounts, replace = store.accounts, msgspec.structs.replace
    changed = accounts.change_project(
        project.id, tier="free", networks=["::1"], flags=["new"], actor=ACTOR
    )
    assert changed == replace(project, tier="free", networks=("::1/128",), flags=("new",))
    assert accounts.get_project(project.id) == changed
    renamed = accounts.change_organisation(project.organisation, name="Emca", actor=ACTOR)
    assert accounts.get_organisation(project.organisation) == renamed
    accounts.change_user(user.id, project=project.id, role="admin", scope="gateway", actor=ACTOR)
    changed_user = accounts.change_user(user.id, project=None, actor=ACTOR)
    assert changed_user == accounts.get_user(user.id)
    assert changed_user == replace(user, role="admin", scope="gateway")


@RULES
def test_only_effective_changes_raise_the_version(store: Store, project: Project) -> None:
    version = store.load_snapshot().version
    store.accounts.change_project(project.id, name="search", tier="standard", actor=ACTOR)
    with pytest.raises(ConflictError):
        store.accounts.create_project(project.organisation, "search", actor=ACTOR)
    assert store.load_snapshot().version == version
    store.accounts.change_project(project.id, weight=3, actor=ACTOR)
    assert store.load_snapshot().version == version + 1


@RULES
def test_names_are_unique_within_their_owner_until_the_record_ends(
    store: Store, organisation: Organisation, project: Project, user: User, clock: FakeClock
) -> None:
    accounts = store.accounts
    other = accounts.create_organisation("Other", actor=ACTOR)
    with pytest.raises(ConflictError, match=f"organisation is called 'Acme', {organisation.id}"):
        accounts.create_organisation(" Acme", actor=ACTOR)
    with pytest.raises(ConflictError, match="Choose another name"):
        accounts.change_organisation(other.id, name="Acme", actor=ACTOR)
    with pytest.raises(ConflictError, match="project is called 'search',"):
        accounts.create_project(organisation.id, "search", actor=ACTOR)
    accounts.create_project(other.id, "search", actor=ACTOR)
    with pytest.raises(ConflictError, match=r"user is called 'ann@example\.com',"):
        accounts.create_user(organisation.id, "ANN@example.com", actor=ACTOR)
    accounts.create_user(other.id, "ANN@example.com", actor=ACTOR)
    key, _ = accounts.create_key(project.id, "laptop", actor=ACTOR)
    with pytest.raises(ConflictError, match="key is called 'laptop',"):
        accounts.create_key(project.id, "laptop", actor=ACTOR)
    accounts.revoke_key(key.id, actor=ACTOR)
    accounts.create_key(project.id, "laptop", expires_at=START + 1, actor=ACTOR)
    clock.now += 1
    accounts.create_key(project.id, "laptop", actor=ACTOR)
    assert len(accounts.list_keys(project.id)) == 3
    accounts.disable_user(user.id, actor=ACTOR)
    accounts.create_user(organisation.id, user.email, actor=ACTOR)
    accounts.archive_project(project.id, actor=ACTOR)
    accounts.create_project(organisation.id, project.name, actor=ACTOR)
    accounts.archive_organisation(organisation.id, actor=ACTOR)
    accounts.create_organisation(organisation.name, actor=ACTOR)


@RULES
def test_ended_records_cannot_be_changed_or_used(
    store: Store, project: Project, user: User
) -> None:
    accounts, terms = store.accounts, store.limits_and_prices
    key, _ = accounts.create_key(project.id, "laptop", actor=ACTOR)
    revoked = accounts.revoke_key(key.id, actor=ACTOR)
    disabled = accounts.disable_user(user.id, actor=ACTOR)
    archived = accounts.archive_project(project.id, actor=ACTOR)
    version = store.load_snapshot().version
    assert accounts.revoke_key(key.id, actor=ACTOR) == revoked
    assert accounts.disable_user(user.id, actor=ACTOR) == disabled
    assert accounts.archive_project(project.id, actor=ACTOR) == archived
    rejected: list[Callable[..., object]] = [
        partial(accounts.change_project, project.id, tier="free"),
        partial(accounts.change_user, user.id, role="admin"),
        partial(accounts.create_key, project.id, "other"),
        partial(accounts.rotate_key, key.id, 1),
        partial(terms.set_limit, "user", user.id, "concurrency", 1),
    ]
    for change in rejected:
        with pytest.raises(ConflictError):
            change(actor=ACTOR)
    assert store.load_snapshot().version == version


# --- rejected values -----------------------------------------------------------------------------


def test_unknown_ids_are_named(store: Store, organisation: Organisation) -> None:
    accounts, terms = store.accounts, store.limits_and_prices
    rejected: list[Callable[[], object]] = [
        partial(accounts.get_organisation, "absent"),
        partial(accounts.create_project, "absent", "search", actor=ACTOR),
        partial(accounts.change_user, "absent", actor=ACTOR),
        partial(accounts.create_user, organisation.id, "a@b.c", project="absent", actor=ACTOR),
        partial(accounts.revoke_key, "absent", actor=ACTOR),
        partial(terms.set_limit, "key", "absent", "concurrency", 1, actor=ACTOR),
        partial(terms.delete_limit, "absent", actor=ACTOR),
    ]
    for call in rejected:
        with pytest.raises(NotFoundError, match="with the id 'absent'"):
            call()
    with pytest.raises(NotFoundError, match="with the id"):
        accounts.create_project("ab\0sent", "search", actor=ACTOR)


@RULES
def test_invalid_values_are_rejected_by_name(store: Store, project: Project) -> None:
    create_organisation = store.accounts.create_organisation
    change_project = partial(store.accounts.change_project, project.id)
    create_key = partial(store.accounts.create_key, project.id, "k")
    rotate_key = partial(store.accounts.rotate_key, "k")
    set_limit = partial(store.limits_and_prices.set_limit, "project", project.id)
    set_foreign_limit = partial(store.limits_and_prices.set_limit, "tenant", "t", "concurrency")  # type: ignore[arg-type]
    set_price = store.limits_and_prices.set_price
    tokens = partial(set_limit, "tokens", window="day")
    rejected: list[tuple[str, Callable[..., object]]] = [
        ("name: give some", partial(create_organisation, " \n")),
        ("name: give some", partial(create_organisation, "a\0b")),
        (r"length <= 200.*\$.name", partial(create_organisation, "a" * 201)),
        (r"length <= 200.*\$.models", partial(create_key, models=["a" * 201])),
        ("models: ", partial(create_key, models=[""])),
        (r"\$.role", partial(create_key, role="root")),
        ("expires_at in the future", partial(create_key, expires_at=START)),
        (r"\$.expires_at", partial(create_key, expires_at=1e15)),
        ("overlap_s must be a finite number", partial(rotate_key, float("nan"))),
        (r"length <= 64.*\$.networks", partial(change_project, networks=["fe80::1%" + "x" * 64])),
        ("networks: .*'10.0.0.300'", partial(change_project, networks=["10.0.0.300"])),
        (r"\$.tier", partial(change_project, tier="gold")),
        # Weights divide each other, so that a tiny one would overflow.
        *((r"\$.weight", partial(change_project, weight=weight)) for weight in (0, 1e-320, 1e7)),
        (r"\$.amount", partial(tokens, -1)),
        (r"\$.amount", partial(tokens, 2**63)),
        ("needs a window", partial(set_limit, "tokens", 1)),
        (
            "Only a limit on concurrency or stored_bytes has none",
            partial(set_limit, "concurrency", 1, window="day"),
        ),
        ("The owner of a limit", partial(set_foreign_limit, 1)),
        (
            r"<= 1000000000 - at .\$.input",
            partial(set_price, Price(model="m", input=10**9 + 1, cached_input=0, output=0)),
        ),
        (
            r"\$.output",
            partial(set_price, Price(model="m", input=0, cached_input=0, output=-1)),
        ),
    ]
    version = store.load_snapshot().version
    for message, change in rejected:
        with pytest.raises(ValueError, match=message):
            change(actor=ACTOR)
    with pytest.raises(ValueError, match="an actor"):
        create_organisation("x", actor="")
    assert store.load_snapshot().version == version


@RULES
def test_records_of_two_organisations_cannot_be_linked(
    store: Store, project: Project, user: User
) -> None:
    accounts = store.accounts
    other = accounts.create_organisation("Other", actor=ACTOR)
    foreign = accounts.create_project(other.id, "foreign", actor=ACTOR)
    rejected: list[Callable[..., object]] = [
        partial(accounts.create_user, other.id, "b@c.d", project=project.id),
        partial(accounts.change_user, user.id, project=foreign.id),
        partial(accounts.create_key, foreign.id, "k", user=user.id),
    ]
    for change in rejected:
        with pytest.raises(ConflictError, match="does not belong to the organisation"):
            change(actor=ACTOR)


# --- keys ----------------------------------------------------------------------------------------


@RULES
def test_key_secret_is_returned_once_and_only_its_digest_stored(
    store: Store, project: Project
) -> None:
    key, plain = store.accounts.create_key(project.id, "laptop", actor=ACTOR)
    assert key.prefix == f"sk-argosy-{key.id.removeprefix('key_')[:8]}"
    assert plain.startswith(f"{key.prefix}-")
    secret = plain.removeprefix(f"{key.prefix}-")
    assert len(secret) >= 32
    assert set(secret) <= set(string.ascii_letters + string.digits + "-_")
    assert key.digest == hash_key(plain)
    assert store.load_snapshot().keys == (key,)
    assert secret not in repr(store.load_snapshot())
    assert store.accounts.create_key(project.id, "other", actor=ACTOR)[1] != plain


@RULES
def test_rotated_key_is_valid_until_the_overlap_ends(
    store: Store, project: Project, user: User, clock: FakeClock
) -> None:
    accounts, terms = store.accounts, store.limits_and_prices
    old, _ = accounts.create_key(
        project.id, "laptop", user=user.id, models=["m"], expires_at=START + 100, actor=ACTOR
    )
    terms.set_limit("key", old.id, "requests", 5, window="second", actor=ACTOR)
    clock.now += 40
    new, plain = accounts.rotate_key(old.id, 10, actor=ACTOR)
    assert new.digest == hash_key(plain)
    assert new == msgspec.structs.replace(
        old,
        id=new.id,
        prefix=new.prefix,
        digest=new.digest,
        created_at=START + 40,
        expires_at=START + 140,
    )
    old = accounts.get_key(old.id)
    assert (old.expires_at, old.replaced_by) == (START + 50, new.id)
    assert store.load_snapshot().keys == (old, new)
    (limit,) = terms.list_limits("key", new.id)
    assert (limit.unit, limit.amount, limit.window) == ("requests", 5, "second")
    assert terms.list_limits("key", old.id) == [], "the new key's limit covers both"
    with pytest.raises(ConflictError, match=f"Rotate {new.id}"):
        accounts.rotate_key(old.id, 10, actor=ACTOR)
    assert accounts.rotate_key(new.id, 1000, actor=ACTOR)[0].expires_at == START + 140
    assert accounts.get_key(new.id).expires_at == START + 140
    clock.now = START + 140
    with pytest.raises(ConflictError, match="no longer valid"):
        accounts.rotate_key(new.id, 10, actor=ACTOR)


@RULES
def test_snapshot_omits_revoked_keys_at_once_and_expired_keys_after_30_days(
    store: Store, project: Project, clock: FakeClock
) -> None:
    revoked, _ = store.accounts.create_key(project.id, "a", actor=ACTOR)
    clock.now += 1
    expired, _ = store.accounts.create_key(project.id, "b", expires_at=START + 2, actor=ACTOR)
    store.accounts.revoke_key(revoked.id, actor=ACTOR)
    clock.now += 30 * 86_400
    assert store.load_snapshot().keys == (expired,)
    clock.now += 1
    assert store.load_snapshot().keys == ()
    assert [key.id for key in store.accounts.list_keys()] == [revoked.id, expired.id]


# --- limits, prices and the snapshot -------------------------------------------------------------


@RULES
def test_limit_replaces_the_limit_of_the_same_unit_window_and_model(
    store: Store, project: Project
) -> None:
    terms = store.limits_and_prices

    def set_limit(amount: int, model: str | None = None) -> Limit:
        return terms.set_limit(
            "project", project.id, "tokens", amount, window="minute", model=model, actor=ACTOR
        )

    first, model_limit = set_limit(5), set_limit(7, "m")
    assert set_limit(6).id == first.id
    assert set_limit(7, " m ").id == model_limit.id
    listed = {(limit.amount, limit.model) for limit in terms.list_limits("project")}
    assert listed == {(6, None), (7, "m")}
    terms.delete_limit(first.id, actor=ACTOR)
    assert terms.list_limits() == [model_limit]
    assert terms.list_limits("organisation") == []


@RULES
def test_prices_have_a_history(store: Store) -> None:
    terms = store.limits_and_prices

    def set_price(output: int, since: float, model: str = "m") -> Price:
        price = Price(model=model, input=1, cached_input=1, output=output, since=since)
        return terms.set_price(price, actor=ACTOR)

    first, later = set_price(1, 0), set_price(1, 5)
    assert set_price(2, 0).id == first.id
    assert set_price(2, 0, " m ").id == first.id
    assert [price.output for price in terms.list_prices()] == [2, 1]
    assert terms.list_prices()[1] == later


@RULES
def test_snapshot_under_concurrent_writes_has_one_version(store: Store) -> None:
    """Each change adds one organisation, so that the version implies their number."""
    failures: list[BaseException] = []

    def write() -> None:
        try:
            for number in range(40):
                store.accounts.create_organisation(f"o{number}", actor=ACTOR)
        except BaseException as error:  # noqa: BLE001 - the test asserts that there is none
            failures.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    while True:
        is_writing = writer.is_alive()
        snapshot = store.load_snapshot()
        assert len(snapshot.organisations) == snapshot.version - 1
        if not is_writing:
            break
    writer.join()
    assert not failures
    assert store.load_snapshot().version == 41


# --- organisation scopes and maximum numbers -----------------------------------------------------


@RULES
def test_scoped_lists_hold_records_of_one_organisation(
    store: Store, organisation: Organisation, project: Project, user: User
) -> None:
    accounts, terms = store.accounts, store.limits_and_prices
    key, _ = accounts.create_key(project.id, "laptop", user=user.id, actor=ACTOR)
    limits = [
        terms.set_limit(kind, owner, "tokens", 1, window="day", actor=ACTOR)
        for kind, owner in zip(
            OWNER_KINDS, (organisation.id, project.id, user.id, key.id), strict=True
        )
    ]
    other = accounts.create_organisation("Other", actor=ACTOR)
    own = accounts.for_organisation(organisation.id)
    assert own.list_organisations() == [organisation]
    assert own.list_projects() == own.list_projects(organisation.id) == [project]
    assert own.list_users() == [user]
    assert own.list_keys() == [key]
    own_terms = terms.for_organisation(organisation.id)
    assert sorted(own_terms.list_limits(), key=str) == sorted(limits, key=str)
    assert [own_terms.get_limit(limit.id) for limit in limits] == limits
    foreign = accounts.for_organisation(other.id)
    assert foreign.list_organisations() == [other]
    assert [*foreign.list_projects(), *foreign.list_users(), *foreign.list_keys()] == []
    assert [*foreign.list_projects(organisation.id), *foreign.list_keys(project.id)] == []
    assert terms.for_organisation(other.id).list_limits() == []


@RULES
def test_scoped_changes_reject_records_of_other_organisations(
    store: Store, organisation: Organisation, project: Project, user: User
) -> None:
    unscoped = store.accounts
    key, _ = unscoped.create_key(project.id, "laptop", actor=ACTOR)
    limit = store.limits_and_prices.set_limit("key", key.id, "tokens", 1, window="day", actor=ACTOR)
    other = unscoped.create_organisation("Other", actor=ACTOR)
    own_project = unscoped.create_project(other.id, "home", actor=ACTOR)
    own_user = unscoped.create_user(other.id, "bob@example.com", actor=ACTOR)
    accounts = unscoped.for_organisation(other.id)
    terms = store.limits_and_prices.for_organisation(other.id)
    version = store.load_snapshot().version
    with pytest.raises(NotFoundError):
        accounts.get_organisation(organisation.id)
    rejected: list[Callable[..., object]] = [
        partial(accounts.change_organisation, organisation.id, name="x"),
        partial(accounts.archive_organisation, organisation.id),
        partial(accounts.create_project, organisation.id, "x"),
        partial(accounts.change_project, project.id, name="x"),
        partial(accounts.archive_project, project.id),
        partial(accounts.create_user, organisation.id, "x@y.z"),
        partial(accounts.create_user, other.id, "x@y.z", project=project.id),
        partial(accounts.change_user, own_user.id, project=project.id),
        partial(accounts.disable_user, user.id),
        partial(accounts.create_key, project.id, "x"),
        partial(accounts.create_key, own_project.id, "x", user=user.id),
        partial(accounts.rotate_key, key.id, 5),
        partial(accounts.revoke_key, key.id),
        partial(terms.set_limit, "key", key.id, "tokens", 2, window="day"),
        partial(terms.delete_limit, limit.id),
    ]
    for change in rejected:
        with pytest.raises(NotFoundError):
            change(actor=ACTOR)
    price = Price(model="m", input=1, cached_input=1, output=1)
    with pytest.raises(ConflictError, match="This price does not belong to"):
        terms.set_price(price, actor=ACTOR)
    with pytest.raises(ConflictError, match="This organisation does not belong to"):
        accounts.create_organisation("Third", actor=ACTOR)
    assert store.load_snapshot().version == version
    store.limits_and_prices.set_price(price, actor=ACTOR)
    assert len(terms.list_prices()) == 1


@RULES
@pytest.mark.parametrize("record_type", [Project, User, Key, Limit, Adapter, Prompt])
def test_organisation_at_its_maximum_rejects_another_record(
    store: Store, monkeypatch: pytest.MonkeyPatch, record_type: type[AccountRecord]
) -> None:
    monkeypatch.setitem(MAX_RECORDS_PER_ORGANISATION, record_type, 3)
    accounts, terms = store.accounts, store.limits_and_prices
    organisation, other = (accounts.create_organisation(name, actor=ACTOR).id for name in "ab")
    project = accounts.create_project(organisation, "first", actor=ACTOR).id

    def create(number: int) -> None:
        name = f"n{number}"
        if record_type is Project:
            accounts.create_project(organisation, name, actor=ACTOR)
        elif record_type is User:
            accounts.create_user(organisation, name, actor=ACTOR)
        elif record_type is Key:
            accounts.create_key(project, name, actor=ACTOR)
        elif record_type is Adapter:
            digest = f"sha256:{'a' * 64}"
            store.adapters.add_version(name, "m", digest, organisation=organisation, actor=ACTOR)
        elif record_type is Prompt:
            store.prompts.add_version(name, "{}", organisation=organisation, actor=ACTOR)
        else:
            terms.set_limit("project", project, "tokens", 1, window="day", model=name, actor=ACTOR)

    for number in range(3 - (record_type is Project)):
        create(number)
    with pytest.raises(ConflictError, match=r"3 .*, the maximum number.* End some"):
        create(9)
    assert len(accounts.list_projects(organisation)) <= 3
    foreign = accounts.create_project(other, "foreign", actor=ACTOR)
    accounts.create_key(foreign.id, "k", actor=ACTOR)


@RULES
def test_ended_records_do_not_count_towards_the_maximum(
    store: Store, clock: FakeClock, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_types: tuple[type[AccountRecord], ...] = (Key, Project)
    for record_type in record_types:
        monkeypatch.setitem(MAX_RECORDS_PER_ORGANISATION, record_type, 2)
    accounts = store.accounts
    first, _ = accounts.create_key(project.id, "a", actor=ACTOR)
    accounts.create_key(project.id, "b", expires_at=clock.now + 5, actor=ACTOR)
    with pytest.raises(ConflictError, match="2 keys"):
        accounts.rotate_key(first.id, 60.0, actor=ACTOR)
    accounts.rotate_key(first.id, 0.0, actor=ACTOR)
    clock.now += 10
    accounts.rotate_key(accounts.create_key(project.id, "c", actor=ACTOR)[0].id, 0.0, actor=ACTOR)
    more = accounts.create_project(project.organisation, "more", actor=ACTOR)
    accounts.archive_project(more.id, actor=ACTOR)
    accounts.create_project(project.organisation, "again", actor=ACTOR)
