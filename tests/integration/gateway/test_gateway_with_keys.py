"""A gateway with keys: who gets which answers, from the front door to the ledger."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import openai
import pytest
from tests.support.scripted_server import Rough, rough_server
from tests.support.waiting import until
from typer.testing import CliRunner

from argosy.cli.app import app
from argosy.gateway import (
    AuthConfig,
    GatewayConfig,
    GatewayServer,
    ModelConfig,
    ReplicaConfig,
    load_config,
)
from argosy.store import AccountSnapshot, Role, Store, StoreConfig, open_store

ANYBODY = AuthConfig()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/argosy.db"


def settings(replica: Rough, url: str, host: str = "127.0.0.1") -> GatewayConfig:
    """Two models on one server, and a store."""
    behind = [ReplicaConfig(url=replica.url, kind="openai", model="rough")]
    return GatewayConfig(
        host=host,
        port=0,
        models=[ModelConfig(name=name, replicas=behind) for name in ("big", "small")],
        store=StoreConfig(url=url),
    )


@contextlib.asynccontextmanager
async def gateway(replica: Rough, url: str, auth: AuthConfig = ANYBODY) -> AsyncIterator[str]:
    """The base URL of a gateway with a store, in front of a server for `big` and `small`."""
    config = msgspec.structs.replace(settings(replica, url), auth=auth)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = GatewayServer(config, ready.set_result)
    running = asyncio.create_task(server.run())
    try:
        yield await ready
    finally:
        server.stop()
        await running


async def complete(base: str, key: str, model: str) -> str:
    """The text that the SDK gets."""
    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key=key, max_retries=0) as client:
        answer = await client.completions.create(
            model=model, prompt="Say", max_tokens=3, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in answer if chunk.choices])


async def test_a_key_made_through_the_api_opens_the_door_and_its_use_is_counted(url: str) -> None:
    async with rough_server() as replica, gateway(replica, url) as base:
        assert await complete(base, "anything", "small"), "nobody has a key yet"
        async with httpx2.AsyncClient(base_url=base, timeout=30) as client:
            made = await client.post("/admin/organisations", json={"name": "acme"})
            body = {"organisation": made.json()["id"], "name": "chat"}
            project = (await client.post("/admin/projects", json=body)).json()["id"]
            admin = {"project": project, "name": "admin", "role": "admin"}
            admin_key = (await client.post("/admin/keys", json=admin)).json()["key"]
            client.headers["authorization"] = f"Bearer {admin_key}"
            scoped = {"project": project, "name": "app", "models": ["big"]}
            key = (await client.post("/admin/keys", json=scoped)).json()

            assert await complete(base, key["key"], "big")
            with pytest.raises(openai.PermissionDeniedError, match="may not use"):
                await complete(base, key["key"], "small")
            with pytest.raises(openai.AuthenticationError, match="key is unknown"):
                await complete(base, "anything", "big")

            await client.post(f"/admin/keys/{key['id']}/revoke")
            with pytest.raises(openai.AuthenticationError, match="may have been revoked"):
                await complete(base, key["key"], "big")
    assert used(url) == [(key["id"], 1), ("", 1)]


async def test_each_tenant_sees_its_own_and_operators_see_all(url: str) -> None:
    chat, search, viewer = tenants(url)
    body = {"model": "big", "prompt": "Say", "max_tokens": 3, "stream": True}
    async with (
        rough_server() as replica,
        gateway(replica, url) as base,
        httpx2.AsyncClient(base_url=base, timeout=30) as client,
    ):
        answer = await client.post("/v1/completions", json=body, headers=chat)
        path = f"/admin/requests/{answer.headers['x-request-id']}"
        assert (await client.get(path, headers=chat)).json()["status"] == "completed"
        assert (await client.get(path, headers=search)).status_code == 404
        assert (await client.get(path, headers=viewer)).json()["model"] == "big"

        seen = {
            model["id"] for model in (await client.get("/v1/models", headers=search)).json()["data"]
        }
        assert seen == {"small"}
        refused = await client.post("/v1/completions", json=body, headers=viewer)
        assert refused.json()["error"]["code"] == "insufficient_role"
        assert (await client.get("/metrics", headers=viewer)).status_code == 200
        assert (await client.get("/metrics", headers=chat)).status_code == 403
        assert (await client.get("/health")).status_code == 200


async def test_what_generates_nothing_counts_against_the_limit_on_requests(url: str) -> None:
    chat, *_ = tenants(url)
    store = open_store(url)
    (key,) = (key for key in store.load_snapshot().keys if key.name == "chat")
    store.limits_and_prices.set_limit("key", key.id, "requests", 2, window="hour", actor="test")
    store.close()
    async with (
        rough_server() as replica,
        gateway(replica, url) as base,
        httpx2.AsyncClient(base_url=base, timeout=30, headers=chat) as client,
    ):
        replica.tokenize = [1, 2]
        told = []
        for _ in range(3):
            answer = await client.post("/tokenize", json={"model": "big", "prompt": "Say"})
            told.append((answer.status_code, answer.headers["x-ratelimit-remaining-requests"]))
        assert told == [(200, "1"), (200, "0"), (429, "0")]
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"


async def test_a_change_by_the_command_line_counts_in_a_running_gateway(url: str) -> None:
    chat, *_ = tenants(url)
    async with (
        rough_server() as replica,
        gateway(replica, url) as base,
        httpx2.AsyncClient(base_url=base, timeout=30) as client,
    ):
        assert (await client.get("/v1/models", headers=chat)).status_code == 200
        arguments = ("keys", "revoke", "chat", "--store", url)
        revoked = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        assert revoked.exit_code == 0, revoked.output
        async with asyncio.timeout(30):
            while (await client.get("/v1/models", headers=chat)).status_code != 401:  # noqa: ASYNC110 - it looks each second
                await asyncio.sleep(0.05)


async def test_changes_count_again_once_they_can_be_read_again(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, *_ = tenants(url)
    looks = Store.is_current
    failed: list[bool] = []

    def is_current(store: Store, directory: AccountSnapshot) -> bool:
        if failed:
            return looks(store, directory)
        failed.append(True)
        raise RuntimeError("can't start new thread")

    async with (
        rough_server() as replica,
        gateway(replica, url) as base,
        httpx2.AsyncClient(base_url=base, timeout=30) as client,
    ):
        monkeypatch.setattr("argosy.gateway.pool.background.RETRY_INTERVAL_S", 0.01)
        monkeypatch.setattr(Store, "is_current", is_current)
        async with asyncio.timeout(30):
            await until(lambda: failed)
            arguments = ("keys", "revoke", "chat", "--store", url)
            await asyncio.to_thread(CliRunner().invoke, app, arguments)
            while (await client.get("/v1/models", headers=chat)).status_code != 401:  # noqa: ASYNC110 - it looks each second
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("lost", [1, 2])
async def test_accounts_that_were_put_back_to_an_earlier_state_count_from_then_on(
    url: str, tmp_path: Path, lost: int
) -> None:
    """As after a PostgreSQL whose standby had not heard of the last changes took over."""
    chat, *_ = tenants(url)
    path, copy = url.removeprefix("sqlite:///"), str(tmp_path / "copy.db")
    put(path, copy)
    async with (
        rough_server() as replica,
        gateway(replica, url) as base,
        httpx2.AsyncClient(base_url=base, timeout=30) as client,
        asyncio.timeout(30),
    ):
        store = open_store(url)
        project = store.accounts.list_projects()[0].id
        for number in range(lost):
            _, plain = store.accounts.create_key(project, f"lost{number}", actor="test")
        known = {"authorization": f"Bearer {plain}"}
        while (await client.get("/v1/models", headers=known)).status_code != 200:  # noqa: ASYNC110 - it looks each second
            await asyncio.sleep(0.5)  # within the failures that an address may have
        put(copy, path)
        (key,) = (key for key in store.load_snapshot().keys if key.name == "chat")
        store.accounts.revoke_key(key.id, actor="test")
        store.close()
        while (await client.get("/v1/models", headers=chat)).status_code != 401:  # noqa: ASYNC110 - it looks each second
            await asyncio.sleep(0.05)


def put(source: str, target: str) -> None:
    """Have a database be what another one is, whoever uses it."""
    with (
        contextlib.closing(sqlite3.connect(source)) as there,
        contextlib.closing(sqlite3.connect(target)) as here,
    ):
        there.backup(here)


async def test_every_line_of_proxies_is_read(url: str) -> None:
    """A proxy may add a line of its own: the last one alone names a proxy where there are two."""
    store = open_store(url)
    store.migrate()
    organisation = store.accounts.create_organisation("acme", actor="test").id
    project = store.accounts.create_project(organisation, "web", actor="test").id
    _, key = store.accounts.create_key(project, "in", networks=["127.0.0.0/8"], actor="test")
    store.close()
    auth = AuthConfig(trusted_proxies=("127.0.0.0/8",))
    async with (
        rough_server() as replica,
        gateway(replica, url, auth) as base,
        httpx2.AsyncClient(base_url=base, timeout=30) as client,
    ):
        asking = [("authorization", f"Bearer {key}")]
        for hops, status in (
            (["127.0.0.2"], 200),
            (["198.51.100.7, 127.0.0.2"], 403),
            (["198.51.100.7", "127.0.0.2"], 403),
            (["127.0.0.3", "198.51.100.7"], 403),
            (["127.0.0.3", "127.0.0.2"], 200),
        ):
            headers = [*asking, *(("x-forwarded-for", hop) for hop in hops)]
            assert (await client.get("/v1/models", headers=headers)).status_code == status, hops
        assert (await client.get("/v1/models", headers=asking * 2)).status_code == 401


@pytest.mark.parametrize(
    "useless", ["limits: {redis: 'redis://localhost'}", "auth: {mode: required}"]
)
def test_settings_that_need_a_store_say_so(tmp_path: Path, useless: str) -> None:
    path = tmp_path / "gateway.yaml"
    behind = "models: [{name: m, replicas: [{url: 'http://localhost:1'}]}]\n"
    path.write_text(behind + useless)
    with pytest.raises(ValueError, match="Add `store`"):
        load_config(path)
    path.write_text(f"{behind}{useless}\nstore: {{}}")
    assert load_config(path).store is not None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("port: 99999", r"<= 65535 - at `\$.port`"),
        ("body_limit_bytes: -1", r">= 1 - at `\$.body_limit_bytes`"),
        ("drain_deadline_s: .nan", r">= 0.0 - at `\$.drain_deadline_s`"),
        ("colour: red", "unknown field `colour`"),
        ("models: [{name: m, replicas: [{url: 'http://a'}, {url: 'http://a'}]}]", "'http://a' is"),
        (
            "models: [{name: m, replicas: [{url: 'http://a', name: x}, {url: 'http://b', name: x}]}]",
            "model 'm', replica 'x' is defined twice",
        ),
        (
            "models: [{name: m, aliases: [m], replicas: [{url: 'http://a'}]}]",
            "model name 'm' is defined twice",
        ),
        (
            "auth:\n  mode: required\n  mode: 'off'",
            "'mode' is defined twice, in line 3 and in line 4",
        ),
        ("port: 1\nport: 2", "'port' is defined twice, in line 2 and in line 3. Keep one"),
        ("models: [{name: m, replicas: [{url: x, url: y}]}]", "'url' is defined twice"),
        ("prot: 1", "unknown field `prot`; did you mean `port`"),
        ("auth: {jwt: {audience: [a], isuer: x}}", r"auth.jwt`; did you mean `issuer`"),
        ("models: [{name: m, replicas: [{url: x, tls: {caa: x}}]}]", "did you mean `ca`"),
        ("log_level: loud", "Invalid enum value 'loud' .*; write debug, error, info or warning"),
        ("auth: {jwt: {audience: [a], algorithms: [HS256]}}", "write ES256, ES384, .* or RS512"),
        ("models: [{name: m, replicas: [{url: x, kind: vlm}]}]", "; write .*vllm"),
        ("port: 2026-12-24", "Expected `int`, got `str`"),
        ("models: []", "length >= 1"),
        ("port: [", "parsing"),
        ("models: [{name: '', replicas: [{url: x}]}]", r"regex .* at `\$.models\[0\].name`"),
        ('models: [{name: "a\\tb", replicas: [{url: x}]}]', "regex .*name"),
        ("models: [{name: m, aliases: [' a'], replicas: [{url: x}]}]", "regex .*aliases"),
        (
            "models: [{name: m, replicas: [{url: 'http://x', tls: {ca: y}}]}]",
            "tls needs an https URL",
        ),
        (
            "models: [{name: m, replicas: [{url: 'http://x', kind: tgi, priority_scheduling: true}]}]",
            "priority_scheduling is only supported for kind vllm or sglang. Remove it",
        ),
        ("explain: {max_requests: -1}", ">= 0"),
        ("explain: {retention_s: .nan}", ">= 0"),
        ("auth: {jwt: {audience: ['']}}", "length >= 1"),
        ("store: {keep_usage_days: 9999999}", "<= 36500"),
        pytest.param("store: " + "[" * 1000, "the settings are nested too deeply", id="nested"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_with_their_file(
    tmp_path: Path, settings: str, said: str
) -> None:
    path = tmp_path / "gateway.yaml"
    with pytest.raises(ValueError, match=r"gateway\.yaml cannot be read: No such file"):
        load_config(path)
    models = (
        ""
        if settings.startswith("models")
        else "models: [{name: m, replicas: [{url: 'http://a'}]}]\n"
    )
    path.write_text(models + settings)
    with pytest.raises(ValueError, match=f"gateway.yaml: .*{said}"):
        load_config(path)


def test_words_of_the_settings_are_words(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    models = "models: [{name: 2026-11-22, aliases: [on], replicas: [{url: 'http://a', stream_usage: false}]}]"
    path.write_text(f"{models}\nfast_path: off\nauth: {{mode: disabled}}")
    config = load_config(path)
    (model,) = config.models
    assert (model.name, model.aliases) == ("2026-11-22", ("on",))
    assert (config.fast_path, config.auth.mode) == ("off", "disabled")
    assert not model.replicas[0].stream_usage


@pytest.mark.parametrize("empty", ["", "# nothing yet", "---"])
def test_a_file_without_settings_lacks_models(tmp_path: Path, empty: str) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(empty)
    with pytest.raises(ValueError, match="missing required field `models`"):
        load_config(path)


@pytest.mark.parametrize(
    ("replica", "said"),
    [
        ({"url": "http://user:secret@x"}, "URL of x has a user, a query"),
        ({"url": "http://x?key=secret"}, "URL of x has a user, a query"),
        ({"url": "http://x/a b"}, "or a space"),
        ({"url": "http://x y"}, "or a space"),
        (
            {"url": "http://x", "headers": {"Content-Length": "5"}},
            r"gateway sets the header .* itself\. Remove it",
        ),
        (
            {"url": "http://x", "headers": {"host": "y"}},
            r"gateway sets the header .* itself\. Remove it",
        ),
    ],
)
def test_what_a_replica_would_not_be_told_is_refused(replica: dict[str, Any], said: str) -> None:
    config = GatewayConfig(models=[ModelConfig(name="m", replicas=[ReplicaConfig(**replica)])])
    with pytest.raises(ValueError, match=said) as refused:
        GatewayServer(config, print)
    assert "secret" not in str(refused.value)


def test_a_log_in_json_has_no_other_lines(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(
        "{port: 0, log_format: json, models: [{name: m, replicas: [{url: 'http://127.0.0.1:1'}]}]}"
    )
    command = [sys.executable, "-m", "argosy.cli", "gateway", "--config", str(path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if json.loads(line)["event"] == "ready":
                break
        process.terminate()
        assert [json.loads(line)["event"] for line in process.stderr][-1] == "draining"


def test_what_the_system_refuses_is_said_with_its_file(tmp_path: Path, url: str) -> None:
    strange = tmp_path / "argosy.db.usage" / "1.usage"
    strange.mkdir(parents=True)
    path = tmp_path / "gateway.yaml"
    models = "models: [{name: m, replicas: [{url: 'http://127.0.0.1:1'}]}]"
    path.write_text(f"port: 0\n{models}\nstore: {{url: '{url}'}}")
    said = CliRunner().invoke(app, ["gateway", "--config", str(path)])
    assert said.exit_code == 2
    assert f"{strange}: Is a directory" in said.output


async def test_listening_to_everybody_without_keys_is_refused(url: str) -> None:
    async with rough_server() as replica:
        config = settings(replica, url, host="0.0.0.0")  # noqa: S104 - what is refused
        with pytest.raises(ValueError, match="argosy keys create"):
            await GatewayServer(config, print).run()


def tenants(url: str) -> list[dict[str, str]]:
    """Headers of a tenant's key, of another's that may only use `small`, and of a viewer's."""
    store = open_store(url)
    store.migrate()
    organisation = store.accounts.create_organisation("acme", actor="test").id
    headers = []
    kinds: tuple[tuple[str, Role, tuple[str, ...]], ...] = (
        ("chat", "user", ()),
        ("search", "user", ("small",)),
        ("watch", "viewer", ()),
    )
    for name, role, models in kinds:
        project = store.accounts.create_project(organisation, name, actor="test").id
        _, plain = store.accounts.create_key(
            project, name, role=role, scope="gateway", models=models, actor="test"
        )
        headers.append({"authorization": f"Bearer {plain}"})
    store.close()
    return headers


def used(url: str) -> list[tuple[str | None, int]]:
    """Requests by key."""
    store = open_store(url)
    rows = store.ledger.report(["key"])
    store.close()
    return sorted(((row.key, row.requests) for row in rows), reverse=True)
