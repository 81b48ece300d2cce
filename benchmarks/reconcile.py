"""Measure the controller's decisions for 1,000 replicas in 100 pools: CPU time and memory. Prints JSON lines.

    python -m benchmarks.reconcile

settled: the fleet is as declared. crashed: one replica of ten has exited. replaced: every pool has a new generation.
started: no replica exists yet. The memory is the peak that one decision allocates, including its result.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
import tracemalloc

import msgspec

from argosy.policy.reconciliation import (
    DesiredFleet,
    DesiredPool,
    LaunchState,
    ObservedFleet,
    ObservedReplica,
    reconcile,
    replica_name,
)

POOLS = 100
REPLICAS = 10
ROUNDS = 100
NOW = 1e6


def fleet(generation: int) -> DesiredFleet:
    """Return the declaration of 100 pools."""
    return DesiredFleet(
        pools=tuple(
            DesiredPool(
                name=f"pool-{number}",
                launcher="local",
                generation=generation,
                replicas=REPLICAS - 1,
                spares=1,
            )
            for number in range(POOLS)
        )
    )


def replicas(crashed_every: int = 0) -> tuple[ObservedReplica, ...]:
    """Return all replicas of the first generation, of which some have crashed."""
    return tuple(
        ObservedReplica(
            name=replica_name(f"pool-{number}", 1, ordinal),
            pool=f"pool-{number}",
            generation=1,
            ordinal=ordinal,
            launcher="local",
            state=LaunchState.EXITED if has_crashed else LaunchState.RUNNING,
            attempt=1,
            started_at=NOW - 500.0,
            exited_at=NOW if has_crashed else None,
            last_response_at=NOW,
            last_step_at=NOW,
            is_serving=not has_crashed,
            ready_at=NOW - 450.0,
            in_rotation=ordinal > 0,
            is_routed=ordinal > 0,
            is_routed_by_any=ordinal > 0,
        )
        for number in range(POOLS)
        for ordinal in range(REPLICAS)
        for has_crashed in [crashed_every > 0 and ordinal % crashed_every == 1]
    )


def measure(label: str, desired: DesiredFleet, observed: ObservedFleet) -> None:
    """Print one JSON line."""
    times_ms = []
    for _ in range(ROUNDS):
        begin = time.process_time()
        result = reconcile(desired, observed, NOW)
        times_ms.append((time.process_time() - begin) * 1e3)
    gc.collect()
    tracemalloc.start()
    result = reconcile(desired, observed, NOW)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    row = {
        "fleet": label,
        "pools": len(desired.pools),
        "replicas": len(observed.replicas),
        "actions": len(result.actions),
        "median_ms": round(statistics.median(times_ms), 2),
        "p90_ms": round(statistics.quantiles(times_ms, n=10)[-1], 2),
        "peak_kib": round(peak_bytes / 1024),
        "observation_kib": round(sum(map(_size, observed.replicas)) / 1024),
    }
    print(json.dumps(row))


def _size(replica: ObservedReplica) -> int:
    """Return the bytes of a replica as the store would write it."""
    return len(msgspec.json.encode(replica))


def main() -> None:
    """Print one JSON line for each state of the fleet."""
    measure("settled", fleet(1), ObservedFleet(replicas=replicas()))
    measure("crashed", fleet(1), ObservedFleet(replicas=replicas(crashed_every=10)))
    measure("replaced", fleet(2), ObservedFleet(replicas=replicas()))
    measure("started", fleet(1), ObservedFleet())


if __name__ == "__main__":
    main()
