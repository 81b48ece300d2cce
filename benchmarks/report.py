"""What benchmarks.engine prints: rows as data, and a table with ratios and shares of the machine's limits."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.catalog import ENGINES
from benchmarks.roofline import Demand
from benchmarks.workloads import SPECIAL, best_peer, more_is_better, ratio, requests

Rounds = dict[int, float]
Values = dict[tuple[str, str], dict[str, Rounds]]
"""(workload, figure) -> engine -> round -> value."""
OURS = "argosy"


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine can do, and what the model asks of it."""

    machine: Mapping[str, float]
    """As benchmarks.roofline measured it."""
    config: Mapping[str, object]

    def share(self, weights: str, workload: str, figure: str, value: float) -> float | None:
        """Decode's of the read bandwidth, W1's and a prefill's of the bfloat16 matrix peak; else None."""
        demand = Demand.of(self.config)
        bandwidth = 1e9 * max(
            rate for name, rate in self.machine.items() if name.startswith("read")
        )
        peak = 1e12 * self.machine["matrix_tflop_s"]
        if (workload, figure) == ("W2", "decode_tok_s"):
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
    """A row for each engine and figure (the median), for each ratio, and for each engine that is missing."""
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
        for weights in ("bf16", "int8", "int4"):
            against = comparison(engines, figure, weights)
            if against is not None:
                peer, found = against
                yield {
                    "workload": workload,
                    "figure": figure,
                    "weights": weights,
                    "ratio_to_best_peer": round(found, 3),
                    "best_peer": peer,
                }
    for engine, why in missing.items():
        yield {"engine": engine, "missing": why}


def machine_rows(machine: Mapping[str, float], threads: int) -> Iterator[dict[str, Any]]:
    """The limits that shares are taken of."""
    for name, value in machine.items():
        yield {"machine": name, "value": value, "threads": threads}


def comparison(
    engines: Mapping[str, Rounds], figure: str, weights: str
) -> tuple[str, float] | None:
    """The best peer with weights of that form, and Argosy's figure over its; None without both."""
    alike = {name: found for name, found in engines.items() if ENGINES[name].weights == weights}
    ours = [name for name in alike if ENGINES[name].module == OURS]
    peers = {name: found for name, found in alike.items() if name not in ours}
    best = best_peer(figure, peers)
    if best is None or not ours:
        return None
    found = ratio(alike[ours[0]], peers[best])
    return None if found is None else (best, found)


def markdown(
    values: Values,
    missing: Mapping[str, str],
    limits: Limits,
) -> str:
    """The table: a line for each engine, then Argosy over the best peer."""
    columns = list(values)
    heads = [f"{workload} {figure}{_arrow(figure)}" for workload, figure in columns]
    lines = [_line(["engine", *heads]), _line(["---", *["---:"] * len(columns)])]
    for engine in ENGINES:
        if any(engine in values[column] for column in columns):
            cells = [_cell(engine, column, values, limits) for column in columns]
            lines.append(_line([engine, *cells]))
    for weights in ("bf16", "int8", "int4"):
        against = [comparison(values[column], column[1], weights) for column in columns]
        if any(against):
            cells = ["" if each is None else f"{each[1]:.2f} ({each[0]})" for each in against]
            lines.append(_line([f"Argosy / best peer, {weights}", *cells]))
    told = ", ".join(f"{name} {value:g}" for name, value in limits.machine.items())
    notes = [
        "In brackets: decode's share of the read bandwidth, W1's and TTFT's of the bfloat16 matrix peak.",
        f"Limits of the machine: {told}.",
        *(
            f"{name} has no server: its W4 is in process, without HTTP, which favours it."
            for name, peer in ENGINES.items()
            if peer.paced and name in values.get(("W4", "ttft_p50_ms"), {})
        ),
        *(f"Not measured, wholly or in part: {name}: {why}." for name, why in missing.items()),
    ]
    return "\n".join([*lines, "", *notes])


def _cell(
    engine: str,
    column: tuple[str, str],
    values: Values,
    limits: Limits,
) -> str:
    found = values[column].get(engine)
    if not found:
        return ""
    value = statistics.median(found.values())
    share = limits.share(ENGINES[engine].weights, *column, value)
    return f"{value:.4g}" + ("" if share is None else f" ({share:.0%})")


def _arrow(figure: str) -> str:
    return " ↑" if more_is_better(figure) else " ↓"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
