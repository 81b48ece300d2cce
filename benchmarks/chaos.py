"""Streams through `argosy serve` while its replicas are killed, stopped, sent away and cut off.

    python -m benchmarks.chaos [--rounds 200] [--streams 32] [--replicas 2] [--seed 0] [--faults kill,stop,term,cut]

Each round runs the same streams, greedy and seeded ones, some of two choices, and does one fault to one replica at
a random moment. A stream is equal when its texts, finish reasons and token counts are those of a run that nobody
disturbed. Prints a JSON line for each fault, and one for the ledger.
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
from benchmarks.processes import heed_sigterm
from benchmarks.whole import Answer, Whole, all_back, stream, whole


@dataclass
class Streams:
    """The same streams again and again."""

    running: Whole
    count: int
    tokens: int
    """Most of each choice."""
    expected: list[Answer] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    """All that clients have been given."""

    async def undisturbed(self) -> None:
        """Learn what they give."""
        streams = (stream(self.running, n, self.tokens) for n in range(self.count))
        self.expected = list(await asyncio.gather(*streams))
        self.answers += self.expected

    async def disturbed(
        self, fault: Callable[[psutil.Process], None], draw: random.Random
    ) -> Outcome:
        """Run them, and do `fault` to a replica when a random part of the text has come, up to three quarters."""
        characters = sum(len(text) for answer in self.expected for text in answer.texts.values())
        told = _Counter(draw.randrange(characters * 3 // 4))
        striking = asyncio.create_task(self._strike(fault, told, draw))
        streams = (stream(self.running, n, self.tokens, told.count) for n in range(self.count))
        got = await asyncio.gather(*streams, return_exceptions=True)
        struck = striking.done()
        if struck:
            await striking
        striking.cancel()
        self.answers += [answer for answer in got if isinstance(answer, Answer)]
        different = 0
        for number, (answer, expected) in enumerate(zip(got, self.expected, strict=True)):
            if answer != expected:
                different += 1
                print(f"stream {number}: {answer!r}\n  expected {expected!r}", file=sys.stderr)
        return Outcome(different, struck)

    async def _strike(
        self, fault: Callable[[psutil.Process], None], told: _Counter, draw: random.Random
    ) -> None:
        replica = await self.running.answering(draw)
        await told.reached.wait()
        with contextlib.suppress(psutil.NoSuchProcess):
            fault(replica)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a round went."""

    different: int
    """Streams that gave something else than undisturbed."""
    struck: bool
    """The fault was done while streams ran."""


class _Counter:
    """Counts characters and tells when there were enough."""

    def __init__(self, enough: int = 0) -> None:
        self.reached = asyncio.Event()
        self._left = enough

    def count(self, text: str) -> None:
        self._left -= len(text)
        if self._left <= 0:
            self.reached.set()


def ledger(state: Path) -> UsageTotals:
    """What the ledger of a server with this state folder says that all requests used."""
    store = open_store(f"sqlite:///{state / 'argosy' / 'argosy.db'}")
    try:
        return store.ledger.report()[0]
    finally:
        store.close()


async def settled(state: Path, requests: int) -> UsageTotals:
    """The ledger, once it has as many rows."""
    while (told := await asyncio.to_thread(ledger, state)).requests < requests:  # noqa: ASYNC110 - only asking tells
        await asyncio.sleep(0.1)
    return told


async def bench(options: argparse.Namespace, state: Path) -> None:
    """All rounds; prints a row for each fault."""
    draw = random.Random(options.seed)
    faults: Sequence[str] = options.faults.split(",")
    took: dict[str, list[float]] = {fault: [] for fault in faults}
    different, struck = dict.fromkeys(faults, 0), dict.fromkeys(faults, 0)
    async with whole("--replicas", str(options.replicas), state=state) as running:
        await all_back(running, options.replicas)
        streams = Streams(running, options.streams, options.tokens)
        await streams.undisturbed()
        begin = time.perf_counter()
        await streams.undisturbed()
        undisturbed_s = time.perf_counter() - begin
        for number in range(options.rounds):
            await all_back(running, options.replicas)
            fault = faults[number % len(faults)]
            begin = time.perf_counter()
            outcome = await streams.disturbed(FAULTS[fault], draw)
            different[fault] += outcome.different
            struck[fault] += outcome.struck
            took[fault].append(time.perf_counter() - begin)
            print(f"round {number + 1}: {fault}, {took[fault][-1]:.1f} s", file=sys.stderr)
        await all_back(running, options.replicas)
        told = await settled(state, len(streams.answers))
    for fault in faults:
        row = {
            "fault": fault,
            "rounds": len(took[fault]),
            "struck": struck[fault],
            "streams": len(took[fault]) * options.streams,
            "different": different[fault],
            "round_s_undisturbed": round(undisturbed_s, 2),
            "round_s_median": round(statistics.median(took[fault]), 2),
            "round_s_most": round(max(took[fault]), 2),
        }
        print(json.dumps(row), flush=True)
    row = {
        "requests": len(streams.answers),
        "rows": told.requests,
        "tokens_delivered": sum(answer.tokens for answer in streams.answers),
        "tokens_in_rows": told.output_tokens,
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
    heed_sigterm()
    with tempfile.TemporaryDirectory() as state:
        asyncio.run(bench(options, Path(state)))


if __name__ == "__main__":
    main()
