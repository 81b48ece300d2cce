"""Packed weights on disk: found again, shared, bounded, and neither trusted nor needed."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from argosy.engine.execution.checkpoint import checkpoint_fingerprint
from argosy.engine.execution.device import create_cpu_device
from argosy.engine.execution.pack_cache import PackCache, open_pack_cache, pack_cache_folder
from argosy.engine.serving.core_messages import EngineRequest
from argosy.models import BUNDLED_MODEL
from argosy.protocol import SamplingParams
from tests.engine.core_driver import core_of, run

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

LIMIT = 1 << 24
PAYLOADS = {"a": b"some weights" * 700, "b": b"", "c": b"x" * 4096}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    create_cpu_device(1)  # builds its kernels where they always are
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return pack_cache_folder()


def fill(data: bytes) -> Callable[[Tensor], None]:
    def pack(out: Tensor) -> None:
        out.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else out)

    return pack


def never(out: Tensor) -> None:
    raise AssertionError("packed again")


def get_all(packs: PackCache, payloads: dict[str, bytes] = PAYLOADS) -> dict[str, bytes]:
    found = {key: packs.get(key, len(data), fill(data)) for key, data in payloads.items()}
    return {key: bytes(tensor.tolist()) for key, tensor in found.items()}


def opened(*identity: str, need_bytes: int = 0, limit_bytes: int = LIMIT) -> PackCache:
    return open_pack_cache(identity, required_bytes=need_bytes, limit_bytes=limit_bytes)


def load(*identity: str, limit_bytes: int = LIMIT) -> None:
    with opened(*identity, limit_bytes=limit_bytes) as packs:
        assert get_all(packs) == PAYLOADS


def only_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


@given(payloads=st.dictionaries(st.text(max_size=9), st.binary(max_size=9000), min_size=1))
def test_what_was_packed_once_is_found(payloads: dict[str, bytes]) -> None:
    with TemporaryDirectory() as base, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", base)
        with opened("model") as packs:
            assert not any(key in packs for key in payloads)
            assert get_all(packs, payloads) == payloads
        with opened("model") as packs:
            assert all(key in packs for key in payloads)
            found = {key: packs.get(key, len(data), never) for key, data in payloads.items()}
            assert packs.mapped_bytes == sum(map(len, payloads.values()))
        assert {key: bytes(tensor.tolist()) for key, tensor in found.items()} == payloads
        assert [file.suffix for file in pack_cache_folder().iterdir()] == [".packed"]


def test_identities_do_not_share(folder: Path) -> None:
    load("model", "bfloat16")
    for other in (("model", "float32"), ("modelbfloat16",), ("model", "bfloat", "16")):
        with opened(*other) as packs:
            assert "a" not in packs
    assert "a" in opened("model", "bfloat16")


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda file: os.truncate(file, 0), id="empty"),
        pytest.param(lambda file: os.truncate(file, 30), id="header only"),
        pytest.param(lambda file: os.truncate(file, file.stat().st_size - 1), id="truncated"),
        pytest.param(lambda file: file.write_bytes(file.read_bytes() + b"x"), id="longer"),
        pytest.param(lambda file: flip(file, 3), id="magic"),
        pytest.param(lambda file: flip(file, 10), id="place of the index"),
        pytest.param(lambda file: flip(file, -2), id="index"),
        pytest.param(lambda file: flip(file, 4096), id="first byte of a payload"),
        pytest.param(lambda file: flip(file, 4096 + 8399), id="last byte of a payload"),
    ],
)
def test_a_damaged_file_is_made_anew(folder: Path, damage: Callable[[Path], None]) -> None:
    load("model")
    file = only_file(folder)
    damage(file)
    with capture_logs() as logs, opened("model") as packs:
        assert "a" not in packs
        assert get_all(packs) == PAYLOADS
    assert [line["event"] for line in logs] == ["pack_cache_file_damaged"]
    with capture_logs() as logs, opened("model") as packs:
        assert "a" in packs
    assert logs == []
    assert only_file(folder) == file


def test_a_payload_of_another_size_removes_the_file(folder: Path) -> None:
    load("model")
    with opened("model") as packs, pytest.raises(RuntimeError, match="removed"):
        packs.get("a", 7, never)
    assert list(folder.iterdir()) == []


def test_only_the_first_of_several_at_once_packs(folder: Path) -> None:
    packed: list[str] = []

    def start(_: int) -> dict[str, bytes]:
        with opened("model") as packs:
            if "a" not in packs:
                packed.append("again")
            return get_all(packs)

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(start, range(6))) == [PAYLOADS] * 6
    assert packed == ["again"]
    assert only_file(folder).suffix == ".packed"


def test_when_the_first_fails_the_next_packs(folder: Path) -> None:
    first = opened("model")
    get_all(first)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(load, "model")
        first.__exit__(ValueError, ValueError("the checkpoint is damaged"), None)
        second.result()
    assert "a" in opened("model")


def test_a_load_that_fails_leaves_nothing(folder: Path) -> None:
    def broken(_: Tensor) -> None:
        raise ValueError("the checkpoint is damaged")

    packs = opened("model")
    get_all(packs)
    with pytest.raises(ValueError, match="damaged"), packs:
        packs.get("d", 5, broken)
    assert list(folder.iterdir()) == []


def test_what_a_dead_process_left_is_used_or_removed(folder: Path) -> None:
    load("model")
    file = only_file(folder)
    file.with_suffix(".partial").write_bytes(b"junk" * 9999)
    file.unlink()
    (folder / "other.partial").write_bytes(b"junk")
    with (folder / "alive.partial").open("wb") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        load("model")
        assert {path.name for path in folder.iterdir()} == {file.name, "alive.partial"}
    assert "a" in opened("model")


def test_the_file_used_longest_ago_gives_way(folder: Path) -> None:
    load("first")
    size = only_file(folder).stat().st_size
    load("second")
    for file in folder.iterdir():
        os.utime(file, (1, 1))
    assert "a" in opened("first")  # used now
    load("third", limit_bytes=2 * size + size // 2)
    assert "a" in opened("first")
    assert "a" in opened("third")
    assert len(list(folder.iterdir())) == 2


def test_a_mapping_outlives_its_file(folder: Path) -> None:
    load("model")
    payload = opened("model").get("a", len(PAYLOADS["a"]), never)
    only_file(folder).unlink()
    assert bytes(payload.tolist()) == PAYLOADS["a"]


def goes_on_without(packs: PackCache, folder: Path) -> None:
    with packs:
        assert get_all(packs) == PAYLOADS
    assert not folder.is_dir() or list(folder.iterdir()) == []


def test_nothing_is_kept_without_a_limit(folder: Path) -> None:
    with capture_logs() as logs:
        goes_on_without(opened("model", limit_bytes=0), folder)
    assert logs == []


@pytest.mark.parametrize("need_bytes", [LIMIT + 1, 0])
def test_what_does_not_fit_is_not_kept(folder: Path, need_bytes: int) -> None:
    limit = LIMIT if need_bytes else 9000
    with capture_logs() as logs:
        goes_on_without(opened("model", need_bytes=need_bytes, limit_bytes=limit), folder)
    assert [line["event"] for line in logs] == ["pack_cache_disabled"]


@pytest.mark.parametrize("writes", [0, 1, 2, 3])
def test_a_full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    whole, left = os.pwrite, [writes]

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= 1
        return whole(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with capture_logs() as logs:
        goes_on_without(opened("model"), folder)
    assert [line["event"] for line in logs] == ["pack_cache_disabled"]


def test_hardly_any_space(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=8192))
    with capture_logs() as logs:
        goes_on_without(opened("model"), folder)
    assert [line["event"] for line in logs] == ["pack_cache_disabled"]


def test_a_place_that_cannot_be_written(folder: Path) -> None:
    folder.parent.parent.mkdir(exist_ok=True)
    folder.parent.write_text("a file where a directory should be")
    with capture_logs() as logs:
        goes_on_without(opened("model"), folder)
    assert [line["event"] for line in logs] == ["pack_cache_disabled"]


def test_the_engine_computes_the_same_from_the_cache(folder: Path) -> None:
    requests = [
        EngineRequest(
            id="r", prompt=[5, 6, 7], params=SamplingParams(temperature=0, max_tokens=9, logprobs=2)
        )
    ]
    expected = run(core_of(BUNDLED_MODEL, dtype="bfloat16", pack_cache_bytes=0), requests)
    assert not folder.exists()
    assert run(core_of(BUNDLED_MODEL, dtype="bfloat16"), requests) == expected
    if not create_cpu_device(1).weight_layout_id(torch.bfloat16):
        pytest.skip("without a C++ compiler nothing is packed by us")
    state = only_file(folder).stat()
    assert run(core_of(BUNDLED_MODEL, dtype="bfloat16"), requests) == expected
    assert only_file(folder).stat().st_ino == state.st_ino
    core_of(BUNDLED_MODEL, dtype="float32")
    assert only_file(folder).stat().st_ino == state.st_ino


def test_equal_names_sizes_and_times_are_not_the_same_checkpoint(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        file = tmp_path / name / "model.safetensors"
        file.write_text(name)
        os.utime(file, (0, 0))
    assert checkpoint_fingerprint(tmp_path / "one") != checkpoint_fingerprint(tmp_path / "two")
    assert checkpoint_fingerprint(tmp_path / "one") == checkpoint_fingerprint(tmp_path / "one")
