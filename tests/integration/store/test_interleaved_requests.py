"""Two requests to the admin API at once have the effect of one order or the other, wherever they meet in the store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy.pool import Pool
from tests.integration.store.conftest import ACTOR
from tests.support.gateway_harness import explain_nothing

from argosy.gateway.admin import AdminRequest, AdminScope, list_endpoints
from argosy.gateway.auth import has_role
from argosy.gateway.principal import Principal
from argosy.protocol import ApiError
from argosy.store import Price, Role, RoleScope, Store

Fields = dict[str, Any]
Rows = dict[str, list[Fields]]

IGNORED_TABLES = frozenset({"audit", "state", "alembic_version"})
"""Tables in which the order of two changes shows, and of which rows are never deleted."""
RANDOM_COLUMNS = frozenset({"id", "digest", "prefix"})
ENDPOINTS = {each.handler.__name__: each for each in list_endpoints()}
ROLES = ["user", "viewer", "operator", "admin"]
SCOPES = ["organisation", "gateway"]


class Call(NamedTuple):
    """A request."""

    caller: tuple[Role, RoleScope, bool]
    """Role, its scope, and whether the caller belongs to the organisation of the records."""
    endpoint: str
    body: Fields
    """Fields of the body. Values with `@` are ids of records."""


def draw(required: Fields | None = None, **optional: list[Any]) -> st.SearchStrategy[Fields]:
    """Draw the fields of a body, of which some are required and have a value to begin with."""
    drawn = {name: st.sampled_from(values) for name, values in optional.items()}
    return st.fixed_dictionaries({}, optional=drawn).map(lambda fields: (required or {}) | fields)


def draw_user(required: Fields | None = None) -> st.SearchStrategy[Fields]:
    emails = ["a@x.test", "b@x.test"]
    return draw(required, role=ROLES, scope=SCOPES, email=emails, project=["@project"])


def draw_project(required: Fields | None = None) -> st.SearchStrategy[Fields]:
    flags, networks = [[], ["new"]], [["10.0.0.0/8"]]
    return draw(required, name=["a", "b"], weight=[1, 5], flags=flags, networks=networks)


LIMIT = {"owner_kind": "project", "owner": "@project", "unit": "requests", "window": "day"}
LIMIT_OF_ALL = LIMIT | {"owner_kind": "organisation", "owner": "@organisation", "amount": 5}
BODIES = {
    "create_user": draw_user({"organisation": "@organisation", "email": "a@x.test"}),
    "change_user": draw_user(),
    "disable_user": draw(),
    "create_key": draw(
        {"project": "@project", "name": "new"},
        role=ROLES,
        scope=SCOPES,
        flags=[[], ["new"]],
        user=["@user"],
        models=[["m"]],
    ),
    "rotate_key": draw(overlap_s=[0, 60]),
    "revoke_key": draw(),
    "create_project": draw_project({"organisation": "@organisation", "name": "a"}),
    "change_project": draw_project(),
    "archive_project": draw(),
    "set_limit": draw(LIMIT | {"amount": 3}, amount=[1, 2]) | st.just(LIMIT_OF_ALL),
    "delete_limit": draw(),
    "set_price": draw({"model": "m", "input": 1, "cached_input": 1, "output": 2, "since": 1}),
    "change_organisation": draw({"name": "a"}, name=["other"]),
    "archive_organisation": draw(),
}
CALLERS = st.tuples(st.sampled_from(ROLES[2:]), st.sampled_from(SCOPES), st.booleans())
CALLS = st.sampled_from(sorted(BODIES)).flatmap(
    lambda name: st.builds(Call, CALLERS, st.just(name), BODIES[name])
)
OWN_ADMIN: tuple[Role, RoleScope, bool] = ("admin", "organisation", True)


class World:
    """A store with a record of each kind, which each run starts with."""

    def __init__(self, store: Store, url: str) -> None:
        self._store = store
        accounts, terms = store.accounts, store.limits_and_prices
        organisation = accounts.create_organisation("acme", actor=ACTOR).id
        self._other = accounts.create_organisation("other", actor=ACTOR).id
        project = accounts.create_project(organisation, "web", actor=ACTOR).id
        user = accounts.create_user(organisation, "ann@x.test", actor=ACTOR).id
        limit = terms.set_limit("project", project, "requests", 9, window="day", actor=ACTOR)
        terms.set_price(Price(model="m", input=1, cached_input=1, output=1, since=1), actor=ACTOR)
        self._ids = {
            "organisation": organisation,
            "project": project,
            "user": user,
            "key": accounts.create_key(project, "web", user=user, actor=ACTOR)[0].id,
            "limit": limit.id,
        }
        self._engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:", 1))
        self._tables = sa.MetaData()
        self._tables.reflect(self._engine, only=lambda name, _: name not in IGNORED_TABLES)
        self._start = self._read()
        self._known = {row["id"] for rows in self._start.values() for row in rows if "id" in row}

    def close(self) -> None:
        self._engine.dispose()

    def run(self, *steps: Callable[[], object]) -> Rows:
        """Run steps from the start, and return what the store has then, without what is random."""
        with self._engine.begin() as connection:
            for table in reversed(self._tables.sorted_tables):
                connection.execute(sa.delete(table))
            for table in self._tables.sorted_tables:
                if self._start[table.name]:
                    connection.execute(sa.insert(table), self._start[table.name])
        for step in steps:
            step()
        return {
            name: sorted(map(self._forget_random, rows), key=repr)
            for name, rows in self._read().items()
        }

    def execute(self, call: Call) -> None:
        """Execute a request, which may be refused."""
        endpoint = ENDPOINTS[call.endpoint]
        role, scope, is_own = call.caller
        organisation = self._ids["organisation"] if is_own else self._other
        caller = Principal(organisation, key="key_1", role=role, role_scope=scope)
        if not has_role(caller, endpoint.role, endpoint.scope):
            return
        fields = {
            name: self._ids[value[1:]] if str(value).startswith("@") else value
            for name, value in call.body.items()
        }
        body = msgspec.convert(fields, endpoint.body_type) if endpoint.body_type else None
        unused: Any = None
        whole = AdminScope(self._store, unused, unused, unused, unused, explain_nothing)
        admin = whole.for_principal(caller)
        target = self._ids.get(call.endpoint.partition("_")[2], "")
        with contextlib.suppress(ApiError, ValueError):
            endpoint.handler(admin, AdminRequest(caller, target, None, body))

    def _read(self) -> Rows:
        with self._engine.connect() as connection:
            return {
                table.name: [dict(row) for row in connection.execute(sa.select(table)).mappings()]
                for table in self._tables.sorted_tables
            }

    def _forget_random(self, row: Fields) -> Fields:
        is_known = row.get("id") in self._known
        return {
            name: "new"
            if (name in RANDOM_COLUMNS and not is_known)
            or (name in {"replaced_by", "owner"} and value not in self._known)
            else value
            for name, value in row.items()
        }


@pytest.fixture
def world(store: Store, url: str) -> Iterator[World]:
    built = World(store, url)
    yield built
    built.close()


def count_transactions(step: Callable[[], object], act: Callable[[int], object]) -> int:
    """Run a step, call `act` with the number of each transaction before it, and return how many there were."""
    count = 0

    def on_transaction(*_: object) -> None:
        nonlocal count
        count += 1
        act(count)

    sa.event.listen(Pool, "checkout", on_transaction)
    try:
        step()
    finally:
        sa.event.remove(Pool, "checkout", on_transaction)
    return count


NEW_ADMIN = {"project": "@project", "name": "new", "role": "admin", "scope": "gateway"}


@example(
    Call(OWN_ADMIN, "change_user", {"scope": "gateway"}),
    Call(OWN_ADMIN, "change_user", {"role": "admin"}),
)
@example(
    Call(OWN_ADMIN, "archive_project", {}),
    Call(("admin", "gateway", False), "create_key", NEW_ADMIN),
)
@given(CALLS, CALLS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_requests_at_once_have_the_effect_of_one_order(
    world: World, first: Call, second: Call
) -> None:
    def execute_first() -> None:
        world.execute(first)

    def execute_second() -> None:
        world.execute(second)

    orders = [
        world.run(execute_first, execute_second),
        world.run(execute_second, execute_first),
    ]
    world.run()
    last = count_transactions(execute_first, lambda _: None)
    for met in range(1, last + 1):

        def execute_both(met: int = met) -> None:
            count_transactions(
                execute_first, lambda count: execute_second() if count == met else None
            )

        found = world.run(execute_both)
        assert found in orders, f"{first} met {second} before its transaction {met}"
