"""Lists in parts, on both databases: nothing twice, nothing left out, and no more read than is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from tests.integration.store.conftest import Clock
from tests.support.database_work import fill, reading

from argosy.store import Accounts, LimitsAndPrices, PageRequest, Price, Store
from argosy.store.records import AccountRecord

ME = "test"
MANY = 3000
PAGE = 50
List = Callable[[Accounts, LimitsAndPrices, PageRequest], Sequence[AccountRecord]]
LISTS: dict[str, List] = {
    "organisations": lambda accounts, _, part: accounts.list_organisations(part),
    "projects": lambda accounts, _, part: accounts.list_projects(None, part),
    "projects of one": lambda accounts, _, part: accounts.list_projects("org_000001", part),
    "users": lambda accounts, _, part: accounts.list_users(None, part),
    "users of one": lambda accounts, _, part: accounts.list_users("org_000001", part),
    "keys": lambda accounts, _, part: accounts.list_keys(None, part),
    "keys of one": lambda accounts, _, part: accounts.list_keys("proj_000001", part),
    "limits": lambda _, terms, part: terms.list_limits(None, None, part),
    "limits of a kind": lambda _, terms, part: terms.list_limits("key", None, part),
    "prices": lambda _, terms, part: terms.list_prices(None, part),
    "prices of a model": lambda _, terms, part: terms.list_prices("m", part),
}


@pytest.mark.parametrize("within", [None, "org_000001"])
def test_a_part_of_a_long_list_reads_little_more_than_itself(
    store: Store, url: str, within: str | None
) -> None:
    fill(url, MANY)
    accounts, terms = (
        store.accounts.for_organisation(within),
        store.limits_and_prices.for_organisation(within),
    )
    for name, listed in LISTS.items():
        whole = listed(accounts, terms, PageRequest())
        for start in (0, len(whole) // 2, max(0, len(whole) - PAGE)):
            after = whole[start - 1].id if start else None
            with reading() as read:
                part = listed(accounts, terms, PageRequest(after, PAGE))
            assert part == whole[start : start + PAGE], name
            assert sum(read) < 6 * PAGE, (name, start, read)


def test_parts_are_the_whole_whatever_the_clock_says(store: Store, clock: Clock) -> None:
    """Many are made at one moment."""
    home = store.accounts.create_organisation("acme", actor=ME)
    project = store.accounts.create_project(home.id, "web", actor=ME)
    for number in range(20):
        clock.now += number % 5 == 4
        key, _ = store.accounts.create_key(project.id, f"k{number}", actor=ME)
        store.limits_and_prices.set_limit("key", key.id, "tokens", 1, window="day", actor=ME)
        store.limits_and_prices.set_price(price(clock.now, f"m{number}"), actor=ME)
    accounts, terms = store.accounts, store.limits_and_prices
    for name in ("keys", "limits", "prices"):
        for size in (1, 3, 20):
            assert [*parts(LISTS[name], store, size)] == LISTS[name](
                accounts, terms, PageRequest()
            ), name


def test_what_comes_and_goes_between_parts_moves_nothing_else(store: Store, clock: Clock) -> None:
    home = store.accounts.create_organisation("acme", actor=ME)
    project = store.accounts.create_project(home.id, "web", actor=ME)
    for number in range(6):
        store.accounts.create_key(project.id, f"k{number}", actor=ME)
    keys = store.accounts.list_keys()
    limits = sorted(
        store.limits_and_prices.set_limit("key", key.id, "tokens", 1, window="day", actor=ME).id
        for key in keys
    )
    store.accounts.revoke_key(keys[2].id, actor=ME)
    store.limits_and_prices.delete_limit(limits[0], actor=ME)
    store.limits_and_prices.delete_limit(limits[2], actor=ME)  # the last of a part, too
    clock.now += 1
    new, _ = store.accounts.rotate_key(keys[0].id, 60, actor=ME)
    after = store.accounts.list_keys(project.id, PageRequest(keys[2].id, 10))
    assert [key.id for key in after] == [key.id for key in (*keys[3:], new)]
    assert [
        one.id
        for one in store.limits_and_prices.list_limits(None, None, PageRequest(limits[2], 10))
    ] == limits[3:]


def test_a_part_goes_on_in_its_own_list_only(store: Store) -> None:
    one, other = (store.accounts.create_organisation(name, actor=ME) for name in ("one", "other"))
    home, foreign = (
        store.accounts.create_project(owner.id, "p", actor=ME) for owner in (one, other)
    )
    keys = [store.accounts.create_key(p.id, "k", actor=ME)[0] for p in (home, foreign)]
    own = store.accounts.for_organisation(one.id)
    for after in (keys[1].id, home.id, "nobody", "", "\0", "\ud800"):
        with pytest.raises(ValueError, match=r"in this list\. Use 'last_id' of a page") as refused:
            own.list_keys(None, PageRequest(after, 1))
        assert type(refused.value) is ValueError
        with pytest.raises(ValueError, match="in this list"):
            store.accounts.list_keys(home.id, PageRequest(after, 1))
        with pytest.raises(ValueError, match="in this list"):
            store.limits_and_prices.list_limits(None, None, PageRequest(after, 1))
    assert own.list_keys(None, PageRequest(keys[0].id, 1)) == []


def parts(listed: List, store: Store, size: int) -> Sequence[AccountRecord]:
    """The list, put together again."""
    found: list[AccountRecord] = []
    while True:
        after = found[-1].id if found else None
        part = listed(store.accounts, store.limits_and_prices, PageRequest(after, size))
        found += part
        if len(part) < size:
            return found


def price(since: float, model: str) -> Price:
    return Price(model=model, input=1, cached_input=1, output=1, since=since)
