"""Models that are taken in again while a gateway serves: all at once or not at all, and no request is lost by it."""

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
from tests.integration.gateway.test_tls import server_context, terminated
from tests.support.backend_formats import Vllm
from tests.support.certificates import Authority
from tests.support.changing_pool import (
    BODY,
    Running,
    Steps,
    address,
    gateway,
    left,
    pods,
    whole,
)
from tests.support.fake_backend import running
from tests.support.fake_engine import FakeEngine, Script
from tests.support.replica_servers import MODEL, serve
from tests.support.scripted_server import Rough, rough_server
from tests.support.waiting import until

from argosy.engine.serving.engine_core.engine_client import EngineFailedError
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.gateway import GatewayConfig, load_config
from argosy.store import Price, open_store

STREAM = BODY | {"stream": True}
TIMEOUTS = {
    "connect_timeout_s": 1.0,
    "first_token_timeout_s": 5.0,
    "stream_idle_timeout_s": 5.0,
    "failover_timeout_s": 0.5,
}
Json = dict[str, Any]


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("argosy.gateway.pool.prober.HEALTH_PROBE_INTERVAL_S", 0.05)
    monkeypatch.setattr("argosy.gateway.model_registry.registry.RETIREMENT_POLL_INTERVAL_S", 0.01)


@dataclass
class File:
    """A gateway's settings."""

    path: Path

    def write(self, *models: Json, **settings: object) -> None:
        told = {"port": 0, "timeouts": TIMEOUTS, "models": models} | settings
        self.path.write_bytes(msgspec.json.encode(told))

    def read(self) -> GatewayConfig:
        return load_config(self.path)

    async def taken(self, behind: Running, event: str = "config_reloaded") -> list[EventDict]:
        """Have the gateway read it, and wait until it has; what it logged."""
        with capture_logs() as logs:
            behind.server.reload()
            await until(lambda: any(line["event"] == event for line in logs))
        return logs


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path / "gateway.yaml")


def replica(server: Rough, **settings: object) -> Json:
    return {"url": server.url, "kind": "openai", "model": "rough"} | settings


def model(*replicas: Json, name: str = "big", **settings: object) -> Json:
    return {"name": name, "routing": "round-robin", "replicas": replicas} | settings


def on(*replicas: Json) -> list[Json]:
    return [model(*replicas)]


async def test_replicas_that_are_added_serve_and_removed_ones_end_what_they_have(
    file: File,
) -> None:
    steps = Steps()
    async with rough_server(steps) as old, rough_server(whole) as new:
        file.write(model(replica(old)))
        async with gateway(file.read(), file.read) as behind:
            streams = [
                asyncio.create_task(behind.client.post("/v1/completions", json=STREAM))
                for _ in range(3)
            ]
            await until(lambda: len(old.asked) == 3)
            file.write(model(replica(new)))
            await file.taken(behind)
            assert behind.names == {new.url}
            for _ in range(5):
                assert await behind.ask() == 200  # also while the new one is asked how it is
            assert len(old.asked) == 3
            assert old.url not in (await behind.client.get("/metrics")).text
            steps.more.set()
            for stream in streams:
                answer = await stream
                assert answer.text.endswith("[DONE]\n\n")
                request = answer.headers["x-argosy-request"]
                told = (await behind.client.get(f"/admin/requests/{request}")).json()
                assert [one["replica"] for one in told["attempts"]] == [old.url]
            await left(old)


@pytest.mark.parametrize("dies", [False, True])
async def test_streams_of_ours_go_on_or_are_carried_on(
    file: File, tokenizer: Tokenizer, *, dies: bool
) -> None:
    """Those on the fast path, too."""
    tokens = list(range(100, 160))
    first = Script(tokens, finish="length", pause_after=20)
    if dies:
        first = Script(tokens[:20], pause_after=20, crash=EngineFailedError("it is gone"))
    old = FakeEngine(tokenizer, lambda _: first)
    new = FakeEngine(tokenizer, lambda _: Script(tokens, finish="length"))
    asked = {"prompt": "Hi", "max_tokens": 60, "return_token_ids": True}
    async with serve(old) as one, serve(new) as other:
        file.write(model({"url": one.url, "model": MODEL}))
        async with gateway(file.read(), file.read) as behind:
            stream = asyncio.create_task(behind.client.post("/v1/completions", json=STREAM | asked))
            await old.paused.wait()
            while "fast_path_streams 1.0" not in (await behind.client.get("/metrics")).text:
                pass
            file.write(model({"url": other.url, "model": MODEL}))
            await file.taken(behind)
            old.go_on.set()
            *events, done = [
                line.removeprefix("data: ")
                for line in (await stream).text.splitlines()
                if line.startswith("data: ")
            ]
            choices = [choice for event in events for choice in json.loads(event)["choices"]]
            assert [one for choice in choices for one in choice.get("token_ids") or ()] == tokens
            assert done == "[DONE]"
            assert len(new.requests) == dies


async def test_what_has_not_changed_stays_what_it_is(file: File) -> None:
    async with rough_server(whole) as first, rough_server(whole) as second:
        file.write(model(replica(first), replica(second), hedge_after_s=9))
        async with gateway(file.read(), file.read) as behind:
            before = behind.server.replicas
            logs = await file.taken(behind)
            assert [line["event"] for line in logs] == ["config_reloaded"]
            changed = replica(second, max_requests=7)
            file.write(model(changed, replica(first), aliases=["other"], routing="hash"))
            await file.taken(behind)
            after = {one.name: one for one in behind.server.replicas}
            assert after[first.url] is before[0]
            assert after[second.url] is not before[1]
            assert after[second.url].max_concurrency == 7
            await behind.served(first, second)
            asked = BODY | {"model": "other"}
            assert (await behind.client.post("/v1/completions", json=asked)).status_code == 200


@pytest.mark.parametrize(
    ("models", "why"),
    [
        ([], "models"),
        ([{"name": "big"}], "replicas"),
        ([{"name": "big", "replicas": [{"url": "http://a"}], "rooting": "hash"}], "rooting"),
        (on({"url": "a"}), "is no URL of a server"),
        (on({"url": "http://a", "api_key_env": "NO_SUCH"}), "NO_SUCH"),
        (on({"url": "https://a", "tls": {"ca": "/no/such"}}), "/no/such"),
        (on({"url": "unix:/a", "discover": "dns"}), "discover needs a URL with a host name"),
        (
            on({"url": "http://a", "discover": "dns", "kv_events": {"endpoint": "tcp://a:1"}}),
            "several",
        ),
        (
            on({"url": "http://a", "discover": "dns"}, {"url": "http://b", "name": "http://a@::1"}),
            "Rename this one",
        ),
    ],
)
async def test_a_file_that_is_wrong_changes_nothing(
    file: File, models: list[Json], why: str
) -> None:
    async with rough_server(whole) as server:
        file.write(model(replica(server)))
        async with gateway(file.read(), file.read) as behind:
            before = behind.server.replicas
            good = model(replica(server), name="good")
            file.write(*([good, *models] if models else []))
            (line,) = await file.taken(behind, "config_reload_failed")
            assert line["log_level"] == "error"
            assert why in line["reason"]
            assert behind.server.replicas[0] is before[0]
            assert await behind.ask() == 200
            file.path.unlink()
            await file.taken(behind, "config_reload_failed")
            assert await behind.ask() == 200
            file.write(good)
            await file.taken(behind)
            assert await behind.ask() == 404


async def test_other_settings_are_said_to_need_a_restart(file: File) -> None:
    async with rough_server(whole) as server:
        file.write(model(replica(server)))
        async with gateway(file.read(), file.read) as behind:
            file.write(model(replica(server)), max_failed_attempts=9, queue={"max_requests": 1})
            logs = await file.taken(behind, "config_restart_required")
            (told,) = (line for line in logs if line["event"] == "config_restart_required")
            assert told["settings"] == ["queue", "max_failed_attempts"]


async def test_models_come_and_go_and_answer_what_they_have_been_asked(file: File) -> None:
    """Those that wait for a seat, too."""
    steps = Steps()
    async with rough_server(steps) as old, rough_server(whole) as new:
        file.write(model(replica(old, max_requests=1)))
        async with gateway(file.read(), file.read) as behind:
            streams = [
                asyncio.create_task(behind.client.post("/v1/completions", json=STREAM))
                for _ in range(3)
            ]
            await until(lambda: behind.server.replicas[0].load.in_flight)
            shown = ""
            while 'queue_depth{model="big"} 2.0' not in shown:
                shown = (await behind.client.get("/metrics")).text
            file.write(model(replica(new), name="new"))
            logs = await file.taken(behind)
            events = {line["event"] for line in logs}
            assert {"model_added", "model_removed"} <= events
            assert await behind.ask() == 404
            listed = (await behind.client.get("/v1/models")).json()["data"]
            assert [one["id"] for one in listed] == ["new"]
            shown = (await behind.client.get("/metrics")).text
            assert 'replica_status{model="big"' not in shown
            assert 'queue_depth{model="big"' not in shown
            file.write(model(replica(new)))  # one of its name, while it is there still
            await file.taken(behind)
            assert await behind.ask() == 200
            steps.more.set()
            for stream in streams:
                assert (await stream).text.endswith("[DONE]\n\n")
            await left(old)


async def test_a_server_that_moves_has_those_wait_that_ask_meanwhile(file: File) -> None:
    async with rough_server(whole) as old, rough_server(whole) as new:
        file.write(model(replica(old, name="one", kind="auto")))
        async with gateway(file.read(), file.read) as behind:
            done = asyncio.Event()

            async def asks() -> set[int]:
                told: set[int] = set()
                while not done.is_set():
                    told.add(await behind.ask())
                return told

            asking = [asyncio.create_task(asks()) for _ in range(4)]
            for number in range(10):
                server = new if number % 2 else old
                file.write(model(replica(server, name="one", kind="auto", max_requests=number + 1)))
                await file.taken(behind)
                await until(lambda: behind.server.replicas[0].is_accepting)
            done.set()
            for one in asking:
                assert await one == {200}


async def test_certificates_that_the_gateway_shows_are_taken_in_again(
    file: File, tmp_path: Path
) -> None:
    authority, double = Authority(tmp_path), Vllm()
    context = server_context(authority.pair("server", "127.0.0.1"), authority.ca)
    pair = authority.pair("client")
    tls = {"ca": authority.ca, "certificate": pair.certificate, "key": pair.key}
    async with running(double), terminated(double, context) as port:
        entry = {"url": f"https://127.0.0.1:{port}", "kind": "vllm", "model": "cat", "tls": tls}
        file.write(model(entry))
        async with gateway(file.read(), file.read) as behind:
            before = behind.server.replicas[0]
            await file.taken(behind)
            assert behind.server.replicas[0] is before
            authority.pair("client")
            await file.taken(behind)
            assert behind.server.replicas[0] is not before
            assert await behind.ask() == 200


async def test_names_keep_their_addresses_when_their_settings_change(
    file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy.gateway.pool.dns_discovery.LOOKUP_INTERVAL_S", 0.01)
    answers = asyncio.Event()
    answers.set()

    async def look_up(host: str, family: socket.AddressFamily) -> Collection[str]:
        del host, family
        await answers.wait()
        return {address(0), address(1)}

    async with pods(2) as servers:
        url = f"http://pods.test:{servers[0].port}"
        entry = {"url": url, "kind": "openai", "model": "rough", "name": "pods", "discover": "dns"}
        for server in servers:
            server.script = whole
        file.write(model(entry))
        async with gateway(file.read(), file.read, look_up) as behind:
            names = {f"pods@{address(0)}", f"pods@{address(1)}"}
            assert behind.names == names
            answers.clear()
            await asyncio.sleep(0.05)
            file.write(model(entry | {"max_requests": 5}))
            await file.taken(behind)
            assert behind.names == names
            assert {one.max_concurrency for one in behind.server.replicas} == {5}
            await behind.served(*servers)
            file.write(model(replica(servers[0])))
            await file.taken(behind)
            assert behind.names == {servers[0].url}
            file.write(model(entry))
            await file.taken(behind)
            asked = asyncio.create_task(behind.ask())  # it waits for the name's addresses
            await asyncio.sleep(0.05)
            answers.set()
            assert await asked == 200
            assert behind.names == names


async def test_routes_are_taken_in_with_the_models_that_they_lead_to(
    file: File, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'argosy.db'}"
    store = open_store(url)
    store.migrate()
    acme = store.accounts.create_organisation("acme", actor="test")
    shop = store.accounts.create_project(acme.id, "shop", actor="test")
    key = store.accounts.create_key(shop.id, "shop", actor="test")[1]
    store.close()
    async with rough_server(whole) as old, rough_server(whole) as new:
        file.write(model(replica(old)), store={"url": url})
        async with gateway(file.read(), file.read) as behind:
            behind.client.headers["authorization"] = f"Bearer {key}"
            assert await behind.ask() == 200
            route = {"model": "big", "tenants": ["acme"], "target_model": "new"}
            models = model(replica(old)), model(replica(new), name="new")
            file.write(*models, routes=[route], store={"url": url})
            await file.taken(behind)
            assert await behind.ask() == 200
            assert (len(old.asked), len(new.asked)) == (1, 1)
            file.write(models[0], routes=[route], store={"url": url})
            (line,) = await file.taken(behind, "config_reload_failed")
            assert "no model has the name 'new'" in line["reason"]
            file.write(models[0], store={"url": url})
            await file.taken(behind)
            assert await behind.ask() == 200
            assert (len(old.asked), len(new.asked)) == (2, 1)


async def test_limits_and_prices_go_with_their_alias(file: File, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'argosy.db'}"
    store = open_store(url)
    store.migrate()
    accounts, terms = store.accounts, store.limits_and_prices
    acme = accounts.create_organisation("acme", actor="test")
    shop = accounts.create_project(acme.id, "shop", actor="test")
    key = accounts.create_key(shop.id, "shop", actor="test")[1]
    terms.set_limit("project", shop.id, "requests", 2, window="hour", model="best", actor="test")
    price = Price(model="best", input=0, cached_input=0, output=7)
    terms.set_price(price, actor="test")
    async with rough_server(whole) as server:
        small, large = (model(replica(server), name=name) for name in ("small", "large"))
        file.write(small | {"aliases": ["best"]}, large, store={"url": url})
        async with gateway(file.read(), file.read) as behind:
            behind.client.headers["authorization"] = f"Bearer {key}"

            async def ask(name: str) -> int:
                asked = BODY | {"model": name}
                return (await behind.client.post("/v1/completions", json=asked)).status_code

            assert [await ask("small") for _ in range(3)] == [200, 200, 429]
            assert [await ask("large") for _ in range(3)] == [200, 200, 200]
            file.write(small, large | {"aliases": ["best"]}, store={"url": url})
            await file.taken(behind)
            assert await ask("small") == 200
            assert await ask("small") == 200
            assert await ask("small") == 200
            while await ask("large") != 429:  # it has been asked for: the ledger says so
                pass
            assert await ask("best") == 429
    store.close()
