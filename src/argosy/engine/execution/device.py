"""The device as a value: where tensors live, how linears are packed, which attention runs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import psutil
import torch

from argosy.engine.execution.attention_cpu import cpu_attention
from argosy.engine.execution.linear_cpu import cpu_linear
from argosy.engine.execution.rows_cpu import RowOps, cpu_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from argosy.engine.execution.batch import Attention

CGROUP_ROOT = Path("/sys/fs/cgroup")


class Event(Protocol):
    """A point in the device's stream of work."""

    def synchronize(self) -> None:
        """Return once all work launched before the event is done."""
        ...


class Device(Protocol):
    """What the engine needs of the hardware. Immutable; its methods have no hidden state."""

    @property
    def name(self) -> str:
        """What is in use, for the log and for `Ready`."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """Where model tensors live."""
        ...

    @property
    def default_dtype(self) -> torch.dtype:
        """The dtype to compute in when the settings say "auto"."""
        ...

    def free_bytes(self) -> int:
        """Bytes that may still be allocated here, now."""
        ...

    def linear(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """Pack weight [N, K] and bias [N] once; the result maps [T, K] to [T, N] in their dtype."""
        ...

    @property
    def rows(self) -> RowOps:
        """Norms and gates."""
        ...

    def attention(
        self,
        *,
        layers: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
    ) -> Attention:
        """Allocate a paged KV cache and the attention over it. ValueError: shapes it cannot do."""
        ...

    def to_device(self, tensor: Tensor) -> Tensor:
        """Stage a host tensor: a copy where device and host differ, else the tensor itself."""
        ...

    def event(self) -> Event:
        """Mark the work launched so far; on CPU it is already done."""
        ...


class _Done:
    """The event of a device that finishes work before it returns."""

    def synchronize(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class _Cpu:
    """The processor that this process runs on."""

    threads: int
    default_dtype: torch.dtype
    rows: RowOps

    @property
    def name(self) -> str:
        return f"cpu ({torch.backends.cpu.get_cpu_capability()}, {self.threads} threads)"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def free_bytes(self) -> int:
        free = psutil.virtual_memory().available
        return max(0, min([free, *_cgroup_headrooms()]))

    def linear(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        return cpu_linear(weight, bias, self.threads)

    def attention(
        self,
        *,
        layers: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
    ) -> Attention:
        return cpu_attention(
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=dtype,
            threads=self.threads,
        )

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor

    def event(self) -> Event:
        return _Done()


def cpu_device(threads: int | None) -> Device:
    """Build the CPU device; None takes every CPU that this process may use.

    Sets torch's intra-op threads for the calling thread, so call it from the thread that computes.
    Raises ValueError for fewer than one thread.
    """
    if threads is not None and threads < 1:
        raise ValueError(f"threads is {threads}; set it to 1 or more, or leave it out")
    count = threads or _usable_cpus()
    torch.set_num_threads(count)
    return _Cpu(threads=count, default_dtype=_native_dtype(), rows=cpu_rows(count))


def _usable_cpus() -> int:
    """CPUs of this process's affinity mask, within the cgroup's quota (at least 1)."""
    cpus = len(os.sched_getaffinity(0))
    for folder in _cgroup_folders():
        words = _read(folder / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            cpus = min(cpus, max(1, int(words[0]) // int(words[1])))
    return cpus


def _native_dtype() -> torch.dtype:
    """bfloat16 where the CPU multiplies it natively; emulated it is slower than float32."""
    flags = _read(Path("/proc/cpuinfo"))
    native = any(flag in flags for flag in ("avx512_bf16", "amx_bf16", " bf16"))
    return torch.bfloat16 if native else torch.float32


def _cgroup_folders() -> list[Path]:
    """Folders of this process's cgroup (v2), innermost first; empty where there is none."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        hierarchy, _, path = line.split(":", 2)
        if hierarchy == "0":
            inner = CGROUP_ROOT / path.lstrip("/")
            return [inner, *(p for p in inner.parents if p.is_relative_to(CGROUP_ROOT))]
    return []


def _cgroup_headrooms() -> list[int]:
    """Bytes left under each memory limit that applies; page cache that can go counts as left."""
    rooms = []
    for folder in _cgroup_folders():
        limit, used = _read(folder / "memory.max"), _read(folder / "memory.current")
        if limit.isdigit() and used.isdigit():
            stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
            rooms.append(int(limit) - int(used) + int(stat.get("inactive_file", 0)))
    return rooms


def _read(path: Path) -> str:
    """The stripped text of a file of the kernel's; empty where it is not there."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
