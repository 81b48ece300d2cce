"""Explanations of requests that another gateway of the same store served, or that only the ledger remembers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.support.certificates import Authority
from tests.support.fake_upstream import UpstreamRequest, fake_upstream
from tests.support.gateway_client import BODIES, COMPLETION, run_gateway_server
from tests.support.gateway_processes import OrganisationAccounts, open_organisation

from argosy.deployment import GatewayConfig, ModelConfig, ReplicaConfig
from argosy.gateway import GatewayServer
from argosy.http_server import TlsConfig
from argosy.store import StoreConfig

RESPONSE_ID = "x-argosy-request"
CLIENT_ID = "the-clients-own-id"
BODY = BODIES[COMPLETION] | {"max_tokens": 3}


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'argosy.db'}"


@pytest.fixture
def accounts(store_url: str) -> Iterator[OrganisationAccounts]:
    with open_organisation(store_url) as organisation:
        yield organisation


@contextlib.asynccontextmanager
async def run_gateways(
    replica_url: str, store_url: str, count: int, tls: TlsConfig | None = None
) -> AsyncIterator[list[tuple[GatewayServer, httpx2.AsyncClient]]]:
    """Run gateways with one store and one replica. Yield each with a client."""
    config = GatewayConfig(
        port=0,
        models=[ModelConfig(name="big", replicas=[ReplicaConfig(url=replica_url, kind="openai")])],
        store=StoreConfig(url=store_url),
        tls=tls,
    )
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(run_gateway_server(config)) for _ in range(count)]


async def explain(
    client: httpx2.AsyncClient, identifier: str, key: str
) -> tuple[int, dict[str, Any]]:
    """Return status and body of an explanation."""
    headers = {"authorization": f"Bearer {key}"}
    response = await client.get(f"/admin/requests/{identifier}", headers=headers)
    return response.status_code, response.json()


async def test_any_gateway_explains_a_request_and_the_ledger_outlives_its_gateway(
    accounts: OrganisationAccounts, store_url: str
) -> None:
    project = accounts.project("shop")
    key, other_key = accounts.key(project), accounts.key(accounts.project("other"))
    operator = accounts.key(project, "operator", role="operator", scope="gateway")
    headers = {"authorization": f"Bearer {key}"}
    async with fake_upstream() as replica, run_gateways(replica.url, store_url, 1) as [(_, asked)]:
        async with run_gateways(replica.url, store_url, 1) as [(_, serving)]:
            plain = await serving.post(COMPLETION, json=BODY, headers=headers)
            named = await serving.post(
                COMPLETION, json=BODY, headers=headers | {"x-request-id": CLIENT_ID}
            )
            await serving.post(
                COMPLETION,
                json=BODY,
                headers={"authorization": f"Bearer {other_key}", "x-request-id": CLIENT_ID},
            )
            ids = [
                plain.headers["x-request-id"],
                plain.headers[RESPONSE_ID],
                named.headers[RESPONSE_ID],
            ]
            for identifier in (*ids, CLIENT_ID):
                expected = await explain(serving, identifier, key)
                assert expected[0] == 200
                assert expected[1]["source"] == "trace"
                assert await explain(asked, identifier, key) == expected
                (_, seen), (_, other) = [
                    await explain(asked, identifier, each) for each in (operator, other_key)
                ]
                if identifier == CLIENT_ID:  # a request of the other project has the same id
                    assert seen == other != expected[1]
                else:
                    assert (seen, other["error"]["code"]) == (expected[1], "not_found")
                assert expected[1]["gateway"] in expected[1]["id"]
        for identifier in ids:
            status, found = await explain(asked, identifier, key)
            assert (status, found["source"]) == (200, "ledger")
            assert found["gateway"] in found["reason"]
            assert found["id"] in ids
            assert (found["status"], found["model"]) == ("completed", "big")
            assert found["tokens"] == {"prompt": 1, "cached": 0, "output": 3}
            assert found["caller"]["project"] == project
            assert found["ms"]["ended"] >= 0
            assert (await explain(asked, identifier, other_key))[0] == 404
        status, error = await explain(asked, CLIENT_ID, key)
        assert (status, error["error"]["code"]) == (404, "not_found")


async def test_running_request_of_another_gateway_is_explained(
    accounts: OrganisationAccounts, store_url: str
) -> None:
    received, may_respond = asyncio.Event(), asyncio.Event()

    async def respond_later(request: UpstreamRequest) -> None:
        received.set()
        await may_respond.wait()
        request.start_stream()
        request.send_text("late", "stop")
        request.end_stream()

    key = accounts.key(accounts.project("shop"))
    headers = {"authorization": f"Bearer {key}", "x-request-id": CLIENT_ID}
    async with (
        fake_upstream(respond_later) as replica,
        run_gateways(replica.url, store_url, 2) as [(_, serving), (_, asked)],
    ):
        body = BODY | {"stream": True}
        pending = asyncio.create_task(serving.post(COMPLETION, json=body, headers=headers))
        await received.wait()
        assert (await explain(asked, CLIENT_ID, key))[1]["status"] == "running"
        may_respond.set()
        await pending


async def test_gateways_with_tls_know_each_other_by_their_certificates(
    accounts: OrganisationAccounts, store_url: str, tmp_path: Path
) -> None:
    """The name in the certificate need not be the internal address, nor the authority be trusted."""
    pair = Authority(tmp_path).pair("gateway.example")
    tls = TlsConfig(certificate=pair.certificate, key=pair.key)
    key = accounts.key(accounts.project("shop"))
    headers = {"authorization": f"Bearer {key}"}
    async with (
        fake_upstream() as replica,
        run_gateways(replica.url, store_url, 2, tls) as [(_, first), (_, second)],
        httpx2.AsyncClient(base_url=first.base_url, verify=False) as serving,
        httpx2.AsyncClient(base_url=second.base_url, verify=False) as asked,
    ):
        response = await serving.post(COMPLETION, json=BODY, headers=headers)
        assert response.status_code == 200
        found = await explain(asked, response.headers[RESPONSE_ID], key)
        assert found[1]["source"] == "trace"


async def test_gateways_answer_only_signed_questions_of_gateways(
    accounts: OrganisationAccounts, store_url: str
) -> None:
    key = accounts.key(accounts.project("shop"), "admin", role="admin", scope="gateway")
    async with fake_upstream() as replica, run_gateways(replica.url, store_url, 1) as [(_, client)]:
        headers = {"authorization": f"Bearer {key}"}
        response = await client.post(COMPLETION, json=BODY, headers=headers)
        for token in ("", "1.aa", "9999999999.aa", "x"):
            sent = {"x-argosy-peer-token": token, **headers}
            path = f"/peer/requests/{response.headers[RESPONSE_ID]}"
            answer = await client.get(path, headers=sent)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
