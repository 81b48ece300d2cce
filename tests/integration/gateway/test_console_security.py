"""Weaknesses that were found in other gateways and consoles. docs/explanation/security.md lists them."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import httpx2
import pytest
from tests.support.fake_upstream import UpstreamRequest, fake_upstream
from tests.support.organisations import AdminGateway, Json, run_admin_gateway

from argosy.gateway.admin import list_endpoints
from argosy.lessons import LESSONS

OWN_PAGE = {"sec-fetch-site": "same-origin"}
CHAT = {"model": "big", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
INJECTIONS = ("' OR '1'='1", "x' UNION SELECT digest FROM keys --", '"; DROP TABLE keys; --', "%")


async def open_session(gateway: AdminGateway, key: str) -> httpx2.Response:
    response = await gateway.client.post("/console/session", json={"key": key}, headers=OWN_PAGE)
    gateway.client.cookies.clear()
    return response


async def send_in_every_way(
    gateway: AdminGateway, key: str, method: str, path: str
) -> dict[str, tuple[int, str | None]]:
    """Present a key in each way that there is. Returns status and error code by way."""
    ways: dict[str, Json] = {
        "bearer": {"authorization": f"Bearer {key}"},
        "x-api-key": {"x-api-key": key},
        "api-key": {"api-key": key},
        "both": {"authorization": "Basic e30=", "x-api-key": key},
    }
    answers = {
        way: await gateway.client.request(method, path, json=CHAT, headers=headers)
        for way, headers in ways.items()
    }
    session = await open_session(gateway, key)
    if session.status_code == 200:
        cookie = OWN_PAGE | {"cookie": session.headers["set-cookie"].partition(";")[0]}
        path = path.replace("/v1/", "/console/v1/")
        session = await gateway.client.request(method, path, json=CHAT, headers=cookie)
    answers["session"] = session
    return {
        way: (answer.status_code, answer.json().get("error", {}).get("code"))
        for way, answer in answers.items()
    }


async def test_restrictions_hold_in_every_way_to_present_a_key(admin_gateway: AdminGateway) -> None:
    chat = ("POST", "/v1/chat/completions")
    restrictions: list[tuple[Json, tuple[str, str], tuple[int, str | None]]] = [
        ({}, chat, (200, None)),
        ({"models": ["small"]}, chat, (403, "model_not_allowed")),
        ({"role": "viewer"}, chat, (403, "insufficient_role")),
        ({"networks": ["192.0.2.0/24"]}, chat, (403, "address_not_allowed")),
        ({"networks": ["192.0.2.0/24"]}, ("GET", "/admin/me"), (403, "address_not_allowed")),
        ({"role": "user"}, ("GET", "/admin/keys"), (403, "insufficient_role")),
        ({"role": "admin"}, ("GET", "/admin/pools"), (403, "insufficient_role")),
    ]
    for number, (fields, (method, path), expected) in enumerate(restrictions):
        body = {"project": admin_gateway.home_project, "name": f"restricted-{number}"} | fields
        key = (await admin_gateway.create("/admin/keys", body))["key"]
        answers = await send_in_every_way(admin_gateway, key, method, path)
        assert set(answers.values()) == {expected}, (fields, answers)
    ends: tuple[Json, ...] = ({"expires_at": time.time() + 0.3}, {})
    for fields in ends:
        name = f"ended-{len(fields)}"
        body = {"project": admin_gateway.home_project, "name": name, **fields}
        created = await admin_gateway.create("/admin/keys", body)
        session = await open_session(admin_gateway, created["key"])
        cookie = OWN_PAGE | {"cookie": session.headers["set-cookie"].partition(";")[0]}
        if not fields:
            await admin_gateway.create(f"/admin/keys/{created['id']}/revoke", {})
        while fields and time.time() < fields["expires_at"]:
            await admin_gateway.client.get("/health")
        answers = await send_in_every_way(admin_gateway, created["key"], *chat)
        assert {status for status, _ in answers.values()} == {401}, answers
        ended = await admin_gateway.client.get("/admin/me", headers=cookie)
        assert ended.status_code == 401


async def test_methods_that_no_route_declares_are_refused(admin_gateway: AdminGateway) -> None:
    client = admin_gateway.client
    declared: dict[str, set[str]] = {}
    for endpoint in list_endpoints(LESSONS):
        path = endpoint.path.replace("{id}", "some")
        declared.setdefault(path, set()).add(endpoint.method)
    declared |= {"/console/session": {"GET", "POST", "DELETE"}, "/console/events": {"GET"}}
    declared |= {"/console/static/app.js": {"GET"}, "/console/v1/models": {"GET"}}
    before = admin_gateway.store.load_snapshot().version
    for path, methods in declared.items():
        for method in {"PUT", "PATCH", "DELETE", "POST", "PROPFIND", "ARGOSY"} - methods:
            headers = admin_gateway.root_headers | OWN_PAGE
            response = await client.request(method, path, headers=headers)
            assert response.status_code in {400, 405}, (method, path, response.text)
            anonymous = await client.request(method, path)
            assert anonymous.status_code in {400, 401, 403, 405}, (method, path)
    assert admin_gateway.store.load_snapshot().version == before


async def test_quotes_in_credentials_ids_and_filters_are_text(admin_gateway: AdminGateway) -> None:
    own, foreign = await admin_gateway.create_customer(), await admin_gateway.create_customer()
    viewer = await admin_gateway.key_headers("viewer", "organisation", own.organisation)
    client = admin_gateway.client
    filters = {"projects": "organisation", "keys": "project", "requests": "project"}
    filters |= {"usage": "model", "audit": "subject"}
    before = admin_gateway.store.load_snapshot().keys
    for text in INJECTIONS:
        answer = await client.get("/admin/keys", headers={"x-api-key": text})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    for text in INJECTIONS:
        for path, name in filters.items():
            answer = await client.get(f"/admin/{path}", params={name: text}, headers=viewer)
            assert answer.status_code in {200, 404}, answer.text
            assert foreign.project not in answer.text
        answer = await client.request("GET", f"/admin/keys/{text}", headers=viewer)
        assert answer.status_code == 404
    assert admin_gateway.store.load_snapshot().keys == before


async def test_secret_of_a_backend_goes_to_its_own_address_only(
    migrated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither fields of a request nor a redirect of the backend send its key elsewhere."""
    monkeypatch.setenv("BACKEND_KEY", "secret")
    path = tmp_path / "argosy.db"
    shutil.copy(migrated, path)
    received: list[str | None] = []
    async with fake_upstream() as attacker:

        async def redirect(request: UpstreamRequest) -> None:
            received.append(request.headers.get("authorization"))
            head = f"HTTP/1.1 307 X\r\nlocation: {attacker.url}{request.path}\r\n"
            request.writer.write(f"{head}content-length: 0\r\n\r\n".encode())

        async with run_admin_gateway(
            f"sqlite:///{path}",
            replica_names=("only",),
            script=redirect,
            replica_settings={"api_key_env": "BACKEND_KEY"},
            max_failed_attempts=1,
        ) as gateway:
            key = await gateway.create(
                "/admin/keys", {"project": gateway.home_project, "name": "k"}
            )
            elsewhere = dict.fromkeys(("api_base", "base_url", "api_url"), attacker.url)
            headers = {"authorization": f"Bearer {key['key']}", "x-api-base": attacker.url}
            response = await gateway.client.post(
                "/v1/chat/completions", json=CHAT | elsewhere, headers=headers
            )
            assert response.status_code >= 500, response.text
            shown = await gateway.client.get("/admin/settings", headers=gateway.root_headers)
            assert "secret" not in re.findall(r'"value":"([^"]*)"', shown.text)
        assert set(received) == {"Bearer secret"}
        assert (attacker.requests, attacker.fetched_paths) == ([], [])
