"""Run `argosy serve` for a long time while clients come and go, limits change and replicas die.

    python -m benchmarks.soak [--minutes 60] [--clients 12] [--fault-interval-s 45] [--seed 0]

Clients of four projects send streams, buffered and bad requests, and leave some streams early. An operator creates,
raises, lowers and deletes limits of these projects. Prints a JSON line with the memory of each minute, and one that
compares each response with its row in the ledger.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil

from argosy.store import Price, Store, Tier, UsageRecord, open_store
from benchmarks.faults import FAULTS
from benchmarks.processes import exit_on_sigterm
from benchmarks.server_process import (
    MODEL,
    RunningServer,
    build_body,
    run_server,
    wait_for_replicas,
)

PROJECTS: tuple[tuple[Tier, float], ...] = (
    ("premium", 2),
    ("standard", 1),
    ("standard", 3),
    ("free", 1),
)
"""Tier and weight of each project."""
MEMORY_INTERVAL_S = 5.0
LIMIT_INTERVAL_S = 3.0
BAD_BODIES: tuple[bytes, ...] = (
    b"{",
    b'{"model": "argosy-mini"}',
    b'{"model": "nobody", "messages": [{"role": "user", "content": "x"}]}',
    b'{"model": "argosy-mini", "messages": [{"role": "user", "content": "x"}], "temperature": -1}',
    json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "x"}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": {"$ref": "#/nowhere"}},
            },
        }
    ).encode(),
)
LIMITS: tuple[tuple[str, str | None, int, int], ...] = (
    ("tokens", "minute", 500, 200_000),
    ("output_tokens", "minute", 200, 100_000),
    ("requests", "minute", 20, 5_000),
    ("concurrency", None, 1, 50),
    ("nano_dollars", "hour", 10_000, 2**40),
)
"""Unit, window, smallest and largest amount of the limits that an operator sets."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """Output that a client received in one response."""

    tokens: int
    """Output tokens by the response's usage. At least the number of chunks with text if the client left."""
    is_complete: bool


@dataclass
class Soak:
    """State of a running soak."""

    running: RunningServer
    until: float
    draw: random.Random
    responses: dict[str, Delivered] = field(default_factory=dict)
    """Responses of admitted requests, by their id."""
    outcomes: Counter[str] = field(default_factory=Counter)
    memory: list[dict[str, float]] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether the soak's time has passed."""
        return time.monotonic() >= self.until

    # --- clients ---------------------------------------------------------------------------------

    async def run_client(self, keys: list[str]) -> None:
        """Send requests one after the other, each few of them over new connections."""
        while not self.is_over:
            async with httpx2.AsyncClient(base_url=self.running.url, timeout=300.0) as client:
                for _ in range(self.draw.randrange(1, 8)):
                    headers = {"authorization": f"Bearer {self.draw.choice(keys)}"}
                    kind = self.draw.choices(
                        (self._stream, self._leave, self._buffered, self._send_bad), (12, 4, 3, 2)
                    )[0]
                    try:
                        self.outcomes[await kind(client, headers)] += 1
                    except httpx2.TransportError as error:
                        self.outcomes[f"transport error: {type(error).__name__}"] += 1
                    if self.is_over:
                        return

    def _body(self, **fields: object) -> dict[str, Any]:
        return build_body(self.draw.randrange(64), self.draw.randrange(10, 120)) | fields

    async def _stream(self, client: httpx2.AsyncClient, headers: dict[str, str]) -> str:
        return await self._read_stream(client, headers, None)

    async def _leave(self, client: httpx2.AsyncClient, headers: dict[str, str]) -> str:
        return await self._read_stream(client, headers, self.draw.randrange(1, 30))

    async def _read_stream(
        self, client: httpx2.AsyncClient, headers: dict[str, str], leave_after: int | None
    ) -> str:
        """Read a stream, and leave it after a number of chunks with output if `leave_after` is given."""
        chunks = tokens = 0
        stream = client.stream("POST", "/v1/chat/completions", json=self._body(), headers=headers)
        async with stream as response:
            if response.status_code != httpx2.codes.OK:
                await response.aread()
                return str(response.status_code)
            request_id = response.headers["x-argosy-request"]
            self.responses[request_id] = Delivered(0, is_complete=False)
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    self.responses[request_id] = Delivered(tokens, is_complete=True)
                    return "complete"
                if not data or data.startswith(":"):
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    self.responses[request_id] = Delivered(chunks, is_complete=False)
                    return f"error event: {chunk['error']['code']}"
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
                chunks += any(_has_output(choice["delta"]) for choice in chunk["choices"])
                self.responses[request_id] = Delivered(chunks, is_complete=False)
                if leave_after is not None and chunks >= leave_after:
                    return "left"
        return "cut"

    async def _buffered(self, client: httpx2.AsyncClient, headers: dict[str, str]) -> str:
        body = self._body(stream=False)
        del body["stream_options"]
        response = await client.post("/v1/chat/completions", json=body, headers=headers)
        if response.status_code != httpx2.codes.OK:
            return f"buffered: {response.status_code}"
        tokens = response.json()["usage"]["completion_tokens"]
        self.responses[response.headers["x-argosy-request"]] = Delivered(tokens, is_complete=True)
        return "buffered: complete"

    async def _send_bad(self, client: httpx2.AsyncClient, headers: dict[str, str]) -> str:
        headers = headers | {"content-type": "application/json"}
        body = self.draw.choice(BAD_BODIES)
        response = await client.post("/v1/chat/completions", content=body, headers=headers)
        return f"bad: {response.status_code}"

    # --- operator, faults and memory -------------------------------------------------------------

    async def change_limits(self, admin_key: str, projects: list[str]) -> None:
        """Set and delete limits of the projects through the admin API."""
        headers = {"authorization": f"Bearer {admin_key}"}
        async with httpx2.AsyncClient(base_url=self.running.url, headers=headers) as client:
            while not self.is_over:
                limits = (await client.get("/admin/limits")).json()["data"]
                if limits and self.draw.random() < len(limits) / 12:
                    path = f"/admin/limits/{self.draw.choice(limits)['id']}"
                    response = await client.delete(path)
                else:
                    unit, window, lowest, highest = self.draw.choice(LIMITS)
                    amount = int(lowest * (highest / lowest) ** self.draw.random())
                    limit = {"unit": unit, "window": window, "amount": amount}
                    limit |= {"owner_kind": "project", "owner": self.draw.choice(projects)}
                    response = await client.post("/admin/limits", json=limit)
                self.outcomes[f"limit: {response.status_code}"] += 1
                await asyncio.sleep(LIMIT_INTERVAL_S)

    async def inject_faults(self, interval_s: float, replicas: int) -> None:
        """Kill, stop, terminate and disconnect replicas in turn."""
        names = list(FAULTS)
        number = 0
        while not self.is_over:
            await asyncio.sleep(interval_s)
            await wait_for_replicas(self.running, replicas)
            name = names[number % len(names)]
            number += 1
            with contextlib.suppress(psutil.NoSuchProcess, PermissionError):
                FAULTS[name](self.draw.choice(self.running.replicas()))
                self.outcomes[f"fault: {name}"] += 1

    async def sample_memory(self, begin: float) -> None:
        """Record the resident memory of the gateway and of all replicas, in MiB."""
        while not self.is_over:
            with contextlib.suppress(psutil.NoSuchProcess):
                server = self.running.process
                self.memory.append(
                    {
                        "minute": (time.monotonic() - begin) / 60,
                        "gateway_mib": server.memory_info().rss / 2**20,
                        "replicas_mib": sum(
                            child.memory_info().rss for child in server.children(recursive=True)
                        )
                        / 2**20,
                        "gateway_files": server.num_fds(),
                    }
                )
            await asyncio.sleep(MEMORY_INTERVAL_S)


def _has_output(delta: dict[str, Any]) -> bool:
    return any(delta.get(name) for name in ("content", "reasoning", "tool_calls"))


def create_accounts(store: Store) -> tuple[str, list[str], list[str]]:
    """Create an administrator key, and a project with a key for each of `PROJECTS`. Return key, projects and keys."""
    store.migrate()
    bootstrapped = store.accounts.bootstrap(actor="soak")
    assert bootstrapped is not None  # noqa: S101 - the store is new
    organisation = store.accounts.create_organisation("soak", actor="soak").id
    projects, keys = [], []
    for number, (tier, weight) in enumerate(PROJECTS):
        project = store.accounts.create_project(
            organisation, f"project {number}", tier=tier, weight=weight, actor="soak"
        )
        projects.append(project.id)
        keys.append(store.accounts.create_key(project.id, "soak", actor="soak")[1])
    price = Price(model=MODEL, input=10, cached_input=1, output=30)
    store.limits_and_prices.set_price(price, actor="soak")
    return bootstrapped[1], projects, keys


async def wait_for_rows(store: Store, ids: set[str]) -> list[UsageRecord]:
    """Wait until the ledger has a row for each of the requests, and return all rows."""
    while True:
        rows = [row for page in store.ledger.iter_records() for row in page]
        if ids <= {row.request for row in rows}:
            return rows
        await asyncio.sleep(0.5)


def compare(responses: dict[str, Delivered], rows: list[UsageRecord]) -> dict[str, Any]:
    """Compare responses with the ledger's rows."""
    known = [row for row in rows if row.request in responses]
    complete = [row for row in known if responses[row.request].is_complete]
    others = [row for row in rows if row.request not in responses]
    return {
        "responses": len(responses),
        "rows_of_responses": len({row.request for row in known}),
        "complete": len(complete),
        "complete_with_other_tokens": sum(
            row.output_tokens != responses[row.request].tokens for row in complete
        ),
        "left_with_fewer_tokens_than_received": sum(
            row.output_tokens < responses[row.request].tokens for row in known
        ),
        "rows_without_response": dict(Counter(row.status for row in others)),
        "tokens_of_rows_without_response": sum(row.output_tokens for row in others),
        "tokens_delivered": sum(response.tokens for response in responses.values()),
        "tokens_in_rows": sum(row.output_tokens for row in rows),
    }


def summarize_memory(samples: list[dict[str, float]]) -> dict[str, Any]:
    """Return the median of each minute, and the growth from the second sixth of the time to the last."""
    minutes: dict[int, list[dict[str, float]]] = {}
    for sample in samples:
        minutes.setdefault(int(sample["minute"]), []).append(sample)
    names = [name for name in samples[0] if name != "minute"]
    sixth = max(1, len(samples) // 6)
    summary: dict[str, Any] = {}
    for name in names:
        values = [sample[name] for sample in samples]
        early = statistics.median(values[sixth : 2 * sixth] or values)
        late = statistics.median(values[-sixth:])
        summary[name] = {
            "by_minute": [
                round(statistics.median(sample[name] for sample in of_minute))
                for of_minute in minutes.values()
            ],
            "second_sixth": round(early, 1),
            "last_sixth": round(late, 1),
        }
    return summary


async def soak(options: argparse.Namespace, state: Path) -> None:
    """Run the soak, and print its results."""
    folder = state / "argosy"
    folder.mkdir(parents=True)
    store = open_store(f"sqlite:///{folder / 'argosy.db'}")
    admin_key, projects, keys = create_accounts(store)
    async with run_server("--replicas", str(options.replicas), state=state) as running:
        await wait_for_replicas(running, options.replicas)
        begin = time.monotonic()
        run = Soak(running, begin + 60 * options.minutes, random.Random(options.seed))
        await asyncio.gather(
            *(run.run_client(keys) for _ in range(options.clients)),
            run.change_limits(admin_key, projects),
            run.inject_faults(options.fault_interval_s, options.replicas),
            run.sample_memory(begin),
        )
        rows = await wait_for_rows(store, set(run.responses))
    store.close()
    print(json.dumps({"minutes": options.minutes, "outcomes": dict(sorted(run.outcomes.items()))}))
    print(json.dumps({"memory": summarize_memory(run.memory)}))
    print(json.dumps({"ledger": compare(run.responses, rows)}), flush=True)


def main() -> None:
    """Print a JSON line each for outcomes, memory and ledger."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--fault-interval-s", type=float, default=45.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    exit_on_sigterm()
    with tempfile.TemporaryDirectory() as state:
        asyncio.run(soak(options, Path(state)))


if __name__ == "__main__":
    main()
