"""Choice of the device, and the CPU: threads, free memory, and the selection and build of kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from argosy import machine_resources as resources
from argosy.engine.engine_config import EngineConfig
from argosy.engine.execution.kernels.cpu import isa as isa_module
from argosy.engine.execution.kernels.cpu.compute_threads import THREADS_VARIABLE
from argosy.engine.execution.kernels.cpu.device import create_cpu_device
from argosy.engine.execution.kernels.cpu.isa import ISA_VARIABLE, TORCH_ISA_NAME, available_isas
from argosy.engine.execution.kernels.cpu.native_kernels import Kernels, load_kernels
from argosy.engine.execution.kernels.device import Device
from argosy.engine.execution.loading.executor_loader import choose_device, load_executor
from argosy.machine_resources import CpuQuota, CpuTimes, read_cpu_times
from argosy.models import BUNDLED_MODEL
from argosy.native import NativeUnavailableError
from argosy.protocol import ModelDescription


def test_loading_reports_its_activities_and_describes_the_model() -> None:
    activities: list[str] = []
    config = EngineConfig(model=str(BUNDLED_MODEL), threads=1, warmup=False, num_blocks=64)
    loaded = load_executor(config, lambda activity, _fraction: activities.append(activity))
    assert list(dict.fromkeys(activities)) == ["preparing the kernels", "loading weights"]
    weights = BUNDLED_MODEL / "model.safetensors"
    assert loaded.model is not None
    assert loaded.model == ModelDescription(
        family=loaded.architecture.family,
        parameters=loaded.architecture.num_parameters,
        size_bytes=weights.stat().st_size,
        format="safetensors",
        quantization="bfloat16",
    )


@pytest.fixture
def device() -> Iterator[Device]:
    before = torch.get_num_threads()
    yield create_cpu_device(2)
    torch.set_num_threads(before)


def load_kernels_or_none() -> Kernels | None:
    try:
        return load_kernels()
    except NativeUnavailableError:
        return None


def test_thread_count_is_set_and_validated(device: Device) -> None:
    assert torch.get_num_threads() == 2
    assert "2 threads" in device.name
    with pytest.raises(ValueError, match="1 or more"):
        create_cpu_device(0)


def test_default_thread_count_divides_usable_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(THREADS_VARIABLE, raising=False)
    before = torch.get_num_threads()
    create_cpu_device(None)
    default = torch.get_num_threads()
    assert 1 <= default <= len(os.sched_getaffinity(0))
    create_cpu_device(None, colocated_replicas=1)
    assert torch.get_num_threads() == max(1, default // 2)
    create_cpu_device(None, colocated_replicas=1000)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("variable", "option", "count"), [("3", None, 3), ("4,2", None, 4), ("3", 2, 2)]
)
def test_environment_sets_thread_count_unless_option_does(
    device: Device, monkeypatch: pytest.MonkeyPatch, variable: str, option: int | None, count: int
) -> None:
    monkeypatch.setenv(THREADS_VARIABLE, variable)
    assert f"{count} threads" in create_cpu_device(option, colocated_replicas=1).name
    monkeypatch.setenv(THREADS_VARIABLE, "many")
    with pytest.raises(ValueError, match="OMP_NUM_THREADS is 'many'; set it to the number"):
        create_cpu_device(None)


def cpu_times(at_s: float, own_s: float, idle_s: float, *quotas: CpuQuota) -> CpuTimes:
    """Return the counters of a machine with 4 CPUs."""
    return CpuTimes(at_s, own_s, idle_s, total_s=4 * at_s, num_cpus=4, quotas=quotas)


@pytest.mark.parametrize(
    ("earlier", "later", "available"),
    [
        (cpu_times(10, 1, 0), cpu_times(12, 5, 0), 2.0),  # other processes use 2 of 4 CPUs
        (cpu_times(10, 1, 0), cpu_times(12, 5, 4), 4.0),  # half of the CPUs are idle
        (  # other processes of the cgroup use 1 of the 3 CPUs of its quota
            cpu_times(10, 1, 0, CpuQuota(3.0, 7.0)),
            cpu_times(12, 5, 4, CpuQuota(3.0, 13.0)),
            2.0,
        ),
        (CpuTimes(10, 1, 0, 0, 4), CpuTimes(12, 5, 0, 0, 4), None),  # the kernel does not count
    ],
)
def test_available_cpus_are_own_and_idle_ones(
    earlier: CpuTimes, later: CpuTimes, available: float | None
) -> None:
    assert later.available_cpus_since(earlier) == available


def test_cpu_times_are_read_from_the_kernel() -> None:
    earlier = read_cpu_times()
    if earlier is None:
        pytest.skip("the kernel has no /proc/stat")
    assert 0 < earlier.idle_s < earlier.total_s
    assert earlier.num_cpus == len(os.sched_getaffinity(0))
    later = read_cpu_times()
    assert later is not None
    assert later.own_s > earlier.own_s


def test_free_bytes_do_not_exceed_total_memory(device: Device) -> None:
    assert 0 < device.free_bytes() <= psutil.virtual_memory().total


def test_free_bytes_respect_cgroup_limit(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {"memory.max": "5000", "memory.current": "3000"}
    for name, text in {**figures, "memory.stat": "anon 2000\ninactive_file 700\n"}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(resources, "_cgroup_folders", lambda: [tmp_path])
    assert device.free_bytes() == 2700
    (tmp_path / "memory.max").write_text("max")
    assert device.free_bytes() > 2700


def test_cpu_quota_of_cgroup_limits_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000")
    (tmp_path / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    monkeypatch.setattr(resources, "_cgroup_folders", lambda: [tmp_path])
    assert resources.usable_cpus() == 1
    assert resources.read_cpu_quotas() == (CpuQuota(1.5, 2.5),)


def test_device_name_contains_isa(isa: str) -> None:
    assert create_cpu_device(1).name == f"cpu ({isa}, 1 threads)"


def test_default_isa_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    expected = available_isas()[0].name if load_kernels_or_none() else TORCH_ISA_NAME
    assert f"({expected}," in create_cpu_device(1).name


def test_unsupported_isa_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    avx2_features = next(isa.required_features for isa in isa_module.ISAS if isa.name == "avx2")
    monkeypatch.setattr(isa_module, "cpu_features", lambda: avx2_features)
    assert [isa.name for isa in available_isas()] == ["avx2", "generic"]
    monkeypatch.setenv(ISA_VARIABLE, "avx512")
    with pytest.raises(ValueError, match=r"lacks avx512bw.*choose one of avx2, generic, .*torch"):
        create_cpu_device(1)
    monkeypatch.setenv(ISA_VARIABLE, "mmx")
    with pytest.raises(ValueError, match="no instruction set has this name"):
        create_cpu_device(1)


def test_compiler_failure_selects_next_isa(tmp_path: Path) -> None:
    """The fake compiler rejects the flags of the fastest instruction set, and copies a finished library for others."""
    kernels = load_kernels_or_none()
    if kernels is None or len(available_isas()) < 2:
        pytest.skip("no compiler, or a CPU with only one instruction set")
    fastest, following = available_isas()[:2]
    compiler = tmp_path / "c++"
    compiler.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *"{" ".join(fastest.compiler_flags)}"*) echo unknown flag >&2; exit 1;; esac\n'
        f'for last; do :; done; [ "$last" = --version ] || cp {kernels.path} "$last"\n'
    )
    compiler.chmod(0o755)
    assert load_kernels(str(compiler), tmp_path / "built").isa == following.name


@pytest.mark.parametrize(
    ("driver", "cuda_version", "message"),
    [
        ("libnothing.so.9", None, "no NVIDIA driver.*--device cpu or auto"),
        ("libnothing.so.9", "12.8", "no NVIDIA driver.*--device cpu or auto"),
        ("libc.so.6", None, "built without CUDA; install a CUDA build.*--device cpu"),
        ("libc.so.6", "12.8", "no GPU is visible; check nvidia-smi.*--device cpu"),
    ],
)
def test_unusable_gpu_is_refused_with_the_right_remedy(
    monkeypatch: pytest.MonkeyPatch, driver: str, cuda_version: str | None, message: str
) -> None:
    """The error on a machine without a GPU recommended a CUDA build of torch."""
    monkeypatch.setattr("argosy.engine.execution.kernels.gpu.device.DRIVER_LIBRARY", driver)
    monkeypatch.setattr(torch.version, "cuda", cuda_version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=message):
        choose_device(EngineConfig(model="any", device="cuda"))
