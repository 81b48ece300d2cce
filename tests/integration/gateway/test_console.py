"""The console's routes over HTTP: hosts, origins, sessions, static files, the event stream and the playground."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.support.organisations import AdminGateway, run_admin_gateway

from argosy.deployment import AuthConfig, ConsoleConfig

OWN_PAGE = {"sec-fetch-site": "same-origin"}
SESSION = "/console/session"


async def sign_in(gateway: AdminGateway, key: str) -> httpx2.Response:
    """Sign in. The client keeps no cookie, so that each test sends the one that it means."""
    response = await gateway.client.post(SESSION, json={"key": key}, headers=OWN_PAGE)
    gateway.client.cookies.clear()
    return response


def root_key(gateway: AdminGateway) -> str:
    return gateway.root_headers["authorization"].removeprefix("Bearer ")


async def session_headers(gateway: AdminGateway, key: str | None = None) -> dict[str, str]:
    """Return the headers of the console's own page with a new session."""
    response = await sign_in(gateway, key or root_key(gateway))
    assert response.status_code == 200, response.text
    cookie = response.headers["set-cookie"]
    assert {"HttpOnly", "Secure", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    return OWN_PAGE | {"cookie": cookie.partition(";")[0]}


async def test_session_reaches_the_admin_api_and_the_playground_but_not_v1(
    admin_gateway: AdminGateway,
) -> None:
    client, headers = admin_gateway.client, await session_headers(admin_gateway)
    assert headers["cookie"].startswith("__Host-argosy=")
    headers["cookie"] = (
        f'other={{"a": [1]}}; {headers["cookie"]}'  # of another service of this host
    )
    who = await client.get(SESSION, headers=headers)
    assert (who.json()["role"], who.json()["is_local"]) == ("admin", False)
    assert (await client.get("/admin/keys", headers=headers)).status_code == 200
    chat = {"model": "big", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    response = await client.post("/console/v1/chat/completions", json=chat, headers=headers)
    assert response.status_code == 200, response.text
    for method, path in (
        ("GET", "/v1/models"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/metrics"),
    ):
        answer = await client.request(method, path, json=chat, headers=headers)
        assert answer.json()["error"]["code"] == "missing_api_key", path


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"sec-fetch-site": "same-site"}, (403, "origin_not_allowed")),
        ({"sec-fetch-site": "cross-site"}, (403, "origin_not_allowed")),
        ({"sec-fetch-site": "none"}, (403, "origin_not_allowed")),
        ({"sec-fetch-site": "", "origin": "http://127.0.0.1:1"}, (403, "origin_not_allowed")),
        ({"sec-fetch-site": ""}, (403, "origin_not_allowed")),
        ({"sec-fetch-site": "", "user-agent": "curl/8.0"}, (403, "origin_not_allowed")),
        ({"host": "attacker.test"}, (421, "host_not_allowed")),
        ({"host": "attacker.test", "origin": "http://attacker.test"}, (421, "host_not_allowed")),
        ({"host": "localhost@attacker.test"}, (421, "host_not_allowed")),
    ],
)
async def test_request_of_another_page_or_name_is_refused(
    admin_gateway: AdminGateway, changed: dict[str, str], expected: tuple[int, str]
) -> None:
    client, headers = admin_gateway.client, {**await session_headers(admin_gateway), **changed}
    events = await client.get("/console/events", headers=headers)
    assert (events.status_code, events.json()["error"]["code"]) == expected
    for method in ("GET", "POST", "PATCH", "PUT", "DELETE", "PROPFIND"):
        for path in ("/admin/organisations", "/admin/keys", "/admin/limits/x"):
            response = await client.request(method, path, json={"name": "x"}, headers=headers)
            assert response.status_code in {401, expected[0]}, (method, path)  # 401: no cookie
    assert "x" not in {one.name for one in admin_gateway.store.accounts.list_organisations()}


async def test_document_is_served_to_browsers_under_known_names_only(
    admin_gateway: AdminGateway,
) -> None:
    client, browser = admin_gateway.client, {"accept": "text/html,*/*"}
    page = await client.get("/", headers=browser)
    assert page.text.startswith("<!doctype html>")
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "frame-ancestors 'none'" in policy
    assert (await client.get("/")).text == "Ollama is running"
    rebound = await client.get("/", headers=browser | {"host": "attacker.test"})
    assert rebound.status_code == 421
    script = await client.get("/console/static/app.js")
    assert script.headers["content-encoding"] == "gzip"
    cached = await client.get(
        "/console/static/app.js", headers={"if-none-match": script.headers["etag"]}
    )
    assert (cached.status_code, cached.content) == (304, b"")
    for path in ("missing.js", "..%2f__init__.py", ""):
        assert (await client.get(f"/console/static/{path}")).status_code == 404, path


async def test_session_ends_with_sign_out_and_with_its_key(admin_gateway: AdminGateway) -> None:
    client = admin_gateway.client
    first, second = await session_headers(admin_gateway), await session_headers(admin_gateway)
    assert (await client.delete(SESSION, headers=first)).status_code == 200
    ended = await client.get("/admin/keys", headers=first)
    assert (ended.status_code, ended.json()["error"]["code"]) == (401, "session_ended")
    assert (await client.get("/admin/keys", headers=second)).status_code == 200
    body = {
        "project": admin_gateway.home_project,
        "name": "short",
        "role": "viewer",
        "scope": "gateway",
    }
    key = await admin_gateway.create("/admin/keys", body)
    session = await session_headers(admin_gateway, key["key"])
    bearer = OWN_PAGE | {"authorization": f"Bearer {key['key']}"}
    async with (
        asyncio.timeout(20),
        client.stream("GET", "/console/events", headers=session) as stream,
        client.stream("GET", "/console/events", headers=bearer) as bearer_stream,
    ):
        lines, bearer_lines = stream.aiter_lines(), bearer_stream.aiter_lines()
        for one in (lines, bearer_lines):
            while await anext(one) != "event: tick":
                pass
        await client.post(f"/admin/keys/{key['id']}/revoke", headers=admin_gateway.root_headers)
        assert (await client.get("/admin/pools", headers=session)).status_code == 401
        for one in (lines, bearer_lines):
            assert "event: session_ended" in [line async for line in one]


async def test_flood_of_a_browser_leaves_requests_for_models_as_they_are(
    admin_gateway: AdminGateway,
) -> None:
    """A screen that sends 50 requests at once and repeats them (BerriAI/litellm#20720), and 20 event streams."""
    client = admin_gateway.client
    completion = {"model": "big", "prompt": "Say", "max_tokens": 4, "stream": True}

    async def complete() -> list[str]:
        answer = await client.post(
            "/v1/completions", json=completion, headers=admin_gateway.root_headers
        )
        events = re.findall(r"^data: (.+)$", answer.text, re.MULTILINE)
        return [json.loads(event)["choices"][0]["text"] for event in events if event != "[DONE]"]

    undisturbed = await complete()
    assert undisturbed
    session = await session_headers(admin_gateway)
    callers = [
        session,
        *[await admin_gateway.key_headers("viewer", "gateway", None) for _ in range(3)],
    ]
    async with contextlib.AsyncExitStack() as streams:
        for headers in callers:
            opened = [
                await streams.enter_async_context(
                    client.stream("GET", "/console/events", headers=OWN_PAGE | headers)
                )
                for _ in range(7)
            ]
            assert [stream.status_code for stream in opened] == [200] * 6 + [429]
        screen = [
            "/admin/requests",
            "/admin/usage?group_by=day",
            "/admin/series",
            "/admin/replicas",
        ]
        reads = [client.get(path, headers=session) for path in screen * 26]
        answers, results = await asyncio.gather(
            asyncio.gather(*reads), asyncio.gather(*(complete() for _ in range(20)))
        )
    assert results == [undisturbed] * 20
    refused = [answer for answer in answers if answer.status_code != 200]
    assert all(answer.json()["error"]["code"] == "overloaded" for answer in refused)
    assert len(refused) < len(answers)


async def test_wrong_keys_are_answered_alike_and_limited(admin_gateway: AdminGateway) -> None:
    body = {"project": admin_gateway.home_project, "name": "old"}
    key = await admin_gateway.create("/admin/keys", body)
    await admin_gateway.client.post(
        f"/admin/keys/{key['id']}/revoke", headers=admin_gateway.root_headers
    )
    answers = [
        await sign_in(admin_gateway, tried) for tried in (key["key"], "x", "", "y", "z", "w")
    ]
    errors: list[dict[str, Any]] = [answer.json()["error"] for answer in answers]
    assert [answer.status_code for answer in answers] == [401] * 5 + [429]
    assert len({error["message"] for error in errors[:5]}) == 1


async def test_sign_in_over_plain_http_from_elsewhere_is_refused(
    admin_gateway: AdminGateway,
) -> None:
    headers = {"host": "10.0.0.5:8000", "origin": "http://10.0.0.5:8000"}
    body = {"key": root_key(admin_gateway)}
    response = await admin_gateway.client.post(SESSION, json=body, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (403, "insecure_connection")


@pytest.mark.parametrize("is_behind_proxy", [False, True])
async def test_named_host_is_served_over_http_by_choice_or_behind_a_trusted_proxy(
    migrated: Path, tmp_path: Path, is_behind_proxy: bool
) -> None:
    path = tmp_path / "argosy.db"
    shutil.copy(migrated, path)
    console = ConsoleConfig(allowed_hosts=("LLM.test",), insecure_http=not is_behind_proxy)
    proxies = ("127.0.0.1/32",) if is_behind_proxy else ()
    headers = {"host": "llm.test:8000", "origin": "http://llm.test:8000"}
    if is_behind_proxy:
        headers |= {"origin": "https://llm.test:8000", "x-forwarded-proto": "https"}
    settings: dict[str, Any] = {"console": console, "auth": AuthConfig(trusted_proxies=proxies)}
    async with run_admin_gateway(f"sqlite:///{path}", **settings) as gateway:
        body = {"key": root_key(gateway)}
        forged = headers | {"origin": "https://attacker.test"}
        assert (await gateway.client.post(SESSION, json=body, headers=forged)).status_code == 403
        response = await gateway.client.post(SESSION, json=body, headers=headers)
        assert response.status_code == 200, response.text
        gateway.client.cookies.clear()
        cookie = response.headers["set-cookie"]
        name = "__Host-argosy" if is_behind_proxy else "argosy-insecure"
        assert cookie.startswith(f"{name}=")
        assert ("; Secure" in cookie) == is_behind_proxy
        session = headers | {"cookie": cookie.partition(";")[0]}
        assert (await gateway.client.get("/admin/keys", headers=session)).status_code == 200
        del session[
            "origin"
        ]  # browsers send none with a GET, and no Sec-Fetch-Site over plain HTTP
        plain = await gateway.client.get("/admin/keys", headers=session)
        assert plain.status_code == (403 if is_behind_proxy else 200)
