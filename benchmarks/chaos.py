"""Check streams through `argosy serve` while its replicas are killed, stopped, terminated and disconnected.

    python -m benchmarks.chaos [--rounds 200] [--streams 32] [--replicas 2] [--seed 0] [--faults kill,stop,term,cut]

Each round runs the same streams, and injects one fault into one replica at a random time. Streams are greedy or seeded,
and some have two choices. A stream is equal if its texts, finish reasons and token counts are those of a run without
faults. Prints a JSON line for each fault, and one for the ledger.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from argosy.store import UsageTotals, open_store
from benchmarks.faults import FAULTS
from benchmarks.processes import exit_on_sigterm
from benchmarks.server_process import (
    Answer,
    RunningServer,
    run_server,
    run_stream,
    wait_for_replicas,
)


@dataclass
class Streams:
    """Set of streams that is run repeatedly."""

    running: RunningServer
    count: int
    tokens: int
    """Maximum tokens of each choice."""
    expected: list[Answer] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    """All answers that clients have received."""

    async def run_undisturbed(self) -> None:
        """Run the streams without a fault, and store the answers as expected."""
        streams = (run_stream(self.running, n, self.tokens) for n in range(self.count))
        self.expected = list(await asyncio.gather(*streams))
        self.answers += self.expected

    async def run_with_fault(
        self, fault: Callable[[psutil.Process], None], draw: random.Random
    ) -> Outcome:
        """Run the streams, and inject a fault into a replica at a random part of the text, up to three quarters."""
        characters = sum(len(text) for answer in self.expected for text in answer.texts.values())
        progress = _Counter(draw.randrange(characters * 3 // 4))
        fault_task = asyncio.create_task(self._inject_fault(fault, progress, draw))
        streams = (
            run_stream(self.running, n, self.tokens, progress.count) for n in range(self.count)
        )
        results = await asyncio.gather(*streams, return_exceptions=True)
        was_injected = fault_task.done()
        if was_injected:
            await fault_task
        fault_task.cancel()
        self.answers += [answer for answer in results if isinstance(answer, Answer)]
        different = 0
        for number, (answer, expected) in enumerate(zip(results, self.expected, strict=True)):
            if answer != expected:
                different += 1
                print(f"stream {number}: {answer!r}\n  expected {expected!r}", file=sys.stderr)
        return Outcome(different, was_injected)

    async def _inject_fault(
        self, fault: Callable[[psutil.Process], None], progress: _Counter, draw: random.Random
    ) -> None:
        replica = await self.running.find_busy_replica(draw)
        await progress.reached.wait()
        with contextlib.suppress(psutil.NoSuchProcess):
            fault(replica)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a round."""

    different: int
    """Streams whose answer differs from the expected."""
    was_injected: bool
    """Whether the fault was injected while streams ran."""


class _Counter:
    """Counts characters, and sets an event once a number is reached."""

    def __init__(self, target: int = 0) -> None:
        self.reached = asyncio.Event()
        self._remaining = target

    def count(self, text: str) -> None:
        self._remaining -= len(text)
        if self._remaining <= 0:
            self.reached.set()


def ledger(state: Path) -> UsageTotals:
    """Return the usage of all requests in the ledger of a server with this state folder."""
    store = open_store(f"sqlite:///{state / 'argosy' / 'argosy.db'}")
    try:
        return store.ledger.report()[0]
    finally:
        store.close()


async def wait_for_rows(state: Path, requests: int) -> UsageTotals:
    """Wait until the ledger has at least this number of rows, and return its sums."""
    while (totals := await asyncio.to_thread(ledger, state)).requests < requests:  # noqa: ASYNC110 - has no event
        await asyncio.sleep(0.1)
    return totals


async def bench(options: argparse.Namespace, state: Path) -> None:
    """Run all rounds, and print a row for each fault."""
    draw = random.Random(options.seed)
    faults: Sequence[str] = options.faults.split(",")
    durations_s: dict[str, list[float]] = {fault: [] for fault in faults}
    different, injected = dict.fromkeys(faults, 0), dict.fromkeys(faults, 0)
    async with run_server("--replicas", str(options.replicas), state=state) as running:
        await wait_for_replicas(running, options.replicas)
        streams = Streams(running, options.streams, options.tokens)
        await streams.run_undisturbed()
        begin = time.perf_counter()
        await streams.run_undisturbed()
        undisturbed_s = time.perf_counter() - begin
        for number in range(options.rounds):
            await wait_for_replicas(running, options.replicas)
            fault = faults[number % len(faults)]
            begin = time.perf_counter()
            outcome = await streams.run_with_fault(FAULTS[fault], draw)
            different[fault] += outcome.different
            injected[fault] += outcome.was_injected
            durations_s[fault].append(time.perf_counter() - begin)
            print(f"round {number + 1}: {fault}, {durations_s[fault][-1]:.1f} s", file=sys.stderr)
        await wait_for_replicas(running, options.replicas)
        totals = await wait_for_rows(state, len(streams.answers))
    for fault in faults:
        row = {
            "fault": fault,
            "rounds": len(durations_s[fault]),
            "struck": injected[fault],
            "streams": len(durations_s[fault]) * options.streams,
            "different": different[fault],
            "round_s_undisturbed": round(undisturbed_s, 2),
            "round_s_median": round(statistics.median(durations_s[fault]), 2),
            "round_s_most": round(max(durations_s[fault]), 2),
        }
        print(json.dumps(row), flush=True)
    row = {
        "requests": len(streams.answers),
        "rows": totals.requests,
        "tokens_delivered": sum(answer.tokens for answer in streams.answers),
        "tokens_in_rows": totals.output_tokens,
    }
    print(json.dumps(row), flush=True)


def main() -> None:
    """Print one JSON line for each fault."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", default=",".join(FAULTS))
    options = parser.parse_args()
    exit_on_sigterm()
    with tempfile.TemporaryDirectory() as state:
        asyncio.run(bench(options, Path(state)))


if __name__ == "__main__":
    main()
