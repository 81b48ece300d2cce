"""Compare the autoscaler with Knative's and Kubernetes' under a virtual clock. Prints JSON lines.

    python -m benchmarks.autoscaling [--seeds 1 2 3] [--plot docs/explanation/autoscaling.svg]

Eight shapes of load of six hours are served by replicas that start in 30 s, 2 min and 10 min. The simulation is fluid:
a replica does one second of work per second, in order of arrival. Work is attained if it is done within 2 s, and given
up after 60 s. A reversal is a change of direction within two start-up times, at least 10 min, of the change before.
It counts as unfounded if the demand of 60 s did not change by a twentieth in the second direction.
cost: CPU time of a decision for a pool of 10 and 1,000 replicas, and of learning the capacity from their reports.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from argosy.bench.svg import PlotSeries, render_plot
from argosy.policy.autoscaling import (
    ArrivedTokens,
    Autoscaler,
    AutoscalerSettings,
    CapacityEstimator,
    PoolObservation,
    ReplicaReport,
)
from benchmarks.autoscaler_peers import Hpa, Kpa, PoolState
from benchmarks.autoscaler_simulation import (
    HOURS,
    Scaler,
    find_reversals,
    is_unfounded,
    make_loads,
    simulate,
)

MAX_REPLICAS = 40
STARTUPS_S = (30, 120, 600)
TICK_S = 5
TOKENS = 1000.0
"""Tokens that a replica serves in a second."""
OURS = "argosy"


class ArgosyScaler:
    """Argosy's autoscaler."""

    wakes_from_zero = True

    def __init__(self, minimum: int, maximum: int, startup_s: float) -> None:
        self._autoscaler = Autoscaler(
            AutoscalerSettings(min_replicas=minimum, max_replicas=maximum)
        )
        self._startup_s = startup_s
        self._arrivals: list[ArrivedTokens] = []

    def decide(self, state: PoolState) -> int | None:
        """Return the number of replicas, or None between two decisions."""
        self._arrivals.append(ArrivedTokens(state.arrived * TOKENS, 1.0))
        wakes = not state.desired and state.queued > 0.0
        if state.second % TICK_S and not wakes:
            return None
        decision = self._autoscaler.decide(
            PoolObservation(
                at=float(state.second),
                desired_replicas=state.desired,
                ready_replicas=state.ready,
                arrivals=tuple(self._arrivals),
                queued_requests=math.ceil(state.queued),
                queued_tokens=state.queued * TOKENS,
                queue_age_s=state.queue_age_s,
                running_requests=math.ceil(state.served),
                capacity_tokens_per_s=TOKENS,
                startup_s=self._startup_s,
                metrics_age_s=0.0,
            )
        )
        self._arrivals.clear()
        return decision.target


SCALERS: Mapping[str, Callable[[int, int, float], Scaler]] = {
    "kpa": lambda minimum, maximum, _: Kpa(minimum, maximum, 0.0),
    "kpa-300s": lambda minimum, maximum, _: Kpa(minimum, maximum, 300.0),
    "hpa": lambda minimum, maximum, _: Hpa(minimum, maximum),
    OURS: ArgosyScaler,
}
BASELINES = ("kpa-300s", "hpa")
"""Scalers that Argosy is measured against. KPA without a delay drops replicas that a flash crowd needs again."""


class Row(NamedTuple):
    """Result of one scaler for one shape and start-up time."""

    scaler: str
    shape: str
    startup_s: int
    seed: int
    attainment: float
    replica_hours: float
    ideal_hours: float
    """Replica hours of the work itself."""
    changes: int
    reversals: int
    unfounded_reversals: int
    below_minimum: int
    """Largest number of replicas by which the minimum was missed."""

    @property
    def cell(self) -> tuple[str, int, int]:
        """Shape, start-up time and seed, which rows that are compared have in common."""
        return self.shape, self.startup_s, self.seed


def compare(
    seconds: int, startups_s: tuple[int, ...], seed: int, shapes: Collection[str] | None = None
) -> Iterator[Row]:
    """Yield a row for each scaler, shape and start-up time.

    Args:
        seconds: Length of the load.
        startups_s: Start-up times.
        seed: Seed of the load.
        shapes: Names of the shapes; None for all.
    """
    loads = make_loads(seconds, seed)
    for startup_s, (shape, load) in itertools.product(startups_s, loads.items()):
        if shapes is not None and shape not in shapes:
            continue
        minimum = 0 if shape == "idle gaps" else 1
        for name, make in SCALERS.items():
            outcome = simulate(load, make(minimum, MAX_REPLICAS, startup_s), startup_s, minimum)
            reversals = find_reversals(outcome.changes, startup_s)
            yield Row(
                scaler=name,
                shape=shape,
                startup_s=startup_s,
                seed=seed,
                attainment=round(outcome.attainment, 5),
                replica_hours=round(outcome.replica_hours, 2),
                ideal_hours=round(float(load.sum()) / 3600, 2),
                changes=len(outcome.changes),
                reversals=len(reversals),
                unfounded_reversals=sum(is_unfounded(each, outcome.demand) for each in reversals),
                below_minimum=max(0, minimum - outcome.lowest),
            )


def find_worse(rows: Collection[Row]) -> list[tuple[Row, Row]]:
    """Return where another scaler attains 0.5 points more with 5 % fewer replica hours: Argosy's row and the other."""
    ours = {row.cell: row for row in rows if row.scaler == OURS}
    return [
        (ours[row.cell], row)
        for row in rows
        if ours[row.cell].attainment < row.attainment - 0.005
        and ours[row.cell].replica_hours > 1.05 * row.replica_hours
    ]


def summarize(rows: Collection[Row]) -> Iterator[dict[str, object]]:
    """Yield the sums of each scaler."""
    for name in SCALERS:
        own = [row for row in rows if row.scaler == name]
        yield {
            "summary": name,
            "cells": len(own),
            "attainment": round(statistics.fmean(row.attainment for row in own), 5),
            "replica_hours": round(sum(row.replica_hours for row in own), 1),
            "changes": sum(row.changes for row in own),
            "reversals": sum(row.reversals for row in own),
            "unfounded_reversals": sum(row.unfounded_reversals for row in own),
            "below_minimum": max(row.below_minimum for row in own),
            "argosy_is_worse_in": sum(theirs.scaler == name for _, theirs in find_worse(rows)),
        }


def format_table(rows: Collection[Row]) -> str:
    """Return a Markdown table: attainment in %, replica hours and reversals of each scaler."""
    cells: dict[tuple[str, int], list[str]] = {}
    for row in rows:
        cells.setdefault((row.shape, row.startup_s), []).append(
            f"{100 * row.attainment:.1f} / {row.replica_hours:.0f} / {row.reversals}"
        )
    lines = [f"| Shape | Start-up | {' | '.join(SCALERS)} |", "|---|---|" + "---|" * len(SCALERS)]
    lines += [
        f"| {shape} | {startup_s} s | {' | '.join(texts)} |"
        for (shape, startup_s), texts in cells.items()
    ]
    return "\n".join(lines)


def render_figure(rows: Collection[Row]) -> str:
    """Return an SVG with attainment over replica hours, relative to the hours of the work itself."""
    series = [
        PlotSeries(
            name,
            [
                (row.replica_hours / row.ideal_hours, 100.0 * row.attainment)
                for row in rows
                if row.scaler == name
            ],
            dots=True,
        )
        for name in (*BASELINES, OURS)
    ]
    return standalone_svg(
        render_plot(
            "Attainment and cost of 24 cells", "replica hours / ideal", "attainment in %", series
        )
    )


def standalone_svg(figure: str) -> str:
    """Return a plot as a file, with the colours that a page gives to one within it."""
    style = "text{font:11px sans-serif;fill:#374151}.grid{stroke:#eef0f3}"
    return figure.replace(
        "<svg ", '<svg xmlns="http://www.w3.org/2000/svg" style="background:#fff" ', 1
    ).replace(">", f"><style>{style}</style>", 1)


def measure_cost(replicas: int) -> dict[str, object]:
    """Return the CPU time of one decision, and of learning from the reports of one tick."""
    settings = AutoscalerSettings(max_replicas=2 * replicas)
    autoscaler, estimator = Autoscaler(settings), CapacityEstimator(1.0, 0.05)
    decide_ms, learn_ms = [], []
    for tick in range(400):
        running = 8.0 + tick % 8
        reports = [
            ReplicaReport(
                tokens_per_s=3.0 * running / (0.01 + 0.001 * running),
                running=running,
                max_running=64.0,
                inter_token_s=0.01 + 0.001 * running,
                ttft_s=0.1,
            )
            for _ in range(replicas)
        ]
        begin = time.process_time_ns()
        estimator.add(reports)
        capacity = estimator.tokens_per_s
        learn_ms.append((time.process_time_ns() - begin) / 1e6)
        observation = PoolObservation(
            at=float(TICK_S * tick),
            desired_replicas=replicas,
            ready_replicas=replicas,
            arrivals=(ArrivedTokens(700.0 * replicas, 1.0),) * TICK_S,
            running_requests=replicas,
            capacity_tokens_per_s=capacity,
            startup_s=600.0,
            metrics_age_s=1.0,
        )
        begin = time.process_time_ns()
        autoscaler.decide(observation)
        decide_ms.append((time.process_time_ns() - begin) / 1e6)
    settled = slice(len(decide_ms) // 2, None)
    return {
        "cost": "one pool",
        "replicas": replicas,
        "decision_ms": round(statistics.median(decide_ms[settled]), 3),
        "learning_ms": round(statistics.median(learn_ms[settled]), 3),
        "state_bytes": len(msgspec.json.encode(autoscaler.state)),
    }


def main() -> None:
    """Print one JSON line for each result and sum, then the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--plot", type=Path, help="file for a figure of the first seed")
    arguments = parser.parse_args()
    rows = [row for seed in arguments.seeds for row in compare(HOURS * 3600, STARTUPS_S, seed)]
    first = [row for row in rows if row.seed == arguments.seeds[0]]
    for row in rows:
        print(json.dumps(row._asdict()))
    for summary in (*summarize(rows), measure_cost(10), measure_cost(1000)):
        print(json.dumps(summary))
    print(format_table(first))
    if arguments.plot is not None:
        arguments.plot.write_text(render_figure(first) + "\n")


if __name__ == "__main__":
    main()
