"""The console's routes over HTTP: hosts, origins, sessions, static files, the event stream and the playground.

Weaknesses that were found in other gateways and consoles are among the tests; docs/explanation/security.md lists them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.support.fake_upstream import UpstreamRequest, fake_upstream
from tests.support.organisations import AdminGateway, Json, run_admin_gateway

from argosy.deployment import AuthConfig, ConsoleConfig
from argosy.gateway.admin import list_endpoints
from argosy.store import ConsoleSessionStore, StoreError

pytestmark = pytest.mark.asyncio(loop_scope="module")

OWN_PAGE = {"sec-fetch-site": "same-origin"}
SESSION = "/console/session"
CHAT = {"model": "big", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
INJECTIONS = ("' OR '1'='1", "x' UNION SELECT digest FROM keys --", '"; DROP TABLE keys; --', "%")
NO_ORIGIN, NO_HOST = (403, "origin_not_allowed"), (421, "host_not_allowed")


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
    shared_gateway: AdminGateway,
) -> None:
    client, headers = shared_gateway.client, await session_headers(shared_gateway)
    assert headers["cookie"].startswith("__Host-argosy=")
    other_service = 'other={"a": [1]}'
    headers["cookie"] = f"{other_service}; {headers['cookie']}"
    who = await client.get(SESSION, headers=headers)
    assert (who.json()["role"], who.json()["is_local"]) == ("admin", False)
    assert (await client.get("/admin/keys", headers=headers)).status_code == 200
    response = await client.post("/console/v1/chat/completions", json=CHAT, headers=headers)
    assert response.status_code == 200, response.text
    for method, path in (
        ("GET", "/v1/models"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/metrics"),
    ):
        answer = await client.request(method, path, json=CHAT, headers=headers)
        assert answer.json()["error"]["code"] == "missing_api_key", path


async def test_requests_of_other_pages_and_under_other_names_are_refused(
    shared_gateway: AdminGateway,
) -> None:
    client, own = shared_gateway.client, await session_headers(shared_gateway)
    changes: list[tuple[Json, tuple[int, str]]] = [
        ({"sec-fetch-site": "same-site"}, NO_ORIGIN),
        ({"sec-fetch-site": "cross-site"}, NO_ORIGIN),
        ({"sec-fetch-site": "none"}, NO_ORIGIN),
        ({"sec-fetch-site": "", "origin": "http://127.0.0.1:1"}, NO_ORIGIN),
        ({"sec-fetch-site": ""}, NO_ORIGIN),
        ({"sec-fetch-site": "", "user-agent": "curl/8.0"}, NO_ORIGIN),
        ({"host": "attacker.test"}, NO_HOST),
        ({"host": "attacker.test", "origin": "http://attacker.test"}, NO_HOST),
        ({"host": "localhost@attacker.test"}, NO_HOST),
    ]
    for changed, expected in changes:
        headers = own | changed
        events = await client.get("/console/events", headers=headers)
        assert (events.status_code, events.json()["error"]["code"]) == expected
        for method in ("GET", "POST", "PATCH", "PUT", "DELETE", "PROPFIND"):
            for path in ("/admin/organisations", "/admin/keys", "/admin/limits/x"):
                response = await client.request(method, path, json={"name": "x"}, headers=headers)
                assert response.status_code in {401, expected[0]}, (method, path)  # 401: no cookie
    assert "x" not in {one.name for one in shared_gateway.store.accounts.list_organisations()}


async def test_document_is_served_to_browsers_under_known_names_only(
    shared_gateway: AdminGateway,
) -> None:
    client, browser = shared_gateway.client, {"accept": "text/html,*/*"}
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


async def test_session_ends_with_sign_out_and_with_its_key(shared_gateway: AdminGateway) -> None:
    client = shared_gateway.client
    first, second = await session_headers(shared_gateway), await session_headers(shared_gateway)
    assert (await client.delete(SESSION, headers=first)).status_code == 200
    ended = await client.get("/admin/keys", headers=first)
    assert (ended.status_code, ended.json()["error"]["code"]) == (401, "session_ended")
    assert (await client.get("/admin/keys", headers=second)).status_code == 200
    body = {"project": shared_gateway.home_project, "name": "short"}
    key = await shared_gateway.create("/admin/keys", body | {"role": "viewer", "scope": "gateway"})
    session = await session_headers(shared_gateway, key["key"])
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
        await client.post(f"/admin/keys/{key['id']}/revoke", headers=shared_gateway.root_headers)
        assert (await client.get("/admin/pools", headers=session)).status_code == 401
        for one in (lines, bearer_lines):
            assert "event: session_ended" in [line async for line in one]


async def test_console_can_be_used_while_the_store_cannot(
    shared_gateway: AdminGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StoreError("gone")

    known = await session_headers(shared_gateway)
    unknown = await session_headers(shared_gateway)
    assert (await shared_gateway.client.get(SESSION, headers=known)).status_code == 200
    with monkeypatch.context() as outage:
        for name in ("find", "create", "delete"):
            outage.setattr(ConsoleSessionStore, name, fail)
        fresh = await session_headers(shared_gateway)
        statuses = [
            (await shared_gateway.client.get("/admin/replicas", headers=each)).status_code
            for each in (known, fresh, unknown)
        ]
        assert statuses == [200, 200, 503]
        response = await sign_in(shared_gateway, "sk-argosy-wrong")
        assert response.status_code == 401
    response = await shared_gateway.client.get("/admin/replicas", headers=fresh)
    assert response.json()["error"]["code"] == "session_ended"


async def test_flood_of_a_browser_leaves_requests_for_models_as_they_are(
    shared_gateway: AdminGateway,
) -> None:
    """A screen that sends 50 requests at once and repeats them (BerriAI/litellm#20720), and 20 event streams."""
    client = shared_gateway.client
    completion = {"model": "big", "prompt": "Say", "max_tokens": 4, "stream": True}

    async def complete() -> list[str]:
        answer = await client.post(
            "/v1/completions", json=completion, headers=shared_gateway.root_headers
        )
        events = re.findall(r"^data: (.+)$", answer.text, re.MULTILINE)
        return [json.loads(event)["choices"][0]["text"] for event in events if event != "[DONE]"]

    undisturbed = await complete()
    assert undisturbed
    session = await session_headers(shared_gateway)
    callers = [
        session,
        *[await shared_gateway.key_headers("viewer", "gateway", None) for _ in range(3)],
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


@pytest.mark.asyncio(loop_scope="function")
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
    shared_gateway: AdminGateway,
) -> None:
    headers = {"host": "10.0.0.5:8000", "origin": "http://10.0.0.5:8000"}
    body = {"key": root_key(shared_gateway)}
    response = await shared_gateway.client.post(SESSION, json=body, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (403, "insecure_connection")


@pytest.mark.parametrize("is_behind_proxy", [False, True])
async def test_named_host_is_served_over_http_by_choice_or_behind_a_trusted_proxy(
    tmp_path: Path, is_behind_proxy: bool
) -> None:
    console = ConsoleConfig(allowed_hosts=("LLM.test",), insecure_http=not is_behind_proxy)
    proxies = ("127.0.0.1/32",) if is_behind_proxy else ()
    headers = {"host": "llm.test:8000", "origin": "http://llm.test:8000"}
    if is_behind_proxy:
        headers |= {"origin": "https://llm.test:8000", "x-forwarded-proto": "https"}
    settings: dict[str, Any] = {"console": console, "auth": AuthConfig(trusted_proxies=proxies)}
    async with run_admin_gateway(tmp_path, **settings) as gateway:
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
        del session["origin"]  # browsers send none with a GET, and over plain HTTP no fetch site
        plain = await gateway.client.get("/admin/keys", headers=session)
        assert plain.status_code == (403 if is_behind_proxy else 200)


# --- weaknesses of others ------------------------------------------------------------------------


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
    session = await sign_in(gateway, key)
    if session.status_code == 200:
        cookie = await session_headers(gateway, key)
        path = path.replace("/v1/", "/console/v1/")
        session = await gateway.client.request(method, path, json=CHAT, headers=cookie)
    answers["session"] = session
    return {
        way: (answer.status_code, answer.json().get("error", {}).get("code"))
        for way, answer in answers.items()
    }


async def test_restrictions_hold_in_every_way_to_present_a_key(
    shared_gateway: AdminGateway,
) -> None:
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
        body = {"project": shared_gateway.home_project, "name": f"restricted-{number}"} | fields
        key = (await shared_gateway.create("/admin/keys", body))["key"]
        answers = await send_in_every_way(shared_gateway, key, method, path)
        assert set(answers.values()) == {expected}, (fields, answers)
    ends: tuple[Json, ...] = ({"expires_at": time.time() + 0.3}, {})
    for fields in ends:
        name = f"ended-{len(fields)}"
        body = {"project": shared_gateway.home_project, "name": name, **fields}
        created = await shared_gateway.create("/admin/keys", body)
        cookie = await session_headers(shared_gateway, created["key"])
        if not fields:
            await shared_gateway.create(f"/admin/keys/{created['id']}/revoke", {})
        while fields and time.time() < fields["expires_at"]:
            await shared_gateway.client.get("/health")
        answers = await send_in_every_way(shared_gateway, created["key"], *chat)
        assert {status for status, _ in answers.values()} == {401}, answers
        ended = await shared_gateway.client.get("/admin/me", headers=cookie)
        assert ended.status_code == 401


async def test_methods_that_no_route_declares_are_refused(shared_gateway: AdminGateway) -> None:
    client = shared_gateway.client
    declared: dict[str, set[str]] = {}
    for endpoint in list_endpoints():
        path = endpoint.path.replace("{id}", "some")
        declared.setdefault(path, set()).add(endpoint.method)
    declared |= {"/console/session": {"GET", "POST", "DELETE"}, "/console/events": {"GET"}}
    declared |= {"/console/static/app.js": {"GET"}, "/console/v1/models": {"GET"}}
    before = shared_gateway.store.load_snapshot().version
    for path, methods in declared.items():
        for method in {"PUT", "PATCH", "DELETE", "POST", "PROPFIND", "ARGOSY"} - methods:
            headers = shared_gateway.root_headers | OWN_PAGE
            response = await client.request(method, path, headers=headers)
            assert response.status_code in {400, 405}, (method, path, response.text)
            anonymous = await client.request(method, path)
            assert anonymous.status_code in {400, 401, 403, 405}, (method, path)
    assert shared_gateway.store.load_snapshot().version == before


async def test_quotes_in_credentials_ids_and_filters_are_text(shared_gateway: AdminGateway) -> None:
    own, foreign = await shared_gateway.create_customer(), await shared_gateway.create_customer()
    viewer = await shared_gateway.key_headers("viewer", "organisation", own.organisation)
    client = shared_gateway.client
    filters = {"projects": "organisation", "keys": "project", "requests": "project"}
    filters |= {"usage": "model", "audit": "subject"}
    before = shared_gateway.store.load_snapshot().keys
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
    assert shared_gateway.store.load_snapshot().keys == before


async def test_secret_of_a_backend_goes_to_its_own_address_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither fields of a request nor a redirect of the backend send its key elsewhere."""
    monkeypatch.setenv("BACKEND_KEY", "secret")
    received: list[str | None] = []
    async with fake_upstream() as attacker:

        async def redirect(request: UpstreamRequest) -> None:
            received.append(request.headers.get("authorization"))
            head = f"HTTP/1.1 307 X\r\nlocation: {attacker.url}{request.path}\r\n"
            request.writer.write(f"{head}content-length: 0\r\n\r\n".encode())

        async with run_admin_gateway(
            tmp_path,
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
            is_default = {each["path"]: each["is_default"] for each in shown.json()["data"]}
            assert is_default["models.0.routing"]
            assert not is_default["models.0.name"]
        assert set(received) == {"Bearer secret"}
        assert (attacker.requests, attacker.fetched_paths) == ([], [])
