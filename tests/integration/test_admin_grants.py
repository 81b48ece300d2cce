"""Callers of the admin API cannot grant or take over rights that they lack. Shared settings need a gateway role."""

from __future__ import annotations

import asyncio
import contextlib

import httpx2
import pytest
import sqlalchemy as sa
from structlog.testing import capture_logs
from tests.support.organisations import (
    AdminGateway,
    Json,
    key_body,
    limit_body,
    unique_name,
    user_body,
)

from argosy.store.database import Database

GATEWAY_ADMIN = {"role": "admin", "scope": "gateway"}
ADDRESS_RESTRICTION = {"networks": ["192.0.2.0/24"]}


pytestmark = pytest.mark.asyncio(loop_scope="module")


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
