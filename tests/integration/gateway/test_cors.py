"""Web pages that ask the gateway themselves: which of them browsers let read what is answered."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import httpx2
import pytest
from tests.support.backend_formats import LlamaCpp
from tests.support.fake_backend import running as listening
from tests.support.gateway_client import BODIES, CHAT, gateway

from argosy.gateway import AuthConfig, GatewayConfig, GatewayServer, ModelConfig, ReplicaConfig

HERE = "http://localhost:5173"
APP = "https://app.example.com"
ALLOWED = "access-control-allow-origin"


@contextlib.asynccontextmanager
async def asked(*origins: str) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of a gateway that lets pages of these origins ask; none: as by default."""
    auth = AuthConfig(allowed_origins=origins) if origins else AuthConfig()
    double = LlamaCpp()
    async with (
        listening(double),
        gateway(ReplicaConfig(url=double.url, model=double.model), auth=auth) as (_, client),
    ):
        yield client


async def preflight(client: httpx2.AsyncClient, origin: str, path: str = CHAT) -> httpx2.Response:
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }
    return await client.options(path, headers=headers)


async def test_a_page_of_this_machine_asks_and_reads() -> None:
    async with asked() as client:
        may = await preflight(client, HERE)
        assert (may.status_code, may.content, may.headers[ALLOWED]) == (200, b"", HERE)
        assert may.headers["access-control-allow-methods"] == "POST"
        allowed = may.headers["access-control-allow-headers"]
        assert allowed == "authorization,content-type,x-stainless-lang"
        for changes, status in (({}, 200), ({"stream": True}, 200), ({"model": "other"}, 404)):
            body = BODIES[CHAT] | changes
            answer = await client.post(CHAT, json=body, headers={"origin": HERE})
            assert (answer.status_code, answer.headers[ALLOWED]) == (status, HERE)
            assert answer.headers["access-control-expose-headers"] == "*"
            assert answer.headers["vary"] == "origin"
        answer = await client.get("/nowhere", headers={"origin": HERE})
        assert (answer.status_code, answer.headers[ALLOWED]) == (404, HERE)


@pytest.mark.parametrize("origin", [APP, "null", "https://localhost.example.com"])
async def test_other_pages_may_not_unless_they_are_named(origin: str) -> None:
    async with asked() as client:
        refused = await preflight(client, origin)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "origin_not_allowed")
        answer = await client.get("/health", headers={"origin": origin})
        assert (answer.status_code, ALLOWED in answer.headers) == (200, False)
    async with asked(origin if origin != "null" else "*") as client:
        assert (await preflight(client, origin)).headers[ALLOWED] == origin
        assert (await preflight(client, origin, "/v1/models")).status_code == 200
        answer = await client.get("/health", headers={"origin": origin})
        assert answer.headers[ALLOWED] == origin


async def test_where_others_are_named_pages_of_this_machine_are_not() -> None:
    async with asked(APP) as client:
        assert (await preflight(client, HERE)).status_code == 403


async def test_no_page_of_another_origin_administers() -> None:
    async with asked(HERE) as client:
        refused = await preflight(client, HERE, "/admin/keys")
        assert (refused.status_code, ALLOWED in refused.headers) == (405, False)


async def test_who_asks_for_options_and_is_no_page_is_told_what_there_is() -> None:
    async with asked() as client:
        answer = await client.options(CHAT, headers={"origin": HERE})
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        answer = await client.options(CHAT)
        assert (answer.status_code, "vary" in answer.headers) == (405, False)


@pytest.mark.parametrize("wrong", ["app.example.com", "https://app.example.com/", "null", ""])
def test_what_is_no_origin_is_refused(wrong: str) -> None:
    models = [ModelConfig(name="big", replicas=[ReplicaConfig(url="http://127.0.0.1:1")])]
    config = GatewayConfig(models=models, auth=AuthConfig(allowed_origins=(wrong,)))
    with pytest.raises(ValueError, match=r"allowed origins: '.*' is not an origin\. Write"):
        GatewayServer(config, print)
