"""The admin API over real HTTP on a real store: what each role may do, what is refused, and how."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import io
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.support.waiting import still

from argosy.gateway.admin import build_admin_app
from argosy.gateway.admin.app import ENDPOINTS
from argosy.gateway.auth import AuthConfig, Authenticator
from argosy.http_server import (
    HttpExchange,
    HttpServer,
    Receive,
    Scope,
    Send,
    bind_tcp,
    bind_unix,
    listen_url,
    run_handler,
)
from argosy.store import AccountSnapshot, Ledger, Role, Store, UsageFilter, UsageRecord, open_store

Cards = Callable[[str], dict[str, Any] | None]
Keys = dict[Role, dict[str, str]]

ROLES: tuple[Role, ...] = ("user", "viewer", "operator", "admin")


@dataclass(frozen=True)
class Limits:
    body_limit_bytes: int = 1 << 20
    body_timeout_s: float = 10.0
    slow_reader_timeout_s: float = 10.0


@contextlib.asynccontextmanager
async def admin(
    store: Store | None,
    cards: Cards = lambda _: None,
    *,
    changed: Callable[[], None] = lambda: None,
    directory: AccountSnapshot | None = None,
    unix: Path | None = None,
) -> AsyncIterator[httpx2.AsyncClient]:
    """A client without a key. Callers are those of the directory, by default the store's."""
    if directory is None:
        directory = AccountSnapshot() if store is None else store.load_snapshot()
    identity = Authenticator(directory, AuthConfig())
    answer = build_admin_app(store, identity, lambda request, _: cards(request), changed)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = HttpExchange(scope, receive, send, Limits())
        await run_handler(exchange, exchange.delegate_to(answer))

    bound = bind_tcp("127.0.0.1", 0) if unix is None else bind_unix(unix)
    url = listen_url(bound) if unix is None else "http://localhost"
    transport = None if unix is None else httpx2.AsyncHTTPTransport(uds=str(unix))
    listener = HttpServer(app)
    listening = asyncio.create_task(listener.serve(sockets=[bound]))
    try:
        async with httpx2.AsyncClient(base_url=url, transport=transport, timeout=30) as client:
            yield client
    finally:
        listener.stop()
        await listening


@pytest.fixture
def store(migrated: Path, tmp_path: Path) -> Iterator[Store]:
    path = tmp_path / "argosy.db"
    shutil.copy(migrated, path)
    opened = open_store(f"sqlite:///{path}")
    yield opened
    opened.close()


@pytest.fixture
def keys(store: Store) -> Keys:
    """The headers of a key for each role in the whole gateway, all of one project."""
    organisation = store.accounts.create_organisation("acme", actor="test")
    project = store.accounts.create_project(organisation.id, "chat", actor="test")
    made = {
        role: store.accounts.create_key(project.id, role, role=role, scope="gateway", actor="test")[
            1
        ]
        for role in ROLES
    }
    return {role: {"authorization": f"Bearer {plain}"} for role, plain in made.items()}


async def done(answer: httpx2.Response) -> dict[str, Any]:
    """The JSON of an answer that should be a good one."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-request-id"]
    body: dict[str, Any] = answer.json()
    return body


def told(answer: httpx2.Response) -> tuple[int, str, str | None]:
    """Status, code and parameter of a refusal, which is shaped as OpenAI's are."""
    error = answer.json()["error"]
    assert error["message"].endswith(".")
    return answer.status_code, error["code"], error["param"]


# --- tenants and keys ----------------------------------------------------------------------------


async def test_from_nothing_to_a_tenant_with_a_key(store: Store) -> None:
    async with admin(store) as client:
        organisation = await done(await client.post("/admin/organisations", json={"name": "acme"}))
        assert organisation["object"] == "organisation"
        body = {"organisation": organisation["id"], "name": "chat", "tier": "premium"}
        project = await done(await client.post("/admin/projects", json=body))
        assert project["tier"] == "premium"
        body = {"project": project["id"], "name": "first", "role": "admin"} | {
            "scope": "gateway",
            "models": ["big"],
        }
        made = await done(await client.post("/admin/keys", json=body))
        assert made["key"].startswith(made["prefix"])

        assert told(await client.get("/admin/keys")) == (401, "missing_api_key", None)
        client.headers["x-api-key"] = made["key"]
        (listed,) = (await done(await client.get("/admin/keys")))["data"]
        assert listed == {name: value for name, value in made.items() if name != "key"}
        me = await done(await client.get("/admin/me"))
        assert me["key"] == made["id"]
        assert (me["organisation"], me["models"]) == (organisation["id"], ["big"])


async def test_a_key_is_rotated_with_overlap_and_revoked(store: Store, keys: Keys) -> None:
    (old,) = [key for key in store.accounts.list_keys() if key.role == "user"]
    async with admin(store) as client:
        rotated = await done(
            await client.post(
                f"/admin/keys/{old.id}/rotate", json={"overlap_s": 60}, headers=keys["operator"]
            )
        )
        fresh = {"authorization": f"Bearer {rotated['key']}"}
        assert (await client.get("/admin/me", headers=keys["user"])).status_code == 200
        assert (await client.get("/admin/me", headers=fresh)).status_code == 200

        await done(await client.post(f"/admin/keys/{old.id}/revoke", headers=keys["operator"]))
        refused = await client.get("/admin/me", headers=keys["user"])
        assert told(refused) == (401, "invalid_api_key", None)
        assert (await client.get("/admin/me", headers=fresh)).status_code == 200


async def test_whoever_keeps_accounts_is_told_of_changes(store: Store, keys: Keys) -> None:
    told_of: list[int] = []
    async with admin(
        store, changed=lambda: told_of.append(store.load_snapshot().version)
    ) as client:
        client.headers |= keys["admin"]
        before = store.load_snapshot().version
        await done(await client.get("/admin/keys"))
        assert not told_of
        await done(await client.post("/admin/organisations", json={"name": "zeta"}))
        assert told_of == [before + 1]


async def test_users_and_projects_change_and_end(store: Store, keys: Keys) -> None:
    project = store.accounts.list_projects()[0]
    async with admin(store) as client:
        client.headers |= keys["admin"]
        body = {"organisation": project.organisation, "email": "Ann@acme.test", "role": "viewer"}
        user = await done(await client.post("/admin/users", json=body))
        path = f"/admin/users/{user['id']}"
        changed = await done(await client.patch(path, json={"project": project.id}))
        assert (changed["project"], changed["role"]) == (project.id, "viewer")
        assert (await done(await client.patch(path, json={"project": None})))["project"] is None
        assert (await done(await client.post(f"{path}/disable")))["disabled_at"] > 0
        assert (await done(await client.get(path)))["email"] == "ann@acme.test"

        path = f"/admin/projects/{project.id}"
        changed = await done(
            await client.patch(path, json={"weight": 2.5, "networks": ["127.0.0.0/8"]})
        )
        assert (changed["weight"], changed["networks"]) == (2.5, ["127.0.0.0/8"])
        for weight in (
            0,
            1e-320,
            1e7,
        ):  # shares are compared: what is too small is a division by zero
            refused = await client.patch(path, json={"weight": weight})
            assert refused.status_code == 400
        assert (await done(await client.get(path)))["name"] == "chat"
        assert (await done(await client.post(f"{path}/archive")))["archived_at"] > 0
        assert told(await client.get(path)) == (401, "project_archived", None)


async def test_organisations_are_renamed_and_end_with_all_they_own(
    store: Store, keys: Keys
) -> None:
    other = store.accounts.create_organisation("zeta", actor="test")
    store.accounts.create_project(other.id, "search", actor="test")
    async with admin(store) as client:
        client.headers |= keys["admin"]
        path = f"/admin/organisations/{other.id}"
        assert (await done(await client.patch(path, json={"name": "eta"})))["name"] == "eta"
        assert told(await client.patch(path, json={"name": "acme"}))[:2] == (409, "conflict")
        await done(await client.post(f"{path}/archive"))
        assert (await done(await client.get(path)))["archived_at"] > 0
        listed = await client.get("/admin/projects", params={"organisation": other.id})
        assert [item["archived_at"] > 0 for item in (await done(listed))["data"]] == [True]


async def test_limits_and_prices(store: Store, keys: Keys) -> None:
    project = store.accounts.list_projects()[0].id
    limit = {
        "owner_kind": "project",
        "owner": project,
        "unit": "tokens",
        "amount": 1000,
        "window": "minute",
    }
    async with admin(store) as client:
        client.headers |= keys["admin"]
        first = await done(await client.post("/admin/limits", json=limit))
        second = await done(await client.post("/admin/limits", json=limit | {"amount": 2000}))
        assert (second["id"], second["amount"]) == (first["id"], 2000)
        query = {"owner_kind": "project", "owner": project}
        listed = await done(await client.get("/admin/limits", params=query))
        assert [item["amount"] for item in listed["data"]] == [2000]
        deleted = await done(await client.delete(f"/admin/limits/{first['id']}"))
        assert deleted == {"object": "deleted", "id": first["id"]}
        assert told(await client.delete(f"/admin/limits/{first['id']}"))[:2] == (404, "not_found")

        price = {"model": "big", "input": 150, "cached_input": 75, "output": 600}
        await done(await client.post("/admin/prices", json=price))
        (listed,) = (await done(await client.get("/admin/prices?model=big")))["data"]
        assert {name: listed[name] for name in price} == price
        assert listed["since"] > 0


async def test_lists_come_in_parts(store: Store, keys: Keys) -> None:
    for n in range(5):
        store.accounts.create_organisation(f"other-{n}", actor="test")
    async with admin(store) as client:
        client.headers |= keys["viewer"]
        names: list[str] = []
        query: dict[str, Any] = {"limit": 4}
        while True:
            part = await done(await client.get("/admin/organisations", params=query))
            names += [item["name"] for item in part["data"]]
            if not part["has_more"]:
                break
            query["after"] = part["last_id"]
        assert names == ["acme", *(f"other-{n}" for n in range(5))]
        unknown = await client.get("/admin/organisations?after=nobody")
        assert told(unknown)[:2] == (400, "invalid_value")


async def test_a_list_goes_on_where_what_was_last_is_no_longer_there(
    store: Store, keys: Keys
) -> None:
    for key in store.accounts.list_keys():
        store.limits_and_prices.set_limit("key", key.id, "tokens", 1, window="day", actor="test")
    ids = [limit.id for limit in store.limits_and_prices.list_limits()]
    async with admin(store) as client:
        client.headers |= keys["operator"]
        part = await done(await client.get("/admin/limits?limit=2"))
        assert ([item["id"] for item in part["data"]], part["has_more"]) == (ids[:2], True)
        await done(await client.delete(f"/admin/limits/{part['last_id']}"))
        part = await done(await client.get(f"/admin/limits?limit=2&after={part['last_id']}"))
        assert ([item["id"] for item in part["data"]], part["has_more"]) == (ids[2:], False)
        assert told(await client.get("/admin/limits?after=nobody"))[:2] == (400, "invalid_value")


# --- from where ----------------------------------------------------------------------------------


async def test_without_keys_whoever_may_write_to_the_socket_is_the_administrator(
    tmp_path: Path,
) -> None:
    async with admin(None, unix=tmp_path / "admin.sock") as client:
        assert (await done(await client.get("/admin/me")))["role"] == "admin"
        proxied = await client.get("/admin/me", headers={"x-forwarded-for": "127.0.0.1"})
        assert told(proxied)[:2] == (401, "no_keys_yet")


async def test_without_keys_nobody_behind_a_proxy_on_this_machine_is(store: Store) -> None:
    async with admin(store) as client:
        assert (await done(await client.get("/admin/me")))["role"] == "admin"
        for headers in (
            {"x-forwarded-for": "127.0.0.1"},
            {"host": "evil.example"},
            {"origin": "https://evil.example"},
        ):
            answer = await client.get("/admin/me", headers=headers)
            assert told(answer)[:2] == (401, "no_keys_yet")


# --- roles ---------------------------------------------------------------------------------------


async def test_nobody_makes_or_takes_a_key_above_their_own_role(store: Store, keys: Keys) -> None:
    project = store.accounts.list_projects()[0].id
    (above,) = [key.id for key in store.accounts.list_keys() if key.role == "admin"]
    async with admin(store) as client:
        client.headers |= keys["operator"]
        body = {"project": project, "name": "more", "role": "admin"}
        assert told(await client.post("/admin/keys", json=body))[0] == 403
        assert told(await client.post(f"/admin/keys/{above}/rotate"))[0] == 403
        assert told(await client.post(f"/admin/keys/{above}/revoke"))[0] == 403
        await done(await client.post("/admin/keys", json=body | {"role": "operator"}))


# --- refusals ------------------------------------------------------------------------------------


TOO_MANY = {"project": "p", "name": "k", "networks": [f"10.0.0.{last}" for last in range(101)]}


@pytest.mark.parametrize(
    ("method", "path", "body", "refusal"),
    [
        ("POST", "/admin/keys", {}, (400, "missing_required_parameter", "project")),
        ("POST", "/admin/keys", {"nam": 1}, (400, "unknown_parameter", "nam")),
        (
            "POST",
            "/admin/keys",
            {"project": "p", "name": "k", "models": ["m"] * 1001},
            (400, "invalid_type", "models"),
        ),
        ("POST", "/admin/keys", TOO_MANY, (400, "invalid_type", "networks")),
        ("POST", "/admin/organisations", {"name": ""}, (400, "invalid_type", "name")),
        ("POST", "/admin/organisations", {"name": "a\u0000b"}, (400, "invalid_value", None)),
        ("POST", "/admin/organisations", {"name": "acme"}, (409, "conflict", None)),
        ("GET", "/admin/keys?limit=0", None, (400, "invalid_type", "limit")),
        ("GET", "/admin/keys?limit=x", None, (400, "invalid_type", "limit")),
        ("GET", "/admin/keys?offset=1", None, (400, "unknown_parameter", "offset")),
        ("GET", "/admin/keys?project=%00", None, (400, "invalid_value", "project")),
        ("GET", "/admin/usage?group_by=day&group_by=key", None, (400, "invalid_value", "group_by")),
        ("GET", "/admin/usage?group_by=colour", None, (400, "invalid_value", None)),
        ("GET", "/admin/usage?since=1e308", None, (400, "invalid_type", "since")),
        ("GET", "/admin/keys/nobody", None, (404, "not_found", None)),
        ("GET", "/admin/keys/%00", None, (404, "not_found", None)),
        ("GET", "/admin/nothing", None, (404, "not_found", None)),
        ("GET", "/admin/requests/req_1", None, (404, "not_found", None)),
        ("PUT", "/admin/keys", {}, (405, "method_not_allowed", None)),
    ],
)
async def test_what_is_wrong_is_named(
    store: Store,
    keys: Keys,
    method: str,
    path: str,
    body: dict[str, Any] | None,
    refusal: tuple[int, str, str | None],
) -> None:
    async with admin(store) as client:
        answer = await client.request(method, path, json=body, headers=keys["admin"])
        assert told(answer) == refusal
        assert answer.headers.get("allow") == ("GET, POST" if answer.status_code == 405 else None)


async def test_a_store_that_is_down_is_no_fault_of_the_caller() -> None:
    down = open_store("postgresql://nobody:hunter2@127.0.0.1:1/argosy")
    async with admin(down, directory=AccountSnapshot()) as client:
        answer = await client.get("/admin/keys")
    assert told(answer)[:2] == (503, "store_unavailable")
    assert answer.headers["retry-after"] == "5"
    assert "hunter2" not in answer.text
    down.close()


async def test_a_gateway_without_a_store_still_explains() -> None:
    card = {"object": "request.explanation", "caller": {"project": ""}}
    async with admin(None, {"req_1": card}.get) as client:
        assert await done(await client.get("/admin/requests/req_1")) == card
        assert told(await client.get("/admin/keys"))[:2] == (404, "no_store")


# --- reports -------------------------------------------------------------------------------------


def used(request: str, key: str, project: str, **fields: object) -> UsageRecord:
    usual: dict[str, Any] = {
        "started_at": 1_763_750_000.0,
        "ended_at": 1_763_750_001.0,
        "status": "completed",
        "model": "big",
        "input_tokens": 10,
        "output_tokens": 5,
        "nano_dollars": 100,
    }
    return UsageRecord(**{"request": request, "key": key, "project": project} | usual | fields)


async def test_usage_is_summed_and_exported(store: Store, keys: Keys) -> None:
    by_role = {key.role: key for key in store.accounts.list_keys()}
    own, project = by_role["user"].id, by_role["user"].project
    rows = [used(f"r{n}", own, project) for n in range(3)]
    rows.append(used("r3", "key_other", project, model="small", ended_at=1_763_850_001.0))
    store.ledger.add_records(rows)
    async with admin(store) as client:
        client.headers |= keys["viewer"]
        report = await done(await client.get("/admin/usage?group_by=model,day"))
        assert [
            (row["model"], row["day"], row["requests"], row["output_tokens"], row["nano_dollars"])
            for row in report["data"]
        ] == [("big", "2025-11-21", 3, 15, 300), ("small", "2025-11-22", 1, 5, 100)]
        (total,) = (await done(await client.get("/admin/usage?until=1763800000")))["data"]
        assert total["requests"] == 3

        exported = await client.get("/admin/usage.csv", params={"model": "big"})
        assert exported.headers["content-type"].startswith("text/csv")
        lines = list(csv.DictReader(io.StringIO(exported.text)))
        assert [line["request"] for line in lines] == ["r0", "r1", "r2"]

        sums = await client.get("/admin/usage.csv?group_by=model")
        assert sums.text.splitlines()[1:] == ["big,3,30,0,15,300", "small,1,10,0,5,100"]

        (mine,) = (await done(await client.get("/admin/me/usage", headers=keys["user"])))["data"]
        assert mine["requests"] == 3


async def test_an_export_ends_when_its_client_leaves(
    store: Store, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = 0

    def rows(_log: Ledger, _where: UsageFilter) -> Iterator[list[UsageRecord]]:
        nonlocal told
        while told < 20_000:
            told += 1
            yield [used("r0", "key_other", "proj_other")] * 10

    monkeypatch.setattr(Ledger, "iter_records", rows)
    async with admin(store) as client:
        async with client.stream("GET", "/admin/usage.csv", headers=keys["viewer"]) as answer:
            assert answer.status_code == 200
        assert await still(lambda: told) < 20_000


async def test_nobody_sees_the_usage_or_requests_of_others(store: Store, keys: Keys) -> None:
    (own,) = store.accounts.list_projects()
    project, organisation = own.id, own.organisation
    store.ledger.add_records(
        [used("r0", "key_other", project), used("r1", "key_other", "proj_other")]
    )
    cards = {
        "mine": {
            "object": "request.explanation",
            "caller": {"organisation": organisation, "project": project},
        },
        "theirs": {
            "object": "request.explanation",
            "caller": {"organisation": "x", "project": "proj_other"},
        },
    }
    async with admin(store, cards.get) as client:
        client.headers |= keys["user"]
        (mine,) = (await done(await client.get("/admin/me/usage")))["data"]
        assert mine["requests"] == 0
        for whose in ("organisation=org_other", "project=proj_other", "key=key_other", "user=u"):
            refused = await client.get(f"/admin/me/usage?{whose}")
            assert told(refused)[:2] == (400, "unknown_parameter")
        assert await done(await client.get("/admin/requests/mine")) == cards["mine"]
        unknown = await client.get("/admin/requests/theirs")
        assert told(unknown)[:2] == (404, "not_found")
        assert "another gateway" in unknown.json()["error"]["message"]
        seen = await client.get("/admin/requests/theirs", headers=keys["viewer"])
        assert await done(seen) == cards["theirs"]


async def test_every_change_is_in_the_audit_log_with_who_made_it(store: Store, keys: Keys) -> None:
    by_role = {key.role: key.id for key in store.accounts.list_keys()}
    async with admin(store) as client:
        client.headers |= keys["admin"]
        made = await done(await client.post("/admin/organisations", json={"name": "zeta"}))
        listed = await done(await client.get("/admin/audit", params={"subject": made["id"]}))
        (entry,) = listed["data"]
        assert (entry["actor"], entry["action"]) == (
            f"key:{by_role['admin']}",
            "organisation.create",
        )
        newest = await done(await client.get("/admin/audit?limit=1"))
        assert newest["has_more"]
        before = {"before": newest["last_id"], "limit": 1}
        older = await done(await client.get("/admin/audit", params=before))
        assert older["data"][0]["entry"] == newest["data"][0]["entry"] - 1
        verdict = await done(await client.get("/admin/audit/verify"))
        assert (verdict["entries"], verdict["broken"]) == (newest["data"][0]["entry"], None)


# --- the document --------------------------------------------------------------------------------

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


async def test_the_document_promises_what_is_done(store: Store, keys: Keys) -> None:
    async with admin(store) as client:
        document = await done(await client.get("/admin/openapi.json", headers=keys["user"]))
        served = {
            (method.upper(), path)
            for path, methods in document["paths"].items()
            for method in methods
        }
        assert served == {(operation.method, operation.path) for operation in ENDPOINTS}
        # What ends a key, or what it belongs to, would end the exploration; it is tested above.
        lasting = sorted(one for one in served if not one[1].endswith(("archive", "revoke")))
        accounts = store.accounts
        ids = [*(key.id for key in accounts.list_keys()), "nobody", "\u0000"]
        ids += [project.id for project in accounts.list_projects()]
        ids += [organisation.id for organisation in accounts.list_organisations()]

        served_well: set[tuple[str, str]] = set()

        def explore(method: str, path: str) -> None:
            operation = schemathesis.openapi.from_dict(document)[path][method]

            @seed(20261121)
            @settings(
                max_examples=5,
                deadline=None,
                database=None,
                phases=[Phase.explicit, Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(), data=st.data())
            def check(case: schemathesis.Case[Any], data: st.DataObject) -> None:
                if "id" in case.path_parameters:
                    case.path_parameters["id"] = data.draw(st.sampled_from(ids))
                if "group_by" in case.query:
                    case.query["group_by"] = data.draw(st.sampled_from(["day,key", "", "x"]))
                answer = case.call_and_validate(
                    base_url=str(client.base_url), headers=keys["admin"], checks=CHECKS
                )
                if answer.status_code == 200:
                    served_well.add((method, path))

            check()

        for method, path in lasting:
            await asyncio.to_thread(explore, method, path)
        lists = {one for one in lasting if one[0] == "GET" and "{id}" not in one[1]}
        assert lists <= served_well, "the document promises too much"
