"""Measure what a batch does to online requests of one server, and how much of the capacity that they leave it uses.

    python -m benchmarks.batch_beside [--seconds 20] [--pairs 4] [--rate 2]

The bundled model runs in `argosy serve` with one thread. Online chats arrive at random, with the same arrivals in both
runs of a pair: one beside a batch and one without, in alternating order. A last run has the batch alone. Prints JSON
lines. The last one has medians of the pairs' ratios, and of the idle capacity used. That is the tokens of lines beside
online requests, divided by those of the batch alone less the online ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.server_process import MODEL, RunningServer, run_server

CHAT = "/v1/chat/completions"
LINES = 20_000
LINE_TOKENS = 64
ONLINE_TOKENS = (16, 64)
SETTLING_S = 8.0
"""Time in which the window of a batch grows before a run, and in which lines of a cancelled one end."""
MIN_SAMPLES = 20


@dataclass(slots=True)
class OnlineRun:
    """Latencies and tokens of online requests in one run."""

    first_s: list[float] = field(default_factory=list)
    """Times to the first token."""
    gaps_s: list[float] = field(default_factory=list)
    """Times between two events with text."""
    tokens: int = 0
    batch_tokens: int = 0
    """Output tokens of lines that ended during the run."""
    seconds: float = 0.0

    def row(self, kind: str) -> dict[str, object]:
        """Return the row of the run."""
        row: dict[str, object] = {
            "kind": kind,
            "requests": len(self.first_s),
            "online_tokens_per_s": round(self.tokens / self.seconds, 1),
            "batch_tokens_per_s": round(self.batch_tokens / self.seconds, 1),
        }
        for name, values in (("ttft", self.first_s), ("gap", self.gaps_s)):
            if len(values) >= MIN_SAMPLES:
                row[f"{name}_p50_ms"] = round(1e3 * statistics.median(values), 2)
                row[f"{name}_p95_ms"] = round(1e3 * p95(values), 2)
        return row


def p95(values: list[float]) -> float:
    """Return the 95th percentile."""
    return statistics.quantiles(values, n=20)[-1]


async def run_online(
    server: RunningServer, options: argparse.Namespace, seed: int, batch_id: str
) -> OnlineRun:
    """Send online requests for `options.seconds`, or none if the rate is 0, and wait for their ends."""
    draw, result, tasks = random.Random(seed), OnlineRun(), set[asyncio.Task[None]]()
    before, began_at = await read_batch_tokens(server, batch_id), time.monotonic()
    if not options.rate:
        await asyncio.sleep(options.seconds)
    while options.rate and time.monotonic() - began_at < options.seconds:
        await asyncio.sleep(draw.expovariate(options.rate))
        tasks.add(asyncio.create_task(ask(server, draw.randint(*ONLINE_TOKENS), draw, result)))
    await asyncio.gather(*tasks)
    result.seconds = time.monotonic() - began_at
    result.batch_tokens = await read_batch_tokens(server, batch_id) - before
    return result


async def ask(server: RunningServer, tokens: int, draw: random.Random, result: OnlineRun) -> None:
    """Run one online stream."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Tell me a story about {draw.random()}."}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    last = started_at = time.monotonic()
    async with server.client.stream("POST", CHAT, json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if '"content":"' not in line or '"content":""' in line:
                continue
            now = time.monotonic()
            (result.first_s if last == started_at else result.gaps_s).append(now - last)
            last = now
    result.tokens += tokens


async def create_batch(server: RunningServer) -> str:
    """Create a batch that outlasts a run. Returns its id."""
    lines = []
    for number in range(LINES):
        messages = [{"role": "user", "content": f"Write about number {number}."}]
        body = {"model": MODEL, "messages": messages, "max_tokens": LINE_TOKENS, "ignore_eos": True}
        lines.append(
            json.dumps({"custom_id": str(number), "method": "POST", "url": CHAT, "body": body})
        )
    files: dict[str, Any] = {
        "file": ("in.jsonl", "\n".join(lines).encode()),
        "purpose": (None, "batch"),
    }
    file = (await server.client.post("/v1/files", files=files)).raise_for_status().json()
    body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    batch = (await server.client.post("/v1/batches", json=body)).raise_for_status().json()
    batch_id = str(batch["id"])
    while not await read_batch_tokens(server, batch_id):  # noqa: ASYNC110 - the API has no event
        await asyncio.sleep(0.2)
    return batch_id


async def read_batch_tokens(server: RunningServer, batch_id: str) -> int:
    """Return the output tokens of the lines of a batch that have ended; 0 without a batch."""
    if not batch_id:
        return 0
    batch = (await server.client.get(f"/v1/batches/{batch_id}")).raise_for_status().json()
    return int((batch.get("usage") or {}).get("output_tokens", 0))


async def run(
    server: RunningServer, options: argparse.Namespace, seed: int, kind: str
) -> OnlineRun:
    """Run online requests, beside a batch unless the kind is `without`, and print the row."""
    batch_id = "" if kind == "without" else await create_batch(server)
    await asyncio.sleep(SETTLING_S)
    result = await run_online(server, options, seed, batch_id)
    if batch_id:
        (await server.client.post(f"/v1/batches/{batch_id}/cancel")).raise_for_status()
    print(json.dumps(result.row(kind)), flush=True)
    return result


async def measure(options: argparse.Namespace) -> None:
    """Print a row for each run, and the ratios."""
    pairs: list[dict[str, OnlineRun]] = []
    with tempfile.TemporaryDirectory(prefix="argosy-beside-") as folder:
        async with run_server("--log-level", "warning", state=Path(folder)) as server:
            for pair in range(options.pairs):
                kinds = ("without", "beside") if pair % 2 else ("beside", "without")
                pairs.append({kind: await run(server, options, pair, kind) for kind in kinds})
            options.rate = 0.0
            alone = await run(server, options, 0, "alone")
    ratios: dict[str, list[float]] = {"ttft_p95_ratio": [], "gap_p95_ratio": [], "idle_used": []}
    for each in pairs:
        without, beside = each["without"], each["beside"]
        ratios["ttft_p95_ratio"].append(p95(beside.first_s) / p95(without.first_s))
        ratios["gap_p95_ratio"].append(p95(beside.gaps_s) / p95(without.gaps_s))
        left = alone.batch_tokens / alone.seconds - beside.tokens / beside.seconds
        ratios["idle_used"].append(beside.batch_tokens / beside.seconds / left)
    row = {name: round(statistics.median(values), 3) for name, values in ratios.items()}
    print(json.dumps({"kind": "ratios", "pairs": options.pairs} | row))


def main() -> None:
    """Parse the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="time of each run")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--rate", type=float, default=2.0, help="online requests per second")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
