"""Forecast of a declared change: the present pool and the declared one serve the same requests, with several seeds.

The requests are those of the ledger. The first seed replays them as they came. Each further one puts parts of that time
together in another order, so that the range of a figure covers the chance of the traffic. Steps are priced so that the
present pool takes as long for a token as the ledger says, unless a scenario has its own prices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from statistics import median

import msgspec
from msgspec.structs import replace

from argosy.deployment import (
    ARGOSY_ENGINE,
    MAX_SEQS_OPTIONS,
    ArgosyOptions,
    ChangeForecast,
    FleetConfig,
    ForecastFigure,
    ForecastRange,
    PoolConfig,
    PoolForecast,
    compare_fleets,
)
from argosy.store import UsageRecord
from argosy.twin.ledger_replay import convert_records
from argosy.twin.linear_cost import LinearStepCost
from argosy.twin.result import TwinResult
from argosy.twin.run import run_scenario
from argosy.twin.scenario import Engine, PoolSettings, Scenario
from argosy.twin.simulation import derive_stream
from argosy.twin.workload import SimulatedRequest, Span

MAX_REQUESTS = 5000
"""Requests of a run. The busiest part of a longer record is taken."""
BLOCKS = 20
"""Parts of the recorded time that a seed puts together."""
CALIBRATION_RUNS = 6
CALIBRATION_ERROR = 0.03
PROBE_INTERVAL_S = 2.0
DAY_HOURS = 24
_SIMULATED = re.compile(
    r"pools\[[^]]+\](\.(replicas|min_replicas|max_replicas|autoscaling\.mode|dollars_per_hour|options\..+))"
    r"|models\[[^]]+\]\.(routing|hedge_after_s|giving_way\.enabled)"
    r"|queue\.timeout_s|timeouts\.failover_timeout_s"
)
"""Settings that the runs differ in."""
_WITHOUT_EFFECT = re.compile(
    r"pools\[[^]]+\]\.(owner|keep_idle|rollout|max_surge|max_unavailable|drain_deadline_s|start_timeout_s|warm_up)\b.*"
    r"|(alerting|backup|console|controller|explain|fleet|log_format|log_level|objectives|quality|series|tracing)\b.*"
)
"""Settings that decide how a change is made, or what is watched, and that no request notices."""
_OPTIONS = dict.fromkeys(MAX_SEQS_OPTIONS.values(), "max_seqs") | {
    "max_step_tokens": "max_step_tokens",
    "max_num_batched_tokens": "max_step_tokens",
    "chunked_prefill_size": "max_step_tokens",
    "max_model_len": "max_model_len",
    "context_length": "max_model_len",
    "prefix_cache": "prefix_cache",
    "enable_prefix_caching": "prefix_cache",
}
"""Options of engines, and the settings of a scenario that they are."""
_FIGURES: tuple[tuple[str, str, Callable[[TwinResult, float], float | None]], ...] = (
    ("TTFT p50", "ms", lambda run, _: run.summary.latency["ttft"].p50),
    ("TTFT p95", "ms", lambda run, _: run.summary.latency["ttft"].p95),
    ("TTFT p99", "ms", lambda run, _: run.summary.latency["ttft"].p99),
    ("TPOT p50", "ms", lambda run, _: run.summary.latency["tpot"].p50),
    ("TPOT p99", "ms", lambda run, _: run.summary.latency["tpot"].p99),
    ("goodput", "requests/s", lambda run, _: run.summary.goodput),
    ("failures", "%", lambda run, _: 100.0 * _failed_share(run)),
    ("utilisation", "%", lambda run, _: 100.0 * run.utilisation),
    ("cost a day", "$", lambda run, price: _mean_replicas(run) * price * DAY_HOURS),
    ("replicas", "", lambda run, _: _mean_replicas(run)),
)
"""Name, unit and value of each figure. Of two that change alike, the first is named."""


def forecast_change(
    old: FleetConfig | None,
    new: FleetConfig,
    records: Sequence[UsageRecord],
    scenario: Scenario | None,
    seeds: int,
) -> ChangeForecast:
    """Simulate the pools that a change of the declaration is about, and compare their figures.

    Args:
        old: The declaration in force; None if nothing runs.
        new: A valid declaration.
        records: Rows of the ledger, of any models.
        scenario: Prices of the engine, and statistics for models without rows. None takes defaults.
        seeds: Number of seeds of each pool.

    Raises:
        ValueError: A change cannot be simulated. The message names its settings.
    """
    changes = () if old is None else compare_fleets(replace(old, fleet=new.fleet), new)
    known = [each.path for each in changes if _SIMULATED.fullmatch(each.path)]
    idle = [each.path for each in changes if _WITHOUT_EFFECT.fullmatch(each.path)]
    unknown = [each.path for each in changes if each.path not in {*known, *idle}]
    if unknown:
        raise ValueError(
            f"the twin does not simulate {', '.join(unknown)}: leave {'it' if len(unknown) == 1 else 'them'} "
            "out of the file to see what the other changes do"
        )
    names = [pool.name for pool in new.pools if old is None or _is_concerned(pool, known)]
    pools = tuple(_PoolRun(old, new, name, records, scenario, seeds).forecast() for name in names)
    largest = max(pools, key=lambda each: _largest(each.figures)[0], default=None)
    if largest is None:
        sentence = "Nothing changes: this declaration is in force."
        if idle:
            sentence = "No figure changes: no request notices these settings."
    else:
        sentence = largest.sentence
    return ChangeForecast(
        simulated=tuple(known),
        without_effect=tuple(idle),
        seeds=seeds,
        pools=pools,
        sentence=sentence,
    )


def _is_concerned(pool: PoolConfig, paths: Sequence[str]) -> bool:
    prefixes = (f"pools[{pool.name}]", f"models[{pool.model}]", "queue.", "timeouts.")
    return any(path.startswith(prefixes) for path in paths)


class _PoolRun:
    """Runs of one pool."""

    def __init__(
        self,
        old: FleetConfig | None,
        new: FleetConfig,
        name: str,
        records: Sequence[UsageRecord],
        scenario: Scenario | None,
        seeds: int,
    ) -> None:
        self._fleets = [each for each in (old, new) if each is not None]
        self._pools = [_find_pool(each, name) for each in self._fleets]
        self._model = self._pools[-1].model
        self._scenario = scenario
        self._seeds = range(1, seeds + 1)
        self._records = _take_busiest([row for row in records if row.model == self._model])
        self._objectives = _build_objectives(new, self._model)

    def forecast(self) -> PoolForecast:
        """Run the pool at present and as declared."""
        requests, tenants = convert_records(self._records)
        if not requests and self._scenario is None:
            raise ValueError(
                f"the ledger has no answers of {self._model} in this time: begin earlier (--since), or give statistics "
                "of its requests (--scenario)"
            )
        base = self._scenario or Scenario()
        if requests:
            duration_s = max(1.0, requests[-1].at_s or 0.0)
            workload = replace(base.workload, tenants=tenants, trace=None)
            base = replace(base, duration_s=duration_s, requests=requests, workload=workload)
        base = replace(base, objectives=self._objectives or base.objectives, faults=())
        longest = max((_count_tokens(each) for each in base.requests or ()), default=0)
        scenarios = [
            _build_scenario(fleet, pool, base, longest, has_prices=self._scenario is not None)
            for fleet, pool in zip(self._fleets, self._pools, strict=True)
        ]
        scenarios, calibration = self._calibrate(scenarios)
        runs = [[self._run(each, seed) for seed in self._seeds] for each in scenarios]
        prices = [pool.dollars_per_hour for pool in self._pools]
        figures = tuple(_build_figures(runs, prices))
        first = runs[-1][0].summary
        return PoolForecast(
            pool=self._pools[-1].name,
            model=self._model,
            traffic="ledger" if requests else "statistics",
            requests=first.completed + first.failed + first.cancelled,
            duration_s=base.duration_s,
            calibration=calibration,
            figures=figures,
            sentence=f"{self._pools[-1].name}: {_largest(figures)[1]}",
        )

    def _run(self, scenario: Scenario, seed: int) -> TwinResult:
        if seed > 1 and scenario.requests is not None:
            requests = _reorder(scenario.requests, scenario.duration_s, seed)
            scenario = replace(scenario, requests=requests)
        result = run_scenario(scenario, seed)
        if result.failure:
            raise ValueError(f"an invariant did not hold for seed {seed}: {result.failure}")
        return result

    def _calibrate(self, scenarios: list[Scenario]) -> tuple[list[Scenario], str]:
        """Scale the default prices until the present pool takes as long for a token as the ledger says."""
        if self._scenario is not None:
            return scenarios, "steps have the prices of the scenario"
        observed = [
            (row.ended_at - row.started_at) / row.output_tokens
            for row in self._records
            if row.status == "completed" and row.output_tokens
        ]
        if not observed or len(self._fleets) == 1:
            return scenarios, "steps have the default prices, those of a model of 0.5B on two cores"
        wanted, factor = median(observed), 1.0
        tried: dict[float, float] = {}
        for _ in range(CALIBRATION_RUNS):
            latency = run_scenario(_scale_cost(scenarios[0], factor), 1).summary.latency
            tried[factor] = found = latency["ntpot"].p50 / 1000.0
            if not found or abs(found / wanted - 1.0) < CALIBRATION_ERROR:
                break
            faster = max((each for each in tried if tried[each] < wanted), default=None)
            slower = min((each for each in tried if tried[each] > wanted), default=None)
            if faster is None or slower is None:
                factor *= wanted / found
            else:
                factor = math.sqrt(faster * slower)
        factor = min(tried, key=lambda each: abs(tried[each] - wanted))
        return [_scale_cost(each, factor) for each in scenarios], (
            f"steps are priced by the ledger: the median time of a token is {1000 * wanted:.1f} ms there, and "
            f"{1000 * tried[factor]:.1f} ms in the present pool's run"
        )


def _find_pool(fleet: FleetConfig, name: str) -> PoolConfig:
    """Return a pool that can be simulated."""
    pool = fleet.find_pool(name)
    if pool is None:
        raise AssertionError(name)  # an added pool is a change that is refused
    if sum(each.model == pool.model for each in fleet.pools) > 1:
        raise ValueError(f"the twin does not simulate models[{pool.model}] with several pools")
    least = (pool.min_replicas if pool.is_autoscaled else pool.initial_replicas) or 0
    if not least:
        setting = "min_replicas" if pool.is_autoscaled else "replicas"
        raise ValueError(f"the twin does not simulate pools[{name}].{setting} of 0")
    return pool


def _build_scenario(
    fleet: FleetConfig, pool: PoolConfig, base: Scenario, longest: int, *, has_prices: bool
) -> Scenario:
    """Return the scenario of a pool. `longest` are the tokens of the longest request."""
    model, engine = fleet.model_of(pool), base.engine
    if not has_prices and pool.engine == ARGOSY_ENGINE:
        defaults = msgspec.to_builtins(ArgosyOptions())
        engine = replace(
            engine, max_seqs=defaults["max_seqs"], max_step_tokens=defaults["max_step_tokens"]
        )
    options = {name.replace("-", "_"): value for name, value in pool.options.items()}
    changes = {_OPTIONS[name]: value for name, value in options.items() if name in _OPTIONS}
    if "max_model_len" not in changes:
        changes["max_model_len"] = max(engine.max_model_len, longest)
    try:
        engine = msgspec.convert(msgspec.to_builtins(engine) | changes, Engine)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"the twin does not simulate the options of {pool.name}: {error}"
        ) from None
    blocks = -(-engine.max_model_len // engine.block_size)
    return replace(
        base,
        engine=replace(engine, kv_blocks=max(engine.kv_blocks, blocks)),
        pool=PoolSettings(
            replicas=pool.initial_replicas,
            min_replicas=pool.min_replicas or 1,
            max_replicas=pool.max_replicas if pool.is_autoscaled else None,
            routing_policy=model.routing,
            hedge_after_s=model.hedge_after_s,
            gives_way=model.giving_way.enabled,
            queue_timeout_s=fleet.queue.timeout_s,
            failover_timeout_s=fleet.timeouts.failover_timeout_s,
            start_s=base.pool.start_s,
            probe_interval_s=max(PROBE_INTERVAL_S, base.pool.probe_interval_s),
            zones=base.pool.zones,
        ),
    )


def _build_objectives(fleet: FleetConfig, model: str) -> str:
    """Return the latency objectives of a model as a scenario has them; empty if there are none."""
    limits = {"ttft": fleet.objectives.ttft_p95_s, "tpot": fleet.objectives.itl_p95_s}
    for each in fleet.objectives.build_objectives():
        if (
            each.below_s is not None
            and each.model in {None, model}
            and not (each.tier or each.tenant)
        ):
            name = {"ttft": "ttft", "itl": "tpot"}.get(each.sli)
            if name is not None:
                limits[name] = each.below_s
    return ",".join(f"{name}:{1000 * limit:g}" for name, limit in limits.items() if limit)


def _scale_cost(scenario: Scenario, factor: float) -> Scenario:
    cost = scenario.engine.cost
    scaled = {name: value * factor for name, value in msgspec.structs.asdict(cost).items()}
    return replace(scenario, engine=replace(scenario.engine, cost=LinearStepCost(**scaled)))


# --- traffic -------------------------------------------------------------------------------------


def _take_busiest(records: list[UsageRecord]) -> list[UsageRecord]:
    """Return the shortest time with `MAX_REQUESTS` requests that have output."""
    rows = sorted((row for row in records if row.output_tokens), key=lambda row: row.started_at)
    last = len(rows) - MAX_REQUESTS
    if last <= 0:
        return rows
    start = min(
        range(last + 1),
        key=lambda at: rows[at + MAX_REQUESTS - 1].started_at - rows[at].started_at,
    )
    return rows[start : start + MAX_REQUESTS]


def _count_tokens(request: SimulatedRequest) -> int:
    return sum(span.tokens for span in request.prompt) + request.output_tokens


def _reorder(
    requests: Sequence[SimulatedRequest], duration_s: float, seed: int
) -> tuple[SimulatedRequest, ...]:
    """Return the requests of as many parts of the time, drawn with replacement. What follows a prefix is new text."""
    stream, size = derive_stream(seed, "blocks"), duration_s / BLOCKS
    blocks: list[list[SimulatedRequest]] = [[] for _ in range(BLOCKS)]
    for request in requests:
        blocks[min(BLOCKS - 1, int((request.at_s or 0.0) / size))].append(request)
    drawn: list[SimulatedRequest] = []
    for position in range(BLOCKS):
        chosen = stream.randrange(BLOCKS)
        for request in blocks[chosen]:
            *prefix, rest = request.prompt
            drawn.append(
                replace(
                    request,
                    number=len(drawn),
                    at_s=round((request.at_s or 0.0) + (position - chosen) * size, 6),
                    prompt=(*prefix, Span(stream.getrandbits(62), rest.tokens)),
                )
            )
    return tuple(drawn) or tuple(requests)


# --- figures -------------------------------------------------------------------------------------


def _failed_share(run: TwinResult) -> float:
    summary = run.summary
    return summary.failed / max(1, summary.completed + summary.failed)


def _mean_replicas(run: TwinResult) -> float:
    return run.replica_hours * 3600.0 / max(run.simulated_s, 1e-9)


def _build_figures(
    runs: Sequence[Sequence[TwinResult]], prices: Sequence[float]
) -> list[ForecastFigure]:
    figures = []
    for name, unit, measure in _FIGURES:
        ranges = []
        for results, price in zip(runs, prices, strict=True):
            measured = [measure(result, price) for result in results]
            values = [value for value in measured if value is not None]
            if values:
                mean = sum(values) / len(values)
                ranges.append(
                    ForecastRange(*(round(x, 4) for x in (mean, min(values), max(values))))
                )
        if not ranges or (unit == "$" and not any(prices)):
            continue
        present = ranges[0] if len(ranges) > 1 else None
        figures.append(ForecastFigure(name=name, unit=unit, present=present, declared=ranges[-1]))
    return figures


def _largest(figures: Sequence[ForecastFigure]) -> tuple[float, str]:
    """Return the size of the largest change beyond the ranges of the seeds, as a logarithm, and its sentence."""
    if all(each.present is None for each in figures):
        figure = figures[1]
        return (
            0.0,
            f"nothing runs at present; {figure.name} would be {show_value(figure, figure.declared.mean)}.",
        )
    changed = [each for each in figures if each.present is not None and _is_disjoint(each)]
    if not changed:
        return 0.0, "no figure changes beyond its range over the seeds."
    figure = max(changed, key=_ratio)
    if figure.present is None:
        raise AssertionError(figure.name)
    verb = "rise" if figure.declared.mean > figure.present.mean else "fall"
    verb += "" if figure.name.endswith("s") else "s"  # failures and replicas
    before, after = (show_value(figure, each.mean) for each in (figure.present, figure.declared))
    return _ratio(figure), f"{figure.name} {verb} from {before} to {after}."


def _is_disjoint(figure: ForecastFigure) -> bool:
    present, declared = figure.present, figure.declared
    return present is not None and (present.high < declared.low or declared.high < present.low)


def _ratio(figure: ForecastFigure) -> float:
    """Return the size of a change. Both values are raised by a small one, so that 0 has a logarithm."""
    if figure.present is None:
        return 0.0
    floor = 1.0 if figure.unit in {"%", "ms"} else 0.01
    return abs(math.log((figure.declared.mean + floor) / (figure.present.mean + floor)))


def show_value(figure: ForecastFigure, value: float) -> str:
    """Return a value of a figure with its unit."""
    if figure.unit == "$":
        return f"${value:,.2f}"
    digits = 0 if figure.unit == "ms" and value >= 100 else 1
    return f"{value:,.{digits}f} {figure.unit}".strip().replace(" %", "%")
