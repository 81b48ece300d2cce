"""Measure what a tenant meets beside an attacker with an ordinary key. Exits with 4 if a bound is exceeded.

    python -m benchmarks.hostile_tenant [--attacks choices,bodies,...] [--seconds 20] [--all-seconds 300]
    python -m benchmarks.hostile_tenant --upstreams [--behaviours events,heads,...]

The victim and the attacker have projects and organisations of their own, on a gateway with a replica that generates and
one that embeds, both with the bundled model. The victim sends a request of one token each second. Each attack of
`hostile_requests` runs on a new fleet, and then all of them run at once. With `--upstreams`, clients use models whose
servers behave as in `hostile_upstreams`, and the victim uses one that behaves well. Prints a JSON line for each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import msgspec
import numpy as np
import psutil

from argosy.deployment import AuthConfig, GatewayConfig, ModelConfig, ReplicaConfig
from argosy.store import StoreConfig, open_store
from benchmarks.fairness import running, wait_for_line, wait_until_ready
from benchmarks.hostile_requests import ALIAS, ATTACKS, CHAT, EMBEDDING_MODEL
from benchmarks.hostile_upstreams import BEHAVIOURS, KINDS
from benchmarks.loop_watch import read_turns
from benchmarks.options import parse_choices
from benchmarks.peers.catalog import ROOT
from benchmarks.processes import BOUND_EXCEEDED, exit_on_sigterm
from benchmarks.server_process import MODEL

STORED_MIB = 256
"""Quota of a project. The database may take twice as much, and the ledger some more."""
HEADROOM_MIB = 512
"""Memory that an engine core may take besides weights, libraries and KV cache, which are less than 512 MiB."""
BOUNDS: dict[str, float] = {
    "failures": 0,
    "ejections": 0,
    "p99_ms": 3000,
    "health_max_ms": 500,
    "gateway_mib": 1536,
    "core_mib": 1024,
    "disk_mib": 2 * STORED_MIB + 64,
    "turn_ms": 50,
}
"""Largest permitted value of each figure."""
SETTLED_S = 3.0
"""Time in which the victim is alone, which does not count."""
SAMPLE_INTERVAL_S = 0.25
OWN = "own"
"""Name of the replicas that behave well."""
WATCH = (sys.executable, "-m", "benchmarks.loop_watch")


@dataclass
class Fleet:
    """Running gateway with replicas."""

    url: str
    folder: Path
    keys: dict[str, str]
    gateway: int
    replicas: list[int]
    """Process ids."""

    def turns_file(self, name: str) -> Path:
        """Return the file with the long turns of a process."""
        return self.folder / f"{name}.turns"

    def processes(self) -> Iterator[tuple[str, int]]:
        """Yield the role and the id of each running process."""
        yield "gateway_mib", self.gateway
        for replica in self.replicas:
            yield "replica_mib", replica
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(replica).children():
                    is_core = any(".core_process" in each for each in child.cmdline())
                    yield "core_mib" if is_core else "renderer_mib", child.pid


def create_keys(url: str) -> dict[str, str]:
    """Create an organisation and a project for each of the tenants, and return their keys."""
    store = open_store(url)
    store.migrate()
    keys = {}
    for name in ("victim", "attacker"):
        organisation = store.accounts.create_organisation(name, actor="benchmark").id
        project = store.accounts.create_project(organisation, name, actor="benchmark")
        keys[name] = store.accounts.create_key(project.id, "key", actor="benchmark")[1]
    store.close()
    return keys


@contextlib.contextmanager
def run_fleet(behaviours: Sequence[str] = ()) -> Iterator[Fleet]:
    """Run a gateway with two replicas, one of which embeds, or with upstreams of which one behaves well."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "state").mkdir()
        paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
        os.environ |= {"XDG_STATE_HOME": str(folder / "state"), "PYTHONPATH": paths}
        pids: list[int] = []
        if behaviours:
            models = [*start_upstreams(stack, folder, ["healthy"])]
            models += start_upstreams(stack, folder, behaviours)
        else:
            models = [
                start_replica(stack, folder, task, served, pids)
                for task, served in (("generate", MODEL), ("embed", EMBEDDING_MODEL))
            ]
        store = f"sqlite:///{folder / 'state' / 'store.db'}"
        keys = create_keys(store)
        config = GatewayConfig(
            port=0,
            models=models,
            store=StoreConfig(url=store, max_stored_bytes_per_project=STORED_MIB << 20),
            auth=AuthConfig(mode="required"),
        )
        file, log = folder / "gateway.yaml", folder / "gateway.log"
        file.write_bytes(msgspec.json.encode(config))
        command = [*WATCH, str(folder / "gateway.turns"), "gateway", "-c", str(file)]
        gateway = stack.enter_context(running(command, log))
        url = wait_for_line(gateway, log, "argosy gateway is ready at ")
        yield Fleet(url.removesuffix("/v1"), folder, keys, gateway.pid, pids)


def start_replica(
    stack: ExitStack, folder: Path, task: str, model: str, pids: list[int]
) -> ModelConfig:
    """Start a replica with the bundled model, and add its process id to `pids`."""
    command = [*WATCH, str(folder / f"{task}.turns"), "replica", MODEL, "--task", task]
    command += ["--uds", str(folder / task), "--served-model-name", model]
    command += ["--threads", "1", "--kv-memory", "64MiB"]
    command += ["--memory-headroom", f"{HEADROOM_MIB}MiB"]
    log = folder / f"{task}.log"
    process = stack.enter_context(running(command, log))
    pids.append(process.pid)
    wait_until_ready(process, folder / task, log)
    replica = ReplicaConfig(url=f"unix:{folder / task}", name=OWN)
    return ModelConfig(name=model, aliases=(ALIAS,) if model == MODEL else (), replicas=[replica])


def start_upstreams(
    stack: ExitStack, folder: Path, behaviours: Sequence[str]
) -> Iterator[ModelConfig]:
    """Start upstreams, and yield a model for each kind that each of them pretends to be."""
    log = folder / f"{behaviours[0]}.log"
    command = [sys.executable, "-m", "benchmarks.hostile_upstreams", *behaviours]
    process = stack.enter_context(running(command, log))
    ports = json.loads("{" + wait_for_line(process, log, "{"))
    for name, port in ports.items():
        if name == "healthy":
            replica = ReplicaConfig(
                url=f"http://127.0.0.1:{port}", name=OWN, kind="vllm", model="m"
            )
            yield ModelConfig(name=MODEL, replicas=[replica])
            continue
        for kind in KINDS:
            replica = ReplicaConfig(url=f"http://127.0.0.1:{port}", kind=kind, model="m")
            yield ModelConfig(name=f"{name} of {kind}", replicas=[replica])


# --- the victim ------------------------------------------------------------------------------------


@dataclass
class Measurement:
    """Figures of the victim and of the processes so far."""

    fleet: Fleet
    until: float
    waits: list[float] = field(default_factory=list)
    """Durations of the victim's answers in seconds."""
    health_waits: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    peaks: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    outcomes: dict[str, int] = field(default_factory=dict)
    """Attempts by attack and outcome."""

    async def send_requests(self, client: httpx2.AsyncClient) -> None:
        """Send the victim's requests, whether earlier ones are answered or not."""
        async with asyncio.TaskGroup() as group:
            due_at = time.monotonic()
            while due_at < self.until:
                group.create_task(self._send(client))
                due_at += 1.0
                await asyncio.sleep(due_at - time.monotonic())

    async def _send(self, client: httpx2.AsyncClient) -> None:
        messages = [{"role": "user", "content": "Hello"}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 1}
        sent_at = time.monotonic()
        try:
            response = await client.post(CHAT, json=body)
        except httpx2.TransportError as error:
            self.failures.append(type(error).__name__)
            return
        self.waits.append(time.monotonic() - sent_at)
        if response.status_code != httpx2.codes.OK:
            self.failures.append(f"{response.status_code} {response.json()['error']['code']}")

    async def check_health(self, client: httpx2.AsyncClient) -> None:
        """Measure how fast the gateway answers `/health`."""
        while time.monotonic() < self.until:
            sent_at = time.monotonic()
            try:
                await client.get("/health")
            except httpx2.TransportError as error:
                self.failures.append(f"health: {type(error).__name__}")
            self.health_waits.append(time.monotonic() - sent_at)
            await asyncio.sleep(0.1)

    async def sample(self) -> None:
        """Record the peaks of memory and disk in MiB."""
        for _, pid in self.fleet.processes():
            reset_peak(pid)
        while time.monotonic() < self.until:
            for role, pid in self.fleet.processes():
                self._record(role, peak_mib(pid))
            self._record("disk_mib", disk_mib(self.fleet.folder / "state"))
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    def _record(self, name: str, value: float) -> None:
        self.peaks[name] = max(self.peaks[name], value)


def reset_peak(pid: int) -> None:
    """Let the largest resident memory of a process be that of now."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_mib(pid: int) -> float:
    """Return the largest resident memory of a process in MiB, and 0 if it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return 0.0


def disk_mib(folder: Path) -> float:
    """Return the size of all files in MiB."""
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += file.stat().st_size
    return total / 2**20


async def measure(fleet: Fleet, attacks: list[str], seconds: float) -> Measurement:
    """Measure the victim while attacks run, and print their outcomes."""
    headers = {"authorization": f"Bearer {fleet.keys['victim']}"}
    async with httpx2.AsyncClient(base_url=fleet.url, headers=headers, timeout=60.0) as client:
        alone = Measurement(fleet, time.monotonic() + SETTLED_S)
        await alone.send_requests(client)
        run = Measurement(fleet, time.monotonic() + seconds)
        attacker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.hostile_requests", fleet.url),
            *(fleet.keys["attacker"], str(seconds), *attacks),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            await asyncio.gather(run.send_requests(client), run.check_health(client), run.sample())
            output, _ = await asyncio.wait_for(attacker.communicate(), 60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                attacker.kill()
    run.outcomes = json.loads(output or b"{}")
    return run


# --- the report ------------------------------------------------------------------------------------


def count_ejections(log: str) -> int:
    """Count the ejections of replicas that behave well in a gateway's log."""
    events = [json.loads(line) for line in log.splitlines() if '"replica_status_changed"' in line]
    return sum(event["replica"] == OWN and event["status"] == "ejected" for event in events)


def find_exceeded(figures: dict[str, float]) -> list[str]:
    """Return the names of the figures that exceed their bounds."""
    return [name for name, bound in BOUNDS.items() if figures.get(name, 0) > bound]


def report(name: str, run: Measurement, began_at: float) -> dict[str, object]:
    """Return the row of an attack."""
    fleet = run.fleet
    turns = {
        process: read_turns(fleet.turns_file(process), began_at, run.until)
        for process in ("gateway", "generate", "embed")
    }
    waits = [1e3 * wait for wait in run.waits] or [float("inf")]
    figures = {
        "requests": len(run.waits),
        "failures": len(run.failures),
        "p50_ms": np.percentile(waits, 50),
        "p99_ms": np.percentile(waits, 99),
        "max_ms": max(waits),
        "health_max_ms": 1e3 * max(run.health_waits, default=0.0),
        "ejections": count_ejections((fleet.folder / "gateway.log").read_text()),
        "turn_ms": 1e3 * max((turn.cpu_s for each in turns.values() for turn in each), default=0.0),
        **run.peaks,
    }
    places = [
        {
            "process": process,
            "ms": round(1e3 * turn.cpu_s),
            "gc_ms": round(1e3 * turn.gc_s),
            "where": turn.where,
        }
        for process, each in turns.items()
        for turn in sorted(each, key=lambda turn: -turn.cpu_s)[:3]
        if 1e3 * turn.cpu_s > BOUNDS["turn_ms"]
    ]
    return {
        "attack": name,
        "seconds": round(run.until - began_at),
        **{figure: round(float(value), 1) for figure, value in figures.items()},
        "exceeded": find_exceeded(figures),
        "failed_with": sorted(set(run.failures)),
        "long_turns": places,
        "outcomes": run.outcomes,
    }


def main() -> None:
    """Print a row for each attack, and exit with 4 if one exceeded a bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attacks", type=parse_choices(tuple(ATTACKS)), default=list(ATTACKS))
    parser.add_argument("--upstreams", action="store_true", help="servers attack, not a tenant")
    parser.add_argument(
        "--behaviours", type=parse_choices(tuple(BEHAVIOURS)), default=list(BEHAVIOURS)
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of one attack")
    parser.add_argument("--all-seconds", type=float, default=300.0, help="duration of all at once")
    parser.add_argument("--toy", action="store_true", help="all at once for three seconds")
    options = parser.parse_args()
    exit_on_sigterm()
    attacks = options.behaviours if options.upstreams else options.attacks
    plan = [] if options.toy else [([name], options.seconds) for name in attacks]
    plan.append((attacks, 3.0 if options.toy else options.all_seconds))
    print(json.dumps({"bounds": BOUNDS}), flush=True)
    is_exceeded = False
    for names, seconds in plan:
        if not seconds:
            continue
        with run_fleet(names if options.upstreams else ()) as fleet:
            models = [f"{name} of {kind}" for name in names for kind in KINDS]
            run = asyncio.run(measure(fleet, models if options.upstreams else names, seconds))
            row = report(names[0] if len(names) == 1 else "all", run, run.until - seconds)
        is_exceeded |= bool(row["exceeded"])
        print(json.dumps(row), flush=True)
    sys.exit(BOUND_EXCEEDED if is_exceeded else 0)


if __name__ == "__main__":
    main()
