"""Compare the cost of proxies in front of an engine: Argosy's gateway and others, in turns, in one run.

    make proxies; python -m benchmarks.gateway [--proxies argosy,nginx,...] [--rounds 3]

json: 32 clients in a closed loop of small requests: requests/s, CPU us per request.
streams: 64, 256 and 512 streams of 100 tokens/s: CPU us per token, and the delay that the proxy adds to the first
token and to each token, compared with direct requests.
most: maximum number of streams before the median token is 20 ms late.
churn: memory over minutes of connections that open and close (--minutes 60 --parts churn for a long run).

The proxy runs on one core, load generator and upstream on the other. Prints JSON lines, then a table.
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
from benchmarks.options import parse_choices
from benchmarks.peers.catalog import ROOT
from benchmarks.processes import PeerError, exit_on_sigterm
from benchmarks.proxies import DEFAULT, KEY, MAX_STREAMS, PROXIES, Running, running

PARTS = ("json", "streams", "most", "churn")
CONNECTIONS = 32
LATE_MS = 20
DIRECT = "direct"
OURS = "argosy"
MORE_IS_BETTER = frozenset({"requests_s", "streams"})
NOT_IN_TABLE = frozenset({"errors", "rate_share", "requests", "minutes"})
"""Figures that only the rows contain."""

Figures = dict[str, float]


@dataclass
class Bench:
    """State of the benchmark run."""

    options: argparse.Namespace
    load: Path
    routes: dict[str, Running]
    """Measured routes to the upstream by name, the direct route first."""
    found: dict[str, dict[str, list[Figures]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    """Figures of each round, by part and route."""
    failed: dict[str, str] = field(default_factory=dict)

    def round(self, number: int) -> None:
        """Measure each selected part once on each route, in turns."""
        selected: list[str] = self.options.parts
        if "json" in selected:
            self._each("json", self._json)
        if "streams" in selected:
            for count in self.options.counts:
                self._each(f"{count} streams", partial(self._streams, count))
        if "most" in selected and number == 0:
            self._each("most", self._most)
        if "churn" in selected and number == 0:
            self._each("churn", self._churn, only=OURS)

    def _each(
        self, part: str, measure: Callable[[Running], Figures], only: str | None = None
    ) -> None:
        for name, route in self.routes.items():
            slow = name in PROXIES and PROXIES[name].slow
            if (slow and part not in {"json", "64 streams"}) or (
                only and not name.startswith(only)
            ):
                continue
            try:
                figures = measure(route)
            except wire.WireError as error:
                self.failed[name] = f"{part}: {error}"
                continue
            self.found[part][name].append(figures)
            log_progress(f"{part}, {name}: {figures}")

    def _json(self, route: Running) -> Figures:
        measured, cpu_s = self._run_load(route, "json", CONNECTIONS, self.options.seconds)
        return {
            "requests_s": measured["requests"] / measured["seconds"],
            "us_per_request": 1e6 * cpu_s / max(1, measured["requests"]),
            "p50_ms": measured["latency_p50"] / 1e3,
            "p99_ms": measured["latency_p99"] / 1e3,
            "errors": measured["errors"],
        }

    def _streams(self, count: int, route: Running) -> Figures:
        measured, cpu_s = self._run_load(route, "streams", count, self.options.seconds)
        return {
            "us_per_token": 1e6 * cpu_s / max(1, measured["chunks"]),
            "ttft_p50_ms": measured["ttft_p50"] / 1e3,
            "ttft_p99_ms": measured["ttft_p99"] / 1e3,
            "delay_p50_ms": measured["delay_p50"] / 1e3,
            "delay_p99_ms": measured["delay_p99"] / 1e3,
            "rate_share": measured["rate"] / wire.TOKENS_PER_S,
            "errors": measured["errors"],
        }

    def _most(self, route: Running) -> Figures:
        measured, _ = self._run_load(route, "most", LATE_MS, MAX_STREAMS)
        return {"streams": measured["streams"], "rate_share": measured["rate"] / wire.TOKENS_PER_S}

    def _churn(self, route: Running) -> Figures:
        """Measure memory after an eighth of the time, when reused objects exist, and at the end."""
        seconds, total, figures = 60 * self.options.minutes, 0.0, {}
        for name, share in (("rss_early_mib", 0.125), ("rss_mib", 0.875)):
            measured, _ = self._run_load(route, "churn", 2 * CONNECTIONS, seconds * share)
            total += measured["requests"] + measured["cuts"]
            figures[name] = route.rss_mib()
        return figures | {"requests": total, "minutes": self.options.minutes}

    def _run_load(
        self, route: Running, mode: str, first: float, second: float
    ) -> tuple[dict[str, float], float]:
        arguments = [mode, str(route.port), route.key, str(first), str(second)]
        return wire.load(self.load, self.options.load_core, arguments, route.cpu_s)


# --- evaluation ------------------------------------------------------------------------------------


def medians(found: dict[str, dict[str, list[Figures]]]) -> dict[str, dict[str, Figures]]:
    """Return the median over the rounds of each figure, by part and route. Added delays are relative to direct."""
    table: dict[str, dict[str, Figures]] = {}
    for part, routes in found.items():
        direct = routes.get(DIRECT, [])
        table[part] = {}
        for route, rounds in routes.items():
            values = {
                figure: statistics.median(
                    each[figure]
                    - (direct[n][figure] if is_relative(route, figure) and n < len(direct) else 0)
                    for n, each in enumerate(rounds)
                )
                for figure in rounds[0]
            }
            table[part][route] = {figure: round(value, 3) for figure, value in values.items()}
    return table


def is_relative(route: str, figure: str) -> bool:
    """Return whether a figure is reported relative to the direct route."""
    return route != DIRECT and figure.startswith(("ttft_", "delay_"))


def ratios(table: dict[str, dict[str, Figures]]) -> Iterator[dict[str, object]]:
    """Yield Argosy's ratio to the best rival, for each figure that both have."""
    for part, routes in table.items():
        ours = routes.get(OURS)
        rivals = {name: routes[name] for name in routes if name in PROXIES and PROXIES[name].rival}
        if ours is None or not rivals:
            continue
        for figure in ours:
            if figure in NOT_IN_TABLE or min(r[figure] for r in (ours, *rivals.values())) <= 0:
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
    """Yield a row for each part and route, for each ratio, and for each proxy that is missing."""
    table = medians(bench.found)
    for part, routes in table.items():
        for route, figures in routes.items():
            rounds = [
                {f: round(v, 3) for f, v in each.items()} for each in bench.found[part][route]
            ]
            yield (
                {"part": part, "proxy": route, "version": bench.routes[route].version}
                | figures
                | {"rounds": rounds}
            )
    yield from ratios(table)
    for name, reason in (missing | bench.failed).items():
        yield {"proxy": name, "missing": reason}


def markdown(bench: Bench, missing: dict[str, str]) -> str:
    """Return a table with a line for each figure, a column for each route, and the ratio to the best rival."""
    table = medians(bench.found)
    ratio_by_figure = {
        (row["part"], row["figure"]): row["ratio_to_best_rival"] for row in ratios(table)
    }
    headings = ["", *bench.routes, f"{OURS} / best rival"]
    lines = [_line(headings), _line(["---", *["---:"] * (len(headings) - 1)])]
    for part, routes in table.items():
        for figure in next(iter(routes.values())):
            if figure in NOT_IN_TABLE:
                continue
            cells = [routes.get(route, {}).get(figure) for route in bench.routes]
            formatted = ["" if cell is None else f"{cell:.4g}" for cell in cells]
            name = f"{part}: {figure} {'↑' if figure in MORE_IS_BETTER else '↓'}"
            lines.append(_line([name, *formatted, str(ratio_by_figure.get((part, figure), ""))]))
    notes = [
        f"ttft and delay are added to the direct route's; `most` ends at {LATE_MS} ms median delay.",
        *(f"Not or only partly measured: {n}: {w}." for n, w in (missing | bench.failed).items()),
    ]
    return "\n".join([*lines, "", *notes])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def log_progress(text: str) -> None:
    """Print a progress message with the time to standard error."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


# --- command line ----------------------------------------------------------------------------------


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = sorted(os.sched_getaffinity(0))
    cache = Path(tempfile.gettempdir()) / "argosy-bench"
    parser.add_argument("--proxies", type=parse_choices(tuple(PROXIES)), default=list(DEFAULT))
    parser.add_argument("--parts", type=parse_choices(PARTS), default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="time of each measurement")
    parser.add_argument(
        "--counts", type=int, nargs="+", default=[64, 256, 512], help="numbers of streams"
    )
    parser.add_argument("--minutes", type=float, default=0.5, help="duration of churn")
    parser.add_argument("--proxy-core", type=int, default=cores[0])
    parser.add_argument("--load-core", type=int, default=cores[-1])
    parser.add_argument("--folder", type=Path, default=cache, help="folder for programs and logs")
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv-peers")
    return parser.parse_args()


def main() -> None:
    """Measure, then print the rows and the table."""
    options = _options()
    exit_on_sigterm()
    programs = {name: wire.build_program(name, options.folder) for name in ("upstream", "load")}
    folder = Path(tempfile.mkdtemp(prefix="proxies-", dir=options.folder))
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        upstream_port = stack.enter_context(wire.upstream(programs["upstream"], options.load_core))
        routes = {DIRECT: Running(upstream_port, KEY)}
        for name in options.proxies:
            arguments = (upstream_port, options.proxy_core, folder / name, options.environments)
            try:
                routes[name] = stack.enter_context(running(PROXIES[name], *arguments))
            except (PeerError, FileNotFoundError) as error:
                missing[name] = str(error)
                log_progress(f"{name}: {error}")
        bench = Bench(options, programs["load"], routes)
        for number in range(options.rounds):
            bench.round(number)
    for row in rows(bench, missing):
        print(json.dumps(row))
    print(markdown(bench, missing))


if __name__ == "__main__":
    main()
