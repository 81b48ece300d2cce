"""The CPU device: linears whose rows keep their bits in any batch, memory figures, native builds."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest
import torch

from argosy.engine.execution import device as device_module
from argosy.engine.execution.device import Device, cpu_device
from argosy.engine.execution.linear_cpu import NativeLinear
from argosy.engine.execution.native import Kernels, NativeUnavailable, load_kernels

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BATCHES = (1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 47, 64, 65, 128, 200, 259)


@pytest.fixture
def device() -> Iterator[Device]:
    before = torch.get_num_threads()
    yield cpu_device(2)
    torch.set_num_threads(before)


def native_kernels() -> Kernels | None:
    try:
        return load_kernels()
    except NativeUnavailable:
        return None


def made(outs: int, cols: int, dtype: torch.dtype, rows: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(outs + cols)
    weight = torch.randn(outs, cols, generator=generator) * cols**-0.5
    bias = torch.randn(outs, generator=generator)
    x = torch.randn(rows, cols, generator=generator)
    return weight.to(dtype), bias.to(dtype), x.to(dtype)


# The bundled model's, then those of models of 0.5 and 1.7 billion parameters, then odd ones.
LINEARS = [
    (320, 320),
    (896, 320),
    (320, 896),
    (4096, 320),
    (896, 896),
    (4864, 896),
    (896, 4864),
    (2048, 6144),
    (100, 70),
    (17, 33),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", LINEARS, ids=[f"{n}x{k}" for n, k in LINEARS])
def test_a_row_has_the_same_bits_in_any_batch(
    device: Device, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    outs, cols = shape
    if dtype == torch.bfloat16 and cols > 512 and native_kernels() is None:
        pytest.skip("oneDNN's bfloat16 sums depend on the batch at this size")
    weight, bias, x = made(outs, cols, dtype, max(BATCHES))
    linear = device.linear(weight, bias)
    whole = linear(x)
    exact = x.double() @ weight.double().T + bias.double()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(whole.double(), exact, atol=tolerance, rtol=tolerance)
    assert whole.dtype == dtype
    for rows in BATCHES:
        first = max(BATCHES) - rows  # at another place in the batch, too
        assert torch.equal(linear(x[:rows]), whole[:rows])
        assert torch.equal(linear(x[first:]), whole[first:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_threads_do_not_change_a_linear(dtype: torch.dtype) -> None:
    weight, _, x = made(896, 896, dtype, 40)
    before = torch.get_num_threads()
    one, three = (cpu_device(n).linear(weight, None)(x) for n in (1, 3))
    torch.set_num_threads(before)
    assert torch.equal(one, three)


@pytest.mark.parametrize("shape", [(896, 896), (100, 600), (4096, 320)], ids=str)
def test_a_long_batch_has_the_bits_of_its_rows(shape: tuple[int, int]) -> None:
    """Rows are worked on in chunks, blocks and steps: none of their edges may show."""
    if native_kernels() is None:
        pytest.skip("no compiler")
    weight, bias, x = made(*shape, torch.bfloat16, 800)
    before = torch.get_num_threads()
    linears = [cpu_device(threads).linear(weight, bias) for threads in (1, 2, 5)]
    torch.set_num_threads(before)
    wholes = [linear(x) for linear in linears]
    assert all(torch.equal(whole, wholes[0]) for whole in wholes)
    for row in (0, 31, 255, 256, 300, 511, 512, 799):
        assert torch.equal(linears[0](x[row : row + 1]), wholes[0][row : row + 1])


@pytest.mark.parametrize("rows", [1, 9, 33, 300])
def test_the_vector_unit_does_what_the_matrix_unit_does(rows: int) -> None:
    kernels = native_kernels()
    if kernels is None:
        pytest.skip("no compiler")
    weight, bias, x = made(100, 600, torch.bfloat16, 300)
    linear = NativeLinear(kernels, weight, bias, 2)
    whole = linear(x)
    others = Kernels(kernels.path)
    vector = ctypes.CDLL(str(kernels.path)).argosy_linear_vector
    vector.argtypes = (ctypes.c_void_p,)
    others.linear = vector
    by_vector = NativeLinear(others, weight, bias, 2)
    torch.testing.assert_close(by_vector(x), whole, atol=2e-2, rtol=2e-2)
    assert torch.equal(by_vector(x[:rows]), by_vector(x)[:rows])


def test_a_linear_of_no_rows_is_empty(device: Device) -> None:
    weight, bias, _ = made(64, 32, torch.bfloat16, 1)
    assert device.linear(weight, bias)(torch.empty(0, 32, dtype=torch.bfloat16)).shape == (0, 64)


def test_a_linear_takes_rows_that_lie_apart(device: Device) -> None:
    weight, bias, x = made(64, 96, torch.bfloat16, 20)
    linear = device.linear(weight, bias)
    wide = torch.zeros(20, 200, dtype=torch.bfloat16)
    wide[:, 50:146] = x
    assert torch.equal(linear(wide[:, 50:146]), linear(x))


def test_threads_are_set_and_checked(device: Device) -> None:
    assert torch.get_num_threads() == 2
    assert "2 threads" in device.name
    with pytest.raises(ValueError, match="1 or more"):
        cpu_device(0)


def test_all_usable_cpus_by_default() -> None:
    before = torch.get_num_threads()
    cpu_device(None)
    assert 1 <= torch.get_num_threads() <= len(os.sched_getaffinity(0))
    torch.set_num_threads(before)


def test_free_memory_is_within_the_machine(device: Device) -> None:
    assert 0 < device.free_bytes() <= psutil.virtual_memory().total


def test_free_memory_respects_the_cgroup(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {"memory.max": "5000", "memory.current": "3000"}
    for name, text in {**figures, "memory.stat": "anon 2000\ninactive_file 700\n"}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(device_module, "_cgroup_folders", lambda: [tmp_path])
    assert device.free_bytes() == 2700
    (tmp_path / "memory.max").write_text("max")
    assert device.free_bytes() > 2700


def test_staging_and_events_cost_nothing_on_cpu(device: Device) -> None:
    tensor = torch.zeros(3)
    assert device.to_device(tensor) is tensor
    assert device.torch_device.type == "cpu"
    device.event().synchronize()


def test_processes_that_build_at_once_share_one_result(tmp_path: Path) -> None:
    if native_kernels() is None:
        pytest.skip("no compiler")
    code = (
        "import sys, pathlib; from argosy.engine.execution.native import load_kernels; "
        "print(load_kernels(None, pathlib.Path(sys.argv[1])).path)"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    printed = {process.communicate(timeout=100)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0]
    assert len(printed) == 1
    (built,) = tmp_path.rglob("*.so")
    assert str(built) in printed
    assert [p for p in built.parent.iterdir() if p != built] == []


def test_a_build_is_used_again(tmp_path: Path) -> None:
    kernels = native_kernels()
    if kernels is None:
        pytest.skip("no compiler")
    copy = tmp_path / kernels.path.parent.name / kernels.path.name
    copy.parent.mkdir()
    shutil.copy2(kernels.path, copy)
    assert load_kernels(None, tmp_path).path == copy
    assert copy.stat().st_mtime_ns == kernels.path.stat().st_mtime_ns


def test_a_damaged_build_is_named(tmp_path: Path) -> None:
    kernels = native_kernels()
    if kernels is None:
        pytest.skip("no compiler")
    copy = tmp_path / kernels.path.parent.name / kernels.path.name
    copy.parent.mkdir()
    copy.write_bytes(b"not a library")
    with pytest.raises(NativeUnavailable, match="delete it"):
        load_kernels(None, tmp_path)
