"""Capacity of the controller's machine, and whether the replicas that a declaration runs there fit into it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from argosy.deployment.declaration.comparison import count_replicas
from argosy.deployment.declaration.config import FleetConfig, PoolConfig
from argosy.deployment.declaration.engines import ARGOSY_ENGINE
from argosy.settings import parse_size

REPLICAS_PER_CORE = 4
"""Most replicas that share a core, or cores that they declare as theirs. More of them would not serve in time."""
_MIB = 1024 * 1024


class MachineCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """Resources that one machine has for replicas, or that one replica takes of it."""

    cores: float = 0.0
    memory_bytes: int = 0
    gpus: int = 0


def list_growing_pools(old: FleetConfig | None, new: FleetConfig) -> Iterator[PoolConfig]:
    """Yield the pools that run more, larger or other replicas on the controller's machine than before."""
    for pool in new.pools:
        before = None if old is None else old.find_pool(pool.name)
        if pool.launcher == "local" and (
            old is None
            or before is None
            or count_replicas(pool) > count_replicas(before)
            or _needs(pool) != _needs(before)
            or new.model_of(pool).source != old.model_of(before).source
        ):
            yield pool


def check_capacity(old: FleetConfig | None, new: FleetConfig, machine: MachineCapacity) -> None:
    """Check that the pools that grow fit on the controller's machine.

    The check is optimistic: it counts what the declaration states, but neither weights nor other programs.

    Raises:
        ValueError: One does not fit. The message says how many replicas, or which KV cache, would.
    """
    for pool in list_growing_pools(old, new):
        needs = _needs(pool)
        for resource in MachineCapacity.__struct_fields__:
            need = getattr(needs, resource)
            others = sum(
                count_replicas(other) * getattr(_needs(other), resource)
                for other in new.pools
                if other is not pool
            )
            left = max(0, getattr(machine, resource) - others)
            if need and count_replicas(pool) * need > left:
                raise ValueError(_describe(pool, resource, machine, need, left))


def _describe(
    pool: PoolConfig,
    resource: str,
    machine: MachineCapacity,
    need: float,
    left: float,
) -> str:
    count = count_replicas(pool)
    sentences = {
        "cores": f"{machine.cores:g} cores, each of which is enough for {REPLICAS_PER_CORE} replicas",
        "memory_bytes": f"{_format(machine.memory_bytes)} of memory, and each takes {_format(need)} for its KV cache",
        "gpus": f"{machine.gpus} GPUs to use, and each needs {need:g}",
    }
    if resource == "cores" and pool.cpus is not None:
        sentences[resource] = f"{machine.cores:g} cores, and each replica declares {pool.cpus:g}"
    fitting = [f"{int(left / need)} of them"] if left >= need else []
    if resource == "memory_bytes" and left >= count * _MIB:
        fitting.append(f"options.kv_memory of {_format(left // count)}")
    others = ", of which other pools take a part" if left < getattr(machine, resource) else ""
    noun = "replica" if count == 1 else "replicas"
    remedy = f"{' or '.join(fitting)} would fit" if fitting else "none fits"
    return (
        f"{count} {noun} of the pool {pool.name} cannot run on the controller's machine: it has "
        f"{sentences[resource]}{others}; {remedy}"
    )


def _needs(pool: PoolConfig) -> MachineCapacity:
    """Return what a replica takes of the controller's machine: nothing if it runs elsewhere."""
    if pool.launcher != "local":
        return MachineCapacity()
    if pool.accelerators:
        return MachineCapacity(gpus=pool.accelerators)
    kv_memory = pool.options.get("kv_memory") if pool.engine == ARGOSY_ENGINE else None
    return MachineCapacity(
        cores=(pool.cpus or 1.0) / REPLICAS_PER_CORE,
        memory_bytes=parse_size(kv_memory) if isinstance(kv_memory, (str, int)) else 0,
    )


def _format(size_bytes: float) -> str:
    """Format a size as settings take it, rounded down."""
    mib = int(size_bytes) // _MIB
    return f"{mib // 1024}GiB" if mib >= 10 * 1024 else f"{mib}MiB"
