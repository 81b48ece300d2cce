"""Prices of steps from the step log of a live engine, by robust least squares.

Errors are relative to the price of a step, and steps that are far off count less (Huber). The standard errors come from
leaving out one of `NUM_BLOCKS` consecutive parts of the log at a time (jackknife), so that they include drift.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from argosy.engine.scheduling import StepRecord
from argosy.twin.linear_cost import LinearStepCost, count_linear_work
from argosy.twin.run import TwinRun, make_plan

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from argosy.bench import RequestRow
    from argosy.twin.scenario import Scenario

MIN_STEPS = 200
"""Fewest steps from which prices are fitted."""
MAX_STEPS = 1_000_000
"""Steps that are read, which bounds memory and time."""
MAX_LINE_BYTES = 1 << 20
NUM_BLOCKS = 20
NUM_SAMPLES = 12
MIN_SINGULAR = 1e-3
"""Smallest singular value of the normalised columns, relative to the largest, at which prices can be separated."""
HUBER = 2.5
"""Standard deviations beyond which a step counts less."""
OUTLIER = 10.0
"""Standard deviations beyond which it is counted as an outlier."""
PRICES = LinearStepCost.__struct_fields__
WORK = {
    "step_s": "steps",
    "token_s": "tokens",
    "context_token_s": "context of decodes",
    "pair_s": "prompts",
    "sequence_s": "sequences",
}
"""Work that has each price, in messages."""


class FittedCost(msgspec.Struct, frozen=True, kw_only=True):
    """Prices that were fitted to steps."""

    cost: LinearStepCost
    standard_errors: LinearStepCost
    samples: tuple[LinearStepCost, ...]
    """Prices that are as likely, drawn from the uncertainty of all prices together."""
    steps: int
    outliers: int
    error: float
    """Median of the relative error of a step, without sign."""


def read_steps(paths: Iterable[Path]) -> list[StepRecord]:
    """Read step logs. A folder has the files `*.jsonl`.

    Raises:
        ValueError: A file cannot be read, or a line is no record of a step.
    """
    records: list[StepRecord] = []
    for path in paths:
        for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
            try:
                with file.open("rb") as opened:
                    lines = iter(partial(opened.readline, MAX_LINE_BYTES), b"")
                    records += islice(_decode_lines(file, lines), MAX_STEPS - len(records))
            except OSError as error:
                raise ValueError(f"cannot read {file}: {error.strerror}") from error
    return records


def _decode_lines(file: Path, lines: Iterable[bytes]) -> Iterator[StepRecord]:
    decode = msgspec.json.Decoder(StepRecord).decode
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            return  # the engine is writing it
        try:
            yield decode(line)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{file}, line {number}: {error}") from error


def fit_cost(records: Sequence[StepRecord]) -> FittedCost:
    """Fit the prices of `LinearStepCost` to steps of an engine.

    A price that would be negative is 0.

    Raises:
        ValueError: There are too few steps, or they do not separate prices. The message names these.
    """
    usable = [record for record in records if record.seconds > 0]
    if len(usable) < MIN_STEPS:
        raise ValueError(
            f"there are {len(usable)} steps with a duration, fewer than {MIN_STEPS}: log more of them"
        )
    work = np.array(
        [count_linear_work(r.decode_rows, r.context_tokens, r.prefill_chunks) for r in usable]
    )
    seconds = np.array([record.seconds for record in usable])
    _check_columns(work, seconds)
    used = list(range(len(PRICES)))
    while True:
        prices, weights = _fit_robustly(work[:, used], seconds)
        lowest = int(np.argmin(prices))
        if prices[lowest] >= 0 or len(used) == 1:
            break
        del used[lowest]
    columns = work[:, used]
    predicted = columns @ prices
    residuals = seconds / predicted - 1.0
    covariance = _jackknife(columns, seconds, weights)
    errors = np.sqrt(np.diagonal(covariance))
    draws = np.random.default_rng(0).multivariate_normal(prices, covariance, NUM_SAMPLES)
    return FittedCost(
        cost=_build_cost(used, prices),
        standard_errors=_build_cost(used, errors),
        samples=tuple(_build_cost(used, draw) for draw in np.maximum(draws, 0.0)),
        steps=len(usable),
        outliers=int(np.sum(np.abs(residuals) > OUTLIER * _spread(residuals))),
        error=float(np.median(np.abs(residuals))),
    )


def fit_request_time(scenario: Scenario, measured: Iterable[RequestRow]) -> float:
    """Return the seconds that requests spend outside the engine: the median by which TTFT is longer than simulated.

    Args:
        scenario: Scenario with fitted prices, whose requests are those of the same trace.
        measured: These requests, as a benchmark measured them.

    Raises:
        ValueError: No request was answered in both.
        BenchError: The trace cannot be read.
    """
    scenario = replace(scenario, engine=replace(scenario.engine, request_s=0.0))
    run = TwinRun(scenario, 1, make_plan(scenario, 1))
    run.run()
    simulated = {row.index: row for row in run.gateway.rows if row.chunks_s}
    differences = [
        _ttft(row) - _ttft(simulated[row.index])
        for row in measured
        if row.phase == "measured" and row.chunks_s and row.index in simulated
    ]
    if not differences:
        raise ValueError(
            "no request of the benchmark is in the scenario: run it with the `workload.trace` of the scenario"
        )
    return max(0.0, float(np.median(differences)))


def _ttft(row: RequestRow) -> float:
    return row.chunks_s[0] - row.scheduled_s


def _check_columns(work: NDArray[np.float64], seconds: NDArray[np.float64]) -> None:
    """Raise ValueError if the steps have nothing of some kind, or some kinds always grow together."""
    for name, column in zip(PRICES, work.T, strict=True):
        if not column.any():
            raise ValueError(
                f"{name} cannot be fitted, because no step has {WORK[name]}: send requests with longer prompts and "
                "several output tokens"
            )
    relative = work / seconds[:, None]
    relative /= np.sqrt((relative**2).mean(0))
    _, singular, rows = np.linalg.svd(relative, full_matrices=False)
    if singular[-1] < MIN_SINGULAR * singular[0]:
        largest = np.abs(rows[-1]).max()
        names = [
            name for name, part in zip(PRICES, np.abs(rows[-1]), strict=True) if part > largest / 4
        ]
        raise ValueError(
            f"{' and '.join(names)} cannot be separated, because {', '.join(WORK[name] for name in names)} grow "
            "together in all steps: send requests at several rates and with several lengths"
        )


def _fit_robustly(
    columns: NDArray[np.float64], seconds: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return prices, and the square roots of the weights of the steps."""
    weights = 1.0 / seconds
    prices = _solve(columns, seconds, weights)
    for _ in range(20):
        predicted = np.maximum(columns @ prices, 0.05 * seconds)
        residuals = seconds / predicted - 1.0
        limit = HUBER * max(_spread(residuals), 1e-9)
        weights = np.sqrt(np.minimum(1.0, limit / np.maximum(np.abs(residuals), 1e-12))) / predicted
        before, prices = prices, _solve(columns, seconds, weights)
        if np.allclose(before, prices, rtol=1e-6, atol=0.0):
            break
    return prices, weights


def _jackknife(
    columns: NDArray[np.float64], seconds: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the covariance of the prices, with the weights of the steps as they are."""
    blocks = np.arange(len(seconds)) * NUM_BLOCKS // len(seconds)
    left_out = [blocks != block for block in range(NUM_BLOCKS)]
    results = np.array([_solve(columns[k], seconds[k], weights[k]) for k in left_out])
    deviations = results - results.mean(0)
    covariance: NDArray[np.float64] = (NUM_BLOCKS - 1) / NUM_BLOCKS * deviations.T @ deviations
    return covariance


def _solve(
    columns: NDArray[np.float64], seconds: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    scale = np.sqrt((columns**2).mean(0)) + 1e-300
    solution, *_ = np.linalg.lstsq(columns / scale * weights[:, None], seconds * weights)
    prices: NDArray[np.float64] = solution / scale
    return prices


def _spread(residuals: NDArray[np.float64]) -> float:
    """Return the standard deviation of residuals by their median, which outliers do not change."""
    return 1.4826 * float(np.median(np.abs(residuals)))


def _build_cost(used: Sequence[int], values: NDArray[np.float64]) -> LinearStepCost:
    """Return prices of which the others are 0."""
    named = dict.fromkeys(PRICES, 0.0)
    for index, value in zip(used, values, strict=True):
        named[PRICES[index]] = float(f"{value:.6g}")
    return LinearStepCost(**named)
