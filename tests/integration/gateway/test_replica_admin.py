"""Operators drain, cordon and weigh replicas: streams lose nothing, and decisions outlive their gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
from structlog.testing import capture_logs
from tests.support.fake_engine import FakeEngine, Script, arithmetic
from tests.support.gateway_processes import open_organisation
from tests.support.idempotent_gateway import run_servers
from tests.support.replica_servers import MODEL, events, serve
from tests.support.waiting import until
from typer.testing import CliRunner, Result

from argosy.cli.app import app
from argosy.deployment import GatewayConfig, ModelConfig, ReplicaConfig
from argosy.engine import EngineRequest
from argosy.engine.serving.text import Tokenizer
from argosy.store import StoreConfig

CHAT = "/v1/chat/completions"
TOKENS = list(range(100, 140))
STREAMS = 64
SHORT = 5
"""Tokens of each stream under load."""
BODY: dict[str, Any] = {
    "model": "big",
    "messages": [{"role": "user", "content": "Hi"}],
    "return_token_ids": True,
    "stream": True,
}


def script(pause_after: int | None, request: EngineRequest) -> Script:
    del request
    return Script(list(TOKENS), finish="length", pause_after=pause_after)


@contextlib.asynccontextmanager
async def run_replicas(
    tokenizer: Tokenizer, pauses: Sequence[int | None], quantizations: Sequence[str] = ()
) -> AsyncIterator[tuple[list[FakeEngine], list[ReplicaConfig]]]:
    """Run a replica for each pause: the number of tokens after which its streams wait for the test."""
    async with contextlib.AsyncExitStack() as stack:
        engines, configs = [], []
        for number, pause_after in enumerate(pauses):
            quantization = quantizations[number] if quantizations else "none"
            engine = FakeEngine(
                tokenizer,
                partial(script, pause_after),
                arithmetic=arithmetic(quantization=quantization),
            )
            engines.append(engine)
            running = await stack.enter_async_context(serve(engine))
            configs.append(ReplicaConfig(url=running.url, model=MODEL, name=f"r{number}"))
        yield engines, configs


@contextlib.asynccontextmanager
async def run_gateway(*replicas: ReplicaConfig) -> AsyncIterator[httpx2.AsyncClient]:
    """Run a gateway without a store."""
    model = ModelConfig(name="big", routing="round-robin", replicas=list(replicas))
    async with (
        run_servers(GatewayConfig(port=0, models=[model])) as (url,),
        httpx2.AsyncClient(base_url=url, timeout=60) as client,
    ):
        yield client


async def decide(
    client: httpx2.AsyncClient, action: str, replica: str, **fields: object
) -> dict[str, Any]:
    response = await client.post(f"/admin/replicas/{action}", json={"replica": replica, **fields})
    assert response.status_code == 200, response.text
    change: dict[str, Any] = response.json()
    return change


async def list_replicas(client: httpx2.AsyncClient) -> dict[str, dict[str, Any]]:
    response = await client.get("/admin/replicas")
    assert response.status_code == 200, response.text
    return {view["replica"]: view for view in response.json()["data"]}


async def wait_for(client: httpx2.AsyncClient, replica: str, **fields: object) -> None:
    """Wait until the list shows a replica with these fields."""
    while True:
        view = (await list_replicas(client))[replica]
        if fields.items() <= view.items():
            return
        await asyncio.sleep(0.05)


async def read_tokens(client: httpx2.AsyncClient, max_tokens: int = len(TOKENS)) -> list[int]:
    """Return the token ids of a complete stream."""
    response = await client.post(CHAT, json=BODY | {"max_tokens": max_tokens})
    assert response.status_code == 200, response.text
    *chunks, last = events(response.content)
    assert last == b"[DONE]", last
    return [
        token_id
        for chunk in map(json.loads, chunks)
        for choice in chunk["choices"]
        for token_id in choice.get("token_ids", ())
    ]


async def test_decisions_under_load_lose_nothing(tokenizer: Tokenizer) -> None:
    is_over, completed = False, asyncio.Semaphore(0)

    async def send_streams(client: httpx2.AsyncClient) -> None:
        while not is_over:
            assert await read_tokens(client, SHORT) == TOKENS[:SHORT]
            completed.release()

    async with run_replicas(tokenizer, [None] * 3) as (_, configs), run_gateway(*configs) as client:
        streams = [asyncio.create_task(send_streams(client)) for _ in range(STREAMS)]
        for action, replica, fields, expected in (
            ("cordon", "r0", {}, {"status": "cordoned", "in_flight": 0}),
            ("weight", "r1", {"weight": 0.25}, {"weight": 0.25}),
            ("undrain", "r0", {}, {"status": "ready"}),
            ("drain", "r1", {}, {"is_drained": True, "phase": "draining"}),
            ("undrain", "r1", {}, {"status": "ready", "phase": "ready"}),
        ):
            await decide(client, action, replica, **fields)
            await wait_for(client, replica, **expected)
            while not completed.locked():
                await completed.acquire()
            await completed.acquire()
        is_over = True
        await asyncio.gather(*streams)


@pytest.mark.parametrize("action", ["drain", "cordon"])
async def test_streams_of_taken_replica_complete(tokenizer: Tokenizer, action: str) -> None:
    """A drained replica's streams move, although it would never finish them. A cordoned replica's stay."""
    async with (
        run_replicas(tokenizer, [5, None]) as ((engine, other), configs),
        run_gateway(*configs) as client,
    ):
        streams = [asyncio.create_task(read_tokens(client)) for _ in range(6)]
        await until(lambda: len(engine.requests) + len(other.requests) == 6)
        assert len(engine.requests) == 3
        await decide(client, action, "r0", reason="new kernel")
        if action == "cordon":
            await wait_for(client, "r0", status="cordoned", in_flight=3)
            engine.may_continue.set()
        assert await asyncio.gather(*streams) == [TOKENS] * 6
        assert len(other.requests) == (6 if action == "drain" else 3)
        view = (await list_replicas(client))["r0"]
        assert view["changed_by"] == "local"
        assert "by local: new kernel" in view["reason"]


async def test_drain_leaves_streams_without_a_replica_of_their_arithmetic(
    tokenizer: Tokenizer,
) -> None:
    async with (
        run_replicas(tokenizer, [5, None], ["none", "int4"]) as ((engine, other), configs),
        run_gateway(*configs) as client,
    ):
        stream = asyncio.create_task(read_tokens(client))
        await engine.paused.wait()
        await decide(client, "drain", "r0")
        await wait_for(client, "r0", phase="draining", is_drained=False)
        (pool,) = (await client.get("/admin/pools")).json()["data"]
        assert pool["is_mixed"]
        assert [group["replicas"] for group in pool["arithmetics"]] == [["r0"], ["r1"]]
        engine.may_continue.set()
        assert await stream == TOKENS
        await wait_for(client, "r0", is_drained=True)
        assert not other.requests


async def test_list_and_events_tell_states_with_reasons(tokenizer: Tokenizer) -> None:
    async with run_replicas(tokenizer, [None]) as (_, configs):
        missing = ReplicaConfig(url="http://127.0.0.1:9", name="gone", kind="argosy")
        async with run_gateway(*configs, missing) as client:
            await wait_for(client, "gone", status="ejected")
            change = await decide(client, "cordon", "r0")
            assert change["persistent"] is False
            views = await list_replicas(client)
            assert "Connection refused" in views["gone"]["reason"]
            assert views["gone"]["since"] <= views["r0"]["changed_at"] + 60
            assert views["r0"]["build"].startswith("argosy ")
            assert views["r0"]["arithmetic"]["quantization"] == "none"
            listed = (await client.get("/admin/replicas/events?replica=r0")).json()["data"]
            assert [(event["previous"], event["status"]) for event in listed] == [
                ("ready", "cordoned"),
                ("starting", "ready"),
            ]
            unknown = await client.post("/admin/replicas/drain", json={"replica": "r7"})
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
            zero = {"replica": "r0", "weight": 0}
            assert (await client.post("/admin/replicas/weight", json=zero)).status_code == 400


async def test_command_line_waits_for_drain_and_tells_results(tokenizer: Tokenizer) -> None:
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(capture_logs())  # or they would be part of the command's output
        replicas = run_replicas(tokenizer, [5, 5])
        (engine, other), configs = await stack.enter_async_context(replicas)
        client = await stack.enter_async_context(run_gateway(*configs))
        running = asyncio.create_task(read_tokens(client))
        await engine.paused.wait()

        async def run(*arguments: str) -> Result:
            options = ("--url", str(client.base_url))
            return await asyncio.to_thread(
                CliRunner().invoke, app, ["replicas", *arguments, *options]
            )

        await run("cordon", "r1")
        impatient = await run("drain", "r0", "--wait", "--timeout", "0")
        assert (impatient.exit_code, "1 requests are left" in impatient.stderr) == (1, True)
        await run("uncordon", "r1")
        other.may_continue.set()
        drained = await run("drain", "r0", "--wait", "--json", "--reason", "disk")
        assert drained.exit_code == 0
        assert json.loads(drained.stdout)["replicas"][0]["is_drained"]
        assert await running == TOKENS
        listed = await run("list", "--status", "draining")
        assert "drained by local: disk" in listed.stdout
        assert "r1" not in listed.stdout
        assert "cordoned -> ready" in (await run("events", "--replica", "r1")).stdout
        assert (await run("weight", "r1", "2")).stdout == "r1 of big has weight 2.\n"
        unknown = await run("undrain", "r7")
        assert (unknown.exit_code, "Use one of: r0, r1." in unknown.stderr) == (2, True)


async def test_decisions_apply_to_all_gateways_and_outlive_them(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'argosy.db'}"
    with open_organisation(url) as accounts:
        project = accounts.project("operations")
        viewer, operator = (
            {"authorization": f"Bearer {accounts.key(project, role, role=role, scope='gateway')}"}
            for role in ("viewer", "operator")
        )
        async with run_replicas(tokenizer, [None, None]) as (_, (first, second)):
            weighed = ReplicaConfig(url=first.url, model=MODEL, name="r0", weight=4.0)
            cordoned = ReplicaConfig(url=second.url, model=MODEL, name="r1", cordoned=True)
            config = GatewayConfig(
                port=0,
                models=[ModelConfig(name="big", replicas=[weighed, cordoned])],
                store=StoreConfig(url=url),
            )
            async with run_servers(config, 2) as urls:
                one, two = (httpx2.AsyncClient(base_url=base, headers=viewer) for base in urls)
                async with one, two:
                    await wait_for(two, "r0", state="active", weight=4.0)
                    await wait_for(two, "r1", status="cordoned", changed_by="")
                    refused = await one.post("/admin/replicas/drain", json={"replica": "r0"})
                    assert refused.status_code == 403
                    one.headers.update(operator)
                    assert (await decide(one, "drain", "r0", reason="disk"))["persistent"] is True
                    await decide(one, "weight", "r0", weight=0.5)
                    await decide(one, "undrain", "r1")
                    for weight in (2.0, 3.0, 4.0):
                        await decide(one, "weight", "r1", weight=weight)
                    await wait_for(two, "r0", state="draining", weight=0.5, phase="draining")
                    await wait_for(two, "r1", status="ready")
            async with (
                run_servers(config) as (base,),
                httpx2.AsyncClient(base_url=base, headers=viewer) as client,
            ):
                await wait_for(client, "r0", state="draining", weight=0.5)
                await wait_for(client, "r1", state="active")
                decisions, own_decisions = [
                    [
                        (event["replica"], event["action"], event["reason"])
                        for event in (await client.get(f"/admin/replicas/events{query}")).json()[
                            "data"
                        ]
                        if event["action"]
                    ]
                    for query in ("", "?model=big&replica=r0&limit=5")
                ]
        assert own_decisions == [("r0", "weight", ""), ("r0", "drain", "disk")]
        assert decisions == [*[("r1", "weight", "")] * 3, ("r1", "undrain", ""), *own_decisions]
        (entry,) = accounts.store.audit_log.list_entries(action_prefix="replica.drain")
        assert (entry.subject, entry.organisation) == ("big/r0", None)
        assert entry.actor.startswith("key:")
