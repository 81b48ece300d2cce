"""Paging on both databases: pages form the whole list, and each page reads few more rows than it returns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from tests.integration.store.conftest import ACTOR, RULES
from tests.support.database_work import count_rows_read, fill
from tests.support.fake_clock import FakeClock

from argosy.store import Accounts, LimitsAndPrices, PageRequest, Price, Project, Store
from argosy.store.records import AccountRecord

ACCOUNTS = 1000
PAGE_SIZE = 50
ListFunction = Callable[[Accounts, LimitsAndPrices, PageRequest], Sequence[AccountRecord]]
LISTS: dict[str, ListFunction] = {
    "organisations": lambda accounts, _, page: accounts.list_organisations(page),
    "projects": lambda accounts, _, page: accounts.list_projects(None, page),
    "organisation's projects": lambda accounts, _, page: accounts.list_projects("org_000001", page),
    "users": lambda accounts, _, page: accounts.list_users(None, page),
    "organisation's users": lambda accounts, _, page: accounts.list_users("org_000001", page),
    "keys": lambda accounts, _, page: accounts.list_keys(None, page),
    "project's keys": lambda accounts, _, page: accounts.list_keys("proj_000001", page),
    "limits": lambda _, terms, page: terms.list_limits(None, None, page),
    "key limits": lambda _, terms, page: terms.list_limits("key", None, page),
    "prices": lambda _, terms, page: terms.list_prices(None, page),
    "model's prices": lambda _, terms, page: terms.list_prices("m", page),
}


def test_page_of_a_long_list_reads_few_more_rows_than_it_returns(store: Store, url: str) -> None:
    fill(url, ACCOUNTS)
    for scope, (name, list_page) in itertools.product((None, "org_000001"), LISTS.items()):
        accounts = store.accounts.for_organisation(scope)
        terms = store.limits_and_prices.for_organisation(scope)
        records = list_page(accounts, terms, PageRequest())
        for start in (0, len(records) // 2, max(0, len(records) - PAGE_SIZE)):
            after = records[start - 1].id if start else None
            with count_rows_read() as rows_read:
                page = list_page(accounts, terms, PageRequest(after, PAGE_SIZE))
            assert page == records[start : start + PAGE_SIZE], (scope, name)
            assert sum(rows_read) < 6 * PAGE_SIZE, (scope, name, start, rows_read)


@RULES
def test_pages_of_any_size_form_the_whole_list(
    store: Store, clock: FakeClock, project: Project
) -> None:
    """Several records have the same creation time."""
    for number in range(20):
        clock.now += number % 5 == 4
        key, _ = store.accounts.create_key(project.id, f"k{number}", actor=ACTOR)
        store.limits_and_prices.set_limit("key", key.id, "tokens", 1, window="day", actor=ACTOR)
        price = Price(model=f"m{number}", input=1, cached_input=1, output=1, since=clock.now)
        store.limits_and_prices.set_price(price, actor=ACTOR)
    for name in ("keys", "limits", "prices"):
        expected = LISTS[name](store.accounts, store.limits_and_prices, PageRequest())
        for size in (1, 3, 20):
            assert [*list_in_pages(LISTS[name], store, size)] == expected, name


def list_in_pages(list_page: ListFunction, store: Store, size: int) -> Sequence[AccountRecord]:
    records: list[AccountRecord] = []
    while True:
        after = records[-1].id if records else None
        page = list_page(store.accounts, store.limits_and_prices, PageRequest(after, size))
        records += page
        if len(page) < size:
            return records


@RULES
def test_changes_between_pages_move_no_other_record(
    store: Store, clock: FakeClock, project: Project
) -> None:
    """A page also continues after a record that was deleted meanwhile."""
    accounts, terms = store.accounts, store.limits_and_prices
    for number in range(6):
        accounts.create_key(project.id, f"k{number}", actor=ACTOR)
    keys = accounts.list_keys()
    limits = sorted(
        terms.set_limit("key", key.id, "tokens", 1, window="day", actor=ACTOR).id for key in keys
    )
    accounts.revoke_key(keys[2].id, actor=ACTOR)
    terms.delete_limit(limits[0], actor=ACTOR)
    terms.delete_limit(limits[2], actor=ACTOR)
    clock.now += 1
    new, _ = accounts.rotate_key(keys[0].id, 60, actor=ACTOR)
    key_page = accounts.list_keys(project.id, PageRequest(keys[2].id, 10))
    assert [key.id for key in key_page] == [key.id for key in (*keys[3:], new)]
    limit_page = terms.list_limits(None, None, PageRequest(limits[2], 10))
    assert [limit.id for limit in limit_page] == limits[3:]


def test_page_after_a_record_of_another_list_is_rejected(store: Store) -> None:
    organisations = [store.accounts.create_organisation(name, actor=ACTOR) for name in "ab"]
    own, foreign = (
        store.accounts.create_project(owner.id, "p", actor=ACTOR) for owner in organisations
    )
    keys = [store.accounts.create_key(p.id, "k", actor=ACTOR)[0] for p in (own, foreign)]
    accounts = store.accounts.for_organisation(own.organisation)
    for after in (keys[1].id, own.id, "absent", "", "\0", "\ud800"):
        page = PageRequest(after, 1)
        with pytest.raises(ValueError, match=r"in this list\. Use 'last_id' of a page") as rejected:
            accounts.list_keys(None, page)
        assert type(rejected.value) is ValueError
        with pytest.raises(ValueError, match="in this list"):
            store.accounts.list_keys(own.id, page)
        with pytest.raises(ValueError, match="in this list"):
            store.limits_and_prices.list_limits(None, None, page)
    assert accounts.list_keys(None, PageRequest(keys[0].id, 1)) == []
