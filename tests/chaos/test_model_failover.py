"""A replica of a model is killed: streams resume with the same bytes, and end with an error if it is not exact."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx2
import pytest
from tests.engine.adapter_files import write_adapter
from tests.engine.generic_cases import GENERIC_FAMILIES
from tests.engine.test_families import FAMILIES
from tests.engine.test_families import MODELS as ARCHITECTURES
from tests.engine.transformers_reference import make_reference
from tests.support.adapter_folders import adapter_source
from tests.support.gateway_client import COMPLETION, StreamResult, gateway
from tests.support.replica_process import MODEL, ReplicaProcess

from argosy.deployment import AdapterConfig, ReplicaConfig
from argosy.folders import cache_folder
from argosy.gateway import GatewayServer
from argosy.models import BUNDLED_MODEL

STREAMS = 4
DEFAULT = "latent attention"
"""The model of `make test`."""
MODELS = {
    "model of transformers": GENERIC_FAMILIES["granite"],
    "attention sinks and windows": FAMILIES["gpt-oss"],
    "latent attention": FAMILIES["deepseek 3"],
    "recurrent layers": FAMILIES["qwen 3.5 moe"],
}


@contextlib.asynccontextmanager
async def run_pair(
    *options: str, name: str = "model", adapters: tuple[AdapterConfig, ...] = ()
) -> AsyncIterator[tuple[list[ReplicaProcess], GatewayServer, httpx2.AsyncClient]]:
    """Run two replicas with these options, which serve the model `name`, and a gateway in front of them."""
    with TemporaryDirectory() as folder:  # the path of pytest's folder may be too long for a socket
        pair = [ReplicaProcess(Path(folder) / f"{n}.sock", options) for n in range(2)]
        try:
            for replica in pair:
                await replica.start()
            await asyncio.gather(*(replica.wait_ready() for replica in pair))
            configs = [
                ReplicaConfig(url=f"unix:{replica.socket}", model=name, kind="argosy")
                for replica in pair
            ]
            async with gateway(*configs, adapters=adapters) as (running, client):
                yield pair, running, client
        finally:
            await asyncio.gather(*(replica.kill() for replica in pair))


async def read_stream(
    client: httpx2.AsyncClient, number: int, model: str, started: asyncio.Event
) -> StreamResult:
    """Read a sampled stream. Set the event when it has text."""
    sampling = {"temperature": 0.9, "seed": number, "max_tokens": 250, "ignore_eos": True}
    body = {"model": model, "stream": True, "prompt": f"Story {number}: once upon a time"}
    received = StreamResult()
    async with client.stream("POST", COMPLETION, json=body | sampling) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                received.add_event(line[6:])
            if received.text:
                started.set()
    return received


async def read_streams(
    running: GatewayServer,
    client: httpx2.AsyncClient,
    killed: ReplicaProcess | None = None,
    models: tuple[str, ...] = ("big",),
) -> list[StreamResult]:
    """Read streams of both replicas for each model. Kill one, the gateway's first, when all have started."""
    started = [(model, asyncio.Event()) for model in models for _ in range(STREAMS)]
    streams = [
        asyncio.create_task(read_stream(client, number % STREAMS, model, event))
        for number, (model, event) in enumerate(started)
    ]
    await asyncio.gather(*(event.wait() for _, event in started))
    if killed is not None:
        assert all(replica.load.in_flight for replica in running.replicas)
        await killed.kill()
    return list(await asyncio.gather(*streams))


async def wait_until_inexact(client: httpx2.AsyncClient) -> None:
    """Wait until the gateway sends requests to the first replica, and knows that it is not exact."""
    while True:
        view = (await client.get("/admin/replicas")).json()["data"][0]
        if view["status"] == "ready" and not view["exact"]:
            return
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == DEFAULT else pytest.mark.exhaustive)
        for name in MODELS
    ],
)
async def test_streams_resume_only_if_the_model_is_exact(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache" / "argosy"
    cache.mkdir(parents=True)
    (cache / "native").symlink_to(cache_folder() / "native")  # kernels that are compiled already
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "model"
    family, options = MODELS[name]
    vocab_size = json.loads((BUNDLED_MODEL / "config.json").read_text())["vocab_size"]
    sizes = {"vocab_size": vocab_size, "max_position_embeddings": 1024}
    make_reference(model, family, options | sizes, model=ARCHITECTURES.get(family, ""))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODEL / file, model)
    async with run_pair(str(model)) as (pair, running, client):
        expected = await read_streams(running, client)
        assert all(result.is_complete and len(result.text) > 250 for result in expected)
        resumed = await read_streams(running, client, killed=pair[0])
        assert [result.text for result in resumed] == [result.text for result in expected]
        assert all(result.is_complete for result in resumed)
        if name != DEFAULT:
            return
        (stored,) = cache.glob("self-test/*.json")  # as of a model that fails the test
        stored.write_text(json.dumps(json.loads(stored.read_text()) | {"is_exact": False}))
        await pair[0].restart()
        await wait_until_inexact(client)
        results = await read_streams(running, client, killed=pair[0])
        broken = [result for result in results if not result.is_complete]
        assert 0 < len(broken) < STREAMS
        for result, undisturbed in zip(results, expected, strict=True):
            if result.is_complete:
                assert result.text == undisturbed.text
            else:
                assert not result.done_count
                assert [error["code"] for error in result.errors] == ["upstream_failed"]
                assert "not exact" in result.errors[0]["message"]


@pytest.mark.exhaustive
async def test_streams_with_an_int8_cache_and_adapters_resume(tmp_path: Path) -> None:
    """Both replicas stream for the base model, an adapter and one with DoRA in the same batch."""
    names = {"big": "", "tuned": "", "dora": ""}
    for seed, name in enumerate(("tuned", "dora")):
        folder = write_adapter(tmp_path / name, BUNDLED_MODEL, seed=seed, use_dora=name == "dora")
        names[name] = adapter_source(folder).digest
    adapters = tuple(
        AdapterConfig(name=name, source=digest, min_replicas=2)
        for name, digest in names.items()
        if digest
    )
    options = ("--kv-dtype", "int8", "--enable-lora", "--adapter-root", str(tmp_path))
    async with run_pair(*options, name=MODEL, adapters=adapters) as (pair, running, client):
        models = tuple(names)
        expected = await read_streams(running, client, models=models)
        resumed = await read_streams(running, client, killed=pair[0], models=models)
    texts = [result.text for result in expected]
    assert len({*texts}) == len(texts)
    assert [result.text for result in resumed] == texts
    assert all(result.is_complete for result in [*expected, *resumed])
