"""Measure changes of a fleet: from `argosy scale` to a ready replica, and what a gateway needs to apply new pools.

    python -m benchmarks.fleet_changes [--rounds 5] [--file examples/two-pools.yaml]

`bare_s` is how long a replica with the options of the pool starts by itself.

`ready_s` is the time from the start of `argosy scale POOL N+1` until every gateway routes to one more replica.

`apply_cpu_ms` is the CPU time of a gateway for a publication that adds one replica to 1,000 in 100 models. `loop_ms` of
it are on its event loop.

Prints JSON lines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import msgspec

from argosy.deployment import GatewayConfig, ModelConfig, ReplicaConfig, read_fleet_status
from argosy.gateway.model_registry import ModelRegistry, build_model_entries
from argosy.store import FleetStore
from benchmarks.declared_fleet import Fleet, run_fleet
from benchmarks.processes import exit_on_sigterm

FLEET, PORT = "changes", 18_320
REPLICA_PORT = 18_330
MODELS, REPLICAS = 100, 10
POOL = "chat"


def start_bare(folder: Path) -> float:
    """Return the seconds in which a replica of the pool starts without a fleet."""
    url = f"http://127.0.0.1:{REPLICA_PORT}"
    options = ["--max-seqs", "16", "--kv-memory", "64MiB", "--threads", "1"]
    command = [sys.executable, "-m", "argosy.cli", "replica", "argosy-mini", *options]
    started_at = time.monotonic()
    with (folder / "replica.log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--port", str(REPLICA_PORT)], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        while True:
            try:
                if httpx2.get(f"{url}/ready", trust_env=False).is_success:
                    return time.monotonic() - started_at
            except httpx2.TransportError:
                time.sleep(0.02)
    finally:
        process.terminate()
        process.wait()


def scale_up(fleet: Fleet, replicas: int) -> float:
    """Return the seconds from the command to the ready replica. Scales down again."""
    started_at = time.monotonic()
    fleet.run("scale", POOL, str(replicas + 1))
    store = fleet.open_store()
    while count_ready(store) <= replicas:
        time.sleep(0.05)
    ready_s = time.monotonic() - started_at
    fleet.run("scale", POOL, str(replicas))
    while count_ready(store) > replicas:
        time.sleep(0.05)
    return ready_s


def count_ready(store: FleetStore) -> int:
    """Return the number of ready replicas of the pool."""
    status = read_fleet_status(store, FLEET)
    return next(pool.ready for pool in status.pools if pool.pool == POOL)


def build_config(extra: int) -> GatewayConfig:
    """Return the settings of a gateway with 1,000 replicas, and some more of the first model."""
    models = [
        ModelConfig(
            name=f"model-{number}",
            replicas=[
                ReplicaConfig(url=f"http://127.0.0.1:{9 + index}", name=f"r-{number}-{index}")
                for index in range(REPLICAS + (extra if not number else 0))
            ],
        )
        for number in range(MODELS)
    ]
    return GatewayConfig(models=models)


async def measure_gateway(rounds: int) -> dict[str, float]:
    """Return the CPU times of a gateway for publications that add one replica. No replica answers."""

    async def resolve(host: str, port: int) -> list[str]:
        raise OSError(f"{host}:{port} is not looked up")

    registry = ModelRegistry(build_model_entries(build_config(0)), [], resolve)
    total, loop = [], []
    for number in range(1, rounds + 1):
        encoded = msgspec.json.encode(build_config(number))
        started = time.process_time()
        entries = build_model_entries(msgspec.json.decode(encoded, type=GatewayConfig))
        built = time.process_time()
        registry.apply_config(entries, [])
        ended = time.process_time()
        total.append(ended - started)
        loop.append(ended - built)
    await registry.close()
    return {
        "apply_cpu_ms": round(1e3 * statistics.median(total), 1),
        "loop_ms": round(1e3 * statistics.median(loop), 2),
    }


def main() -> None:
    """Run the fleet and all rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--file", type=Path, default=Path("examples/two-pools.yaml"))
    options = parser.parse_args()
    exit_on_sigterm()
    rows = []
    with run_fleet({"fleet": FLEET, "port": PORT}, options.file) as fleet:
        for _ in range(options.rounds):
            bare_s, ready_s = start_bare(fleet.folder), scale_up(fleet, 2)
            rows.append((bare_s, ready_s))
            print(json.dumps({"bare_s": round(bare_s, 2), "ready_s": round(ready_s, 2)}))
    summary = {
        "bare_s_median": round(statistics.median(bare for bare, _ in rows), 2),
        "ready_s_median": round(statistics.median(ready for _, ready in rows), 2),
        "ratio_median": round(statistics.median(ready / bare for bare, ready in rows), 2),
    }
    print(json.dumps(summary | asyncio.run(measure_gateway(options.rounds))))


if __name__ == "__main__":
    main()
