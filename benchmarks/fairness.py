"""One tenant floods a gateway with ten times what the others ask: who is served how much, and who waits how long.

python -m benchmarks.fairness                      (a stand-in with known seats and a known pace)
python -m benchmarks.fairness --replica            (a real one, with the bundled model)

Three projects of one tier keep the same number of requests waiting each, with answers of different lengths; a fourth
keeps ten times as many; a premium project asks now and then. Prints a row for each of three times: the premium project
alone, all but the flood, and all; then what they say together.
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
from argosy.gateway import GatewayConfig, ModelConfig, ReplicaConfig
from argosy.gateway.auth import AuthConfig
from argosy.protocol import parse_endpoint
from argosy.store import StoreConfig, open_store
from benchmarks.processes import heed_sigterm

MODEL = "model"
SEATS = 32
PACE = StubDelays(first_token_s=0.05, token_gap_s=0.02)
CALLERS = 16
"""Requests that each project of the tier keeps waiting or running."""
FLOOD = 10
LENGTHS = {"short": 16, "middle": 32, "long": 64, "flood": 32}
"""Tokens of the answers of the tier's projects."""
PREMIUM_EACH_S = 0.2
PREMIUM_TOKENS = 16
SETTLED_S = 5.0
"""Of each time that is not measured: the beginning."""


@dataclass
class Tenant:
    """What came for one project."""

    client: BenchClient
    output: int
    waits: list[float] = field(default_factory=list)
    """Seconds to each first token, in the measured time."""
    tokens: int = 0
    """That came in the measured time."""
    prompts: int = 0
    """Tokens of the prompts that were answered then, as the gateway estimates them."""
    errors: int = 0
    last_error: str = ""

    async def ask(self, window: tuple[float, float]) -> None:
        """One answer; what of it falls into `window` counts."""
        prompt = f"Tell me about {np.random.default_rng().integers(1 << 30)}."
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self.output,
            "ignore_eos": True,
            "stream": True,
        }
        reply = await self.client.post(
            "/v1/chat/completions", msgspec.json.encode(body), BenchResponse()
        )
        begin, end = window
        self.tokens += sum(begin <= at < end for at in reply.chunk_times)
        if reply.error:
            self.errors += 1
            self.last_error = f"{reply.error}: {reply.error_detail}"
        if reply.chunk_times and reply.sent_at is not None and begin <= reply.chunk_times[0] < end:
            self.waits.append(reply.chunk_times[0] - reply.sent_at)
            self.prompts += len(msgspec.json.encode(body["messages"])) // 4


async def busy(tenant: Tenant, callers: int, window: tuple[float, float]) -> None:
    """Keep so many requests waiting or running until the time is over."""

    async def call() -> None:
        while time.perf_counter() < window[1]:
            await tenant.ask(window)

    await asyncio.gather(*(call() for _ in range(callers)))


async def now_and_then(tenant: Tenant, window: tuple[float, float]) -> None:
    """Ask at a steady pace, whatever becomes of it."""
    async with asyncio.TaskGroup() as group:
        due = time.perf_counter()
        while due < window[1]:
            group.create_task(tenant.ask(window))
            due += PREMIUM_EACH_S
            await asyncio.sleep(max(0.0, due - time.perf_counter()))


async def measure(
    url: str, keys: dict[str, str], who: list[str], seconds: float
) -> dict[str, Tenant]:
    """What each of these projects gets in so many seconds."""
    begin = time.perf_counter() + SETTLED_S
    window = begin, begin + seconds
    found = {
        name: Tenant(
            BenchClient(
                parse_endpoint(url),
                time.perf_counter,
                {"authorization": f"Bearer {keys[name]}"},
                120.0,
            ),
            LENGTHS.get(name, PREMIUM_TOKENS),
        )
        for name in who
    }
    loads = [
        now_and_then(tenant, window)
        if name == "premium"
        else busy(tenant, CALLERS * (FLOOD if name == "flood" else 1), window)
        for name, tenant in found.items()
    ]
    await asyncio.gather(*loads)
    for tenant in found.values():
        tenant.client.close()
    return found


def row(kind: str, found: dict[str, Tenant], seconds: float, busy_s: float) -> dict[str, object]:
    """For the record; `busy_s` is the gateway's processor time."""
    return {
        "kind": kind,
        "seconds": seconds,
        "gateway_cpu": round(busy_s / (seconds + SETTLED_S), 3),
        "tokens_per_s": round(sum(one.tokens for one in found.values()) / seconds, 1),
        "tenants": {
            name: {
                "tokens": one.tokens,
                "prompts": one.prompts,
                "answers": len(one.waits),
                "ttft_p50_ms": ms(one.waits, 50),
                "ttft_p95_ms": ms(one.waits, 95),
                "longest_wait_ms": ms(one.waits, 100),
                "errors": one.errors,
            }
            for name, one in found.items()
        },
    }


def ms(waits: list[float], percent: float) -> float:
    """A percentile."""
    return round(1e3 * float(np.percentile(waits, percent)), 1) if waits else float("nan")


def jain(shares: list[int]) -> float:
    """1 when all are alike, 1/n when one has it all."""
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))


async def compare(url: str, keys: dict[str, str], seconds: float, gateway: psutil.Process) -> None:
    """Print a row for each time, and what they say together."""
    tier = [name for name in LENGTHS if name != "flood"]
    times = {
        "alone": ["premium"],
        "calm": ["premium", *tier],
        "flood": ["premium", *LENGTHS],
    }
    found: dict[str, dict[str, Tenant]] = {}
    for kind, who in times.items():
        before = sum(gateway.cpu_times()[:2])
        found[kind] = await measure(url, keys, who, seconds)
        premium = found[kind]["premium"]
        if not premium.waits:
            raise SystemExit(f"Nothing is answered: {premium.last_error}")
        spent = sum(gateway.cpu_times()[:2]) - before
        print(json.dumps(row(kind, found[kind], seconds, spent)))
    alone, calm, flood = found.values()
    waits = {name: max(one.waits, default=float("inf")) for name, one in flood.items()}
    total = [sum(one.tokens for one in found.values()) for found in (calm, flood)]
    p95 = [ms(found["premium"].waits, 95) for found in (alone, calm, flood)]
    together = {
        "kind": "together",
        "jain": round(jain([flood[name].tokens + flood[name].prompts for name in LENGTHS]), 4),
        "premium_p95_ms": p95,
        "premium_p95_ratio": round(p95[2] / p95[0], 2),
        "premium_p95_ratio_to_calm": round(p95[2] / p95[1], 2),
        "longest_wait_s": round(max(waits[name] for name in (*tier, "premium")), 2),
        "longest_wait_flood_s": round(waits["flood"], 2),
        "throughput_ratio": round(total[1] / total[0], 3),
    }
    print(json.dumps(together))
    for name, value in together.items():
        print(f"{name:>28}  {value}")


# --- what runs ---------------------------------------------------------------------------------


@contextlib.contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that writes to `log`; ended at the end."""
    with log.open("wb") as written:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=written, stderr=written, cwd=log.parent
        )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


def said(process: subprocess.Popen[bytes], log: Path, before: str) -> str:
    """The rest of the line that begins like this, once it is there."""
    while process.poll() is None:
        for line in log.read_text().splitlines(keepends=True):
            if line.startswith(before) and line.endswith("\n"):
                return line.removeprefix(before).strip()
        time.sleep(0.02)
    raise SystemExit(f"{process.args!r} ended: {log.read_text()}")


@contextlib.contextmanager
def upstream(folder: Path, *, real: bool) -> Iterator[ReplicaConfig]:
    """The stand-in, or a replica of ours."""
    log = folder / "upstream.log"
    if not real:
        stub = "from argosy.bench.stub_server import main; main()"
        pace = msgspec.json.encode(PACE).decode()
        with running([sys.executable, "-c", stub, pace], log) as process:
            url = said(process, log, "http://")
            yield ReplicaConfig(url=f"http://{url}", kind="openai", max_requests=SEATS)
        return
    command = [sys.executable, "-m", "argosy.cli", "replica", "--uds", str(folder / "r")]
    command += ["--max-seqs", str(SEATS), "--threads", "1", "--served-model-name", MODEL]
    with running(command, log) as process:
        transport = httpx2.HTTPTransport(uds=str(folder / "r"))
        with httpx2.Client(transport=transport, base_url="http://replica") as client:
            while not ready(client):
                if process.poll() is not None:
                    raise SystemExit(f"The replica ended: {log.read_text()}")
                time.sleep(0.05)
        yield ReplicaConfig(url=f"unix:{folder / 'r'}")


def ready(client: httpx2.Client) -> bool:
    """Whether the replica takes requests."""
    with contextlib.suppress(httpx2.TransportError):
        return client.get("/ready").status_code == 200
    return False


def accounts(url: str) -> dict[str, str]:
    """A key for each project."""
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
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replica", action="store_true", help="a real one, not the stand-in")
    parser.add_argument("--seconds", type=float, default=30.0, help="measured, each of the times")
    told = parser.parse_args()
    heed_sigterm()
    with tempfile.TemporaryDirectory() as name, upstream(Path(name), real=told.replica) as replica:
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
            url = said(process, log, "argosy gateway is ready at ")
            asyncio.run(compare(url, keys, told.seconds, psutil.Process(process.pid)))


if __name__ == "__main__":
    main()
