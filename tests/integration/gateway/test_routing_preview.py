"""Preview of routing over the admin API: who may preview whose requests, and what it says about each replica."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.support.organisations import AdminGateway, Json

from argosy.store import Role

CHAT: Json = {"model": "big", "messages": [{"role": "user", "content": "Say"}]}


async def preview(
    gateway: AdminGateway, headers: dict[str, str] | None = None, status: int = 200, **body: object
) -> Json:
    """Preview a request, by default as the administrator."""
    response = await gateway.client.post(
        "/admin/routing/preview",
        json={"request": CHAT} | body,
        headers=gateway.root_headers if headers is None else headers,
    )
    assert response.status_code == status, response.text
    answer: Json = response.json()
    return answer


async def preview_after_cordon(gateway: AdminGateway, replica: str) -> Json:
    """Cordon a replica, and preview once the gateway applies it and no older accounts any more."""
    await gateway.create("/admin/replicas/cordon", {"replica": replica, "reason": "new kernel"})
    while True:
        answer = await preview(gateway)
        if replica in {each["replica"] for each in answer["excluded"]}:
            return answer
        await asyncio.sleep(0.02)


async def test_only_operators_preview_as_another_sender(admin_gateway: AdminGateway) -> None:
    customer = await admin_gateway.create_customer()
    statuses: dict[Role, int] = {"viewer": 403, "operator": 200}
    for role, status in statuses.items():
        headers = await admin_gateway.key_headers(role, "gateway", None)
        await preview(admin_gateway, headers)
        for sender in ({"project": customer.project}, {"key": customer.key}):
            answer = await preview(admin_gateway, headers, status, **sender)
            assert status != 200 or answer["tenant"] == customer.project


async def test_preview_names_every_replica_and_why_a_request_is_refused(
    admin_gateway: AdminGateway,
) -> None:
    before = (
        await admin_gateway.client.get("/admin/pools", headers=admin_gateway.root_headers)
    ).json()
    answer = await preview(admin_gateway, tier="free")
    assert (answer["outcome"], answer["tier"], answer["excluded"]) == ("placed", "free", [])
    assert {each["replica"] for each in answer["candidates"]} == {"a", "b"}
    answer = await preview_after_cordon(admin_gateway, "a")
    assert answer["sentence"] == "b would get it: no other replica can take it now."
    (excluded,) = answer["excluded"]
    assert excluded["replica"] == "a"
    assert "new kernel" in excluded["reason"]
    answer = await preview_after_cordon(admin_gateway, "b")
    assert answer["replica"] is None
    assert answer["outcome"] in {"queued", "refused"}
    assert {each["replica"] for each in answer["excluded"]} == {"a", "b"}
    answer = await preview(admin_gateway, request=CHAT | {"model": "unknown"})
    assert (answer["outcome"], answer["error"]["code"]) == ("refused", "model_not_found")
    after = (
        await admin_gateway.client.get("/admin/pools", headers=admin_gateway.root_headers)
    ).json()
    assert after["data"][0]["active_requests"] == before["data"][0]["active_requests"] == 0


async def test_malformed_previews_are_refused(admin_gateway: AdminGateway) -> None:
    bodies: list[tuple[dict[str, Any], int]] = [
        ({"request": []}, 400),
        ({"request": {"model": "big"}}, 400),
        ({"request": CHAT | {"n": "two"}}, 400),
        ({"key": "key_unknown"}, 404),
        ({"project": "proj_unknown"}, 404),
        ({"tenant": "x"}, 400),
    ]
    for body, status in bodies:
        await preview(admin_gateway, None, status, **body)
