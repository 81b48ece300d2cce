"""Files of gateway processes: flat memory, a kill in the middle of an upload, and their place in the settings."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from tests.support.gateway_processes import GatewayProcess, gateways
from tests.support.waiting import until

from argosy.deployment import GatewayConfig, ModelConfig, ReplicaConfig, load_config
from argosy.store import StoreConfig

FILE_BYTES = 200_000_000
BLOCK = os.urandom(1 << 20)
MAX_GROWTH_BYTES = 50_000_000
HEAD = (
    b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
)
HEADERS = {"content-type": "multipart/form-data; boundary=x"}


@pytest.fixture
def config(tmp_path: Path) -> GatewayConfig:
    return GatewayConfig(
        port=0,
        models=[ModelConfig(name="big", replicas=[ReplicaConfig(url="http://127.0.0.1:9")])],
        store=StoreConfig(url=f"sqlite:///{tmp_path}/argosy.db"),
    )


def read_memory(gateway: GatewayProcess, field: str) -> int:
    """Return a field of /proc/PID/status in bytes."""
    assert gateway.process is not None
    status = Path(f"/proc/{gateway.process.pid}/status").read_text()
    found = re.search(rf"{field}:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def blobs(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.exhaustive
async def test_memory_stays_flat_while_a_large_file_arrives_and_leaves(
    config: GatewayConfig, tmp_path: Path
) -> None:
    digest = hashlib.sha256()

    async def body() -> AsyncIterator[bytes]:
        yield HEAD
        left = FILE_BYTES
        while left:
            block = BLOCK[:left]
            digest.update(block)
            left -= len(block)
            yield block
        yield b"\r\n--x--\r\n"

    async with (
        gateways(config, tmp_path) as (gateway,),
        httpx2.AsyncClient(base_url=gateway.url, timeout=None) as client,
    ):
        small: Any = {"file": ("a", b"a"), "purpose": (None, "batch")}
        assert (await client.post("/v1/files", files=small)).status_code == 200
        before = read_memory(gateway, "VmRSS")
        file = (await client.post("/v1/files", content=body(), headers=HEADERS)).json()
        assert file["bytes"] == FILE_BYTES
        received = hashlib.sha256()
        async with client.stream("GET", f"/v1/files/{file['id']}/content") as response:
            async for part in response.aiter_bytes():
                received.update(part)
        assert received.digest() == digest.digest()
        assert read_memory(gateway, "VmHWM") - before < MAX_GROWTH_BYTES


async def test_killed_gateway_leaves_nothing_of_an_upload(
    config: GatewayConfig, tmp_path: Path
) -> None:
    folder = tmp_path / "argosy.db.files"

    async def body() -> AsyncIterator[bytes]:
        yield HEAD + BLOCK
        await asyncio.Event().wait()

    async with (
        gateways(config, tmp_path) as (gateway,),
        httpx2.AsyncClient(timeout=None) as client,
    ):
        path = f"{gateway.url}/v1/files"
        upload = asyncio.create_task(client.post(path, content=body(), headers=HEADERS))
        await until(lambda: any(blob.stat().st_size for blob in blobs(folder)))
        await gateway.kill()
        upload.cancel()
        assert len(blobs(folder)) == 1
        await gateway.start()
        assert blobs(folder) == []
        files = await client.get(f"{gateway.url}/v1/files")
        assert files.json()["data"] == []


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ("files", "is no absolute path and no URL"),
        ("ftp://files", "ftp:// is not supported"),
    ],
)
def test_settings_name_what_is_wrong_with_the_place(
    config: GatewayConfig, tmp_path: Path, place: str, problem: str
) -> None:
    assert config.store is not None
    store = msgspec.structs.replace(config.store, blobs=place)
    path = tmp_path / "gateway.yaml"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(config, store=store)))
    with pytest.raises(ValueError, match=problem):
        load_config(path)
