"""What a proxy before an engine costs: Argosy's gateway and others, in turns, in one run.

    make proxies; python -m benchmarks.gateway [--proxies argosy,nginx,...] [--rounds 3]

json: 32 clients in a closed loop of small requests: requests/s, CPU us per request.
streams: 64, 256 and 512 streams of 100 tokens/s: CPU us per token, and what the proxy adds to the time to the first
token and to each token's delay (the direct way's is taken off).
most: the most streams before the median token is 20 ms late.
churn: memory over minutes of connections that come and go (--minutes 60 --parts churn for a long one).

The proxy has one core, load and upstream have the other. Prints JSON lines, then a table.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks import wire
from benchmarks.options import choice
from benchmarks.peers.catalog import ROOT
from benchmarks.processes import PeerError, heed_sigterm
from benchmarks.proxies import DEFAULT, KEY, MOST_STREAMS, PROXIES, Running, running

PARTS = ("json", "streams", "most", "churn")
CONNECTIONS = 32
LATE_MS = 20
DIRECT = "direct"
OURS = "argosy"
MORE_IS_BETTER = frozenset({"requests_s", "streams"})
UNTOLD = frozenset({"errors", "rate_share", "requests", "minutes"})
"""Figures that are in the rows only."""

Figures = dict[str, float]


@dataclass
class Bench:
    """The run as it goes."""

    options: argparse.Namespace
    load: Path
    ways: dict[str, Running]
    """What there is to measure, the direct way first."""
    found: dict[str, dict[str, list[Figures]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    """Part -> way -> figures of each round."""
    failed: dict[str, str] = field(default_factory=dict)

    def round(self, number: int) -> None:
        """Each part once on each way, the ways in turns."""
        asked: list[str] = self.options.parts
        if "json" in asked:
            self._each("json", self._json)
        if "streams" in asked:
            for count in self.options.counts:
                self._each(f"{count} streams", partial(self._streams, count))
        if "most" in asked and number == 0:
            self._each("most", self._most)
        if "churn" in asked and number == 0:
            self._each("churn", self._churn, only=OURS)

    def _each(
        self, part: str, measure: Callable[[Running], Figures], only: str | None = None
    ) -> None:
        for name, way in self.ways.items():
            slow = name in PROXIES and PROXIES[name].slow
            if (slow and part not in {"json", "64 streams"}) or (
                only and not name.startswith(only)
            ):
                continue
            try:
                figures = measure(way)
            except wire.WireError as error:
                self.failed[name] = f"{part}: {error}"
                continue
            self.found[part][name].append(figures)
            say(f"{part}, {name}: {figures}")

    def _json(self, way: Running) -> Figures:
        told, cpu_s = self._ask(way, "json", CONNECTIONS, self.options.seconds)
        return {
            "requests_s": told["requests"] / told["seconds"],
            "us_per_request": 1e6 * cpu_s / max(1, told["requests"]),
            "p50_ms": told["latency_p50"] / 1e3,
            "p99_ms": told["latency_p99"] / 1e3,
            "errors": told["errors"],
        }

    def _streams(self, count: int, way: Running) -> Figures:
        told, cpu_s = self._ask(way, "streams", count, self.options.seconds)
        return {
            "us_per_token": 1e6 * cpu_s / max(1, told["chunks"]),
            "ttft_p50_ms": told["ttft_p50"] / 1e3,
            "ttft_p99_ms": told["ttft_p99"] / 1e3,
            "delay_p50_ms": told["delay_p50"] / 1e3,
            "delay_p99_ms": told["delay_p99"] / 1e3,
            "rate_share": told["rate"] / wire.TOKENS_PER_S,
            "errors": told["errors"],
        }

    def _most(self, way: Running) -> Figures:
        told, _ = self._ask(way, "most", LATE_MS, MOST_STREAMS)
        return {"streams": told["streams"], "rate_share": told["rate"] / wire.TOKENS_PER_S}

    def _churn(self, way: Running) -> Figures:
        """Memory after an eighth of the time, when all that is kept for reuse has been made, and at the end."""
        seconds, total, figures = 60 * self.options.minutes, 0.0, {}
        for name, part in (("rss_early_mib", 0.125), ("rss_mib", 0.875)):
            told, _ = self._ask(way, "churn", 2 * CONNECTIONS, seconds * part)
            total += told["requests"] + told["cuts"]
            figures[name] = way.rss_mib()
        return figures | {"requests": total, "minutes": self.options.minutes}

    def _ask(
        self, way: Running, mode: str, first: float, second: float
    ) -> tuple[dict[str, float], float]:
        arguments = [mode, str(way.port), way.key, str(first), str(second)]
        return wire.load(self.load, self.options.load_core, arguments, way.cpu_s)


# --- what it comes to ------------------------------------------------------------------------------


def medians(found: dict[str, dict[str, list[Figures]]]) -> dict[str, dict[str, Figures]]:
    """Part -> way -> each figure's median over the rounds, the direct way's times taken off."""
    table: dict[str, dict[str, Figures]] = {}
    for part, ways in found.items():
        direct = ways.get(DIRECT, [])
        table[part] = {}
        for way, rounds in ways.items():
            values = {
                figure: statistics.median(
                    each[figure]
                    - (direct[n][figure] if added(way, figure) and n < len(direct) else 0)
                    for n, each in enumerate(rounds)
                )
                for figure in rounds[0]
            }
            table[part][way] = {figure: round(value, 3) for figure, value in values.items()}
    return table


def added(way: str, figure: str) -> bool:
    """Whether a figure is told as what the way adds to the direct one."""
    return way != DIRECT and figure.startswith(("ttft_", "delay_"))


def ratios(table: dict[str, dict[str, Figures]]) -> Iterator[dict[str, object]]:
    """Ours over the best rival, for each figure that there is of both."""
    for part, ways in table.items():
        ours = ways.get(OURS)
        rivals = {name: ways[name] for name in ways if name in PROXIES and PROXIES[name].rival}
        if ours is None or not rivals:
            continue
        for figure in ours:
            if figure in UNTOLD or min(r[figure] for r in (ours, *rivals.values())) <= 0:
                continue
            best = max if figure in MORE_IS_BETTER else min
            value, name = best((figures[figure], name) for name, figures in rivals.items())
            yield {
                "part": part,
                "figure": figure,
                "ratio_to_best_rival": round(ours[figure] / value, 3),
                "best_rival": name,
            }


def rows(bench: Bench, missing: dict[str, str]) -> Iterator[dict[str, object]]:
    """A row for each part and way, for each ratio, and for each proxy that is missing."""
    table = medians(bench.found)
    for part, ways in table.items():
        for way, figures in ways.items():
            rounds = [{f: round(v, 3) for f, v in each.items()} for each in bench.found[part][way]]
            yield (
                {"part": part, "proxy": way, "version": bench.ways[way].version}
                | figures
                | {"rounds": rounds}
            )
    yield from ratios(table)
    for name, why in (missing | bench.failed).items():
        yield {"proxy": name, "missing": why}


def markdown(bench: Bench, missing: dict[str, str]) -> str:
    """The table: a line for each figure, a column for each way, and ours over the best rival."""
    table = medians(bench.found)
    against = {(row["part"], row["figure"]): row["ratio_to_best_rival"] for row in ratios(table)}
    heads = ["", *bench.ways, f"{OURS} / best rival"]
    lines = [_line(heads), _line(["---", *["---:"] * (len(heads) - 1)])]
    for part, ways in table.items():
        for figure in next(iter(ways.values())):
            if figure in UNTOLD:
                continue
            cells = [ways.get(way, {}).get(figure) for way in bench.ways]
            told = ["" if cell is None else f"{cell:.4g}" for cell in cells]
            name = f"{part}: {figure} {'↑' if figure in MORE_IS_BETTER else '↓'}"
            lines.append(_line([name, *told, str(against.get((part, figure), ""))]))
    notes = [
        f"ttft and delay: what a proxy adds to the direct way's ({LATE_MS} ms late ends `most`).",
        *(
            f"Not measured, wholly or in part: {n}: {w}."
            for n, w in (missing | bench.failed).items()
        ),
    ]
    return "\n".join([*lines, "", *notes])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def say(text: str) -> None:
    """Tell the one who waits."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


# --- the command -----------------------------------------------------------------------------------


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = sorted(os.sched_getaffinity(0))
    cache = Path(tempfile.gettempdir()) / "argosy-bench"
    parser.add_argument("--proxies", type=choice(tuple(PROXIES)), default=list(DEFAULT))
    parser.add_argument("--parts", type=choice(PARTS), default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--counts", type=int, nargs="+", default=[64, 256, 512], help="streams")
    parser.add_argument("--minutes", type=float, default=0.5, help="of churn")
    parser.add_argument("--proxy-core", type=int, default=cores[0])
    parser.add_argument("--load-core", type=int, default=cores[-1])
    parser.add_argument("--folder", type=Path, default=cache, help="for programs and logs")
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv-peers")
    return parser.parse_args()


def main() -> None:
    """Measure, then print rows and table."""
    options = _options()
    heed_sigterm()
    programs = {name: wire.built(name, options.folder) for name in ("upstream", "load")}
    folder = Path(tempfile.mkdtemp(prefix="proxies-", dir=options.folder))
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        behind = stack.enter_context(wire.upstream(programs["upstream"], options.load_core))
        ways = {DIRECT: Running(behind, KEY)}
        for name in options.proxies:
            place = (behind, options.proxy_core, folder / name, options.environments)
            try:
                ways[name] = stack.enter_context(running(PROXIES[name], *place))
            except (PeerError, FileNotFoundError) as error:
                missing[name] = str(error)
                say(f"{name}: {error}")
        bench = Bench(options, programs["load"], ways)
        for number in range(options.rounds):
            bench.round(number)
    for row in rows(bench, missing):
        print(json.dumps(row))
    print(markdown(bench, missing))


if __name__ == "__main__":
    main()
