"""Kill replicas, controllers and gateways of a declared fleet under load, and measure how it repairs itself.

    python -m benchmarks.fleet_kills [--kills 100] [--clients 4] [--seed 0] [--file examples/two-pools.yaml]

Clients send one greedy chat after another to the models of the fleet. A request whose gateway was killed is sent again,
as clients of a killed server must; any other failure, and any other text, counts as lost. After each kill the
fleet must return to what is declared. Prints a JSON line for each kill, and one for all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import httpx2
import psutil
import yaml

from argosy.deployment import FleetStatus, read_fleet_status
from argosy.store import FleetStore
from benchmarks.declared_fleet import Fleet, run_fleet
from benchmarks.processes import exit_on_sigterm

FLEET, PORT = "kills", 18_310
TARGETS = ("replica", "replica", "replica", "controller", "gateway")
"""Kinds of processes to draw from. Replicas are as frequent as they are in a fleet."""
ACTIONS = frozenset({"replica_phase", "controller_leads"})
PROMPT = "Count from one to twenty."


def find_processes(fleet: Fleet, kind: str) -> list[psutil.Process]:
    """Return the running processes of a fleet of one kind."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if (
            "argosy.cli" in command[:4]
            and kind in command[:5]
            and process.ppid() not in {other.pid for other in found}  # not the engine core
            and any(str(fleet.folder) in argument for argument in command)
        ):
            found.append(process)
    return found


class Load:
    """Clients that send requests until they are cancelled."""

    def __init__(self, models: list[str]) -> None:
        self._models = models
        self.expected: dict[str, str] = {}
        self.gateway_killed_at = float("-inf")
        self.completed = self.repeated = 0
        self.lost: list[str] = []

    async def run_client(self, number: int) -> None:
        """Send one chat after another."""
        model = self._models[number % len(self._models)]
        async with httpx2.AsyncClient(timeout=120, trust_env=False) as client:
            while True:
                started_at = time.monotonic()
                try:
                    text = await send_chat(client, model)
                except (httpx2.HTTPError, OSError) as error:
                    if self.gateway_killed_at >= started_at - 1:  # killed, or not back yet
                        self.repeated += 1
                        await asyncio.sleep(0.2)
                        self.gateway_killed_at = max(self.gateway_killed_at, started_at)
                    else:
                        self.lost.append(repr(error))
                    continue
                self.completed += 1
                if text != self.expected.setdefault(model, text):
                    self.lost.append(f"{text!r} instead of {self.expected[model]!r}")


async def send_chat(client: httpx2.AsyncClient, model: str) -> str:
    """Send a chat and return the text of the response."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": 0,
        "max_tokens": 96,
        "ignore_eos": True,
    }
    response = await client.post(f"http://127.0.0.1:{PORT}/v1/chat/completions", json=body)
    response.raise_for_status()
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


async def wait_until_declared(store: FleetStore, after_event: int) -> FleetStatus:
    """Wait until a controller that has seen the latest kill finds the fleet as declared."""
    while True:
        # Events are written after the records from which the status is read.
        events = await asyncio.to_thread(store.list_events, FLEET, after=after_event or 1)
        status = await asyncio.to_thread(read_fleet_status, store, FLEET)
        if status.is_as_declared and any(event.kind in ACTIONS for event in events):
            return status
        await asyncio.sleep(0.1)


async def run_round(
    fleet: Fleet, store: FleetStore, load: Load, draw: random.Random
) -> dict[str, object]:
    """Kill one process, and wait until the fleet is as declared."""
    kind = draw.choice(TARGETS)
    await asyncio.sleep(draw.uniform(0.0, 2.0))
    processes = find_processes(fleet, kind)
    victim = draw.choice(sorted(processes, key=lambda process: process.pid))
    last_event = store.list_events(FLEET)[-1].number
    lost = len(load.lost)
    killed_at, killed_wall = time.monotonic(), time.time()
    if kind == "gateway":
        load.gateway_killed_at = killed_at
    victim.kill()
    await wait_until_declared(store, last_event)
    repaired_s = time.monotonic() - killed_at
    events = [
        event
        for event in store.list_events(FLEET, after=last_event, limit=1000)
        if event.kind in ACTIONS
    ]
    return {
        "killed": kind,
        "detected_s": round(events[0].at - killed_wall, 2),
        "repaired_s": round(repaired_s, 2),
        "lost": len(load.lost) - lost,
    }


async def measure(fleet: Fleet, options: argparse.Namespace) -> None:
    """Run all rounds, and print their rows."""
    draw = random.Random(options.seed)
    store = fleet.open_store()
    settings = yaml.safe_load(options.file.read_text())
    load = Load([model["name"] for model in settings["models"]])
    clients = [asyncio.create_task(load.run_client(n)) for n in range(options.clients)]
    rows = []
    for _ in range(options.kills):
        row = await run_round(fleet, store, load, draw)
        rows.append(row)
        print(json.dumps(row), flush=True)
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    for error in load.lost:
        print(error, file=sys.stderr)
    kinds = Counter(row["killed"] for row in rows)
    summary: dict[str, object] = {
        "kills": dict(kinds),
        "requests": load.completed,
        "repeated": load.repeated,
        "lost": len(load.lost),
    }
    for kind in kinds:
        for figure in ("detected_s", "repaired_s"):
            values = [float(str(row[figure])) for row in rows if row["killed"] == kind]
            summary[f"{kind}_{figure}_median"] = statistics.median(values)
            summary[f"{kind}_{figure}_max"] = max(values)
    print(json.dumps(summary))


def main() -> None:
    """Run the fleet, the load and the kills."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file", type=Path, default=Path("examples/two-pools.yaml"))
    options = parser.parse_args()
    exit_on_sigterm()
    with run_fleet({"fleet": FLEET, "port": PORT}, options.file) as fleet:
        asyncio.run(measure(fleet, options))


if __name__ == "__main__":
    main()
