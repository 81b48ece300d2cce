"""Reloading of the models: all at once or not at all, and without losing requests."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict
from tests.integration.gateway.test_tls import serve_behind_tls, server_context
from tests.support.backend_formats import Vllm
from tests.support.certificates import Authority
from tests.support.changing_pool import (
    BODY,
    PausedStream,
    RunningGateway,
    fake_pods,
    gateway,
    pod_address,
    wait_until_disconnected,
)
from tests.support.fake_backend import serve_backends
from tests.support.fake_engine import FakeEngine, Script
from tests.support.fake_upstream import (
    FakeUpstream,
    UpstreamRequest,
    fake_upstream,
    respond_500,
    respond_with_text,
)
from tests.support.migrated_store import open_migrated_store
from tests.support.replica_servers import MODEL, serve
from tests.support.waiting import until

from argosy.deployment import GatewayConfig, load_config
from argosy.engine import EngineFailedError
from argosy.engine.serving.text import Tokenizer

STREAM = BODY | {"stream": True}
TIMEOUTS = {
    "connect_timeout_s": 1.0,
    "first_token_timeout_s": 5.0,
    "stream_idle_timeout_s": 5.0,
    "failover_timeout_s": 0.5,
}
Json = dict[str, Any]


@pytest.fixture(autouse=True)
def _short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("argosy.policy.health_check.HEALTH_PROBE_INTERVAL_S", 0.05)
    monkeypatch.setattr("argosy.gateway.model_registry.registry.RETIREMENT_POLL_INTERVAL_S", 0.01)


@dataclass
class ConfigFile:
    """A gateway's settings file."""

    path: Path

    def write(self, *models: Json, **settings: object) -> None:
        settings_dict = {"port": 0, "timeouts": TIMEOUTS, "models": models} | settings
        self.path.write_bytes(msgspec.json.encode(settings_dict))

    def read(self) -> GatewayConfig:
        return load_config(self.path)

    async def reload(
        self, running: RunningGateway, event: str = "config_reloaded"
    ) -> list[EventDict]:
        """Let the gateway reload the file, wait for the log event, and return the log."""
        with capture_logs() as logs:
            running.server.reload()
            await until(lambda: any(line["event"] == event for line in logs))
        return logs


@pytest.fixture
def config_file(tmp_path: Path) -> ConfigFile:
    return ConfigFile(tmp_path / "gateway.yaml")


def replica_entry(server: FakeUpstream, **settings: object) -> Json:
    return {"url": server.url, "kind": "openai", "model": "rough"} | settings


def model_entry(*replicas: Json, name: str = "big", **settings: object) -> Json:
    return {"name": name, "routing": "round-robin", "replicas": replicas} | settings


def model_list(*replicas: Json) -> list[Json]:
    return [model_entry(*replicas)]


@pytest.mark.parametrize("fails", [False, True])
async def test_streams_continue_or_resume_after_their_replica_is_removed(
    config_file: ConfigFile, tokenizer: Tokenizer, *, fails: bool
) -> None:
    """Applies to streams on the fast path, too."""
    tokens = list(range(100, 160))
    first = Script(tokens, finish="length", pause_after=20)
    if fails:
        first = Script(tokens[:20], pause_after=20, crash=EngineFailedError("the engine failed"))
    old = FakeEngine(tokenizer, lambda _: first)
    new = FakeEngine(tokenizer, lambda _: Script(tokens, finish="length"))
    body = {"prompt": "Hi", "max_tokens": 60, "return_token_ids": True}
    async with serve(old) as old_server, serve(new) as new_server:
        config_file.write(model_entry({"url": old_server.url, "model": MODEL}))
        async with gateway(config_file.read(), config_file.read) as running:
            stream = asyncio.create_task(running.client.post("/v1/completions", json=STREAM | body))
            await old.paused.wait()
            while "fast_path_streams 1.0" not in (await running.client.get("/metrics")).text:
                pass
            config_file.write(model_entry({"url": new_server.url, "model": MODEL}))
            await config_file.reload(running)
            old.may_continue.set()
            *events, done = [
                line.removeprefix("data: ")
                for line in (await stream).text.splitlines()
                if line.startswith("data: ")
            ]
            choices = [choice for event in events for choice in json.loads(event)["choices"]]
            assert [one for choice in choices for one in choice.get("token_ids") or ()] == tokens
            assert done == "[DONE]"
            assert len(new.requests) == fails


async def test_requests_of_a_removed_model_with_fallbacks_end_with_its_error(
    config_file: ConfigFile,
) -> None:
    """The model goes while one request is at its only replica and another one in its queue."""
    may_fail = asyncio.Event()

    async def fail_later(request: UpstreamRequest) -> None:
        await may_fail.wait()
        await respond_500(request)

    async with fake_upstream(fail_later) as weak, fake_upstream(respond_with_text) as other:
        models = (
            model_entry(replica_entry(other), name="other"),
            model_entry(replica_entry(weak, max_requests=1), fallback_models=["other"]),
        )
        config_file.write(*models, queue={"timeout_s": 1.0})
        async with gateway(config_file.read(), config_file.read) as running:
            posts = [asyncio.create_task(running.request_status()) for _ in range(2)]
            await until(lambda: len(weak.requests) == 1)
            config_file.write(models[0], queue={"timeout_s": 1.0})
            await config_file.reload(running)
            may_fail.set()
            assert {*await asyncio.wait_for(asyncio.gather(*posts), 10)} <= {502, 503}
            assert not other.requests


async def test_unchanged_replicas_are_kept(config_file: ConfigFile) -> None:
    async with (
        fake_upstream(respond_with_text) as first,
        fake_upstream(respond_with_text) as second,
    ):
        config_file.write(model_entry(replica_entry(first), replica_entry(second), hedge_after_s=9))
        async with gateway(config_file.read(), config_file.read) as running:
            before = running.server.replicas
            logs = await config_file.reload(running)
            assert [line["event"] for line in logs] == ["config_reloaded"]
            changed = replica_entry(second, max_requests=7)
            config_file.write(
                model_entry(changed, replica_entry(first), aliases=["other"], routing="hash")
            )
            await config_file.reload(running)
            after = {replica.name: replica for replica in running.server.replicas}
            assert after[first.url] is before[0]
            assert after[second.url] is not before[1]
            assert after[second.url].max_concurrency == 7
            await running.wait_until_served_by(first, second)
            body = BODY | {"model": "other"}
            assert (await running.client.post("/v1/completions", json=body)).status_code == 200


INVALID_MODELS: list[tuple[list[Json], str]] = [
    ([], "models"),
    ([{"name": "big"}], "replicas"),
    ([{"name": "big", "replicas": [{"url": "http://a"}], "rooting": "hash"}], "rooting"),
    (model_list({"url": "a"}), "is not the URL of a server"),
    (model_list({"url": "http://a", "api_key_env": "NO_SUCH"}), "NO_SUCH"),
    (model_list({"url": "https://a", "tls": {"ca": "/no/such"}}), "/no/such"),
    (
        model_list({"url": "unix:/a", "discover": "dns"}),
        "discover needs a URL with a host name",
    ),
    (
        model_list({"url": "http://a", "discover": "dns", "kv_events": {"endpoint": "tcp://a:1"}}),
        "several",
    ),
    (
        model_list(
            {"url": "http://a", "discover": "dns"}, {"url": "http://b", "name": "http://a@::1"}
        ),
        "Rename this one",
    ),
]


async def test_invalid_file_changes_nothing(config_file: ConfigFile) -> None:
    async with fake_upstream(respond_with_text) as server:
        config_file.write(model_entry(replica_entry(server)))
        async with gateway(config_file.read(), config_file.read) as running:
            before = running.server.replicas
            good = model_entry(replica_entry(server), name="good")
            for models, reason in INVALID_MODELS:
                config_file.write(*([good, *models] if models else []))
                (entry,) = await config_file.reload(running, "config_reload_failed")
                assert entry["log_level"] == "error"
                assert reason in entry["reason"]
                assert running.server.replicas[0] is before[0]
                assert await running.request_status() == 200
            config_file.path.unlink()
            await config_file.reload(running, "config_reload_failed")
            assert await running.request_status() == 200
            config_file.write(good)
            await config_file.reload(running)
            assert await running.request_status() == 404


async def test_other_settings_need_restart(config_file: ConfigFile) -> None:
    async with fake_upstream(respond_with_text) as server:
        config_file.write(model_entry(replica_entry(server)))
        async with gateway(config_file.read(), config_file.read) as running:
            config_file.write(
                model_entry(replica_entry(server)), max_failed_attempts=9, queue={"max_requests": 1}
            )
            logs = await config_file.reload(running, "config_restart_required")
            (entry,) = (entry for entry in logs if entry["event"] == "config_restart_required")
            assert entry["settings"] == ["queue", "max_failed_attempts"]


async def test_removed_model_completes_its_requests(config_file: ConfigFile) -> None:
    """Applies to queued requests, too."""
    paused_stream = PausedStream()
    async with fake_upstream(paused_stream) as old, fake_upstream(respond_with_text) as new:
        config_file.write(model_entry(replica_entry(old, max_requests=1)))
        async with gateway(config_file.read(), config_file.read) as running:
            streams = [
                asyncio.create_task(running.client.post("/v1/completions", json=STREAM))
                for _ in range(3)
            ]
            await until(lambda: running.server.replicas[0].load.in_flight)
            metrics_text = ""
            while 'queue_depth{model="big"} 2.0' not in metrics_text:
                metrics_text = (await running.client.get("/metrics")).text
            config_file.write(model_entry(replica_entry(new), name="new"))
            logs = await config_file.reload(running)
            events = {entry["event"] for entry in logs}
            assert {"model_added", "model_removed"} <= events
            assert await running.request_status() == 404
            models = (await running.client.get("/v1/models")).json()["data"]
            assert [card["id"] for card in models] == ["new"]
            metrics_text = (await running.client.get("/metrics")).text
            assert 'replica_status{model="big"' not in metrics_text
            assert 'queue_depth{model="big"' not in metrics_text
            # A model of that name again, while the removed one still has requests.
            config_file.write(model_entry(replica_entry(new)))
            await config_file.reload(running)
            assert await running.request_status() == 200
            paused_stream.resume.set()
            for stream in streams:
                assert (await stream).text.endswith("[DONE]\n\n")
            await wait_until_disconnected(old)


async def test_changed_client_certificate_is_reloaded(
    config_file: ConfigFile, tmp_path: Path
) -> None:
    authority, backend = Authority(tmp_path), Vllm()
    context = server_context(authority.pair("server", "127.0.0.1"), authority.ca)
    pair = authority.pair("client")
    tls = {"ca": authority.ca, "certificate": pair.certificate, "key": pair.key}
    async with serve_backends(backend), serve_behind_tls(backend, context) as port:
        entry = {"url": f"https://127.0.0.1:{port}", "kind": "vllm", "model": "cat", "tls": tls}
        config_file.write(model_entry(entry))
        async with gateway(config_file.read(), config_file.read) as running:
            before = running.server.replicas[0]
            await config_file.reload(running)
            assert running.server.replicas[0] is before
            authority.pair("client")
            await config_file.reload(running)
            assert running.server.replicas[0] is not before
            assert await running.request_status() == 200


async def test_discovered_addresses_are_kept_when_settings_change(
    config_file: ConfigFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy.gateway.pool.dns_discovery.LOOKUP_INTERVAL_S", 0.01)
    resolver_answers = asyncio.Event()
    resolver_answers.set()

    async def look_up(host: str, family: socket.AddressFamily) -> Collection[str]:
        del host, family
        await resolver_answers.wait()
        return {pod_address(0), pod_address(1)}

    async with fake_pods(2) as servers:
        url = f"http://pods.test:{servers[0].port}"
        entry = {"url": url, "kind": "openai", "model": "rough", "name": "pods", "discover": "dns"}
        for server in servers:
            server.script = respond_with_text
        config_file.write(model_entry(entry))
        async with gateway(config_file.read(), config_file.read, look_up) as running:
            names = {f"pods@{pod_address(0)}", f"pods@{pod_address(1)}"}
            assert running.replica_names == names
            resolver_answers.clear()
            await asyncio.sleep(0.05)
            config_file.write(model_entry(entry | {"max_requests": 5}))
            await config_file.reload(running)
            assert running.replica_names == names
            assert {replica.max_concurrency for replica in running.server.replicas} == {5}
            await running.wait_until_served_by(*servers)
            config_file.write(model_entry(replica_entry(servers[0])))
            await config_file.reload(running)
            assert running.replica_names == {servers[0].url}
            config_file.write(model_entry(entry))
            await config_file.reload(running)
            task = asyncio.create_task(running.request_status())  # waits for the addresses
            await asyncio.sleep(0.05)
            resolver_answers.set()
            assert await task == 200
            assert running.replica_names == names


async def test_routes_are_reloaded_with_their_models(
    config_file: ConfigFile, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'argosy.db'}"
    store = open_migrated_store(url)
    acme = store.accounts.create_organisation("acme", actor="test")
    shop = store.accounts.create_project(acme.id, "shop", actor="test")
    key = store.accounts.create_key(shop.id, "shop", actor="test")[1]
    store.close()
    async with fake_upstream(respond_with_text) as old, fake_upstream(respond_with_text) as new:
        config_file.write(model_entry(replica_entry(old)), store={"url": url})
        async with gateway(config_file.read(), config_file.read) as running:
            running.client.headers["authorization"] = f"Bearer {key}"
            assert await running.request_status() == 200
            route = {"model": "big", "tenants": ["acme"], "target_model": "new"}
            models = model_entry(replica_entry(old)), model_entry(replica_entry(new), name="new")
            config_file.write(*models, routes=[route], store={"url": url})
            await config_file.reload(running)
            assert await running.request_status() == 200
            assert (len(old.requests), len(new.requests)) == (1, 1)
            config_file.write(models[0], routes=[route], store={"url": url})
            (entry,) = await config_file.reload(running, "config_reload_failed")
            assert "no model has the name 'new'" in entry["reason"]
            config_file.write(models[0], store={"url": url})
            await config_file.reload(running)
            assert await running.request_status() == 200
            assert (len(old.requests), len(new.requests)) == (2, 1)
