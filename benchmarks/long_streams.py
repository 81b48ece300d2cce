"""Measure first tokens of others while hundreds of long streams of one free tenant hold every slot of two replicas.

    python -m benchmarks.long_streams [--kill] [--off]

Streams of the bundled model with a temperature of 0, after each of which its text is compared with the text that the
same prompt has alone. Requests of a standard and a premium project arrive every half second. At the end every row of
the ledger is compared with what its client received. `--kill` kills one of the replicas, `--off` switches giving way
off. Prints a row, and exits with 1 if a text or a row is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec

from argosy.bench.client import BenchClient
from argosy.bench.response import BenchResponse
from argosy.deployment import (
    AuthConfig,
    GatewayConfig,
    GivingWayConfig,
    ModelConfig,
    QueueConfig,
    ReplicaConfig,
)
from argosy.protocol import parse_endpoint
from argosy.store import StoreConfig, Tier, open_store
from benchmarks.fairness import MODEL, ms, running, wait_for_line, wait_until_ready
from benchmarks.processes import exit_on_sigterm

PROMPTS = [f"Tell me story number {number}, and do not stop." for number in range(4)]
TIERS: dict[str, Tier] = {"greedy": "free", "standard": "standard", "premium": "premium"}
INTERVAL_S = 0.5
SHORT_TOKENS = 16
SETTLED_S = 5.0
"""Time between the start of the long streams and the first other request."""
KILL_AFTER_S = 10.0


def make_body(prompt: str, max_tokens: int) -> bytes:
    """Return the body of a request for a stream of exactly `max_tokens` tokens."""
    return msgspec.json.encode(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


class Run:
    """Requests of one run, and what is wrong with them."""

    def __init__(self, url: str, keys: dict[str, str]) -> None:
        self._clients = {
            name: BenchClient(
                parse_endpoint(url), time.perf_counter, {"authorization": f"Bearer {key}"}, 1800.0
            )
            for name, key in keys.items()
        }
        self.waits: dict[str, list[float]] = defaultdict(list)
        """Times to first token by project."""
        self.tokens: Counter[str] = Counter()
        """Output tokens that each project received, by the usage of its streams."""
        self.responses: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()

    async def send(self, project: str, prompt: str, max_tokens: int) -> str:
        """Send a request and return its text."""
        body = make_body(prompt, max_tokens)
        response = await self._clients[project].post(
            "/v1/chat/completions", body, BenchResponse(keep_text=True)
        )
        self.responses[project] += 1
        if response.error or not response.saw_done:
            self.errors[f"{project}: {response.error or 'no [DONE]'}"] += 1
        if response.chunk_times and response.sent_at is not None:
            self.waits[project].append(response.chunk_times[0] - response.sent_at)
        self.tokens[project] += response.output_tokens or 0
        return response.text

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


async def measure(
    run: Run, options: argparse.Namespace, victim: subprocess.Popen[bytes]
) -> dict[str, object]:
    """Send the long streams and then the others, and return what was measured."""
    alone = [await run.send("greedy", prompt, options.tokens) for prompt in PROMPTS]
    run.waits.clear()
    begin = time.perf_counter()
    long = [
        asyncio.create_task(run.send("greedy", PROMPTS[number % len(PROMPTS)], options.tokens))
        for number in range(options.streams)
    ]
    await asyncio.sleep(SETTLED_S)
    short = []
    for number in range(int(options.seconds / INTERVAL_S)):
        short += [
            asyncio.create_task(run.send(project, f"Hi {number}", SHORT_TOKENS))
            for project in ("standard", "premium")
        ]
        await asyncio.sleep(INTERVAL_S)
        if options.kill and number == int(KILL_AFTER_S / INTERVAL_S):
            victim.send_signal(signal.SIGKILL)
    await asyncio.gather(*short)
    texts = await asyncio.gather(*long)
    run.close()
    different = sum(text != alone[number % len(PROMPTS)] for number, text in enumerate(texts))
    return {
        "streams": options.streams,
        "giving_way": not options.off,
        "killed": options.kill,
        **{
            f"{project}_ttft_p{percent}_ms": ms(run.waits[project], percent)
            for project in ("premium", "standard")
            for percent in (50, 95, 100)
        },
        "long_streams_s": round(time.perf_counter() - begin, 1),
        "different_texts": different,
        "errors": dict(run.errors),
    }


def compare_ledger(url: str, run: Run) -> dict[str, object]:
    """Compare rows and tokens in the ledger with the responses."""
    store = open_store(url)
    rows, tokens = Counter[str](), Counter[str]()
    names = {project.id: project.name for project in store.load_snapshot().projects}
    for records in store.ledger.iter_records():
        for record in records:
            rows[names[record.project]] += 1
            tokens[names[record.project]] += record.output_tokens
    store.close()
    return {
        "ledger_rows": dict(rows),
        "ledger_tokens": dict(tokens),
        "is_ledger_exact": rows == run.responses and tokens == run.tokens,
    }


def create_keys(url: str) -> dict[str, str]:
    """Create a project for each name, and return their keys."""
    store = open_store(url)
    store.migrate()
    organisation = store.accounts.create_organisation("acme", actor="benchmark").id
    keys = {}
    for name, tier in TIERS.items():
        project = store.accounts.create_project(organisation, name, tier=tier, actor="benchmark")
        keys[name] = store.accounts.create_key(project.id, "key", actor="benchmark")[1]
    store.close()
    return keys


@contextlib.contextmanager
def run_replica(folder: Path, name: str, slots: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a replica with the bundled model until the end of the block."""
    command = [sys.executable, "-m", "argosy.cli", "replica", "--uds", str(folder / name)]
    command += ["--max-seqs", str(slots), "--threads", "1", "--served-model-name", MODEL]
    log = folder / f"{name}.log"
    with running(command, log) as process:
        wait_until_ready(process, folder / name, log)
        yield process


def main() -> None:
    """Measure, and print the row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each long stream")
    parser.add_argument("--slots", type=int, default=32, help="sequences of each replica")
    parser.add_argument("--seconds", type=float, default=30.0, help="time of the other requests")
    parser.add_argument("--kill", action="store_true", help="kill a replica after 10 seconds")
    parser.add_argument("--off", action="store_true", help="switch giving way off")
    options = parser.parse_args()
    exit_on_sigterm()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = f"sqlite:///{folder / 'store.db'}"
        keys = create_keys(store)
        with (
            run_replica(folder, "a", options.slots) as victim,
            run_replica(folder, "b", options.slots),
        ):
            model = ModelConfig(
                name=MODEL,
                replicas=[
                    ReplicaConfig(url=f"unix:{folder / each}", kind="argosy") for each in "ab"
                ],
                giving_way=GivingWayConfig(enabled=not options.off),
            )
            config = GatewayConfig(
                port=0,
                models=[model],
                store=StoreConfig(url=store),
                auth=AuthConfig(mode="required"),
                queue=QueueConfig(timeout_s=1200.0),
                log_level="warning",
            )
            (folder / "gateway.yaml").write_bytes(msgspec.json.encode(config))
            command = [sys.executable, "-m", "argosy.cli", "gateway"]
            log = folder / "gateway.log"
            with running([*command, "-c", str(folder / "gateway.yaml")], log) as process:
                run = Run(wait_for_line(process, log, "argosy gateway is ready at "), keys)
                row = asyncio.run(measure(run, options, victim))
        row |= compare_ledger(store, run)
    print(json.dumps(row))
    if row["different_texts"] or row["errors"] or not row["is_ledger_exact"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
