"""Report of `benchmarks.engine`: rows as data, and a table with ratios and shares of the machine's limits."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.catalog import ENGINES
from benchmarks.roofline import BYTES, Demand
from benchmarks.workloads import SPECIAL, best_peer, more_is_better, ratio, requests

Rounds = dict[int, float]
Values = dict[tuple[str, str], dict[str, Rounds]]
"""Values by (workload, figure), engine and round."""
OURS = "argosy"
WEIGHTS = tuple(dict.fromkeys(peer.weights for peer in ENGINES.values()))


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the machine, and demand of the model."""

    machine: Mapping[str, float]
    """Figures of `benchmarks.roofline`."""
    config: Mapping[str, object]

    def share(self, weights: str, workload: str, figure: str, value: float) -> float | None:
        """Return the share of a limit, or None for other figures.

        Decode is limited by read bandwidth, W1 and prefill by the bfloat16 matrix peak.
        """
        demand = Demand.of(self.config)
        bandwidth = 1e9 * max(
            rate for name, rate in self.machine.items() if name.startswith("read")
        )
        peak = 1e12 * self.machine["matrix_tflop_s"]
        if (workload, figure) == ("W2", "decode_tok_s") and weights in BYTES:
            return value * demand.token_bytes(weights) / bandwidth
        work = requests(workload, 0, SPECIAL + 1)
        if (workload, figure) == ("W2", "ttft_ms"):
            return demand.operations(len(work[0].prompt), 1) / (value / 1e3) / peak
        if (workload, figure) == ("W1", "out_tok_s"):
            output = sum(request.output for request in work)
            tokens = sum(len(request.prompt) for request in work) + output
            return demand.operations(tokens, output) * value / output / peak
        return None


def rows(
    values: Values,
    versions: Mapping[str, str],
    missing: Mapping[str, str],
    limits: Limits,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each engine and figure (the median), for each ratio, and for each missing engine."""
    for (workload, figure), engines in values.items():
        for engine, rounds in engines.items():
            value = statistics.median(rounds.values())
            share = limits.share(ENGINES[engine].weights, workload, figure, value)
            yield {
                "engine": engine,
                "version": versions.get(engine, ""),
                "workload": workload,
                figure: round(value, 2),
                "rounds": [round(each, 2) for each in rounds.values()],
            } | ({} if share is None else {"of_limit": round(share, 3)})
        for weights in WEIGHTS:
            best = comparison(engines, figure, weights)
            if best is not None:
                peer, best_ratio = best
                yield {
                    "workload": workload,
                    "figure": figure,
                    "weights": weights,
                    "ratio_to_best_peer": round(best_ratio, 3),
                    "best_peer": peer,
                }
    for engine, reason in missing.items():
        yield {"engine": engine, "missing": reason}


def machine_rows(machine: Mapping[str, float], threads: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each limit of the machine."""
    for name, value in machine.items():
        yield {"machine": name, "value": value, "threads": threads}


def comparison(
    engines: Mapping[str, Rounds], figure: str, weights: str
) -> tuple[str, float] | None:
    """Return the best peer with this weight format and Argosy's ratio to it, or None without both."""
    same_format = {
        name: rounds for name, rounds in engines.items() if ENGINES[name].weights == weights
    }
    ours = [name for name in same_format if ENGINES[name].module == OURS]
    peers = {name: rounds for name, rounds in same_format.items() if name not in ours}
    best = best_peer(figure, peers)
    if best is None or not ours:
        return None
    best_ratio = ratio(same_format[ours[0]], peers[best])
    return None if best_ratio is None else (best, best_ratio)


def markdown(
    values: Values,
    missing: Mapping[str, str],
    limits: Limits,
) -> str:
    """Return a table with a line for each engine, then the ratios of Argosy to the best peer."""
    columns = list(values)
    headings = [f"{workload} {figure}{_arrow(figure)}" for workload, figure in columns]
    lines = [_line(["engine", *headings]), _line(["---", *["---:"] * len(columns)])]
    for engine in ENGINES:
        if any(engine in values[column] for column in columns):
            cells = [_cell(engine, column, values, limits) for column in columns]
            lines.append(_line([engine, *cells]))
    for weights in WEIGHTS:
        comparisons = [comparison(values[column], column[1], weights) for column in columns]
        if any(comparisons):
            cells = ["" if each is None else f"{each[1]:.2f} ({each[0]})" for each in comparisons]
            lines.append(_line([f"Argosy / best peer, {weights}", *cells]))
    limit_values = ", ".join(f"{name} {value:g}" for name, value in limits.machine.items())
    notes = [
        "In brackets: share of the read bandwidth for decode, of the bfloat16 matrix peak for W1 and TTFT.",
        f"Limits of the machine: {limit_values}.",
        *(
            f"{name} has no server: its W4 runs in process without HTTP, which favours it."
            for name, peer in ENGINES.items()
            if peer.paced and name in values.get(("W4", "ttft_p50_ms"), {})
        ),
        *(f"Not or only partly measured: {name}: {reason}." for name, reason in missing.items()),
    ]
    return "\n".join([*lines, "", *notes])


def _cell(
    engine: str,
    column: tuple[str, str],
    values: Values,
    limits: Limits,
) -> str:
    rounds = values[column].get(engine)
    if not rounds:
        return ""
    value = statistics.median(rounds.values())
    share = limits.share(ENGINES[engine].weights, *column, value)
    return f"{value:.4g}" + ("" if share is None else f" ({share:.0%})")


def _arrow(figure: str) -> str:
    return " ↑" if more_is_better(figure) else " ↓"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
