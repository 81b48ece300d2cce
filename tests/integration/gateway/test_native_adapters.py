"""Adapters at native replicas behind a gateway: loaded on first use, resumed elsewhere, missing at some."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import msgspec
import pytest
from tests.engine.adapter_files import write_adapter as write_real_adapter
from tests.support.adapter_folders import adapter_source, write_adapter
from tests.support.fake_engine import FakeEngine, Script
from tests.support.fake_upstream import Json
from tests.support.gateway_client import run_gateway_server
from tests.support.replica_servers import (
    CONFIG,
    MODEL,
    RunningReplica,
    bundled_model_engine,
    events,
    serve,
)

from argosy.deployment import AdapterConfig, GatewayConfig, ModelConfig, ReplicaConfig
from argosy.engine import EngineFailedError, EngineRequest
from argosy.engine.serving.text import Tokenizer
from argosy.models import BUNDLED_MODEL

TOKENS = 12


def find_tokens(digest: str) -> list[int]:
    """Return tokens that only the digest of an adapter decides. The base model has none."""
    digits = digest.removeprefix("sha256:") or "0" * TOKENS
    return [300 + int(digit, 16) for digit in digits[:TOKENS]]


def tokens_of(request: EngineRequest) -> list[int]:
    return find_tokens("" if request.adapter is None else request.adapter.digest)


@contextlib.asynccontextmanager
async def run_gateway(
    replicas: list[RunningReplica], adapters: dict[str, str], min_replicas: int = 2
) -> AsyncIterator[httpx2.AsyncClient]:
    """Run a gateway before replicas, with adapters by name."""
    configs = [
        ReplicaConfig(url=replica.url, model=MODEL, kind="argosy", name=f"r{index}")
        for index, replica in enumerate(replicas)
    ]
    declared = tuple(
        AdapterConfig(name=name, source=digest, min_replicas=min_replicas)
        for name, digest in adapters.items()
    )
    model = ModelConfig(name="base", replicas=configs, adapters=declared)
    async with run_gateway_server(GatewayConfig(port=0, models=[model])) as (_, client):
        yield client


async def complete(
    client: httpx2.AsyncClient, model: str, options: Json | None = None
) -> httpx2.Response:
    body = {"model": model, "prompt": "Say", "max_tokens": TOKENS, "seed": 1} | (options or {})
    return await client.post("/v1/completions", json=body)


async def test_replicas_load_adapters_on_first_use_and_resume_each_other(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """The stream of an adapter goes on at a replica that has not loaded it, and ends with the same bytes."""
    both, second = tmp_path / "both", tmp_path / "second"
    sources = {name: adapter_source(write_adapter(both / name, name)) for name in ("a", "b")}
    for name in ("a", "b", "c"):
        write_adapter(second / name, name)
    sources["c"] = adapter_source(second / "c")
    engines = [
        FakeEngine(tokenizer, lambda request: Script(tokens_of(request), finish="length"))
        for _ in range(2)
    ]
    async with contextlib.AsyncExitStack() as stack:
        replicas = [
            await stack.enter_async_context(
                serve(
                    engine,
                    msgspec.structs.replace(CONFIG, adapter_root=str(root)),
                    enable_lora=True,
                )
            )
            for engine, root in zip(engines, (both, second), strict=True)
        ]
        digests = {name: source.digest for name, source in sources.items()}
        client = await stack.enter_async_context(
            run_gateway(replicas, digests | {"missing": f"sha256:{'0' * 64}"})
        )
        expected = {}
        for name, source in sources.items():  # only the second replica has `c`
            answers = [await complete(client, name) for _ in range(3)]
            expected[name] = answers[0].json()["choices"][0]["text"]
            text = tokenizer.decode(find_tokens(source.digest))
            assert [answer.json()["choices"][0]["text"] for answer in answers] == [text] * 3
            assert {answer.json()["model"] for answer in answers} == {name}
        base = await complete(client, "base")
        assert base.json()["choices"][0]["text"] not in {*expected.values()}
        missing = await complete(client, "missing")
        assert missing.json()["error"]["code"] == "adapter_load_failed", missing.text
        assert missing.status_code == 503
        states = (await client.get("/admin/replicas")).json()["data"]
        assert {state["status"] for state in states} == {"ready"}
        used = {request.adapter for engine in engines for request in engine.requests}
        assert {source for source in used if source is not None} >= {sources["c"]}

        def crash_once(request: EngineRequest) -> Script:
            for engine in engines:
                engine.script = lambda request: Script(tokens_of(request), finish="length")
            return Script(tokens_of(request)[:5], crash=EngineFailedError("killed"))

        for name in ("a", "b"):
            for engine in engines:
                engine.script = crash_once
            answer = await complete(client, name)
            assert answer.json()["choices"][0]["text"] == expected[name]
            resumed = [
                each for engine in engines for each in engine.requests if each.resumed_tokens
            ]
            assert resumed[-1].adapter is not None
            assert resumed[-1].adapter.digest == digests[name]
        listed = (await client.get("/v1/models")).json()["data"]
        assert {card["id"] for card in listed} == {"base", "a", "b", "c", "missing"}


@pytest.mark.exhaustive
async def test_an_adapters_stream_of_the_real_engine_moves_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica that streams is stopped, and the other one has not loaded the adapter before."""
    # The gateway would load a frequent adapter at both.
    monkeypatch.setattr("argosy.gateway.adapter_keeper.CHECK_INTERVAL_S", 3600.0)
    digest = adapter_source(write_real_adapter(tmp_path / "real", BUNDLED_MODEL, seed=1)).digest
    config = msgspec.structs.replace(CONFIG, adapter_root=str(tmp_path))
    async with contextlib.AsyncExitStack() as stack:
        replicas = []
        for _ in range(2):
            engine = bundled_model_engine(256, 8, enable_lora=True)
            replicas.append(
                await stack.enter_async_context(serve(engine, config, enable_lora=True))
            )
        client = await stack.enter_async_context(run_gateway(replicas, {"tuned": digest}, 0))
        options = {"max_tokens": 200, "temperature": 0.8, "ignore_eos": True}
        text = (await complete(client, "tuned", options)).json()["choices"][0]["text"]
        base = (await complete(client, "base", options)).json()["choices"][0]["text"]
        assert base != text
        loaded = [bool((await each.client.get("/load")).json()["adapters"]) for each in replicas]
        assert sorted(loaded) == [False, True]
        body = {"model": "tuned", "prompt": "Say", "seed": 1, "stream": True} | options
        running, received = replicas[loaded.index(True)], b""
        async with client.stream("POST", "/v1/completions", json=body) as stream:
            async for piece in stream.aiter_bytes():
                if not received:
                    running.server.stop()
                    running.server.stop()
                received += piece
        chunks = [json.loads(event) for event in events(received) if event != b"[DONE]"]
        pieces = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
        assert "".join(pieces) == text
        loaded = [
            bool((await replicas[1 - loaded.index(True)].client.get("/load")).json()["adapters"])
        ]
        assert loaded == [True]
