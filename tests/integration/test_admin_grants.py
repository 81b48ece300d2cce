"""Nobody gives themselves or others more than they have, and what is the whole gateway's is not an organisation's."""

from __future__ import annotations

import asyncio
import contextlib

import httpx2
import pytest
import sqlalchemy as sa
from structlog.testing import capture_logs
from tests.support.organisations import World, key_body, limit_body, name, user_body

from argosy.store.database import Database


def refusal(answer: httpx2.Response) -> str:
    """The code of a refusal for want of a right."""
    assert answer.status_code == 403, answer.text
    code: str = answer.json()["error"]["code"]
    return code


async def test_nobody_gives_or_takes_over_more_than_they_have(world: World) -> None:
    customer = await world.customer()
    accounts, client = world.store.accounts, world.client
    client.headers |= await world.headers("admin", "organisation", customer.organisation)
    fleet = {"role": "admin", "scope": "gateway"}
    boss = accounts.create_user(
        customer.organisation, f"{name()}@x.test", role="viewer", scope="gateway", actor="test"
    )
    above, _ = accounts.create_key(
        customer.project, "above", role="operator", scope="gateway", actor="test"
    )
    before = world.store.load_snapshot().version
    for method, path, body in (
        ("POST", "/admin/keys", key_body(customer) | fleet),
        ("POST", f"/admin/keys/{above.id}/rotate", {}),
        ("POST", f"/admin/keys/{above.id}/revoke", {}),
        ("POST", "/admin/users", user_body(customer) | fleet),
        ("PATCH", f"/admin/users/{customer.user}", fleet),
        ("PATCH", f"/admin/users/{boss.id}", {"email": "mine@x.test"}),
        ("PATCH", f"/admin/users/{boss.id}", {"scope": "organisation"}),
        ("POST", f"/admin/users/{boss.id}/disable", None),
        ("PATCH", f"/admin/projects/{customer.project}", {"networks": ["192.0.2.0/24"]}),
        ("POST", f"/admin/projects/{customer.project}/archive", None),
    ):
        answer = await client.request(method, path, json=body)
        assert refusal(answer) == "insufficient_role", path
    assert world.store.load_snapshot().version == before
    # A key that works no longer stands in nobody's way.
    later, _ = accounts.rotate_key(above.id, 0, actor="test")
    accounts.revoke_key(later.id, actor="test")
    fence = {"networks": ["127.0.0.0/8"]}
    answer = await client.patch(f"/admin/projects/{customer.project}", json=fence)
    assert answer.status_code == 200, answer.text
    # What the gateway's own admin may: and the way there in two steps is none.
    parked = await world.made("/admin/users", user_body(customer) | {"scope": "gateway"})
    answer = await client.patch(f"/admin/users/{parked['id']}", json={"role": "admin"})
    assert refusal(answer) == "insufficient_role"
    answer = await client.patch(
        f"/admin/users/{parked['id']}", json={"role": "admin", "scope": "organisation"}
    )
    assert answer.json()["scope"] == "organisation"


async def test_nobody_ends_or_fences_in_the_project_of_a_user_above_them(world: World) -> None:
    customer = await world.customer()
    accounts, client = world.store.accounts, world.client
    client.headers |= await world.headers("admin", "organisation", customer.organisation)
    boss = accounts.create_user(
        customer.organisation,
        f"{name()}@x.test",
        role="admin",
        scope="gateway",
        project=customer.project,
        actor="test",
    )
    path = f"/admin/projects/{customer.project}"
    fence = {"networks": ["192.0.2.0/24"]}
    assert refusal(await client.patch(path, json=fence)) == "insufficient_role"
    assert refusal(await client.post(f"{path}/archive")) == "insufficient_role"
    accounts.disable_user(boss.id, actor="test")
    assert (await client.patch(path, json=fence)).status_code == 200


async def test_a_key_for_some_models_makes_none_for_others(world: World) -> None:
    customer = await world.customer()
    admin = {"project": customer.project, "name": name(), "role": "admin", "models": ["a", "b"]}
    made = await world.made("/admin/keys", admin)
    world.client.headers["authorization"] = f"Bearer {made['key']}"
    for models in ([], ["c"], ["a", "c"]):
        answer = await world.client.post(
            "/admin/keys", json=key_body(customer) | {"models": models}
        )
        assert refusal(answer) == "model_not_allowed"
    answer = await world.client.post(f"/admin/keys/{customer.key}/rotate", json={})
    assert refusal(answer) == "model_not_allowed"
    answer = await world.client.post("/admin/users", json=user_body(customer))
    assert refusal(answer) == "model_not_allowed"
    answer = await world.client.post("/admin/keys", json=key_body(customer) | {"models": ["b"]})
    assert answer.json()["models"] == ["b"]


async def test_what_weighs_against_others_is_given_by_the_gateways_admins(world: World) -> None:
    customer = await world.customer()
    client = world.client
    own = await world.headers("admin", "organisation", customer.organisation)
    limit = limit_body("organisation")(customer)
    given = await world.made("/admin/limits", limit)
    project = {"organisation": customer.organisation, "name": name()}
    for method, path, body in (
        ("POST", "/admin/projects", project | {"tier": "premium"}),
        ("PATCH", f"/admin/projects/{customer.project}", {"weight": 5}),
        ("PATCH", f"/admin/projects/{customer.project}", {"tier": "standard"}),
        ("POST", "/admin/projects", project | {"name": name(), "flags": ["new"]}),
        ("PATCH", f"/admin/projects/{customer.project}", {"flags": []}),
        ("POST", "/admin/keys", key_body(customer) | {"flags": ["new"]}),
        ("POST", "/admin/limits", limit | {"amount": 10**9}),
        ("DELETE", f"/admin/limits/{given['id']}", None),
    ):
        refused = await client.request(method, path, json=body, headers=own)
        assert refusal(refused) == "insufficient_role", path
        done = await client.request(method, path, json=body, headers=world.root)
        assert done.status_code == 200, done.text


# --- beside the admin API ------------------------------------------------------------------------


async def test_metrics_are_the_whole_gateways(world: World) -> None:
    customer = await world.customer()
    own = await world.headers("admin", "organisation", customer.organisation)
    whole = await world.headers("viewer", "gateway", None)
    shown = (await world.client.get("/metrics", headers=whole)).text
    assert customer.project in shown
    for path in ("/metrics", "/replicas/any/metrics"):
        assert refusal(await world.client.get(path, headers=own)) == "insufficient_role"
    assert (await world.client.get("/replicas/any/metrics", headers=whole)).status_code == 404


async def test_the_replicas_document_is_for_those_with_a_key(world: World) -> None:
    refused = await world.client.get("/openapi.json")
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "missing_api_key")


async def test_an_export_whose_store_fails_is_cut_off_with_one_line_in_the_log(
    world: World,
) -> None:
    database = Database(world.url)
    with database.write_transaction() as connection:
        connection.execute(sa.text("DROP TABLE usage"))
    database.close()
    with capture_logs() as logs:
        with pytest.raises(httpx2.TransportError):
            await world.client.get("/admin/usage.csv", headers=world.root)
        with contextlib.suppress(TimeoutError):  # then the last line shows what was told instead
            async with asyncio.timeout(30):
                while not any(line["event"] == "request" for line in logs):  # noqa: ASYNC110 - written after the cut
                    await asyncio.sleep(0.01)
    bad = [line for line in logs if line["log_level"] == "error"]
    assert [line["event"] for line in bad] == ["store_unavailable"]
    assert "exc_info" not in bad[0]
    ended = [line["error"] for line in logs if line["event"] == "request"]
    assert ended == ["store_unavailable"], logs
