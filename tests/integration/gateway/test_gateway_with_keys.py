"""Gateway with a store and API keys: access of each key, changes of accounts while it runs, and recorded usage."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import msgspec
import openai
import pytest
from tests.support.fake_upstream import FakeUpstream, fake_upstream
from tests.support.gateway_processes import open_sdk_client
from tests.support.idempotent_gateway import run_servers
from tests.support.migrated_store import open_migrated_store
from tests.support.waiting import until
from typer.testing import CliRunner

from argosy.cli.app import app
from argosy.deployment import AuthConfig, GatewayConfig, ModelConfig, ReplicaConfig
from argosy.gateway import GatewayServer
from argosy.store import AccountSnapshot, Role, Store, StoreConfig, open_store

TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.05
DEFAULT_AUTH = AuthConfig()


@pytest.fixture
def url(tmp_path: Path) -> str:
    """URL of a store that does not exist yet."""
    return f"sqlite:///{tmp_path}/argosy.db"


def make_config(server: FakeUpstream, url: str, host: str = "127.0.0.1") -> GatewayConfig:
    """Return the configuration of a gateway with a store and two models on one server."""
    replicas = [ReplicaConfig(url=server.url, kind="openai", model="rough")]
    return GatewayConfig(
        host=host,
        port=0,
        models=[ModelConfig(name=name, replicas=replicas) for name in ("big", "small")],
        store=StoreConfig(url=url),
    )


@contextlib.asynccontextmanager
async def gateway_with_store(
    url: str, auth: AuthConfig = DEFAULT_AUTH
) -> AsyncIterator[tuple[FakeUpstream, httpx2.AsyncClient]]:
    """Run a gateway with a store. Yields its upstream server and a client without a key."""
    async with fake_upstream() as server:
        config = msgspec.structs.replace(make_config(server, url), auth=auth)
        async with (
            run_servers(config) as (base_url,),
            httpx2.AsyncClient(base_url=base_url, timeout=TIMEOUT_S) as client,
        ):
            yield server, client


async def stream_completion(client: httpx2.AsyncClient, key: str, model: str) -> str:
    """Stream a completion with the OpenAI SDK and return its text."""
    async with open_sdk_client(str(client.base_url).rstrip("/"), key) as openai_client:
        stream = await openai_client.completions.create(
            model=model, prompt="Say", max_tokens=3, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])


async def wait_for_status(
    client: httpx2.AsyncClient, headers: dict[str, str], status: int, interval_s: float
) -> None:
    """Wait until /v1/models has this status. The gateway reads changed accounts once per second."""
    async with asyncio.timeout(TIMEOUT_S):
        while (await client.get("/v1/models", headers=headers)).status_code != status:  # noqa: ASYNC110
            await asyncio.sleep(interval_s)


async def revoke_by_command(url: str, name: str) -> None:
    """Revoke a key with `argosy keys revoke`."""
    arguments = ("keys", "revoke", name, "--store", url)
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert result.exit_code == 0, result.output


def create_keys(url: str) -> dict[str, dict[str, str]]:
    """Create projects with a key each. Returns the headers by name: "chat", "search" (only "small") and "viewer"."""
    store = open_migrated_store(url)
    organisation = store.accounts.create_organisation("acme", actor="test").id
    headers = {}
    keys: tuple[tuple[str, Role, tuple[str, ...]], ...] = (
        ("chat", "user", ()),
        ("search", "user", ("small",)),
        ("viewer", "viewer", ()),
    )
    for name, role, models in keys:
        project = store.accounts.create_project(organisation, name, actor="test").id
        _, plaintext = store.accounts.create_key(
            project, name, role=role, scope="gateway", models=models, actor="test"
        )
        headers[name] = {"authorization": f"Bearer {plaintext}"}
    store.close()
    return headers


def requests_by_key(url: str) -> list[tuple[str | None, int]]:
    """Return the number of recorded requests by key."""
    store = open_store(url)
    rows = store.ledger.report(["key"])
    store.close()
    return sorted(((row.key, row.requests) for row in rows), reverse=True)


async def test_key_created_by_admin_api_is_required_scoped_and_counted(url: str) -> None:
    async with gateway_with_store(url) as (_, client):
        assert await stream_completion(client, "anything", "small"), "no key exists yet"
        created = await client.post("/admin/organisations", json={"name": "acme"})
        body = {"organisation": created.json()["id"], "name": "chat"}
        project = (await client.post("/admin/projects", json=body)).json()["id"]
        admin = {"project": project, "name": "admin", "role": "admin"}
        admin_key = (await client.post("/admin/keys", json=admin)).json()["key"]
        client.headers["authorization"] = f"Bearer {admin_key}"
        scoped = {"project": project, "name": "app", "models": ["big"]}
        key = (await client.post("/admin/keys", json=scoped)).json()

        assert await stream_completion(client, key["key"], "big")
        with pytest.raises(openai.PermissionDeniedError, match="may not use"):
            await stream_completion(client, key["key"], "small")
        with pytest.raises(openai.AuthenticationError, match="key is unknown"):
            await stream_completion(client, "anything", "big")

        await client.post(f"/admin/keys/{key['id']}/revoke")
        with pytest.raises(openai.AuthenticationError, match="may have been revoked"):
            await stream_completion(client, key["key"], "big")
    assert requests_by_key(url) == [(key["id"], 1), ("", 1)]


async def test_tenants_see_own_requests_and_models_and_viewer_sees_all(url: str) -> None:
    keys = create_keys(url)
    chat, search, viewer = keys["chat"], keys["search"], keys["viewer"]
    body = {"model": "big", "prompt": "Say", "max_tokens": 3, "stream": True}
    async with gateway_with_store(url) as (_, client):
        response = await client.post("/v1/completions", json=body, headers=chat)
        path = f"/admin/requests/{response.headers['x-request-id']}"
        assert (await client.get(path, headers=chat)).json()["status"] == "completed"
        assert (await client.get(path, headers=search)).status_code == 404
        assert (await client.get(path, headers=viewer)).json()["model"] == "big"

        models = (await client.get("/v1/models", headers=search)).json()["data"]
        assert {model["id"] for model in models} == {"small"}
        rejected = await client.post("/v1/completions", json=body, headers=viewer)
        assert rejected.json()["error"]["code"] == "insufficient_role"
        assert (await client.get("/metrics", headers=viewer)).status_code == 200
        assert (await client.get("/metrics", headers=chat)).status_code == 403
        assert (await client.get("/health")).status_code == 200


async def test_tokenize_counts_against_request_limit(url: str) -> None:
    chat = create_keys(url)["chat"]
    store = open_store(url)
    (key,) = (key for key in store.load_snapshot().keys if key.name == "chat")
    store.limits_and_prices.set_limit("key", key.id, "requests", 2, window="hour", actor="test")
    store.close()
    async with gateway_with_store(url) as (server, client):
        server.token_ids = [1, 2]
        results = []
        for _ in range(3):
            response = await client.post(
                "/tokenize", json={"model": "big", "prompt": "Say"}, headers=chat
            )
            remaining = response.headers["x-ratelimit-remaining-requests"]
            results.append((response.status_code, remaining))
        assert results == [(200, "1"), (200, "0"), (429, "0")]
        assert response.json()["error"]["code"] == "rate_limit_exceeded"


@pytest.mark.parametrize("first_poll_fails", [False, True])
async def test_key_revoked_by_command_line_is_rejected_by_running_gateway(
    url: str, monkeypatch: pytest.MonkeyPatch, first_poll_fails: bool
) -> None:
    chat = create_keys(url)["chat"]
    original = Store.is_current
    failures: list[bool] = []

    def is_current(store: Store, snapshot: AccountSnapshot) -> bool:
        if failures:
            return original(store, snapshot)
        failures.append(True)
        raise RuntimeError("can't start new thread")

    async with gateway_with_store(url) as (_, client), asyncio.timeout(TIMEOUT_S):
        assert (await client.get("/v1/models", headers=chat)).status_code == 200
        if first_poll_fails:
            monkeypatch.setattr("argosy.gateway.event_loop.RETRY_INTERVAL_S", 0.01)
            monkeypatch.setattr(Store, "is_current", is_current)
            await until(lambda: failures)
        await revoke_by_command(url, "chat")
        await wait_for_status(client, chat, 401, POLL_INTERVAL_S)


@pytest.mark.parametrize("num_lost_keys", [1, 2])
async def test_changes_after_store_is_restored_to_earlier_state_take_effect(
    url: str, tmp_path: Path, num_lost_keys: int
) -> None:
    """A PostgreSQL standby that takes over may lack the last changes."""
    chat = create_keys(url)["chat"]
    path, backup = url.removeprefix("sqlite:///"), str(tmp_path / "backup.db")
    copy_database(path, backup)
    async with gateway_with_store(url) as (_, client), asyncio.timeout(TIMEOUT_S):
        store = open_store(url)
        project = store.accounts.list_projects()[0].id
        for number in range(num_lost_keys):
            _, plaintext = store.accounts.create_key(project, f"lost{number}", actor="test")
        # Rejected attempts of an address are throttled, so poll slowly.
        await wait_for_status(client, {"authorization": f"Bearer {plaintext}"}, 200, 0.5)
        copy_database(backup, path)
        (key,) = (key for key in store.load_snapshot().keys if key.name == "chat")
        store.accounts.revoke_key(key.id, actor="test")
        store.close()
        await wait_for_status(client, chat, 401, POLL_INTERVAL_S)


def copy_database(source: str, target: str) -> None:
    """Copy an SQLite database over another one that may be in use."""
    with (
        contextlib.closing(sqlite3.connect(source)) as source_connection,
        contextlib.closing(sqlite3.connect(target)) as target_connection,
    ):
        source_connection.backup(target_connection)


async def test_all_forwarded_for_lines_are_read(url: str) -> None:
    """Each proxy may add a line. With two proxies the last line names only a proxy."""
    store = open_migrated_store(url)
    organisation = store.accounts.create_organisation("acme", actor="test").id
    project = store.accounts.create_project(organisation, "web", actor="test").id
    _, key = store.accounts.create_key(project, "in", networks=["127.0.0.0/8"], actor="test")
    store.close()
    auth = AuthConfig(trusted_proxies=("127.0.0.0/8",))
    async with gateway_with_store(url, auth) as (_, client):
        authorization = [("authorization", f"Bearer {key}")]
        for hops, status in (
            (["127.0.0.2"], 200),
            (["198.51.100.7, 127.0.0.2"], 403),
            (["198.51.100.7", "127.0.0.2"], 403),
            (["127.0.0.3", "198.51.100.7"], 403),
            (["127.0.0.3", "127.0.0.2"], 200),
        ):
            headers = [*authorization, *(("x-forwarded-for", hop) for hop in hops)]
            assert (await client.get("/v1/models", headers=headers)).status_code == status, hops
        assert (await client.get("/v1/models", headers=authorization * 2)).status_code == 401


def test_unreadable_usage_log_is_named_in_error(tmp_path: Path, url: str) -> None:
    usage_file = tmp_path / "argosy.db.usage" / "1.usage"
    usage_file.mkdir(parents=True)
    path = tmp_path / "gateway.yaml"
    models = "models: [{name: m, replicas: [{url: 'http://127.0.0.1:1'}]}]"
    path.write_text(f"port: 0\n{models}\nstore: {{url: '{url}'}}")
    result = CliRunner().invoke(app, ["gateway", "--config", str(path)])
    assert result.exit_code == 2
    assert f"{usage_file}: Is a directory" in result.output


async def test_public_listener_without_keys_is_rejected(url: str) -> None:
    async with fake_upstream() as server:
        config = make_config(server, url, host="0.0.0.0")  # noqa: S104 - must be rejected
        with pytest.raises(ValueError, match="argosy keys create"):
            await GatewayServer(config, print).run()
