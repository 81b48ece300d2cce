"""Disk cache of packed weights: reuse, sharing between processes, eviction, and recovery from damage and full disks."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from torch import Tensor

from argosy.engine.engine_request import EngineRequest
from argosy.engine.execution.checkpoint_formats.checkpoint import checkpoint_fingerprint
from argosy.engine.execution.kernels.cpu.device import create_cpu_device
from argosy.engine.execution.kernels.pack_cache import PackCache, open_pack_cache, pack_cache_folder
from argosy.models import BUNDLED_MODEL
from argosy.protocol import SamplingParams
from tests.engine.core_driver import create_core, run_requests

LIMIT = 1 << 24
DISABLED = ["pack_cache_disabled"]
PAYLOADS = {"a": b"some weights" * 700, "b": b"", "c": b"x" * 4096}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    create_cpu_device(1)  # builds the kernels in the usual folder before it changes
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return pack_cache_folder()


def packer(data: bytes) -> Callable[[Tensor], None]:
    def pack(out: Tensor) -> None:
        out.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else out)

    return pack


def fail_if_packed(out: Tensor) -> None:
    raise AssertionError("packed again")


def get_all(packs: PackCache, payloads: dict[str, bytes] = PAYLOADS) -> dict[str, bytes]:
    tensors = {key: packs.get(key, len(data), packer(data)) for key, data in payloads.items()}
    return {key: bytes(tensor.tolist()) for key, tensor in tensors.items()}


def open_cache(*identity: str, required_bytes: int = 0, limit_bytes: int = LIMIT) -> PackCache:
    return open_pack_cache(identity, required_bytes=required_bytes, limit_bytes=limit_bytes)


def load_all(*identity: str, limit_bytes: int = LIMIT) -> None:
    with open_cache(*identity, limit_bytes=limit_bytes) as packs:
        assert get_all(packs) == PAYLOADS


def only_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


@given(payloads=st.dictionaries(st.text(max_size=9), st.binary(max_size=9000), min_size=1))
def test_packed_weights_are_found_again(payloads: dict[str, bytes]) -> None:
    with TemporaryDirectory() as base, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", base)
        with open_cache("model") as packs:
            assert not any(key in packs for key in payloads)
            assert get_all(packs, payloads) == payloads
        with open_cache("model") as packs:
            assert all(key in packs for key in payloads)
            tensors = {
                key: packs.get(key, len(data), fail_if_packed) for key, data in payloads.items()
            }
            assert packs.mapped_bytes == sum(map(len, payloads.values()))
        assert {key: bytes(tensor.tolist()) for key, tensor in tensors.items()} == payloads
        assert [file.suffix for file in pack_cache_folder().iterdir()] == [".packed"]


def test_identities_have_separate_files(folder: Path) -> None:
    load_all("model", "bfloat16")
    for other in (("model", "float32"), ("modelbfloat16",), ("model", "bfloat", "16")):
        with open_cache(*other) as packs:
            assert "a" not in packs
    assert "a" in open_cache("model", "bfloat16")


def flip_bit(file: Path, offset: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
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
        pytest.param(lambda file: flip_bit(file, 3), id="magic"),
        pytest.param(lambda file: flip_bit(file, 10), id="index offset"),
        pytest.param(lambda file: flip_bit(file, -2), id="index"),
        pytest.param(lambda file: flip_bit(file, 4096), id="first byte of a payload"),
        pytest.param(lambda file: flip_bit(file, 4096 + 8399), id="last byte of a payload"),
    ],
)
def test_damaged_file_is_replaced(folder: Path, damage: Callable[[Path], None]) -> None:
    load_all("model")
    file = only_file(folder)
    damage(file)
    with capture_logs() as logs, open_cache("model") as packs:
        assert "a" not in packs
        assert get_all(packs) == PAYLOADS
    assert [line["event"] for line in logs] == ["pack_cache_file_damaged"]
    with capture_logs() as logs, open_cache("model") as packs:
        assert "a" in packs
    assert logs == []
    assert only_file(folder) == file


def test_payload_of_wrong_size_removes_file(folder: Path) -> None:
    load_all("model")
    with open_cache("model") as packs, pytest.raises(RuntimeError, match="removed"):
        packs.get("a", 7, fail_if_packed)
    assert list(folder.iterdir()) == []


def test_concurrent_opens_pack_once(folder: Path) -> None:
    packed: list[str] = []

    def start(_: int) -> dict[str, bytes]:
        with open_cache("model") as packs:
            if "a" not in packs:
                packed.append("again")
            return get_all(packs)

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(start, range(6))) == [PAYLOADS] * 6
    assert packed == ["again"]
    assert only_file(folder).suffix == ".packed"


def test_waiting_open_packs_after_failure(folder: Path) -> None:
    first = open_cache("model")
    get_all(first)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(load_all, "model")
        first.__exit__(ValueError, ValueError("the checkpoint is damaged"), None)
        second.result()
    assert "a" in open_cache("model")


def test_failed_load_leaves_no_file(folder: Path) -> None:
    def fail(_: Tensor) -> None:
        raise ValueError("the checkpoint is damaged")

    packs = open_cache("model")
    get_all(packs)
    with pytest.raises(ValueError, match="damaged"), packs:
        packs.get("d", 5, fail)
    assert list(folder.iterdir()) == []


def test_partial_files_of_dead_processes_are_replaced_or_removed(folder: Path) -> None:
    load_all("model")
    file = only_file(folder)
    file.with_suffix(".partial").write_bytes(b"junk" * 9999)
    file.unlink()
    (folder / "other.partial").write_bytes(b"junk")
    with (folder / "alive.partial").open("wb") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        load_all("model")
        assert {path.name for path in folder.iterdir()} == {file.name, "alive.partial"}
    assert "a" in open_cache("model")


def test_least_recently_used_file_is_evicted(folder: Path) -> None:
    load_all("first")
    size = only_file(folder).stat().st_size
    load_all("second")
    for file in folder.iterdir():
        os.utime(file, (1, 1))
    assert "a" in open_cache("first")  # marks it as used
    load_all("third", limit_bytes=2 * size + size // 2)
    assert "a" in open_cache("first")
    assert "a" in open_cache("third")
    assert len(list(folder.iterdir())) == 2


def test_mapped_payload_outlives_file(folder: Path) -> None:
    load_all("model")
    payload = open_cache("model").get("a", len(PAYLOADS["a"]), fail_if_packed)
    only_file(folder).unlink()
    assert bytes(payload.tolist()) == PAYLOADS["a"]


def fail_writes(after: int) -> Callable[[Path, pytest.MonkeyPatch], None]:
    """Fill the disk after a number of writes."""

    def set_up(_: Path, patch: pytest.MonkeyPatch) -> None:
        original_pwrite, remaining = os.pwrite, [after]

        def failing_pwrite(fd: int, data: bytes, offset: int) -> int:
            if not remaining[0]:
                raise OSError(errno.ENOSPC, "No space left on device")
            remaining[0] -= 1
            return original_pwrite(fd, data, offset)

        patch.setattr(os, "pwrite", failing_pwrite)

    return set_up


def use_low_disk(_: Path, patch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=8192)
    patch.setattr(shutil, "disk_usage", lambda _path: usage)


def use_file_as_folder(folder: Path, _: pytest.MonkeyPatch) -> None:
    folder.parent.parent.mkdir(exist_ok=True)
    folder.parent.write_text("a file where a directory should be")


@pytest.mark.parametrize(
    ("set_up", "options", "events"),
    [
        pytest.param(None, {"limit_bytes": 0}, [], id="limit of zero"),
        pytest.param(None, {"required_bytes": LIMIT + 1}, DISABLED, id="estimate above limit"),
        pytest.param(None, {"limit_bytes": 9000}, DISABLED, id="weights above limit"),
        *(pytest.param(fail_writes(n), {}, DISABLED, id=f"full after {n}") for n in range(4)),
        pytest.param(use_low_disk, {}, DISABLED, id="low disk space"),
        pytest.param(use_file_as_folder, {}, DISABLED, id="unwritable folder"),
    ],
)
def test_weights_are_packed_in_memory_where_no_file_can_be_written(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    set_up: Callable[[Path, pytest.MonkeyPatch], None] | None,
    options: dict[str, int],
    events: list[str],
) -> None:
    if set_up is not None:
        set_up(folder, monkeypatch)
    with capture_logs() as logs, open_cache("model", **options) as packs:
        assert get_all(packs) == PAYLOADS
    assert not folder.is_dir() or list(folder.iterdir()) == []
    assert [line["event"] for line in logs] == events


def test_engine_output_is_equal_from_cache(folder: Path) -> None:
    requests = [
        EngineRequest(
            id="r", prompt=[5, 6, 7], params=SamplingParams(temperature=0, max_tokens=9, logprobs=2)
        )
    ]
    expected = run_requests(
        create_core(BUNDLED_MODEL, dtype="bfloat16", pack_cache_bytes=0), requests
    )
    assert not folder.exists()
    assert run_requests(create_core(BUNDLED_MODEL, dtype="bfloat16"), requests) == expected
    if not create_cpu_device(1).weight_layout_id(torch.bfloat16):
        pytest.skip("without a C++ compiler, weights are not packed")
    state = only_file(folder).stat()
    assert run_requests(create_core(BUNDLED_MODEL, dtype="bfloat16"), requests) == expected
    assert only_file(folder).stat().st_ino == state.st_ino
    create_core(BUNDLED_MODEL, dtype="float32")
    assert only_file(folder).stat().st_ino == state.st_ino


def test_fingerprints_differ_for_equal_names_sizes_and_times(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        file = tmp_path / name / "model.safetensors"
        file.write_text(name)
        os.utime(file, (0, 0))
    assert checkpoint_fingerprint(tmp_path / "one") != checkpoint_fingerprint(tmp_path / "two")
    assert checkpoint_fingerprint(tmp_path / "one") == checkpoint_fingerprint(tmp_path / "one")
