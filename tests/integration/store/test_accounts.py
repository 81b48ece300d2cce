"""Accounts on both databases: what is kept, what is refused, and what a gateway is told."""

from __future__ import annotations

import string
import threading
from collections.abc import Callable

import msgspec
import pytest
from tests.integration.store.conftest import START, Clock

from argosy.store import (
    ConflictError,
    Key,
    Limit,
    NotFoundError,
    Organisation,
    OwnerKind,
    Price,
    Project,
    Store,
    User,
    hash_key,
)
from argosy.store.records import AccountRecord
from argosy.store.validation import MAX_RECORDS_PER_ORGANISATION

ME = "key:test"
OWNERS: tuple[OwnerKind, ...] = ("organisation", "project", "user", "key")


@pytest.fixture
def organisation(store: Store) -> Organisation:
    return store.accounts.create_organisation("Acme", actor=ME)


@pytest.fixture
def project(store: Store, organisation: Organisation) -> Project:
    return store.accounts.create_project(organisation.id, "search", actor=ME)


@pytest.fixture
def user(store: Store, organisation: Organisation) -> User:
    return store.accounts.create_user(organisation.id, "Ann@example.com", actor=ME)


def test_what_is_created_is_found_again(store: Store, organisation: Organisation) -> None:
    accounts = store.accounts
    project = accounts.create_project(
        organisation.id,
        " search ",
        tier="premium",
        weight=2,
        share_cache=True,
        quota_failure_mode="closed",
        networks=["10.0.0.7", "2001:db8::1/32"],
        flags=["new", " old", "new"],
        actor=ME,
    )
    assert project == Project(
        id=project.id,
        organisation=organisation.id,
        name="search",
        tier="premium",
        weight=2.0,
        share_cache=True,
        quota_failure_mode="closed",
        networks=("10.0.0.7/32", "2001:db8::/32"),
        flags=("new", "old"),
        created_at=START,
    )
    user = accounts.create_user(
        organisation.id, "Ann@Example.com", role="viewer", project=project.id, actor=ME
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
        actor=ME,
    )
    assert (key.models, key.networks, key.role) == (("m", "n"), ("10.0.0.0/8",), "operator")
    assert key.flags == ("beta",)
    limit = store.limits_and_prices.set_limit(
        "key", key.id, "tokens", 2**62, window="minute", model="m", actor=ME
    )
    price = store.limits_and_prices.set_price(
        Price(model="m", tier="free", input=3, cached_input=1, output=9, since=7.5), actor=ME
    )
    assert accounts.get_organisation(organisation.id) == organisation
    assert accounts.get_project(project.id) == project
    assert accounts.get_user(user.id) == user
    assert accounts.get_key(key.id) == key
    directory = store.load_snapshot()
    assert store.is_current(directory)
    assert list(directory.organisations) == accounts.list_organisations() == [organisation]
    assert list(directory.projects) == accounts.list_projects(organisation.id) == [project]
    assert list(directory.users) == accounts.list_users(organisation.id) == [user]
    assert list(directory.keys) == accounts.list_keys(project.id) == [key]
    assert list(directory.limits) == store.limits_and_prices.list_limits("key", key.id) == [limit]
    assert list(directory.prices) == store.limits_and_prices.list_prices("m") == [price]
    assert [*accounts.list_projects("org_other"), *store.limits_and_prices.list_prices("n")] == []


def test_what_is_changed_stays_changed(store: Store, project: Project, user: User) -> None:
    accounts = store.accounts
    changed = accounts.change_project(
        project.id, tier="free", networks=["::1"], flags=["new"], actor=ME
    )
    assert changed == msgspec.structs.replace(
        project, tier="free", networks=("::1/128",), flags=("new",)
    )
    assert accounts.get_project(project.id) == changed
    renamed = accounts.change_organisation(project.organisation, name="Emca", actor=ME)
    assert accounts.get_organisation(project.organisation) == renamed
    accounts.change_user(user.id, project=project.id, role="admin", scope="gateway", actor=ME)
    freed = accounts.change_user(user.id, project=None, actor=ME)
    assert freed == accounts.get_user(user.id)
    assert freed == msgspec.structs.replace(user, role="admin", scope="gateway")


def test_each_change_raises_the_version_and_nothing_else_does(
    store: Store, project: Project
) -> None:
    version = store.load_snapshot().version
    store.accounts.change_project(project.id, name="search", tier="standard", actor=ME)
    with pytest.raises(ConflictError):
        store.accounts.create_project(project.organisation, "search", actor=ME)
    assert store.load_snapshot().version == version
    store.accounts.change_project(project.id, weight=3, actor=ME)
    assert store.load_snapshot().version == version + 1


def test_names_are_unique_where_people_expect_it(
    store: Store, organisation: Organisation, project: Project, user: User
) -> None:
    accounts = store.accounts
    other = accounts.create_organisation("Other", actor=ME)
    with pytest.raises(ConflictError, match=f"organisation is called 'Acme', {organisation.id}"):
        accounts.create_organisation(" Acme", actor=ME)
    with pytest.raises(ConflictError, match="Choose another name"):
        accounts.change_organisation(other.id, name="Acme", actor=ME)
    with pytest.raises(ConflictError, match="project is called 'search',"):
        accounts.create_project(organisation.id, "search", actor=ME)
    accounts.create_project(other.id, "search", actor=ME)
    with pytest.raises(ConflictError, match=r"user is called 'ann@example\.com',"):
        accounts.create_user(organisation.id, "ANN@example.com", actor=ME)
    accounts.create_user(other.id, "ANN@example.com", actor=ME)
    accounts.create_key(project.id, "laptop", actor=ME)
    with pytest.raises(ConflictError, match="key is called 'laptop',"):
        accounts.create_key(project.id, "laptop", actor=ME)


def test_a_name_is_free_again_when_its_bearer_has_ended(
    store: Store, organisation: Organisation, project: Project, user: User, clock: Clock
) -> None:
    accounts = store.accounts
    key, _ = accounts.create_key(project.id, "laptop", actor=ME)
    accounts.revoke_key(key.id, actor=ME)
    accounts.create_key(project.id, "laptop", expires_at=START + 1, actor=ME)
    clock.now += 1
    accounts.create_key(project.id, "laptop", actor=ME)
    assert len(accounts.list_keys(project.id)) == 3
    accounts.disable_user(user.id, actor=ME)
    accounts.create_user(organisation.id, user.email, actor=ME)
    accounts.archive_project(project.id, actor=ME)
    accounts.create_project(organisation.id, project.name, actor=ME)
    accounts.archive_organisation(organisation.id, actor=ME)
    accounts.create_organisation(organisation.name, actor=ME)


def test_an_organisation_ends_with_all_that_it_has(
    store: Store, project: Project, user: User, clock: Clock
) -> None:
    clock.now += 10
    ended = store.accounts.archive_organisation(project.organisation, actor=ME)
    directory = store.load_snapshot()
    assert directory.organisations == (ended,)
    assert [p.archived_at for p in directory.projects] == [START + 10]
    assert [u.disabled_at for u in directory.users] == [START + 10]


def test_what_has_ended_stays_ended(store: Store, project: Project, user: User) -> None:
    accounts = store.accounts
    key, _ = accounts.create_key(project.id, "laptop", actor=ME)
    revoked = accounts.revoke_key(key.id, actor=ME)
    disabled = accounts.disable_user(user.id, actor=ME)
    archived = accounts.archive_project(project.id, actor=ME)
    version = store.load_snapshot().version
    assert accounts.revoke_key(key.id, actor=ME) == revoked
    assert accounts.disable_user(user.id, actor=ME) == disabled
    assert accounts.archive_project(project.id, actor=ME) == archived
    refused: list[Callable[[], object]] = [
        lambda: accounts.change_project(project.id, tier="free", actor=ME),
        lambda: accounts.change_user(user.id, role="admin", actor=ME),
        lambda: accounts.create_key(project.id, "other", actor=ME),
        lambda: accounts.rotate_key(key.id, 1, actor=ME),
        lambda: store.limits_and_prices.set_limit("user", user.id, "concurrency", 1, actor=ME),
    ]
    for refusal in refused:
        with pytest.raises(ConflictError):
            refusal()
    assert store.load_snapshot().version == version


def test_unknown_ids_are_named(store: Store, organisation: Organisation) -> None:
    accounts = store.accounts
    unknown: list[Callable[[], object]] = [
        lambda: accounts.get_organisation("nobody"),
        lambda: accounts.create_project("nobody", "search", actor=ME),
        lambda: accounts.change_user("nobody", actor=ME),
        lambda: accounts.create_user(organisation.id, "a@b.c", project="nobody", actor=ME),
        lambda: accounts.revoke_key("nobody", actor=ME),
        lambda: store.limits_and_prices.set_limit("key", "nobody", "concurrency", 1, actor=ME),
        lambda: store.limits_and_prices.delete_limit("nobody", actor=ME),
    ]
    for refusal in unknown:
        with pytest.raises(NotFoundError, match="with the id 'nobody'"):
            refusal()
    with pytest.raises(NotFoundError, match="with the id"):
        accounts.create_project("no\0body", "search", actor=ME)


def test_wrong_values_are_refused_by_name(store: Store, project: Project) -> None:
    accounts = store.accounts
    wrong: dict[str, Callable[[], object]] = {
        "name: give some": lambda: accounts.create_organisation(" \n", actor=ME),
        "name: give some ": lambda: accounts.create_organisation("a\0b", actor=ME),
        r"length <= 200.*\$.name": lambda: accounts.create_organisation("a" * 201, actor=ME),
        r"length <= 200.*\$.models": lambda: accounts.create_key(
            project.id, "k", models=["a" * 201], actor=ME
        ),
        r"length <= 64.*\$.networks": lambda: accounts.change_project(
            project.id, networks=["fe80::1%" + "x" * 64], actor=ME
        ),
        r"\$.weight": lambda: accounts.change_project(project.id, weight=0, actor=ME),
        r"\$.tier": lambda: accounts.change_project(project.id, tier="gold", actor=ME),  # type: ignore[arg-type]
        "networks: .*'10.0.0.300'": lambda: accounts.change_project(
            project.id, networks=["10.0.0.300"], actor=ME
        ),
        r"\$.role": lambda: accounts.create_key(project.id, "k", role="root", actor=ME),  # type: ignore[arg-type]
        "models: ": lambda: accounts.create_key(project.id, "k", models=[""], actor=ME),
        "expires_at in the future": lambda: accounts.create_key(
            project.id, "k", expires_at=START, actor=ME
        ),
        r"\$.expires_at": lambda: accounts.create_key(project.id, "k", expires_at=1e15, actor=ME),
        "an actor": lambda: accounts.create_organisation("x", actor=""),
        "overlap_s must be a finite number": lambda: accounts.rotate_key(
            "k", float("nan"), actor=ME
        ),
        r"\$.amount": lambda: store.limits_and_prices.set_limit(
            "project", project.id, "tokens", -1, window="day", actor=ME
        ),
        r"\$.amount ": lambda: store.limits_and_prices.set_limit(
            "project", project.id, "tokens", 2**63, window="day", actor=ME
        ),
        "needs a window": lambda: store.limits_and_prices.set_limit(
            "project", project.id, "tokens", 1, actor=ME
        ),
        "Only a limit on concurrency has none": lambda: store.limits_and_prices.set_limit(
            "project", project.id, "concurrency", 1, window="day", actor=ME
        ),
        "The owner of a limit": lambda: store.limits_and_prices.set_limit(
            "tenant",  # type: ignore[arg-type]
            "t",
            "concurrency",
            1,
            actor=ME,
        ),
        r"<= 1000000000 - at .\$.input": lambda: store.limits_and_prices.set_price(
            Price(model="m", input=10**9 + 1, cached_input=0, output=0), actor=ME
        ),
        r"\$.output": lambda: store.limits_and_prices.set_price(
            Price(model="m", input=0, cached_input=0, output=-1), actor=ME
        ),
    }
    version = store.load_snapshot().version
    for said, refusal in wrong.items():
        with pytest.raises(ValueError, match=said.strip()):
            refusal()
    assert store.load_snapshot().version == version


def test_organisations_do_not_mix(store: Store, project: Project, user: User) -> None:
    accounts = store.accounts
    other = accounts.create_organisation("Other", actor=ME)
    theirs = accounts.create_project(other.id, "theirs", actor=ME)
    mixed: list[Callable[[], object]] = [
        lambda: accounts.create_user(other.id, "b@c.d", project=project.id, actor=ME),
        lambda: accounts.change_user(user.id, project=theirs.id, actor=ME),
        lambda: accounts.create_key(theirs.id, "k", user=user.id, actor=ME),
    ]
    for refusal in mixed:
        with pytest.raises(ConflictError, match="does not belong to the organisation"):
            refusal()


def test_a_key_is_shown_once_and_only_its_digest_is_kept(store: Store, project: Project) -> None:
    key, plain = store.accounts.create_key(project.id, "laptop", actor=ME)
    assert key.prefix == f"sk-argosy-{key.id.removeprefix('key_')[:8]}"
    assert plain.startswith(f"{key.prefix}-")
    secret = plain.removeprefix(f"{key.prefix}-")
    assert len(secret) >= 32
    assert set(secret) <= set(string.ascii_letters + string.digits + "-_")
    assert key.digest == hash_key(plain)
    assert store.load_snapshot().keys == (key,)
    assert secret not in repr(store.load_snapshot())
    assert store.accounts.create_key(project.id, "other", actor=ME)[1] != plain


def test_a_rotated_key_works_until_the_overlap_ends(
    store: Store, project: Project, user: User, clock: Clock
) -> None:
    accounts = store.accounts
    old, _ = accounts.create_key(
        project.id, "laptop", user=user.id, models=["m"], expires_at=START + 100, actor=ME
    )
    store.limits_and_prices.set_limit("key", old.id, "requests", 5, window="second", actor=ME)
    clock.now += 40
    new, plain = accounts.rotate_key(old.id, 10, actor=ME)
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
    (limit,) = store.limits_and_prices.list_limits("key", new.id)
    assert (limit.unit, limit.amount, limit.window) == ("requests", 5, "second")
    assert store.limits_and_prices.list_limits("key", old.id) == [], "both are under the new one's"
    with pytest.raises(ConflictError, match=f"Rotate {new.id}"):
        accounts.rotate_key(old.id, 10, actor=ME)
    assert accounts.rotate_key(new.id, 1000, actor=ME)[0].expires_at == START + 140
    assert accounts.get_key(new.id).expires_at == START + 140
    clock.now = START + 140
    with pytest.raises(ConflictError, match="no longer valid"):
        accounts.rotate_key(new.id, 10, actor=ME)


def test_revoked_keys_leave_the_directory_at_once_and_expired_ones_later(
    store: Store, project: Project, clock: Clock
) -> None:
    first, _ = store.accounts.create_key(project.id, "a", actor=ME)
    clock.now += 1
    second, _ = store.accounts.create_key(project.id, "b", expires_at=START + 2, actor=ME)
    store.accounts.revoke_key(first.id, actor=ME)
    clock.now += 30 * 86_400
    assert store.load_snapshot().keys == (second,)
    clock.now += 1
    assert store.load_snapshot().keys == ()
    assert [key.id for key in store.accounts.list_keys()] == [first.id, second.id]


def test_a_limit_takes_the_place_of_the_one_before(store: Store, project: Project) -> None:

    def set_limit(amount: int, model: str | None = None) -> Limit:
        return store.limits_and_prices.set_limit(
            "project", project.id, "tokens", amount, window="minute", model=model, actor=ME
        )

    first, of_model = set_limit(5), set_limit(7, "m")
    assert set_limit(6).id == first.id
    assert set_limit(7, " m ").id == of_model.id
    assert {
        (limit.amount, limit.model) for limit in store.limits_and_prices.list_limits("project")
    } == {
        (6, None),
        (7, "m"),
    }
    store.limits_and_prices.delete_limit(first.id, actor=ME)
    assert store.limits_and_prices.list_limits() == [of_model]
    assert store.limits_and_prices.list_limits("organisation") == []


def test_prices_have_a_history(store: Store) -> None:
    def set_price(output: int, since: float, model: str = "m") -> Price:
        price = Price(model=model, input=1, cached_input=1, output=output, since=since)
        return store.limits_and_prices.set_price(price, actor=ME)

    first, later = set_price(1, 0), set_price(1, 5)
    assert set_price(2, 0).id == first.id
    assert set_price(2, 0, " m ").id == first.id
    assert [price.output for price in store.limits_and_prices.list_prices()] == [2, 1]
    assert store.limits_and_prices.list_prices()[1] == later


def test_a_directory_is_of_one_version(store: Store) -> None:
    """Each change adds one organisation, so the version tells how many there are."""
    failures: list[BaseException] = []

    def write() -> None:
        try:
            for number in range(40):
                store.accounts.create_organisation(f"o{number}", actor=ME)
        except BaseException as error:  # noqa: BLE001 - told to the test
            failures.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    seen: set[int] = set()
    while writer.is_alive() or not seen:
        directory = store.load_snapshot()
        assert len(directory.organisations) == directory.version - 1
        seen.add(directory.version)
    writer.join()
    assert not failures
    assert store.load_snapshot().version == 41


def test_a_first_run_makes_what_a_caller_needs(store: Store) -> None:
    made = store.accounts.bootstrap(actor="serve")
    assert made is not None
    key, plain = made
    directory = store.load_snapshot()
    assert directory.version == 2
    assert [organisation.name for organisation in directory.organisations] == ["default"]
    assert [project.name for project in directory.projects] == ["default"]
    assert directory.keys == (key,)
    assert isinstance(key, Key)
    assert (key.role, key.scope, key.digest) == ("admin", "gateway", hash_key(plain))
    assert key.project == directory.projects[0].id
    assert store.accounts.bootstrap(actor="serve") is None


# --- one organisation, as if there were no others ------------------------------------------------


def test_within_an_organisation_there_is_nothing_else(
    store: Store, organisation: Organisation, project: Project, user: User
) -> None:
    everywhere = store.accounts
    key, _ = everywhere.create_key(project.id, "laptop", user=user.id, actor=ME)
    limits = [
        store.limits_and_prices.set_limit(kind, owner, "tokens", 1, window="day", actor=ME)
        for kind, owner in zip(OWNERS, (organisation.id, project.id, user.id, key.id), strict=True)
    ]
    other = everywhere.create_organisation("Other", actor=ME)
    own, foreign = (
        everywhere.for_organisation(organisation.id),
        everywhere.for_organisation(other.id),
    )
    assert own.list_organisations() == [organisation]
    assert own.list_projects() == own.list_projects(organisation.id) == [project]
    assert own.list_users() == [user]
    assert own.list_keys() == [key]
    assert sorted(
        store.limits_and_prices.for_organisation(organisation.id).list_limits(), key=str
    ) == sorted(limits, key=str)
    assert [
        store.limits_and_prices.for_organisation(organisation.id).get_limit(limit.id)
        for limit in limits
    ] == limits
    assert foreign.list_organisations() == [other]
    lists = (foreign.list_projects, foreign.list_users, foreign.list_keys)
    assert [len(listed()) for listed in lists] == [0, 0, 0]
    assert store.limits_and_prices.for_organisation(other.id).list_limits() == []
    assert foreign.list_projects(organisation.id) == []
    assert foreign.list_keys(project.id) == []


def test_within_an_organisation_nothing_else_is_changed(
    store: Store, organisation: Organisation, project: Project, user: User
) -> None:
    everywhere = store.accounts
    key, _ = everywhere.create_key(project.id, "laptop", actor=ME)
    limit = store.limits_and_prices.set_limit("key", key.id, "tokens", 1, window="day", actor=ME)
    other = everywhere.create_organisation("Other", actor=ME)
    home = everywhere.create_project(other.id, "home", actor=ME)
    mine = everywhere.create_user(other.id, "bob@example.com", actor=ME)
    accounts, terms = (
        everywhere.for_organisation(other.id),
        store.limits_and_prices.for_organisation(other.id),
    )
    version = store.load_snapshot().version
    unknown: list[Callable[[], object]] = [
        lambda: accounts.get_organisation(organisation.id),
        lambda: accounts.change_organisation(organisation.id, name="x", actor=ME),
        lambda: accounts.archive_organisation(organisation.id, actor=ME),
        lambda: accounts.create_project(organisation.id, "x", actor=ME),
        lambda: accounts.change_project(project.id, name="x", actor=ME),
        lambda: accounts.archive_project(project.id, actor=ME),
        lambda: accounts.create_user(organisation.id, "x@y.z", actor=ME),
        lambda: accounts.create_user(other.id, "x@y.z", project=project.id, actor=ME),
        lambda: accounts.change_user(mine.id, project=project.id, actor=ME),
        lambda: accounts.disable_user(user.id, actor=ME),
        lambda: accounts.create_key(project.id, "x", actor=ME),
        lambda: accounts.create_key(home.id, "x", user=user.id, actor=ME),
        lambda: accounts.rotate_key(key.id, 5, actor=ME),
        lambda: accounts.revoke_key(key.id, actor=ME),
        lambda: terms.set_limit("key", key.id, "tokens", 2, window="day", actor=ME),
        lambda: terms.delete_limit(limit.id, actor=ME),
    ]
    for change in unknown:
        with pytest.raises(NotFoundError):
            change()
    price = Price(model="m", input=1, cached_input=1, output=1)
    with pytest.raises(ConflictError, match="This price does not belong to"):
        terms.set_price(price, actor=ME)
    with pytest.raises(ConflictError, match="This organisation does not belong to"):
        accounts.create_organisation("Third", actor=ME)
    assert store.load_snapshot().version == version
    store.limits_and_prices.set_price(price, actor=ME)
    assert len(terms.list_prices()) == 1


@pytest.mark.parametrize("kind", [Project, User, Key, Limit])
def test_an_organisation_has_no_more_than_it_may(
    store: Store, monkeypatch: pytest.MonkeyPatch, kind: type[AccountRecord]
) -> None:
    monkeypatch.setitem(MAX_RECORDS_PER_ORGANISATION, kind, 3)
    accounts, terms = store.accounts, store.limits_and_prices
    organisation, other = (accounts.create_organisation(name, actor=ME).id for name in "ab")
    project = accounts.create_project(organisation, "first", actor=ME).id

    def make(number: int) -> None:
        name = f"n{number}"
        if kind is Project:
            accounts.create_project(organisation, name, actor=ME)
        elif kind is User:
            accounts.create_user(organisation, name, actor=ME)
        elif kind is Key:
            accounts.create_key(project, name, actor=ME)
        else:
            terms.set_limit("project", project, "tokens", 1, window="day", model=name, actor=ME)

    for number in range(3 - (kind is Project)):
        make(number)
    with pytest.raises(ConflictError, match=r"3 .*, the maximum number.* End some"):
        make(9)
    assert len(accounts.list_projects(organisation)) <= 3
    accounts.create_key(accounts.create_project(other, "theirs", actor=ME).id, "k", actor=ME)


def test_what_has_ended_makes_room(
    store: Store, clock: Clock, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: tuple[type[AccountRecord], ...] = (Key, Project)
    for kind in kinds:
        monkeypatch.setitem(MAX_RECORDS_PER_ORGANISATION, kind, 2)
    accounts = store.accounts
    first, _ = accounts.create_key(project.id, "a", actor=ME)
    old, _ = accounts.create_key(project.id, "b", expires_at=clock.now + 5, actor=ME)
    with pytest.raises(ConflictError, match="2 keys"):
        accounts.rotate_key(first.id, 60.0, actor=ME)
    accounts.rotate_key(first.id, 0.0, actor=ME)
    clock.now += 10
    accounts.rotate_key(accounts.create_key(project.id, "c", actor=ME)[0].id, 0.0, actor=ME)
    more = accounts.create_project(project.organisation, "more", actor=ME)
    accounts.archive_project(more.id, actor=ME)
    accounts.create_project(project.organisation, "again", actor=ME)
    assert old.expires_at is not None
