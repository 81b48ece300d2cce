"""Measure changes of a fleet: from `argosy scale` to a ready replica, and what a gateway needs to apply new pools.

    python -m benchmarks.fleet_changes [--rounds 5] [--file examples/two-pools.yaml]
    python -m benchmarks.fleet_changes --lost [--gateways 2]

`bare_s` is how long a replica with the options of the pool starts by itself.

`ready_s` is the time from the start of `argosy scale POOL N+1` until every gateway routes to one more replica.

`apply_cpu_ms` is the CPU time of a gateway for a publication that adds one replica to 1,000 in 100 models. `loop_ms` of
it are on its event loop.

With `--lost`, `sent` and `lost` count requests, 20 a second to all gateways in turn, while `argosy apply` changes eight
settings of the gateways and replaces all replicas. Half of them are streams, and nothing is tried again.

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


CHANGES = {
    "log_level": "debug",
    "queue": {"timeout_s": 20},
    "timeouts": {"connect_timeout_s": 1},
    "max_failed_attempts": 3,
    "explain": {"max_requests": 100},
    "body_timeout_s": 30,
    "early_stream_start_s": 1,
    "max_connection_age_s": 300,
    "pools": [
        {"name": POOL, "environment": {"A": "1"}},
        {"name": "small", "environment": {"A": "1"}},
    ],
}


async def count_lost(fleet: Fleet, gateways: int) -> dict[str, int]:
    """Return the number of requests that were sent and that were lost while the declaration changed."""
    lost: list[str] = []

    async def send(client: httpx2.AsyncClient, number: int) -> None:
        url = f"http://127.0.0.1:{PORT + number % gateways}/v1/chat/completions"
        message = {"role": "user", "content": "Count to three."}
        stream = bool(number & 2)
        body = {"model": POOL, "max_tokens": 8, "messages": [message], "stream": stream}
        try:
            text = (await client.post(url, json=body)).raise_for_status().text
            if stream and not text.rstrip().endswith("[DONE]"):
                lost.append("cut")
        except httpx2.HTTPError as error:
            lost.append(repr(error))

    async with (
        httpx2.AsyncClient(timeout=120, trust_env=False) as client,
        asyncio.TaskGroup() as group,
    ):
        fleet.declare({"fleet": FLEET, "port": PORT, "gateways": gateways, **CHANGES})
        change = asyncio.create_task(asyncio.to_thread(fleet.run, "apply", "--yes", "--wait"))
        sent = 0
        while not change.done():
            group.create_task(send(client, sent))
            sent += 1
            await asyncio.sleep(0.05)
        await change
    for problem in sorted(set(lost)):
        print(problem, file=sys.stderr)
    return {"gateways": gateways, "sent": sent, "lost": len(lost)}


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
    parser.add_argument("--lost", action="store_true", help="count lost requests")
    parser.add_argument("--gateways", type=int, default=1)
    options = parser.parse_args()
    exit_on_sigterm()
    if options.lost:
        overlay = {"fleet": FLEET, "port": PORT, "gateways": options.gateways}
        with run_fleet(overlay, options.file) as fleet:
            print(json.dumps(asyncio.run(count_lost(fleet, options.gateways))))
        return
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
