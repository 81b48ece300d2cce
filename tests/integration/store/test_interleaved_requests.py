"""Two requests at once have the effect of one order or the other, wherever they meet in the store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import msgspec
import psycopg
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy.pool import Pool
from tests.integration.store.conftest import ACTOR
from tests.support.fake_clock import FakeClock
from tests.support.gateway_harness import explain_nothing

from argosy.deployment import FleetControl, GatewayConfig
from argosy.gateway.admin import AdminRequest, AdminScope, list_endpoints
from argosy.gateway.auth import has_role
from argosy.gateway.model_registry import ReplicaAdmin, build_model_entries
from argosy.gateway.model_registry.model_entries import build_model_router
from argosy.gateway.principal import Principal
from argosy.protocol import ApiError
from argosy.store import (
    ConflictError,
    Item,
    ItemOwner,
    Price,
    Role,
    RoleScope,
    Store,
    StoredResponse,
    StoreError,
)

Fields = dict[str, Any]
Rows = dict[str, list[Fields]]
Running = list[Future[bool]]

IGNORED_TABLES = frozenset({"audit", "state", "alembic_version"})
"""Tables in which the order of two changes shows, and of which rows are never deleted."""
LINKED_TABLES = frozenset({"organisations", "projects", "users", "keys"})
"""Tables with foreign keys."""
RANDOM_COLUMNS = frozenset({"id", "digest", "prefix"})
ENDPOINTS = {each.handler.__name__: each for each in list_endpoints()}
REPLICAS = ReplicaAdmin(build_model_router(build_model_entries(GatewayConfig())), None)
"""Replicas of a gateway without models. Views of projects and keys ask them which flags nothing reads."""
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


DECLARATION = b"""{
    "fleet": "demo",
    "models": [{"name": "chat", "source": "argosy-mini"}],
    "gateways": 0,
    "pools": [{"name": "chat", "model": "chat", "replicas": %d}]
}"""
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
    "apply_fleet_change": draw(
        {"declaration": (DECLARATION % 4).decode(), "after": 2}, after=[1, 2, 3]
    ),
    "roll_back_fleet": draw({"revision": 1}, after=[1, 2, 3]),
    "scale_pool": draw({"pool": "chat", "replicas": 5}),
}
TENANT_CALLS: dict[str, Callable[[Store, ItemOwner, dict[str, str]], object]] = {
    "create_conversation": lambda store, owner, _: store.conversations.create(
        owner, {}, [item("new")], RETENTION_S
    ),
    "add_items": lambda store, owner, ids: store.conversations.append_items(
        owner, ids["conversation"], [item("added")], RETENTION_S
    ),
    "set_metadata": lambda store, owner, ids: store.conversations.set_metadata(
        owner, ids["conversation"], {"name": "a" * ITEM_BYTES}
    ),
    "delete_item": lambda store, owner, ids: store.conversations.delete_item(
        owner, ids["conversation"], "first"
    ),
    "delete_conversation": lambda store, owner, ids: store.conversations.delete(
        owner, ids["conversation"]
    ),
    "finish_response": lambda store, owner, _: store.responses.finish(
        owner, "resp_1", "completed", {}, [item("out")]
    ),
    "cancel_response": lambda store, owner, _: store.responses.cancel(owner, "resp_1"),
    "delete_response": lambda store, owner, _: store.responses.delete(owner, "resp_1"),
    "fail_interrupted": lambda store, *_: store.responses.fail_interrupted(),
    "delete_expired": lambda store, *_: (
        store.responses.delete_expired(),
        store.conversations.delete_expired(),
    ),
}
"""Changes of responses and conversations, by tenants and by the gateway itself."""
RETENTION_S = 1000.0
ITEM_BYTES = 5000
TENANT_CALL = st.sampled_from(sorted(TENANT_CALLS)).map(lambda name: Call(OWN_ADMIN, name, {}))
CALLERS = st.tuples(st.sampled_from(ROLES[2:]), st.sampled_from(SCOPES), st.booleans())
CALLS = TENANT_CALL | st.sampled_from(sorted(BODIES)).flatmap(
    lambda name: st.builds(Call, CALLERS, st.just(name), BODIES[name])
)
GATEWAY_OPERATOR: tuple[Role, RoleScope, bool] = ("operator", "gateway", False)
OWN_ADMIN: tuple[Role, RoleScope, bool] = ("admin", "organisation", True)


def item(item_id: str) -> Item:
    return {"id": item_id, "text": "a" * ITEM_BYTES}


class World:
    """A store with a record of each kind, which each run starts with.

    The project has room for one more item. A background response is interrupted, and a conversation has expired.
    """

    def __init__(self, store: Store, url: str, clock: FakeClock) -> None:
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
        self._owner = ItemOwner(organisation, project)
        self._store_items(clock)
        for replicas in (2, 3):
            store.fleets.apply("demo", DECLARATION % replicas, {"chat": "1"}, author="ann")
        self._engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:", 1))
        self._tables = sa.MetaData()
        self._tables.reflect(self._engine, only=lambda name, _: name not in IGNORED_TABLES)
        self._start = self._last = self._read()
        self._known = {row["id"] for rows in self._start.values() for row in rows if "id" in row}

    def _store_items(self, clock: FakeClock) -> None:
        responses, conversations = self._store.responses, self._store.conversations
        conversations.create(self._owner, {}, [item("expired")], RETENTION_S)
        running = StoredResponse(
            id="resp_1", status="in_progress", body={}, input=[item("in")], is_background=True
        )
        responses.create(self._owner, running, 3 * RETENTION_S)
        clock.now += 2 * RETENTION_S
        items = [item("first"), item("second")]
        created = conversations.create(self._owner, {}, items, RETENTION_S)
        self._ids["conversation"] = created.id
        project = self._owner.owner
        stored = self._store.stored_bytes.read_use([project])[project].stored_bytes
        room = stored + ITEM_BYTES * 3 // 2
        self._store.limits_and_prices.set_limit(
            "project", project, "stored_bytes", room, actor=ACTOR
        )

    def close(self) -> None:
        self._engine.dispose()

    def run(self, *steps: Callable[[], object]) -> Rows:
        """Run steps from the start, and return what the store has then, without what is random."""
        changed = {name for name, rows in self._start.items() if rows != self._last[name]}
        if changed & LINKED_TABLES:
            changed |= LINKED_TABLES
        tables = [table for table in self._tables.sorted_tables if table.name in changed]
        with self._engine.begin() as connection:
            for table in reversed(tables):
                connection.execute(sa.delete(table))
            for table in tables:
                if self._start[table.name]:
                    connection.execute(sa.insert(table), self._start[table.name])
        for step in steps:
            step()
        self._last = self._read()
        return {
            name: sorted(map(self._forget_random, rows), key=repr)
            for name, rows in self._last.items()
        }

    def execute(self, call: Call) -> bool:
        """Execute a request, which may be refused. Returns whether its answer is that it met another one."""
        try:
            self._execute(call)
        except ConflictError:
            return True
        except StoreError:  # of the database, such as a deadlock
            raise
        except (ApiError, ValueError):
            pass
        return False

    def _execute(self, call: Call) -> None:
        if call.endpoint in TENANT_CALLS:
            TENANT_CALLS[call.endpoint](self._store, self._owner, self._ids)
            return
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
        control = FleetControl("demo", self._store.fleets)
        whole = AdminScope(
            *(self._store, REPLICAS, unused, unused, unused, explain_nothing), fleet_control=control
        )
        admin = whole.for_principal(caller)
        target = self._ids.get(call.endpoint.partition("_")[2], "")
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
            or (name in {"replaced_by", "owner", "parent"} and value not in self._known)
            else value
            for name, value in row.items()
        }


@pytest.fixture
def world(store: Store, url: str, clock: FakeClock) -> Iterator[World]:
    built = World(store, url, clock)
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


def count_statements(step: Callable[[], object], act: Callable[[int], object]) -> int:
    """Run a step, call `act` with the number of each statement before it, and return how many there were."""
    count, thread = 0, threading.get_ident()

    def on_statement(*_: object) -> None:
        nonlocal count
        if threading.get_ident() == thread:
            count += 1
            act(count)

    sa.event.listen(sa.Engine, "before_cursor_execute", on_statement)
    try:
        step()
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", on_statement)
    return count


WAITING = """SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND wait_event_type = 'Lock'"""
NEW_ADMIN = {"project": "@project", "name": "new", "role": "admin", "scope": "gateway"}


@example(
    Call(OWN_ADMIN, "change_user", {"scope": "gateway"}),
    Call(OWN_ADMIN, "change_user", {"role": "admin"}),
)
@example(
    Call(OWN_ADMIN, "archive_project", {}),
    Call(("admin", "gateway", False), "create_key", NEW_ADMIN),
)
@example(
    Call(GATEWAY_OPERATOR, "scale_pool", {"pool": "chat", "replicas": 5}),
    Call(GATEWAY_OPERATOR, "roll_back_fleet", {"revision": 1}),
)
@given(CALLS, CALLS)
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    max_examples=settings().max_examples // 2,
)
def test_requests_at_once_have_the_effect_of_one_order(
    world: World, first: Call, second: Call
) -> None:
    def execute_first() -> bool:
        return world.execute(first)

    def execute_second() -> bool:
        return world.execute(second)

    orders = [
        world.run(execute_first, execute_second),
        world.run(execute_second, execute_first),
    ]
    counts: list[int] = []
    world.run(lambda: counts.append(count_transactions(execute_first, lambda _: None)))
    for met in range(1, counts[0] + 1):
        refused: list[bool] = []

        def execute_both(met: int = met, refused: list[bool] = refused) -> None:
            count_transactions(
                lambda: refused.append(world.execute(first)),
                lambda count: execute_second() if count == met else None,
            )

        found = world.run(execute_both)
        if found not in orders:  # unless the first was refused because it met another one
            assert refused == [True], f"{first} met {second} before its transaction {met}"
            assert found == world.run(execute_second)


@pytest.mark.parametrize("database_kind", ["postgresql"])
@example(Call(OWN_ADMIN, "add_items", {}), Call(OWN_ADMIN, "delete_conversation", {}))
@example(Call(OWN_ADMIN, "finish_response", {}), Call(OWN_ADMIN, "delete_response", {}))
@example(Call(OWN_ADMIN, "add_items", {}), Call(OWN_ADMIN, "create_conversation", {}))
@given(TENANT_CALL, TENANT_CALL)
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    max_examples=settings().max_examples // 10,
)
def test_transactions_at_once_have_the_effect_of_one_order(
    world: World, url: str, first: Call, second: Call
) -> None:
    """On PostgreSQL transactions of tenants run at once, so they meet at each statement. On SQLite they cannot."""
    orders = [
        world.run(lambda: world.execute(first), lambda: world.execute(second)),
        world.run(lambda: world.execute(second), lambda: world.execute(first)),
    ]
    counts: list[int] = []
    world.run(lambda: counts.append(count_statements(lambda: world.execute(first), lambda _: None)))
    with ThreadPoolExecutor() as threads, psycopg.connect(url, autocommit=True) as monitor:
        for met in range(1, counts[0] + 1):
            running: list[Future[bool]] = []

            def start_second(count: int, met: int = met, running: Running = running) -> None:
                if count == met:
                    running.append(threads.submit(world.execute, second))
                    while not running[0].done() and monitor.execute(WAITING).fetchone() == (0,):
                        futures.wait(running, timeout=0.001)

            def execute_both(meet: Callable[[int], None], running: Running = running) -> None:
                count_statements(lambda: world.execute(first), meet)
                running[0].result()

            found = world.run(partial(execute_both, start_second))
            assert found in orders, f"{first} met {second} at its statement {met}"
