"""Admin API over HTTP on an SQLite store: requests, responses, errors, and rights that callers cannot take.

`tests/integration/store` tests the rules of accounts, and `test_admin_organisations.py` the permissions of roles.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio
import sqlalchemy as sa
from structlog.testing import capture_logs
from tests.support.gateway_client import run_gateway_server
from tests.support.organisations import (
    AdminGateway,
    Json,
    key_body,
    limit_body,
    run_admin_gateway,
    unique_name,
    user_body,
)
from tests.support.usage_rows import usage_row
from tests.support.waiting import stable_value

from argosy.deployment import GatewayConfig
from argosy.gateway.accounting import AccountingService
from argosy.store import Ledger, Role, UsageFilter, UsageRecord
from argosy.store.database import Database

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Caller:
    """Sends requests with the key of a role, whose project is in an organisation of its own."""

    gateway: AdminGateway
    headers: Json

    async def send(self, method: str, path: str, **options: Any) -> httpx2.Response:  # noqa: ANN401 - of the client
        options["headers"] = self.headers | options.get("headers", {})
        return await self.gateway.client.request(method, f"/admin/{path}", **options)

    async def read(self, path: str, **options: Any) -> Json:  # noqa: ANN401 - of the client
        return success(await self.send("GET", path, **options))

    async def change(self, path: str, body: Json | None = None, method: str = "POST") -> Json:
        return success(await self.send(method, path, json=body))

    async def refuse(
        self, path: str, body: Json | None = None, method: str = ""
    ) -> tuple[int, str]:
        """Return status and code of the error."""
        method = method or ("GET" if body is None else "POST")
        return failure(await self.send(method, path, json=body))[:2]


def success(response: httpx2.Response) -> Json:
    """Return the JSON of a response, whose status must be 200."""
    assert response.status_code == 200, response.text
    assert response.headers["x-request-id"]
    body: Json = response.json()
    return body


def failure(response: httpx2.Response) -> tuple[int, str, str | None]:
    """Return status, code and parameter of an error in OpenAI's format."""
    error = response.json()["error"]
    assert error["message"].endswith(".")
    return response.status_code, error["code"], error["param"]


@pytest_asyncio.fixture(loop_scope="module")
async def admin(shared_gateway: AdminGateway) -> Caller:
    return Caller(shared_gateway, shared_gateway.root_headers)


async def create_caller(gateway: AdminGateway, role: Role = "user") -> tuple[Caller, Json]:
    """Create a key of a role for the whole gateway, in a new project. Returns its caller and the key."""
    organisation = gateway.create_organisation("acme")
    headers = await gateway.key_headers(role, "gateway", organisation)
    caller = Caller(gateway, headers)
    return caller, await caller.read("me")


# --- accounts ------------------------------------------------------------------------------------


async def test_created_key_authenticates_and_is_listed_without_its_secret(admin: Caller) -> None:
    name = unique_name()
    organisation = await admin.change("organisations", {"name": name})
    assert organisation["object"] == "organisation"
    assert await admin.refuse("organisations", {"name": name}) == (409, "conflict")
    body: Json = {"organisation": organisation["id"], "name": "chat", "tier": "premium"}
    project = await admin.change("projects", body)
    assert project["tier"] == "premium"
    body = {"project": project["id"], "name": "first", "role": "admin", "models": ["big"]}
    created = await admin.change("keys", body)
    assert created["key"].startswith(created["prefix"])
    assert failure(await admin.gateway.client.get("/admin/keys")) == (401, "missing_api_key", None)
    caller = Caller(admin.gateway, {"x-api-key": created["key"]})
    (listed,) = (await caller.read("keys"))["data"]
    assert listed == {name: value for name, value in created.items() if name != "key"}
    me = await caller.read("me")
    assert (me["key"], me["organisation"], me["models"]) == (
        *(created["id"], organisation["id"]),
        ["big"],
    )


async def test_key_changes_take_effect_at_once(admin: Caller) -> None:
    user, old = await create_caller(admin.gateway)
    rotated = await admin.change(f"keys/{old['key']}/rotate", {"overlap_s": 60})
    new = Caller(admin.gateway, {"authorization": f"Bearer {rotated['key']}"})
    assert (await user.read("me"))["project"] == (await new.read("me"))["project"]
    await admin.change(f"keys/{old['key']}/revoke")
    assert await user.refuse("me") == (401, "invalid_api_key")
    await new.read("me")
    await admin.change(f"projects/{old['project']}/archive")
    assert await new.refuse("me") == (401, "project_archived")


@pytest.mark.asyncio(loop_scope="function")
async def test_only_changes_are_reported_to_the_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions: list[int] = []

    def notify_changed(accounting: AccountingService) -> None:
        versions.append(accounting.store.load_snapshot().version)

    monkeypatch.setattr(AccountingService, "notify_changed", notify_changed)
    async with run_admin_gateway(tmp_path) as gateway:
        admin = Caller(gateway, gateway.root_headers)
        versions.clear()
        before = gateway.store.load_snapshot().version
        await admin.read("keys")
        assert not versions
        await admin.change("organisations", {"name": "zeta"})
        assert versions == [before + 1]


async def test_patch_changes_only_the_given_fields(admin: Caller) -> None:
    """A null clears a field, and an absent field keeps its value."""
    _, key = await create_caller(admin.gateway)
    email = f"Ann-{unique_name()}@acme.test"
    body = {"organisation": key["organisation"], "email": email, "role": "viewer"}
    path = f"users/{(await admin.change('users', body))['id']}"
    changed = await admin.change(path, {"project": key["project"]}, "PATCH")
    assert (changed["project"], changed["role"]) == (key["project"], "viewer")
    assert (await admin.change(path, {"project": None}, "PATCH"))["project"] is None
    assert (await admin.change(f"{path}/disable"))["disabled_at"] > 0
    assert (await admin.read(path))["email"] == email.lower()
    before = await admin.read(f"projects/{key['project']}")
    fields = {"weight": 2.5, "networks": ["127.0.0.0/8"]}
    assert await admin.change(f"projects/{key['project']}", fields, "PATCH") == before | fields


async def test_limits_are_deleted_and_prices_apply_from_now(admin: Caller) -> None:
    _, key = await create_caller(admin.gateway)
    query = {"owner_kind": "project", "owner": key["project"]}
    limit = query | {"unit": "tokens", "amount": 1000, "window": "minute"}
    created = await admin.change("limits", limit)
    assert (await admin.read("limits", params=query))["data"] == [created]
    path = f"limits/{created['id']}"
    deleted = await admin.change(path, method="DELETE")
    assert deleted == {"object": "deleted", "id": created["id"]}
    assert await admin.refuse(path, method="DELETE") == (404, "not_found")
    price = {"model": unique_name(), "input": 150, "cached_input": 75, "output": 600}
    await admin.change("prices", price)
    (listed,) = (await admin.read(f"prices?model={price['model']}"))["data"]
    assert listed.items() >= price.items()
    assert listed["since"] > 0


async def test_lists_are_paged_after_the_last_id(admin: Caller) -> None:
    """A page also continues after a record that was deleted meanwhile."""
    _, key = await create_caller(admin.gateway)
    query = f"limits?owner={key['project']}&limit=2"
    limits = admin.gateway.store.limits_and_prices
    for model in ("a", "b", "c", "d"):
        limits.set_limit(
            "project", key["project"], "tokens", 1, window="day", model=model, actor="test"
        )
    ids = [limit.id for limit in limits.list_limits("project", key["project"])]
    page = await admin.read(query)
    assert ([item["id"] for item in page["data"]], page["has_more"]) == (ids[:2], True)
    await admin.change(f"limits/{page['last_id']}", method="DELETE")
    page = await admin.read(f"{query}&after={page['last_id']}")
    assert ([item["id"] for item in page["data"]], page["has_more"]) == (ids[2:], False)
    assert await admin.refuse("limits?after=absent") == (400, "invalid_value")


async def test_keys_above_the_callers_role_are_forbidden(admin: Caller) -> None:
    operator, _ = await create_caller(admin.gateway, "operator")
    _, key = await create_caller(admin.gateway, "admin")
    body = {"project": key["project"], "name": "more", "role": "admin"}
    for path in ("", f"/{key['key']}/rotate", f"/{key['key']}/revoke"):
        refused = await operator.refuse(f"keys{path}", {} if path else body, "POST")
        assert refused == (403, "insufficient_role")
    await operator.change("keys", body | {"role": "operator"})


# --- errors --------------------------------------------------------------------------------------


async def test_pages_of_other_origins_cannot_change_accounts_before_the_first_key() -> None:
    """Browsers send a POST of another page's text/plain without asking first."""
    no_origin, no_type = (403, "origin_not_allowed"), (415, "unsupported_media_type")
    async with run_gateway_server(GatewayConfig(port=0)) as (_, client):
        own = f"http://127.0.0.1:{client.base_url.port}"
        requests: list[tuple[Json, tuple[int, str]]] = [
            ({"origin": "http://localhost:3000"}, no_origin),
            ({"origin": own, "host": f"localhost:{client.base_url.port}"}, no_origin),
            ({"sec-fetch-site": "same-site"}, no_origin),
            ({"sec-fetch-site": "cross-site"}, no_origin),
            ({"content-type": "text/plain"}, no_type),
            ({"content-type": ""}, no_type),
            ({"origin": own}, (404, "no_store")),
            ({"origin": own, "sec-fetch-site": "same-origin"}, (404, "no_store")),
            ({"content-type": "Application/JSON; charset=utf-8"}, (404, "no_store")),
        ]
        for headers, expected in requests:
            sent = {"content-type": "application/json"} | headers
            body = b'{"name": "acme"}'
            response = await client.post("/admin/organisations", content=body, headers=sent)
            assert failure(response)[:2] == expected, headers


KEY = {"project": "p", "name": "k"}
INVALID_REQUESTS: list[tuple[str, str, Json | None, tuple[int, str, str | None]]] = [
    ("POST", "keys", {}, (400, "missing_required_parameter", "project")),
    ("POST", "keys", {"nam": 1}, (400, "unknown_parameter", "nam")),
    ("POST", "keys", KEY | {"models": ["m"] * 1001}, (400, "invalid_type", "models")),
    ("POST", "keys", KEY | {"networks": ["::1"] * 101}, (400, "invalid_type", "networks")),
    ("POST", "organisations", {"name": ""}, (400, "invalid_type", "name")),
    ("POST", "organisations", {"name": "a\u0000b"}, (400, "invalid_value", None)),
    ("GET", "keys?limit=0", None, (400, "invalid_type", "limit")),
    ("GET", "keys?limit=x", None, (400, "invalid_type", "limit")),
    ("GET", "keys?offset=1", None, (400, "unknown_parameter", "offset")),
    ("GET", "keys?project=%00", None, (400, "invalid_value", "project")),
    ("GET", "usage?group_by=day&group_by=key", None, (400, "invalid_value", "group_by")),
    ("GET", "usage?group_by=colour", None, (400, "invalid_value", None)),
    ("GET", "usage?since=1e308", None, (400, "invalid_type", "since")),
    ("GET", "me/usage?organisation=org_other", None, (400, "unknown_parameter", "organisation")),
    ("GET", "me/usage?project=proj_other", None, (400, "unknown_parameter", "project")),
    ("GET", "me/usage?key=key_other", None, (400, "unknown_parameter", "key")),
    ("GET", "me/usage?user=u", None, (400, "unknown_parameter", "user")),
    ("GET", "keys/absent", None, (404, "not_found", None)),
    ("GET", "keys/%00", None, (404, "not_found", None)),
    ("GET", "absent", None, (404, "not_found", None)),
    ("GET", "requests/req_1", None, (404, "not_found", None)),
    ("PUT", "keys", {}, (405, "method_not_allowed", None)),
]


async def test_invalid_requests_are_rejected_by_parameter(admin: Caller) -> None:
    for method, path, body, expected in INVALID_REQUESTS:
        response = await admin.send(method, path, json=body)
        assert failure(response) == expected, path
        allowed = "GET, POST" if response.status_code == 405 else None
        assert response.headers.get("allow") == allowed


# --- reports -------------------------------------------------------------------------------------


def build_row(request: str, caller: Json, **fields: object) -> UsageRecord:
    usage = {"model": "big", "cached_tokens": 0, "output_tokens": 5, "nano_dollars": 100}
    owners = {"organisation": "", "user": "", "key": caller["key"], "project": caller["project"]}
    return usage_row(request, **owners | usage | fields)


async def test_usage_is_reported_and_exported(admin: Caller) -> None:
    user, key = await create_caller(admin.gateway)
    next_day = 1_763_850_001.0
    rows = [build_row(f"r{number}", key) for number in range(3)]
    rows.append(build_row("r3", key, key="key_other", model="small", ended_at=next_day))
    admin.gateway.store.ledger.add_records(rows)
    query = {"project": key["project"]}
    report = await admin.read("usage", params=query | {"group_by": "model,day"})
    fields = ("model", "day", "requests", "output_tokens", "nano_dollars")
    assert [tuple(row[field] for field in fields) for row in report["data"]] == [
        ("big", "2025-11-21", 3, 15, 300),
        ("small", "2025-11-22", 1, 5, 100),
    ]
    (total,) = (await admin.read("usage", params=query | {"until": 1763800000}))["data"]
    assert total["requests"] == 3

    exported = await admin.send("GET", "usage.csv", params=query | {"model": "big"})
    assert exported.headers["content-type"].startswith("text/csv")
    lines = list(csv.DictReader(io.StringIO(exported.text)))
    assert [line["request"] for line in lines] == ["r0", "r1", "r2"]
    sums = await admin.send("GET", "usage.csv", params=query | {"group_by": "model"})
    assert sums.text.splitlines()[1:] == ["big,3,30,0,15,300", "small,1,10,0,5,100"]
    (usage,) = (await user.read("me/usage"))["data"]
    assert usage["requests"] == 3, "users see only the usage of their own key"


async def test_lists_are_sorted_and_sent_in_pages_as_columns(admin: Caller) -> None:
    _, key = await create_caller(admin.gateway)
    rows = [
        build_row(f"s{number}", key, model=f"m{number}", nano_dollars=number * 7 % 5)
        for number in range(5)
    ]
    admin.gateway.store.ledger.add_records(rows)
    by_cost = ["s2", "s4", "s1", "s3", "s0"]
    columns = {"accept": "application/vnd.argosy.columns+json"}
    query: Json = {"project": key["project"], "sort": "nano_dollars", "limit": 3}
    first = await admin.read("requests", params=query)
    rest = await admin.read("requests", params=query | {"before": first["next"]})
    assert first["columns"]["request"] + rest["columns"]["request"] == by_cost
    assert key["key"] not in first["columns"]["key_name"]
    assert rest["next"] is None
    unknown = await admin.send("GET", "requests", params=query | {"before": "r9"})
    assert failure(unknown)[:2] == (400, "invalid_value")
    query["group_by"] = "model"
    first = await admin.read("usage", params=query, headers=columns)
    after = query | {"after": first["last_id"]}
    rest = await admin.read("usage", params=after, headers=columns)
    models = first["columns"]["model"] + rest["columns"]["model"]
    assert models == [f"m{request[1:]}" for request in by_cost]
    assert (first["has_more"], rest["has_more"]) == (True, False)
    audit = await admin.send("GET", "audit", headers=columns)
    assert audit.headers["content-encoding"] == "gzip"
    assert audit.headers["content-type"] == columns["accept"]
    assert len(success(audit)["columns"]["entry"]) > 1


async def test_disconnect_ends_an_export(admin: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    exported_pages = 0

    def iter_pages(_ledger: Ledger, _where: UsageFilter) -> Iterator[list[UsageRecord]]:
        nonlocal exported_pages
        while exported_pages < 20_000:
            exported_pages += 1
            yield [usage_row("r0")] * 10

    monkeypatch.setattr(Ledger, "iter_records", iter_pages)
    client = admin.gateway.client
    async with client.stream("GET", "/admin/usage.csv", headers=admin.headers) as response:
        assert response.status_code == 200
    assert await stable_value(lambda: exported_pages) < 20_000


async def test_audit_log_names_the_actor_and_is_verified(admin: Caller) -> None:
    created = await admin.change("organisations", {"name": unique_name()})
    (entry,) = (await admin.read("audit", params={"subject": created["id"]}))["data"]
    key = (await admin.read("me"))["key"]
    assert (entry["actor"], entry["action"]) == (f"key:{key}", "organisation.create")
    assert entry["names"].keys() == {created["id"], key}
    assert entry["names"][created["id"]] == created["name"]
    newest = await admin.read("audit?limit=1")
    assert newest["has_more"]
    older = await admin.read("audit", params={"before": newest["last_id"], "limit": 1})
    assert older["data"][0]["entry"] == newest["data"][0]["entry"] - 1
    entries = (await admin.read("audit?limit=1000"))["data"]
    for since, until in (
        (entry["at"], entry["at"] + 1e-6),
        (0.0, entry["at"]),
        (entry["at"], 1e10),
    ):
        query = {"since": since, "until": until, "action": "key.,organisation.create"}
        assert (await admin.read("audit", params=query))["data"] == [
            each
            for each in entries
            if since <= each["at"] < until
            and each["action"].startswith(("key.", "organisation.create"))
        ]
    result = await admin.read("audit/verify")
    assert (result["entries"], result["broken"]) == (newest["data"][0]["entry"], None)


# --- rights that callers cannot grant or take over -----------------------------------------------

GATEWAY_ADMIN = {"role": "admin", "scope": "gateway"}
ADDRESS_RESTRICTION = {"networks": ["192.0.2.0/24"]}


def forbidden_code(response: httpx2.Response) -> str:
    assert response.status_code == 403, response.text
    code: str = response.json()["error"]["code"]
    return code


async def test_records_above_the_callers_role_cannot_be_granted_or_changed(
    shared_gateway: AdminGateway,
) -> None:
    customer = await shared_gateway.create_customer()
    accounts, client = shared_gateway.store.accounts, shared_gateway.client
    headers = await shared_gateway.key_headers("admin", "organisation", customer.organisation)
    higher_user = accounts.create_user(
        customer.organisation,
        f"{unique_name()}@x.test",
        role="viewer",
        scope="gateway",
        actor="test",
    )
    higher_key, _ = accounts.create_key(
        customer.project, "higher", role="operator", scope="gateway", actor="test"
    )
    project_path = f"/admin/projects/{customer.project}"
    before = shared_gateway.store.load_snapshot().version
    requests: list[tuple[str, str, Json | None]] = [
        ("POST", "/admin/keys", key_body(customer) | GATEWAY_ADMIN),
        ("POST", f"/admin/keys/{higher_key.id}/rotate", {}),
        ("POST", f"/admin/keys/{higher_key.id}/revoke", {}),
        ("POST", "/admin/users", user_body(customer) | GATEWAY_ADMIN),
        ("PATCH", f"/admin/users/{customer.user}", GATEWAY_ADMIN),
        ("PATCH", f"/admin/users/{higher_user.id}", {"email": "mine@x.test"}),
        ("PATCH", f"/admin/users/{higher_user.id}", {"scope": "organisation"}),
        ("POST", f"/admin/users/{higher_user.id}/disable", None),
        ("PATCH", project_path, ADDRESS_RESTRICTION),
        ("POST", f"{project_path}/archive", None),
    ]
    for method, path, body in requests:
        response = await client.request(method, path, json=body, headers=headers)
        assert forbidden_code(response) == "insufficient_role", path
    assert shared_gateway.store.load_snapshot().version == before
    # A key that is no longer valid does not protect its project.
    rotated, _ = accounts.rotate_key(higher_key.id, 0, actor="test")
    accounts.revoke_key(rotated.id, actor="test")
    response = await client.patch(project_path, json={"networks": ["127.0.0.0/8"]}, headers=headers)
    assert response.status_code == 200, response.text
    # Two steps, first the scope and then the role, are no way around.
    for path, body in (("/admin/users", user_body(customer)), ("/admin/keys", key_body(customer))):
        response = await client.post(path, json=body | {"scope": "gateway"}, headers=headers)
        assert forbidden_code(response) == "insufficient_role"


async def test_project_of_a_higher_user_cannot_be_archived_or_restricted(
    shared_gateway: AdminGateway,
) -> None:
    customer = await shared_gateway.create_customer()
    accounts, client = shared_gateway.store.accounts, shared_gateway.client
    headers = await shared_gateway.key_headers("admin", "organisation", customer.organisation)
    higher_user = accounts.create_user(
        customer.organisation,
        f"{unique_name()}@x.test",
        role="admin",
        scope="gateway",
        project=customer.project,
        actor="test",
    )
    path = f"/admin/projects/{customer.project}"
    response = await client.patch(path, json=ADDRESS_RESTRICTION, headers=headers)
    assert forbidden_code(response) == "insufficient_role"
    assert (
        forbidden_code(await client.post(f"{path}/archive", headers=headers)) == "insufficient_role"
    )
    accounts.disable_user(higher_user.id, actor="test")
    assert (await client.patch(path, json=ADDRESS_RESTRICTION, headers=headers)).status_code == 200


async def test_key_with_models_creates_no_key_for_other_models(
    shared_gateway: AdminGateway,
) -> None:
    customer = await shared_gateway.create_customer()
    client = shared_gateway.client
    body = {"project": customer.project, "name": unique_name(), "role": "admin"}
    key = await shared_gateway.create("/admin/keys", body | {"models": ["a", "b"]})
    headers = {"authorization": f"Bearer {key['key']}"}
    for models in ([], ["c"], ["a", "c"]):
        response = await client.post(
            "/admin/keys", json=key_body(customer) | {"models": models}, headers=headers
        )
        assert forbidden_code(response) == "model_not_allowed"
    response = await client.post(f"/admin/keys/{customer.key}/rotate", json={}, headers=headers)
    assert forbidden_code(response) == "model_not_allowed"
    response = await client.post("/admin/users", json=user_body(customer), headers=headers)
    assert forbidden_code(response) == "model_not_allowed"
    response = await client.post(
        "/admin/keys", json=key_body(customer) | {"models": ["b"]}, headers=headers
    )
    assert response.json()["models"] == ["b"]


async def test_settings_that_affect_other_organisations_need_a_gateway_role(
    shared_gateway: AdminGateway,
) -> None:
    customer = await shared_gateway.create_customer()
    client = shared_gateway.client
    headers = await shared_gateway.key_headers("admin", "organisation", customer.organisation)
    limit = limit_body("organisation")(customer)
    created = await shared_gateway.create("/admin/limits", limit)
    project = {"organisation": customer.organisation, "name": unique_name()}
    requests: list[tuple[str, str, Json | None]] = [
        ("POST", "/admin/projects", project | {"tier": "premium"}),
        ("PATCH", f"/admin/projects/{customer.project}", {"weight": 5}),
        ("PATCH", f"/admin/projects/{customer.project}", {"tier": "free"}),
        ("POST", "/admin/projects", project | {"name": unique_name(), "flags": ["new"]}),
        ("PATCH", f"/admin/projects/{customer.project}", {"flags": ["old"]}),
        ("POST", "/admin/keys", key_body(customer) | {"flags": ["new"]}),
        ("POST", "/admin/limits", limit | {"amount": 10**9}),
        ("DELETE", f"/admin/limits/{created['id']}", None),
    ]
    for method, path, body in requests:
        rejected = await client.request(method, path, json=body, headers=headers)
        assert forbidden_code(rejected) == "insufficient_role", path
        accepted = await client.request(
            method, path, json=body, headers=shared_gateway.root_headers
        )
        assert accepted.status_code == 200, accepted.text


# --- other endpoints of the gateway --------------------------------------------------------------


async def test_metrics_need_a_gateway_role(shared_gateway: AdminGateway) -> None:
    customer = await shared_gateway.create_customer()
    client = shared_gateway.client
    own = await shared_gateway.key_headers("admin", "organisation", customer.organisation)
    viewer = await shared_gateway.key_headers("viewer", "gateway", None)
    assert customer.project in (await client.get("/metrics", headers=viewer)).text
    for path in ("/metrics", "/replicas/any/metrics"):
        assert forbidden_code(await client.get(path, headers=own)) == "insufficient_role"
    assert (await client.get("/replicas/any/metrics", headers=viewer)).status_code == 404


async def test_openapi_document_needs_a_key(shared_gateway: AdminGateway) -> None:
    response = await shared_gateway.client.get("/openapi.json")
    assert (response.status_code, response.json()["error"]["code"]) == (401, "missing_api_key")


@pytest.mark.asyncio(loop_scope="function")
async def test_store_failure_during_an_export_closes_the_connection_and_logs_one_error(
    admin_gateway: AdminGateway,
) -> None:
    database = Database(admin_gateway.store_url)
    with database.write_transaction() as connection:
        connection.execute(sa.text("DROP TABLE usage"))
    database.close()
    with capture_logs() as logs:
        with pytest.raises(httpx2.TransportError):
            await admin_gateway.client.get("/admin/usage.csv", headers=admin_gateway.root_headers)
        # Without the timeout's error, the last assertion shows the events that were logged instead.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(30):
                while not any(event["event"] == "request" for event in logs):  # noqa: ASYNC110 - logged after the close
                    await asyncio.sleep(0.01)
    errors = [event for event in logs if event["log_level"] == "error"]
    assert [event["event"] for event in errors] == ["store_unavailable"]
    assert "exc_info" not in errors[0]
    requests = [event["error"] for event in logs if event["event"] == "request"]
    assert requests == ["store_unavailable"], logs
    usage = await admin_gateway.client.get("/admin/usage", headers=admin_gateway.root_headers)
    assert (usage.status_code, usage.headers["retry-after"]) == (503, "5")
    assert usage.json()["error"]["code"] == "store_unavailable"
