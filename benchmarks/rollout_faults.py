"""Roll out bad versions and a good one of a real pool under load, and measure who noticed, when, and what was lost.

    python -m benchmarks.rollout_faults [--faults slow,wrong,erring,crashing,good] [--rate 20] [--users 200]

Two replicas of the bundled model serve users that send greedy chats at a constant rate. Each version has the same
weights, and a fault of `benchmarks/planted_faults`. The first step has 25 % of the users.

Prints a JSON line for each version: the end of its rollout and the reason, and the number of requests that it answered.

`lost` requests failed, and `different` ones had another text. `first_to_last_s` is the time from the first request of
the version to its last one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from argosy.deployment import read_rollouts
from argosy.policy.rollout import RolloutRecord
from argosy.store import FleetStore
from benchmarks.declared_fleet import Fleet, run_fleet
from benchmarks.options import parse_choices
from benchmarks.processes import exit_on_sigterm

PORT = 18_340
FLEET, POOL = "rollouts", "chat"
FAULTS = ("slow", "wrong", "erring", "crashing", "good")
TIMEOUT_S = 1200.0
TOPICS = ("a lighthouse", "a river", "the sea", "a clock", "snow", "bread", "a train", "stars")
PREAMBLE = "You are a patient storyteller who answers in short and simple sentences. " * 6
VERSION_HEADER = "x-argosy-version"


def build_declaration(fault: str) -> dict[str, Any]:
    """Return the declaration of the fleet with a fault; empty for the first version."""
    site = Path(__file__).resolve().parent / "planted_faults"
    environment = {"PYTHONPATH": str(site), "ARGOSY_PLANTED_FAULT": fault} if fault else {}
    return {
        "fleet": FLEET,
        "port": PORT,
        "models": [{"name": POOL, "source": "argosy-mini"}],
        "objectives": {"ttft_p95_s": 2.0, "itl_p95_s": 0.5},
        "pools": [
            {
                "name": POOL,
                "model": POOL,
                "replicas": 2,
                "options": {"max_seqs": 16, "kv_memory": "64MiB", "threads": 1},
                "environment": environment,
                "rollout": {
                    "steps": ["25%", "50%"],
                    "shadow": 0,
                    "min_step_s": 10,
                    "soak_s": 20,
                },
            }
        ],
    }


@dataclass(frozen=True)
class Answer:
    """Answer to one request. Times are seconds of a monotonic clock."""

    sent_at: float
    version: str
    error: str = ""
    is_different: bool = False


class Load:
    """Users that send requests at a constant rate, whatever the answers take."""

    def __init__(self, rate: float, users: int) -> None:
        self._rate = rate
        self._users = users
        self._draw = random.Random(0)
        self._expected: dict[str, str] = {}
        self.answers: list[Answer] = []

    async def run(self) -> None:
        """Send requests until cancelled. Running ones are completed."""
        limits = httpx2.Limits(max_connections=1000, max_keepalive_connections=100)
        async with (
            httpx2.AsyncClient(timeout=120, trust_env=False, limits=limits) as client,
            asyncio.TaskGroup() as tasks,
        ):
            with contextlib.suppress(asyncio.CancelledError):
                while True:
                    tasks.create_task(self._send(client))
                    await asyncio.sleep(self._draw.expovariate(self._rate))

    async def _send(self, client: httpx2.AsyncClient) -> None:
        topic = self._draw.choice(TOPICS)
        body = {
            "model": POOL,
            "messages": [
                {"role": "system", "content": PREAMBLE},
                {"role": "user", "content": f"Tell me about {topic}."},
            ],
            "user": f"user-{self._draw.randrange(self._users)}",
            "temperature": 0,
            "max_tokens": 12,
        }
        sent_at, version = time.monotonic(), ""
        try:
            response = await client.post(f"http://127.0.0.1:{PORT}/v1/chat/completions", json=body)
            version = response.headers.get(VERSION_HEADER, "")
            response.raise_for_status()
            text: str = response.json()["choices"][0]["message"]["content"]
        except (httpx2.HTTPError, OSError) as error:
            self.answers.append(Answer(sent_at, version, error=repr(error)))
            return
        is_different = text != self._expected.setdefault(topic, text)
        self.answers.append(Answer(sent_at, version, is_different=is_different))


def find_rollout(store: FleetStore) -> RolloutRecord | None:
    """Return the current or last rollout of the pool."""
    reports = {report.pool: report for report in read_rollouts(store, FLEET)}
    return reports[POOL].rollouts.current if POOL in reports else None


async def roll_out(fleet: Fleet, store: FleetStore, load: Load, fault: str) -> dict[str, object]:
    """Roll a version out, and wait until its rollout has ended."""
    before = await asyncio.to_thread(find_rollout, store)
    first = len(load.answers)
    started_at = time.monotonic()
    fleet.declare(build_declaration(fault))
    await asyncio.to_thread(fleet.run, "apply")
    record = None
    while time.monotonic() - started_at < TIMEOUT_S:
        record = await asyncio.to_thread(find_rollout, store)
        if record is not None and before is not None and record.id == before.id:
            record = None
        if record is not None and record.has_ended:
            break
        await asyncio.sleep(0.2)
    await asyncio.sleep(5)  # running requests
    answers = load.answers[first:]
    if record is None:
        return {"fault": fault, "state": "no rollout began"}
    digest = record.candidate
    touched = [each for each in answers if each.version and digest.startswith(each.version)]
    times = [each.sent_at for each in touched]
    return {
        "fault": fault,
        "state": record.state,
        "cause": record.cause,
        "reason": record.reason,
        "transitions": [
            [round(each.at - record.started_at, 1), each.state, each.step, each.reason]
            for each in record.transitions
        ],
        "requests": len(answers),
        "touched": len(touched),
        "first_to_last_s": round(max(times) - min(times), 1) if times else None,
        "lost": sum(bool(each.error) for each in answers),
        "different": sum(each.is_different for each in answers),
        "errors": sorted({each.error for each in answers if each.error})[:3],
    }


async def measure(fleet: Fleet, options: argparse.Namespace) -> None:
    """Roll all versions out, and print their rows."""
    store = fleet.open_store()
    load = Load(options.rate, options.users)
    running = asyncio.create_task(load.run())
    await asyncio.sleep(options.history_s)
    for fault in options.faults:
        print(json.dumps(await roll_out(fleet, store, load, fault)), flush=True)
    running.cancel()
    await running


def main() -> None:
    """Run the fleet, the load and the rollouts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=parse_choices(FAULTS), default=list(FAULTS))
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second")
    parser.add_argument("--users", type=int, default=200)
    parser.add_argument(
        "--history-s", type=float, default=60.0, help="seconds of load before the first rollout"
    )
    options = parser.parse_args()
    exit_on_sigterm()
    with run_fleet(build_declaration("")) as fleet:
        asyncio.run(measure(fleet, options))


if __name__ == "__main__":
    main()
