"""Cross-origin requests from web pages: preflights, response headers and the `allowed_origins` setting."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import httpx2
import msgspec
import pytest
from tests.support.fake_upstream import fake_upstream
from tests.support.gateway_client import BODIES, CHAT, gateway

from argosy.deployment import AuthConfig, GatewayConfig, ModelConfig, ReplicaConfig
from argosy.gateway import GatewayServer

LOCAL_ORIGIN = "http://localhost:5173"
APP_ORIGIN = "https://app.example.com"
ALLOW_ORIGIN = "access-control-allow-origin"


@contextlib.asynccontextmanager
async def cors_client(*allowed_origins: str) -> AsyncIterator[httpx2.AsyncClient]:
    """Run a gateway that allows these origins, by default those of this machine, and yield a client."""
    auth = AuthConfig(allowed_origins=allowed_origins) if allowed_origins else AuthConfig()
    async with (
        fake_upstream() as server,
        gateway(ReplicaConfig(url=server.url, kind="openai", model="rough"), auth=auth) as (
            _,
            client,
        ),
    ):
        yield client


async def preflight(client: httpx2.AsyncClient, origin: str, path: str = CHAT) -> httpx2.Response:
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }
    return await client.options(path, headers=headers)


async def test_local_page_may_call_and_read_responses() -> None:
    async with cors_client() as client:
        allowed = await preflight(client, LOCAL_ORIGIN)
        assert (allowed.status_code, allowed.content) == (200, b"")
        assert allowed.headers[ALLOW_ORIGIN] == LOCAL_ORIGIN
        assert allowed.headers["access-control-allow-methods"] == "POST"
        allowed_headers = allowed.headers["access-control-allow-headers"]
        assert allowed_headers == "authorization,content-type,x-stainless-lang"
        for changes, status in (({}, 200), ({"stream": True}, 200), ({"model": "other"}, 404)):
            body = BODIES[CHAT] | {"max_tokens": 3} | changes
            response = await client.post(CHAT, json=body, headers={"origin": LOCAL_ORIGIN})
            assert (response.status_code, response.headers[ALLOW_ORIGIN]) == (status, LOCAL_ORIGIN)
            assert response.headers["access-control-expose-headers"] == "*"
            assert response.headers["vary"] == "origin"
        response = await client.get("/nowhere", headers={"origin": LOCAL_ORIGIN})
        assert (response.status_code, response.headers[ALLOW_ORIGIN]) == (404, LOCAL_ORIGIN)


OTHER_ORIGINS = [
    *(
        APP_ORIGIN,
        "null",
        "https://localhost.example.com",
        "app://obsidian.md",
        "tauri://localhost",
    ),
    *("chrome-extension://abcdefgh", "vscode-webview://1a-2b", "moz-extension://0f"),
]


@pytest.mark.parametrize("origin", OTHER_ORIGINS)
async def test_other_origin_is_rejected_unless_allowed(origin: str) -> None:
    async with cors_client() as client:
        rejected = await preflight(client, origin)
        assert rejected.status_code == 403
        assert rejected.json()["error"]["code"] == "origin_not_allowed"
        response = await client.get("/health", headers={"origin": origin})
        assert (response.status_code, ALLOW_ORIGIN in response.headers) == (200, False)
    async with cors_client(origin if origin != "null" else "*") as client:
        assert (await preflight(client, origin)).headers[ALLOW_ORIGIN] == origin
        assert (await preflight(client, origin, "/v1/models")).status_code == 200
        response = await client.get("/health", headers={"origin": origin})
        assert response.headers[ALLOW_ORIGIN] == origin
        if origin != "null":
            assert (await preflight(client, f"{origin}.evil")).status_code == 403


async def test_allowed_origins_replace_local_default() -> None:
    async with cors_client(APP_ORIGIN) as client:
        assert (await preflight(client, LOCAL_ORIGIN)).status_code == 403


@pytest.mark.parametrize("content_type", ["application/json", "text/plain"])
async def test_keyless_request_of_unlisted_local_page_is_not_run(content_type: str) -> None:
    """A browser sends text/plain without a preflight, so hiding the response is not enough."""
    body = BODIES[CHAT] | {"max_tokens": 3}
    async with cors_client(APP_ORIGIN) as client:
        response = await client.post(
            CHAT,
            content=msgspec.json.encode(body),
            headers={"origin": LOCAL_ORIGIN, "content-type": content_type},
        )
        assert response.status_code == 403
        assert response.json()["error"]["code"] == "origin_not_allowed"
        own_page = str(client.base_url).rstrip("/")
        response = await client.post(CHAT, json=body, headers={"origin": own_page})
        assert response.status_code == 200


async def test_admin_api_allows_no_other_origin() -> None:
    async with cors_client(LOCAL_ORIGIN) as client:
        rejected = await preflight(client, LOCAL_ORIGIN, "/admin/keys")
        assert (rejected.status_code, ALLOW_ORIGIN in rejected.headers) == (405, False)


async def test_options_without_preflight_headers_returns_allowed_methods() -> None:
    async with cors_client() as client:
        response = await client.options(CHAT, headers={"origin": LOCAL_ORIGIN})
        assert (response.status_code, response.headers["allow"]) == (405, "POST, GET")
        response = await client.options(CHAT)
        assert (response.status_code, "vary" in response.headers) == (405, False)


@pytest.mark.parametrize("origin", ["app.example.com", "https://app.example.com/", "null", ""])
def test_invalid_origin_in_settings_is_rejected(origin: str) -> None:
    models = [ModelConfig(name="big", replicas=[ReplicaConfig(url="http://127.0.0.1:1")])]
    config = GatewayConfig(models=models, auth=AuthConfig(allowed_origins=(origin,)))
    with pytest.raises(ValueError, match=r"allowed origins: '.*' is not an origin\. Write"):
        GatewayServer(config, print)
