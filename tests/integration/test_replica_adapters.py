"""LoRA adapters of a replica over HTTP: names, digests, endpoints of vLLM, versions, resume, and hostile input."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from tests.engine.adapter_files import write_adapter as write_peft_adapter
from tests.support.adapter_folders import adapter_source, write_adapter
from tests.support.fake_engine import FakeEngine, Script
from tests.support.replica_servers import (
    CONFIG,
    MODEL,
    RunningReplica,
    bundled_model_engine,
    chat,
    completion,
    serve,
)

from argosy.models import BUNDLED_MODEL
from argosy.protocol import ApiError

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Folder of adapters that requests may load."""
    for name in ("a", "b", "owner/c"):
        write_adapter(tmp_path / "root" / name, name)
    write_adapter(tmp_path / "outside", "outside")
    write_adapter(tmp_path / "root" / "own-template", "t", template=TEMPLATE)
    write_adapter(tmp_path / "root" / "bad-template", "u", template="{% for %}")
    (tmp_path / "root" / "no-adapter").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "outside")
    return tmp_path / "root"


@pytest.fixture
async def replica(engine: FakeEngine, root: Path) -> AsyncIterator[RunningReplica]:
    config = msgspec.structs.replace(
        CONFIG,
        lora_modules=(f"sql={root / 'a'}", f'{{"name": "odd=name", "path": "{root / "a"}"}}'),
        adapter_root=str(root),
        allow_adapter_loading=True,
        vllm_metrics=True,
    )
    async with serve(engine, config, enable_lora=True) as running:
        yield running


async def load(replica: RunningReplica, name: str, path: str, **fields: object) -> httpx2.Response:
    body = {"lora_name": name, "lora_path": path, **fields}
    return await replica.client.post(LOAD, json=body)


def digest_of(folder: Path) -> str:
    return adapter_source(folder).digest


async def test_names_and_digests_reach_engine_as_one_adapter(
    replica: RunningReplica, engine: FakeEngine, root: Path
) -> None:
    source = adapter_source(root / "a")
    for model in ("sql", "odd=name", source.digest):
        response = await replica.client.post("/v1/chat/completions", json=chat(model=model))
        assert response.status_code == 200, response.text
        assert response.json()["model"] == model
        assert response.headers["x-argosy-adapter"] == source.digest
        assert engine.requests[-1].adapter == source
    for path in ("b", "owner/c"):  # loaded by their digest on first use
        source = adapter_source(root / path)
        body = completion(model=source.digest, n=2)
        response = await replica.client.post("/v1/completions", json=body)
        assert response.headers["x-argosy-adapter"] == source.digest
        assert [request.adapter for request in engine.requests[-2:]] == [source, source]
    response = await replica.client.post("/v1/completions", json=completion())
    assert "x-argosy-adapter" not in response.headers
    assert engine.requests[-1].adapter is None
    report = (await replica.client.get("/load")).json()
    assert [(each["digest"], each["size_bytes"]) for each in report["adapters"]] == [
        (digest_of(root / "a").removeprefix("sha256:")[:16], 10)
    ]
    assert report["adapter_memory_bytes"] == 2 << 30


async def test_model_list_names_base_and_digest(replica: RunningReplica, root: Path) -> None:
    body = (await replica.client.get("/v1/models")).json()
    digest = digest_of(root / "a")
    assert [(card["id"], card["parent"], card["root"]) for card in body["data"]] == [
        (MODEL, None, MODEL),
        ("sql", MODEL, digest),
        ("odd=name", MODEL, digest),
    ]
    assert body["last_id"] == "odd=name"
    card = (await replica.client.get("/v1/models/sql")).json()
    assert (card["digest"], card["parent"]) == (digest, MODEL)


async def test_load_and_unload_answer_as_vllm(
    replica: RunningReplica, engine: FakeEngine, root: Path
) -> None:
    response = await load(replica, "b", "b")
    assert (response.status_code, response.text) == (
        200,
        "Success: LoRA adapter 'b' added successfully.",
    )
    assert digest_of(root / "b") in engine.resident_adapters
    again = await load(replica, "b", "b")
    assert again.status_code == 400
    assert "load_inplace" in again.json()["error"]["message"]
    assert (await load(replica, "b", "b", load_inplace=True)).status_code == 200
    response = await replica.client.post(UNLOAD, json={"lora_name": "b"})
    assert response.text == "Success: LoRA adapter 'b' removed successfully."
    assert digest_of(root / "b") not in engine.resident_adapters
    for path, body in [(UNLOAD, {"lora_name": "b"}), ("/v1/completions", completion(model="b"))]:
        response = await replica.client.post(path, json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    metrics = (await replica.client.get("/metrics")).text
    assert 'running_lora_adapters=""' in metrics


async def test_requests_keep_their_version_while_name_gets_another(
    replica: RunningReplica, engine: FakeEngine, root: Path
) -> None:
    engine.script = lambda request: Script([5] * 9, pause_after=2 if request.id != "x" else None)
    old = digest_of(root / "a")
    running = asyncio.create_task(
        replica.client.post("/v1/completions", json=completion(model="sql"))
    )
    await engine.paused.wait()
    write_adapter(root / "a", "second version")
    assert (await load(replica, "sql", "a", load_inplace=True)).status_code == 200
    assert (await load(replica, "odd=name", "a", load_inplace=True)).status_code == 200
    new = digest_of(root / "a")
    assert engine.resident_adapters.keys() == {old, new}
    engine.may_continue.set()
    assert (await running).headers["x-argosy-adapter"] == old
    await engine.wait_idle()
    response = await replica.client.post("/v1/completions", json=completion(model="sql"))
    assert response.headers["x-argosy-adapter"] == new
    assert engine.resident_adapters.keys() == {new}


async def test_resume_needs_adapter_that_began_the_stream(
    replica: RunningReplica, root: Path
) -> None:
    own, other = digest_of(root / "a"), digest_of(root / "b")
    for model, began, status in [
        ("sql", own, 200),
        (own, own, 200),
        ("sql", other, 409),
        (MODEL, own, 409),
        ("sql", "", 200),
    ]:
        headers = {"x-argosy-adapter": began}
        body = completion(model=model, resume={"token_ids": [7]})
        response = await replica.client.post("/v1/completions", json=body, headers=headers)
        assert response.status_code == status, response.text
        assert status == 200 or response.json()["error"]["code"] == "other_model"


async def test_own_chat_template_replaces_that_of_the_model(
    replica: RunningReplica, engine: FakeEngine
) -> None:
    assert (await load(replica, "own", "own-template")).status_code == 200
    prompts = {}
    for model in ("own", "sql", MODEL):
        await replica.client.post("/v1/chat/completions", json=chat("Hi", model=model))
        prompts[model] = engine.requests[-1].prompt
    assert engine.tokenizer.decode(prompts["own"], skip_special_tokens=False).endswith("[Hi]")
    assert prompts["sql"] == prompts[MODEL]
    body = {"model": "own", "messages": [{"role": "user", "content": "Hi"}]}
    tokens = (await replica.client.post("/tokenize", json=body)).json()["tokens"]
    assert tokens == prompts["own"]


async def test_hostile_loads_change_nothing(
    replica: RunningReplica, engine: FakeEngine, root: Path
) -> None:
    engine.adapter_failures = {"b": ApiError(400, "invalid_adapter", "r is 0.")}
    fine: dict[str, Any] = {"lora_name": "x", "lora_path": "owner/c"}
    changes: list[dict[str, Any]] = [
        {"lora_path": "../outside"},
        {"lora_path": str(root.parent / "outside")},
        {"lora_path": "link"},
        {"lora_path": "."},
        {"lora_path": "no-adapter"},
        {"lora_path": "missing"},
        {"lora_path": "a\0b"},
        {"lora_path": "x" * 300},
        {"lora_path": "bad-template"},
        {"lora_path": "b"},
        {"lora_path": "store:nothing"},
        {"lora_path": "sha256:" + "0" * 64},
        {"lora_path": "https://example.org/adapter"},
        {"lora_path": ""},
        {"lora_path": 7},
        {"lora_name": MODEL},
        {"lora_name": "sha256:" + "0" * 64},
        {"lora_name": "a\nb"},
        {"lora_name": "n" * 300},
        {"lora_name": None},
        {"load_inplace": "perhaps"},
    ]
    for change in changes:
        response = await replica.client.post(LOAD, json=fine | change)
        assert response.status_code == 400, (change, response.text)
    for model in ("x", "sha256:" + "0" * 64, "sha256:short", "../a"):
        response = await replica.client.post("/v1/completions", json=completion(model=model))
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    page = {"origin": "https://example.org", "sec-fetch-site": "cross-site"}
    assert (await replica.client.post(LOAD, json=fine, headers=page)).status_code == 403
    names = [card["id"] for card in (await replica.client.get("/v1/models")).json()["data"]]
    assert names == [MODEL, "sql", "odd=name"]


async def test_stream_survives_crash_of_the_core_with_its_adapter(tmp_path: Path) -> None:
    folder = str(write_peft_adapter(tmp_path / "a", BUNDLED_MODEL))
    engine = bundled_model_engine(enable_lora=True)
    config = msgspec.structs.replace(CONFIG, adapter_root=str(tmp_path), allow_adapter_loading=True)
    async with serve(engine, config, enable_lora=True) as replica:
        response = await load(replica, "a", folder, pinned=True)
        assert response.status_code == 200, response.text
        body = completion(model="a", max_tokens=200, ignore_eos=True, seed=3, temperature=0.8)
        alone = (await replica.client.post("/v1/completions", json=body)).json()
        assert (
            alone["choices"]
            != (await replica.client.post("/v1/completions", json=body | {"model": MODEL})).json()[
                "choices"
            ]
        )
        pieces = []
        async with replica.client.stream(
            "POST", "/v1/completions", json=body | {"stream": True}
        ) as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data: {"):
                    pieces.append(json.loads(line[6:])["choices"][0]["text"])
                if len(pieces) == 5 and not engine.restarts_total and engine.core_pid:
                    os.kill(engine.core_pid, signal.SIGKILL)
        assert engine.restarts_total == 1
        assert "".join(pieces) == alone["choices"][0]["text"]
        assert len(engine.resident_adapters) == 1


async def test_loading_by_request_is_off_by_default(
    replica_server: RunningReplica, root: Path
) -> None:
    for path in (LOAD, UNLOAD):
        body = {"lora_name": "x", "lora_path": "a"}
        response = await replica_server.client.post(path, json=body)
        assert response.status_code == 404
        assert "--allow-adapter-loading" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("module", "enabled", "message"),
    [
        ("x", True, "NAME=PATH"),
        ("x={root}/no-adapter", True, "adapter_config.json"),
        ("x={root}/bad-template", True, "template"),
        (f"{MODEL}={{root}}/a", True, "name of the model"),
        ("x={root}/a", False, "--enable-lora"),
    ],
)
async def test_unusable_modules_end_the_start(
    engine: FakeEngine, root: Path, module: str, enabled: bool, message: str
) -> None:
    config = msgspec.structs.replace(CONFIG, lora_modules=(module.format(root=root),))
    with pytest.raises(ValueError, match=message):
        async with serve(engine, config, enable_lora=enabled):
            pass
