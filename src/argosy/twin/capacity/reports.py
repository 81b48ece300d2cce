"""Plans as a self-contained HTML page, and as the declaration of a fleet."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from argosy.bench import PlotSeries, render_plot
from argosy.settings import dump_yaml
from argosy.twin.capacity.planner import MAX_BATCH, CapacityPlan, PlannedPool
from argosy.twin.hardware import CapacityError, Hardware, ReplicaHardware, model_source
from argosy.twin.scenario import Engine, PoolSettings, Scenario
from argosy.twin.workload import Lengths, Workload

MAX_REPLICAS_OF_A_POOL = 10_000
SCENARIO_REPLICAS = 2
"""Most replicas of a scenario, which serve their share of the load."""
SCENARIO_S = 20.0
BLOCK_TOKENS = 16
PLAN_COLUMNS = (
    "Accelerator",
    "Weights",
    "TP",
    "Replicas",
    "Accelerators",
    "$/month",
    "$/M tokens",
    "Req/s each",
    "TTFT p50/p99 ms",
    "TPOT p50/p99 ms",
    "kW",
    "Bound",
)
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1100px; padding: 0 1rem; color: #1f2937 }
table { border-collapse: collapse; margin: 1rem 0 } th, td { padding: .2rem .7rem; text-align: right;
  border-bottom: 1px solid #e5e7eb } th:first-child, td:first-child { text-align: left }
svg { max-width: 720px; width: 100%; height: auto } svg text { font-size: 11px; fill: #374151 }
svg .title { font-size: 13px; font-weight: 600 } .grid { stroke: #eef0f3 } .muted { color: #6b7280 }
"""


def plan_cells(pool: PlannedPool) -> Sequence[object]:
    """Return the cells of a pool in a plan's table."""
    return (
        pool.accelerator,
        pool.weights,
        pool.tensor_parallel,
        f"{pool.replicas:,} ({pool.replicas_low:,}-{pool.replicas_high:,})",
        f"{pool.accelerators:,}",
        f"{pool.dollars_per_month:,.0f}",
        f"{pool.dollars_per_million_output_tokens:,.2f}",
        f"{pool.replica_requests_s:,.2f}",
        f"{pool.ttft_p50_ms:,.0f} / {pool.ttft_p99_ms:,.0f}",
        f"{pool.tpot_p50_ms:,.0f} / {pool.tpot_p99_ms:,.0f}",
        f"{pool.kilowatts:,.1f}",
        pool.bound,
    )


def render_plan_page(plan: CapacityPlan) -> str:
    """Return a plan as one HTML page that loads nothing from the network."""
    question = plan.question
    title = f"{plan.model}: {plan.peak_requests_s:,.1f} requests/s"
    objectives = ", ".join(map(str, question.objectives)) or "none"
    series = [
        PlotSeries(
            name, [(1e3 / pool.tpot_p50_ms, pool.dollars_per_million_output_tokens)], dots=True
        )
        for pool in plan.pools[:8]
        for name in [f"{pool.tensor_parallel} x {pool.accelerator} {pool.weights}"]
    ]
    front = PlotSeries("best", _pareto_front(plan.pools))
    plot = render_plot(
        "Cost and speed of a stream",
        "tokens/s of a stream, median",
        "$ per M tokens",
        [front, *series],
    )
    rejected = "".join(
        f"<tr><td>{each.tensor_parallel} x {each.accelerator} {each.weights}</td>"
        f"<td>{html.escape(each.reason)}</td></tr>"
        for each in plan.rejected
    )
    head = "".join(f"<th>{html.escape(name)}</th>" for name in PLAN_COLUMNS)
    rows = "".join(
        "<tr>"
        + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in plan_cells(pool))
        + "</tr>"
        for pool in plan.pools
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{html.escape(title)}</h1>"
        f'<p class="muted">{question.prompt_tokens:,} tokens of prompt, {question.output_tokens:,} of output,'
        f" {question.prefix_hits:.0%} prefix hits, {question.spares} spares, {question.zones} zones;"
        f" objectives: {html.escape(objectives)}. Replicas in brackets: by the error of the model.</p>"
        f"<table><tr>{head}</tr>{rows}</table>{plot}"
        f"<h2>Not possible</h2><table>{rejected}</table></body></html>\n"
    )


def _pareto_front(pools: Sequence[PlannedPool]) -> list[tuple[float, float]]:
    """Return speed and cost of the pools that no other beats in both, by speed."""
    front: list[tuple[float, float]] = []
    lowest = float("inf")
    for pool in sorted(pools, key=lambda each: (each.tpot_p50_ms, each.dollars_per_hour)):
        if pool.dollars_per_million_output_tokens < lowest:
            lowest = pool.dollars_per_million_output_tokens
            front.append((1e3 / pool.tpot_p50_ms, lowest))
    return front


def render_fleet_file(plan: CapacityPlan, hardware: Hardware) -> str:
    """Return the declaration of a fleet with the cheapest pool of a plan, as `argosy plan` reads it.

    Raises:
        CapacityError: A fleet has no such engine, or the pool is larger than a declaration allows.
    """
    pool = plan.pools[0]
    engine = hardware.find_engine(pool.engine).fleet_engine
    if not engine:
        raise CapacityError(f"a fleet file has no engine {pool.engine!r}; plan with --engine vllm")
    if pool.replicas > MAX_REPLICAS_OF_A_POOL:
        raise CapacityError(
            f"{pool.replicas:,} replicas exceed the {MAX_REPLICAS_OF_A_POOL:,} of a pool; declare several fleets"
        )
    question = plan.question
    context = min(4 * (question.prompt_tokens + question.output_tokens), pool.kv_tokens)
    options: dict[str, object] = {}
    if engine == "vllm":
        options = {"tensor_parallel_size": pool.tensor_parallel, "max_model_len": context}
        if pool.weights == "fp8":
            options["quantization"] = "fp8"
        if pool.kv == "fp8":
            options["kv_cache_dtype"] = "fp8"
    elif engine == "sglang":
        options = {"tp_size": pool.tensor_parallel, "context_length": context}
    elif pool.tensor_parallel > 1:
        raise CapacityError(
            "the engine argosy has no tensor parallelism; plan with --tensor-parallel 1"
        )
    name = plan.model.replace(".", "-").replace("_", "-").rpartition("/")[2][:40].strip("-").lower()
    price = pool.dollars_per_hour / pool.replicas
    is_host = hardware.accelerators[pool.accelerator].host
    declaration = {
        "models": [{"name": name, "source": model_source(plan.model)}],
        "pools": [
            {
                "name": name,
                "model": name,
                "engine": engine,
                "accelerators": 0 if is_host else pool.tensor_parallel,
                "replicas": pool.replicas,
                "dollars_per_hour": round(price, 4),
                "options": options,
            }
        ],
    }
    return f"# {pool.tensor_parallel} x {pool.accelerator} for each replica.\n" + dump_yaml(
        declaration
    )


def build_scenario(plan: CapacityPlan, hardware: Hardware) -> Scenario:
    """Return a scenario in which the twin serves the load of the cheapest pool of a plan.

    The engine's own scheduler and the gateway's placement run on the prices of the plan. A few replicas get their share
    of the peak, since replicas are alike.
    """
    pool, question = plan.pools[0], plan.question
    replicas = min(pool.load_replicas, SCENARIO_REPLICAS)
    peak = pool.load_replicas * pool.replica_requests_s
    if question.peak_requests_s:
        peak = question.peak_requests_s
    limits = {each.metric: each.limit_ms for each in question.objectives}
    cached = int(question.prompt_tokens * question.prefix_hits)
    shared = Lengths(median=max(1, cached), maximum=max(1, cached))
    return Scenario(
        duration_s=SCENARIO_S,
        pool=PoolSettings(replicas=replicas, zones=max(1, min(question.zones, replicas))),
        engine=Engine(
            max_seqs=MAX_BATCH,
            max_step_tokens=hardware.find_engine(pool.engine).max_batch_tokens,
            max_prefill_fraction=1.0,
            max_model_len=min(
                4 * (question.prompt_tokens + question.output_tokens), pool.kv_tokens
            ),
            block_size=BLOCK_TOKENS,
            kv_blocks=max(1, pool.kv_tokens // BLOCK_TOKENS),
            hardware=ReplicaHardware(
                model=plan.model,
                accelerator=pool.accelerator,
                weights=pool.weights,
                kv=pool.kv,
                engine=pool.engine,
                tensor_parallel=pool.tensor_parallel,
            ),
        ),
        workload=Workload(
            sessions_per_s=peak * replicas / pool.load_replicas,
            clients=1,
            zipf=0.0,
            burstiness=1 / question.burstiness**2,
            bursty_fraction=0.0,
            prompt=_lengths(question.prompt_tokens - cached, question.spread),
            output=_lengths(question.output_tokens, question.spread),
            more_turns=0.0,
            system_prompts=1 if cached else 0,
            system_prompt=shared,
            leave_fraction=0.0,
        ),
        objectives=",".join(f"{name}:{limit:g}" for name, limit in limits.items()),
    )


def _lengths(mean: float, spread: float) -> Lengths:
    """Return lognormal lengths with this mean, at most four times it, as the planner draws them."""
    median = max(1.0, mean * math.exp(-(spread**2) / 2))
    return Lengths(median=median, sigma=spread, maximum=max(1, int(4 * mean)))
