"""Measure fairness while one tenant floods a gateway with ten times the requests of the others.

python -m benchmarks.fairness                      (a stub with known slots and delays)
python -m benchmarks.fairness --replica            (a replica with the bundled model)

Three projects of one tier keep the same number of requests in flight, with outputs of different lengths. A fourth
project keeps ten times as many. A premium project sends a request five times per second. Prints a row for each of
three phases (premium alone, all without the flood, and all), then a summary.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import msgspec
import numpy as np
import psutil

from argosy.bench.client import BenchClient
from argosy.bench.response import BenchResponse
from argosy.bench.stub_server import StubDelays
from argosy.deployment import AuthConfig, GatewayConfig, ModelConfig, ReplicaConfig
from argosy.protocol import parse_endpoint
from argosy.store import StoreConfig, open_store
from benchmarks.processes import exit_on_sigterm

MODEL = "model"
SLOTS = 32
PACE = StubDelays(first_token_s=0.05, token_gap_s=0.02)
CALLERS = 16
"""Requests that each project of the tier keeps in flight."""
FLOOD = 10
LENGTHS = {"short": 16, "middle": 32, "long": 64, "flood": 32}
"""Output tokens of the tier's projects."""
PREMIUM_INTERVAL_S = 0.2
PREMIUM_TOKENS = 16
SETTLED_S = 5.0
"""Start of each phase, which is not measured."""


@dataclass
class Tenant:
    """Measurements of one project."""

    client: BenchClient
    output: int
    waits: list[float] = field(default_factory=list)
    """Times to first token in the measured window, in seconds."""
    tokens: int = 0
    """Output tokens received in the measured window."""
    prompts: int = 0
    """Prompt tokens of the requests answered in the window, as the gateway estimates them."""
    errors: int = 0
    last_error: str = ""

    async def ask(self, window: tuple[float, float]) -> None:
        """Send a request, and count its tokens and wait if they fall into `window`."""
        prompt = f"Tell me about {np.random.default_rng().integers(1 << 30)}."
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self.output,
            "ignore_eos": True,
            "stream": True,
        }
        response = await self.client.post(
            "/v1/chat/completions", msgspec.json.encode(body), BenchResponse()
        )
        begin, end = window
        self.tokens += sum(begin <= received_at < end for received_at in response.chunk_times)
        if response.error:
            self.errors += 1
            self.last_error = f"{response.error}: {response.error_detail}"
        if (
            response.chunk_times
            and response.sent_at is not None
            and begin <= response.chunk_times[0] < end
        ):
            self.waits.append(response.chunk_times[0] - response.sent_at)
            self.prompts += len(msgspec.json.encode(body["messages"])) // 4


async def keep_busy(tenant: Tenant, callers: int, window: tuple[float, float]) -> None:
    """Keep `callers` requests in flight until the end of the window."""

    async def call() -> None:
        while time.perf_counter() < window[1]:
            await tenant.ask(window)

    await asyncio.gather(*(call() for _ in range(callers)))


async def send_periodically(tenant: Tenant, window: tuple[float, float]) -> None:
    """Send requests at a fixed interval, whether earlier ones are answered or not."""
    async with asyncio.TaskGroup() as group:
        due_at = time.perf_counter()
        while due_at < window[1]:
            group.create_task(tenant.ask(window))
            due_at += PREMIUM_INTERVAL_S
            await asyncio.sleep(max(0.0, due_at - time.perf_counter()))


async def measure(
    url: str, keys: dict[str, str], names: list[str], seconds: float
) -> dict[str, Tenant]:
    """Measure the projects `names` for `seconds`."""
    begin = time.perf_counter() + SETTLED_S
    window = begin, begin + seconds
    tenants = {
        name: Tenant(
            BenchClient(
                parse_endpoint(url),
                time.perf_counter,
                {"authorization": f"Bearer {keys[name]}"},
                120.0,
            ),
            LENGTHS.get(name, PREMIUM_TOKENS),
        )
        for name in names
    }
    loads = [
        send_periodically(tenant, window)
        if name == "premium"
        else keep_busy(tenant, CALLERS * (FLOOD if name == "flood" else 1), window)
        for name, tenant in tenants.items()
    ]
    await asyncio.gather(*loads)
    for tenant in tenants.values():
        tenant.client.close()
    return tenants


def row(kind: str, tenants: dict[str, Tenant], seconds: float, busy_s: float) -> dict[str, object]:
    """Return the row of a phase. `busy_s` is the gateway's processor time in seconds."""
    return {
        "kind": kind,
        "seconds": seconds,
        "gateway_cpu": round(busy_s / (seconds + SETTLED_S), 3),
        "tokens_per_s": round(sum(tenant.tokens for tenant in tenants.values()) / seconds, 1),
        "tenants": {
            name: {
                "tokens": tenant.tokens,
                "prompts": tenant.prompts,
                "answers": len(tenant.waits),
                "ttft_p50_ms": ms(tenant.waits, 50),
                "ttft_p95_ms": ms(tenant.waits, 95),
                "longest_wait_ms": ms(tenant.waits, 100),
                "errors": tenant.errors,
            }
            for name, tenant in tenants.items()
        },
    }


def ms(waits: list[float], percent: float) -> float:
    """Return a percentile in milliseconds."""
    return round(1e3 * float(np.percentile(waits, percent)), 1) if waits else float("nan")


def jain(shares: list[int]) -> float:
    """Return Jain's fairness index: 1 if all shares are equal, 1/n if one of n has everything."""
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))


async def compare(url: str, keys: dict[str, str], seconds: float, gateway: psutil.Process) -> None:
    """Measure the phases, and print a row for each and a summary."""
    tier = [name for name in LENGTHS if name != "flood"]
    phases = {
        "alone": ["premium"],
        "calm": ["premium", *tier],
        "flood": ["premium", *LENGTHS],
    }
    results: dict[str, dict[str, Tenant]] = {}
    for kind, names in phases.items():
        before = sum(gateway.cpu_times()[:2])
        results[kind] = await measure(url, keys, names, seconds)
        premium = results[kind]["premium"]
        if not premium.waits:
            raise SystemExit(f"No request was answered: {premium.last_error}")
        busy_s = sum(gateway.cpu_times()[:2]) - before
        print(json.dumps(row(kind, results[kind], seconds, busy_s)))
    alone, calm, flood = results.values()
    waits = {name: max(tenant.waits, default=float("inf")) for name, tenant in flood.items()}
    total = [sum(tenant.tokens for tenant in tenants.values()) for tenants in (calm, flood)]
    p95 = [ms(tenants["premium"].waits, 95) for tenants in (alone, calm, flood)]
    summary = {
        "kind": "summary",
        "jain": round(jain([flood[name].tokens + flood[name].prompts for name in LENGTHS]), 4),
        "premium_p95_ms": p95,
        "premium_p95_ratio": round(p95[2] / p95[0], 2),
        "premium_p95_ratio_to_calm": round(p95[2] / p95[1], 2),
        "longest_wait_s": round(max(waits[name] for name in (*tier, "premium")), 2),
        "longest_wait_flood_s": round(waits["flood"], 2),
        "throughput_ratio": round(total[1] / total[0], 3),
    }
    print(json.dumps(summary))
    for name, value in summary.items():
        print(f"{name:>28}  {value}")


# --- processes ---------------------------------------------------------------------------------


@contextlib.contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that writes to `log`, and terminate it at the end."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, cwd=log.parent
        )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


def wait_for_line(process: subprocess.Popen[bytes], log: Path, prefix: str) -> str:
    """Wait for a line with this prefix, and return the rest of the line."""
    while process.poll() is None:
        for line in log.read_text().splitlines(keepends=True):
            if line.startswith(prefix) and line.endswith("\n"):
                return line.removeprefix(prefix).strip()
        time.sleep(0.02)
    raise SystemExit(f"{process.args!r} ended: {log.read_text()}")


@contextlib.contextmanager
def upstream(folder: Path, *, real: bool) -> Iterator[ReplicaConfig]:
    """Run the stub, or a replica with the bundled model."""
    log = folder / "upstream.log"
    if not real:
        stub = "from argosy.bench.stub_server import main; main()"
        pace = msgspec.json.encode(PACE).decode()
        with running([sys.executable, "-c", stub, pace], log) as process:
            url = wait_for_line(process, log, "http://")
            yield ReplicaConfig(url=f"http://{url}", kind="openai", max_requests=SLOTS)
        return
    command = [sys.executable, "-m", "argosy.cli", "replica", "--uds", str(folder / "r")]
    command += ["--max-seqs", str(SLOTS), "--threads", "1", "--served-model-name", MODEL]
    with running(command, log) as process:
        wait_until_ready(process, folder / "r", log)
        yield ReplicaConfig(url=f"unix:{folder / 'r'}")


def wait_until_ready(process: subprocess.Popen[bytes], uds: Path, log: Path) -> None:
    """Wait until the replica that listens on this Unix socket is ready."""
    transport = httpx2.HTTPTransport(uds=str(uds))
    with httpx2.Client(transport=transport, base_url="http://replica") as client:
        while process.poll() is None:
            with contextlib.suppress(httpx2.TransportError):
                if client.get("/ready").is_success:
                    return
            time.sleep(0.05)
    raise SystemExit(f"The replica ended: {log.read_text()}")


def accounts(url: str) -> dict[str, str]:
    """Create a project for each name, and return their keys."""
    store = open_store(url)
    store.migrate()
    organisation = store.accounts.create_organisation("acme", actor="benchmark").id
    keys = {}
    for name in ("premium", *LENGTHS):
        project = store.accounts.create_project(
            organisation,
            name,
            tier="premium" if name == "premium" else "standard",
            actor="benchmark",
        )
        keys[name] = store.accounts.create_key(project.id, "key", actor="benchmark")[1]
    store.close()
    return keys


def main() -> None:
    """Measure, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replica", action="store_true", help="measure a replica, not the stub")
    parser.add_argument("--seconds", type=float, default=30.0, help="measured time of each phase")
    options = parser.parse_args()
    exit_on_sigterm()
    with (
        tempfile.TemporaryDirectory() as name,
        upstream(Path(name), real=options.replica) as replica,
    ):
        folder = Path(name)
        store = f"sqlite:///{folder / 'store.db'}"
        keys = accounts(store)
        config = GatewayConfig(
            port=0,
            models=[ModelConfig(name=MODEL, replicas=[replica])],
            store=StoreConfig(url=store),
            auth=AuthConfig(mode="required"),
            log_level="warning",
        )
        (folder / "gateway.yaml").write_bytes(msgspec.json.encode(config))
        command = [
            sys.executable,
            "-m",
            "argosy.cli",
            "gateway",
            "-c",
            str(folder / "gateway.yaml"),
        ]
        log = folder / "gateway.log"
        with running(command, log) as process:
            url = wait_for_line(process, log, "argosy gateway is ready at ")
            asyncio.run(compare(url, keys, options.seconds, psutil.Process(process.pid)))


if __name__ == "__main__":
    main()
