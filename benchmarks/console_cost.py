"""Measure what the console and its time series cost requests for models: pairs of runs, in turns.

    python -m benchmarks.record console_cost [--conditions off,on] [--starts 3] [--rounds 4]

Conditions:
- off: a gateway without console and series.
- on: a gateway with both. Nothing reads them.
- browser: the same gateway, while a browser shows the Overview with its event stream.
- flood: the same gateway, with 20 event streams and a page that sends 50 requests each second (BerriAI/litellm#20720).

Parts:
- json: 32 clients in a closed loop of small requests.
- streams: 64 streams of 100 tokens/s.

Every second round has the reverse order; flood is only in the first round of a start. Each start has new processes,
since two processes of the same program differ by some percent. The gateway runs on one core, everything else on the
other. Prints JSON lines, then a table: the ratios of pairs, each as the median over the rounds with its quartiles.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from argosy.store import open_store
from benchmarks import wire
from benchmarks.browsers import Browser, flood, show_overview
from benchmarks.gateway import CONNECTIONS, log_progress
from benchmarks.options import parse_choices
from benchmarks.peers.catalog import ROOT
from benchmarks.processes import exit_on_sigterm
from benchmarks.proxies import PROXIES, Running, running, store_url

STREAMS = 64
FLOOD_KEYS = 4
PAIRS = (("on", "off"), ("browser", "off"), ("browser", "on"), ("flood", "on"))
CONDITIONS = ("off", "on", "browser", "flood")
UNITS = {"json": "us_per_request", "streams": "us_per_token"}
"""Parts with their figure of CPU time."""

Figures = dict[str, float]
Rounds = dict[tuple[str, str], dict[int, Figures]]
"""Figures by part and condition, and then by the number of the round."""


class Ratio(NamedTuple):
    """Ratio of a figure under two conditions: the median over the rounds, and its quartiles."""

    part: str
    pair: str
    figure: str
    ratio: float
    low: float
    high: float
    pairs: int


def measure(options: argparse.Namespace, load: Path, part: str, route: Running) -> Figures:
    """Measure one part on a gateway."""
    count = CONNECTIONS if part == "json" else STREAMS
    arguments = [part, str(route.port), route.key, str(count), str(options.seconds)]
    found, cpu_s = wire.load(load, options.load_core, arguments, route.cpu_s)
    if part == "json":
        return {
            "us_per_request": 1e6 * cpu_s / max(1, found["requests"]),
            "requests_s": found["requests"] / found["seconds"],
            "p50_ms": found["latency_p50"] / 1e3,
            "p99_ms": found["latency_p99"] / 1e3,
            "errors": found["errors"],
        }
    return {
        "us_per_token": 1e6 * cpu_s / max(1, found["chunks"]),
        "ttft_p50_ms": found["ttft_p50"] / 1e3,
        "ttft_p99_ms": found["ttft_p99"] / 1e3,
        "delay_p99_ms": found["delay_p99"] / 1e3,
        "errors": found["errors"],
    }


def measure_start(
    options: argparse.Namespace, load: Path, upstream: int, folder: Path, start: int, found: Rounds
) -> None:
    """Start both gateways, and measure the rounds of this start."""
    place = (upstream, options.proxy_core)
    with (
        running(
            PROXIES["argosy-without-console"], *place, folder / "off", options.environments
        ) as off,
        running(PROXIES["argosy"], *place, folder / "on", options.environments) as on,
    ):
        keys = _create_viewers(store_url(folder / "on"))
        address = f"http://127.0.0.1:{on.port}"
        conditions: dict[str, tuple[Running, Callable[[], AbstractContextManager[None]]]] = {
            "off": (off, contextlib.nullcontext),
            "on": (on, contextlib.nullcontext),
            "browser": (on, lambda: Browser(address, keys, show_overview)),
            "flood": (on, lambda: Browser(address, keys, flood)),
        }
        for number in range(options.rounds):
            names = [name for name in options.conditions if name != "flood" or not number]
            for name in names if number % 2 == 0 else reversed(names):
                route, open_browser = conditions[name]
                with open_browser():
                    for part in UNITS:
                        figures = measure(options, load, part, route)
                        found[part, name][start * options.rounds + number] = figures
                        log_progress(f"{part}, {name}: {figures}")


def _create_viewers(url: str) -> list[str]:
    """Return keys that may see everything, for the browsers."""
    store = open_store(url)
    try:
        actor = "benchmark"
        organisation = store.accounts.create_organisation("viewers", actor=actor).id
        project = store.accounts.create_project(organisation, "console", actor=actor).id
        return [
            store.accounts.create_key(
                project, f"viewer-{number}", role="viewer", scope="gateway", actor=actor
            )[1]
            for number in range(FLOOD_KEYS)
        ]
    finally:
        store.close()


def compare(found: Rounds) -> Iterator[Ratio]:
    """Yield the ratios of the pairs of conditions."""
    for part, unit in UNITS.items():
        pairs = [pair for pair in PAIRS if all((part, condition) in found for condition in pair)]
        compared = (unit, "requests_s") if part == "json" else (unit,)
        for (one, other), figure in ((pair, figure) for pair in pairs for figure in compared):
            others = found[part, other]
            ratios = [
                figures[figure] / others[number][figure]
                for number, figures in found[part, one].items()
            ]
            several = ratios if len(ratios) > 1 else ratios * 2
            low, median, high = statistics.quantiles(several, n=4, method="inclusive")
            yield Ratio(part, f"{one}/{other}", figure, median, low, high, len(ratios))


def rows(found: Rounds) -> Iterator[dict[str, object]]:
    """Yield the medians of each part and condition with their rounds, and then the ratios."""
    for (part, condition), by_round in found.items():
        rounds = list(by_round.values())
        medians = {
            name: round(statistics.median(each[name] for each in rounds), 3) for name in rounds[0]
        }
        yield {
            "part": part,
            "condition": condition,
            **medians,
            "rounds": [{name: round(value, 3) for name, value in each.items()} for each in rounds],
        }
    for ratio in compare(found):
        yield {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in ratio._asdict().items()
        }


def markdown(found: Rounds) -> str:
    """Return the ratios as a table."""
    lines = ["| | pair | ratio | quartiles | pairs |", "|---|---|---:|---:|---:|"]
    for each in compare(found):
        quartiles = f"{each.low:.3f} to {each.high:.3f}"
        lines.append(
            f"| {each.part}: {each.figure} | {each.pair} | {each.ratio:.3f} | {quartiles} | {each.pairs} |"
        )
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = sorted(os.sched_getaffinity(0))
    cache = Path(tempfile.gettempdir()) / "argosy-bench"
    parser.add_argument("--conditions", type=parse_choices(CONDITIONS), default=list(CONDITIONS))
    parser.add_argument("--starts", type=int, default=3, help="pairs of processes")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of each pair")
    parser.add_argument("--seconds", type=float, default=1.5, help="time of each measurement")
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
    folder = Path(tempfile.mkdtemp(prefix="console-cost-", dir=options.folder))
    found: Rounds = defaultdict(dict)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        upstream = stack.enter_context(wire.upstream(programs["upstream"], options.load_core))
        os.sched_setaffinity(0, {options.load_core})  # the browsers
        for number in range(options.starts):
            place = folder / f"start-{number}"
            measure_start(options, programs["load"], upstream, place, number, found)
    for row in rows(found):
        print(json.dumps(row))
    print(markdown(found))


if __name__ == "__main__":
    main()
