"""`argosy capacity`: memory, hardware and cost of a load, from a model of the hardware. No server is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from argosy.cli.failure import fail
from argosy.cli.output import JsonOutput, print_json, print_records
from argosy.cli.quantities import format_count, format_size, parse_count
from argosy.process import format_os_error

if TYPE_CHECKING:
    from argosy.twin.capacity import CapacityQuestion
    from argosy.twin.hardware import Hardware

app = typer.Typer(
    help="Memory, hardware and cost of a load, from a model of the hardware.", no_args_is_help=True
)
MINUTE_S = 60.0
SCENARIO_COMMENT = "A few replicas of a plan, with their share of the load at its peak."
ModelArgument = Annotated[
    str,
    typer.Argument(
        help="Well-known name such as llama-3.1-70b, or path of a config.json or its folder."
    ),
]
HardwareFile = Annotated[
    Path | None,
    typer.Option(
        "--hardware",
        help="YAML file with accelerators or prices of your own, by name.",
        dir_okay=False,
    ),
]
Accelerators = Annotated[
    list[str] | None,
    typer.Option("--accelerator", "-a", help="Accelerator to consider. Repeat it for several."),
]
Weights = Annotated[
    list[str] | None,
    typer.Option("--weights", "-w", help="Type of the weights: bf16, fp8, int8, fp4 or int4."),
]
EngineName = Annotated[str, typer.Option(help="Engine: vllm, sglang, trtllm or argosy.")]
PromptTokens = Annotated[int, typer.Option(help="Mean tokens of a prompt.")]
OutputTokens = Annotated[int, typer.Option(help="Mean tokens of an output.")]
Users = Annotated[
    str | None, typer.Option(help="Users of a day, such as 10M. Needs --requests-per-user.")
]
RequestsPerUser = Annotated[float, typer.Option(help="Requests of a user on a day.")]
PeakFactor = Annotated[float, typer.Option(help="Peak rate divided by the mean rate of a day.")]
RequestsPerMinute = Annotated[
    str | None, typer.Option(help="Requests per minute at the peak, such as 100K.")
]
Concurrent = Annotated[str | None, typer.Option(help="Requests in flight at the peak.")]
Ttft = Annotated[
    list[str] | None,
    typer.Option(help="Limit of the time to the first token in ms: p50:200, or 800 for p99."),
]
Tpot = Annotated[list[str] | None, typer.Option(help="Limit of the time per output token in ms.")]
PrefixHits = Annotated[
    float, typer.Option(help="Share of the prompts' tokens that the prefix cache has.")
]
Burstiness = Annotated[
    float, typer.Option(help="Variation of the times between requests. 1 is a Poisson process.")
]
Spares = Annotated[int, typer.Option(help="Replicas beside those that the load needs (N+1).")]
Zones = Annotated[int, typer.Option(help="Zones, one of which may be lost.")]
SpotShare = Annotated[float, typer.Option(help="Share of the replicas on spot capacity.")]
TensorParallel = Annotated[
    list[int] | None, typer.Option(help="Accelerators of a replica. Default: 1, 2, 4 and 8.")
]
MaxAccelerators = Annotated[
    int | None, typer.Option(help="Accelerators of one kind that can be had.")
]


@contextmanager
def _capacity_errors() -> Iterator[None]:
    """End the command with the bound that an impossible question breaks."""
    from argosy.twin.hardware import CapacityError

    try:
        yield
    except CapacityError as error:
        fail(str(error))
    except OSError as error:
        fail(format_os_error(error))


@app.command()
def kv(
    model: ModelArgument,
    *,
    context: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 8192,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 1,
    json: JsonOutput = False,
) -> None:
    """Show the memory of a model's weights and KV cache, by type and for each accelerator of a replica."""
    from argosy.twin.hardware import load_shape

    with _capacity_errors():
        shape = load_shape(model)
        share = min(1.0, shape.window / context) if shape.window else 1.0
        rows: list[dict[str, Any]] = []
        for weights in ("bf16", "fp8", "fp4"):
            for kv_type in ("bf16", "fp8"):
                token = shape.kv_bytes_per_token(kv_type, window_share=share)
                rows.append(
                    {
                        "weights": weights,
                        "kv": kv_type,
                        "weight_bytes": shape.weight_bytes(weights),
                        "kv_bytes_per_token": token,
                        "kv_bytes": token * context * sequences,
                        "total_bytes": shape.weight_bytes(weights) + token * context * sequences,
                    }
                )
    if not json:
        typer.echo(
            f"{shape.name}: {shape.parameters() / 1e9:,.1f} B parameters, of which a token uses"
            f" {shape.active_parameters() / 1e9:,.1f} B. {sequences:,} x {context:,} tokens:"
        )
    print_records(
        rows,
        ("Weights", "KV", "Weights size", "KV of a token", "KV", "Sum", "Sum/2", "Sum/4", "Sum/8"),
        lambda row: (
            row["weights"],
            row["kv"],
            format_size(row["weight_bytes"]),
            format_size(row["kv_bytes_per_token"]),
            format_size(row["kv_bytes"]),
            *(format_size(row["total_bytes"] / n) for n in (1, 2, 4, 8)),
        ),
        "",
        json=json,
    )


@app.command()
def fit(
    model: ModelArgument,
    *,
    context: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 8192,
    weights: Weights = None,
    accelerator: Accelerators = None,
    engine: EngineName = "vllm",
    hardware: HardwareFile = None,
    json: JsonOutput = False,
) -> None:
    """Show on which accelerators a model fits: the smallest replica, its KV cache, and the speed of one request."""
    from argosy.twin.hardware import RooflineCost, build_replica, fit_memory, load_shape

    with _capacity_errors():
        known = _load_hardware(hardware)
        shape = load_shape(model)
        rows: list[dict[str, Any]] = []
        for name in accelerator or known.accelerators:
            for kind in _precisions(weights):
                row: dict[str, Any] = {"accelerator": name, "weights": kind}
                for size in (1, 2, 4, 8):
                    if shape.heads % size:
                        continue
                    spec = build_replica(
                        known, shape, name, engine=engine, weights=kind, tensor_parallel=size
                    )
                    memory = fit_memory(spec, context_tokens=context)
                    if memory.kv_tokens < context:
                        continue
                    cost = RooflineCost(spec)
                    row |= {
                        "tensor_parallel": size,
                        "kv_tokens": memory.kv_tokens,
                        "sequences": memory.kv_tokens // context,
                        "ttft_ms": 1e3 * cost.step_seconds(0, 0, [(context, 0)]),
                        "tpot_ms": 1e3 * cost.step_seconds(1, context),
                        "dollars_per_hour": size * spec.accelerator.dollars_per_hour["on_demand"],
                    }
                    break
                rows.append(row)
    print_records(
        rows,
        (
            "Accelerator",
            "Weights",
            "TP",
            "KV tokens",
            "Sequences",
            "Prefill ms",
            "ms/token",
            "$/hour",
        ),
        lambda row: (
            row["accelerator"],
            row["weights"],
            row.get("tensor_parallel", "does not fit 8"),
            format_count(row["kv_tokens"]) if "kv_tokens" in row else "",
            row.get("sequences", ""),
            f"{row['ttft_ms']:,.0f}" if "ttft_ms" in row else "",
            f"{row['tpot_ms']:.1f}" if "tpot_ms" in row else "",
            f"{row['dollars_per_hour']:.2f}" if "dollars_per_hour" in row else "",
        ),
        "",
        json=json,
    )


@app.command()
def plan(
    model: ModelArgument,
    *,
    users: Users = None,
    requests_per_user: RequestsPerUser = 5.0,
    peak_factor: PeakFactor = 3.0,
    requests_per_minute: RequestsPerMinute = None,
    concurrent: Concurrent = None,
    prompt_tokens: PromptTokens = 1000,
    output_tokens: OutputTokens = 250,
    prefix_hits: PrefixHits = 0.0,
    burstiness: Burstiness = 1.2,
    ttft: Ttft = None,
    tpot: Tpot = None,
    accelerator: Accelerators = None,
    weights: Weights = None,
    tensor_parallel: TensorParallel = None,
    engine: EngineName = "vllm",
    spares: Spares = 1,
    zones: Zones = 1,
    spot_share: SpotShare = 0.0,
    max_accelerators: MaxAccelerators = None,
    hardware: HardwareFile = None,
    html: Annotated[Path | None, typer.Option(help="File for a page with a plot.")] = None,
    fleet: Annotated[
        Path | None, typer.Option(help="File for the declaration of a fleet with the cheapest way.")
    ] = None,
    scenario: Annotated[
        Path | None, typer.Option(help="File for a scenario of `argosy twin run` with its load.")
    ] = None,
    json: JsonOutput = False,
) -> None:
    """Find the hardware for a load and its objectives, and rank it by cost.

    Give the load as users of a day, as requests per minute at the peak, or as requests in flight. Bursts, unequal
    lengths and queues are simulated. Replicas in brackets are those if steps are faster or slower by the error of the
    model of the hardware.
    """
    from argosy.twin import write_scenario
    from argosy.twin.capacity import (
        PLAN_COLUMNS,
        build_scenario,
        plan_capacity,
        plan_cells,
        render_fleet_file,
        render_plan_page,
    )

    with _capacity_errors():
        known = _load_hardware(hardware)
        question = _build_question(
            model,
            load=(users, requests_per_user, peak_factor, requests_per_minute, concurrent),
            objectives=(ttft, tpot),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            prefix_hits=prefix_hits,
            burstiness=burstiness,
            accelerators=accelerator,
            weights=weights,
            tensor_parallel=tensor_parallel,
            engine=engine,
            spares=spares,
            zones=zones,
            spot_share=spot_share,
            max_accelerators=max_accelerators,
        )
        answer = plan_capacity(known, question)
        if html is not None:
            html.write_text(render_plan_page(answer), encoding="utf-8")
        if fleet is not None:
            fleet.write_text(render_fleet_file(answer, known), encoding="utf-8")
        if scenario is not None:
            write_scenario(scenario, build_scenario(answer, known), SCENARIO_COMMENT)
    if json:
        print_json(answer)
        return
    typer.echo(f"{answer.model}: {answer.peak_requests_s:,.1f} requests/s at the peak")
    print_records(answer.pools, PLAN_COLUMNS, plan_cells, "", json=False)
    for each in answer.rejected:
        typer.echo(
            f"not {each.tensor_parallel} x {each.accelerator} {each.weights}: {each.reason}",
            err=True,
        )


@app.command()
def cost(
    model: ModelArgument,
    *,
    users: Users = None,
    requests_per_user: RequestsPerUser = 5.0,
    peak_factor: PeakFactor = 3.0,
    requests_per_minute: RequestsPerMinute = None,
    concurrent: Concurrent = None,
    prompt_tokens: PromptTokens = 1000,
    output_tokens: OutputTokens = 250,
    prefix_hits: PrefixHits = 0.0,
    ttft: Ttft = None,
    tpot: Tpot = None,
    accelerator: Accelerators = None,
    weights: Weights = None,
    tensor_parallel: TensorParallel = None,
    engine: EngineName = "vllm",
    spares: Spares = 1,
    zones: Zones = 1,
    spot_share: SpotShare = 0.0,
    small_model: Annotated[
        str | None, typer.Option(help="Smaller model that can answer a part of the requests.")
    ] = None,
    small_share: Annotated[
        float, typer.Option(help="Share of the requests that it answers.")
    ] = 0.4,
    budget: Annotated[str | None, typer.Option(help="Dollars for a month, such as 300K.")] = None,
    people: Annotated[float, typer.Option(help="Persons who run the fleet.")] = 1.0,
    dollars_per_person: Annotated[
        float, typer.Option(help="Cost of a person in a month.")
    ] = 15_000.0,
    egress_price: Annotated[float, typer.Option(help="Dollars for a GB to clients.")] = 0.08,
    storage_price: Annotated[
        float, typer.Option(help="Dollars for a GB of weights in a month.")
    ] = 0.08,
    support_share: Annotated[
        float, typer.Option(help="Support, as a share of the accelerators.")
    ] = 0.03,
    power_price: Annotated[
        float, typer.Option(help="Dollars for a kWh, where the accelerators' price has no power.")
    ] = 0.0,
    hardware: HardwareFile = None,
    json: JsonOutput = False,
) -> None:
    """Show what a load costs in a month with all that is beside the accelerators, and what measures would save."""
    from argosy.twin.capacity import TotalCostInputs, analyse_cost

    with _capacity_errors():
        known = _load_hardware(hardware)
        question = _build_question(
            model,
            load=(users, requests_per_user, peak_factor, requests_per_minute, concurrent),
            objectives=(ttft, tpot),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            prefix_hits=prefix_hits,
            accelerators=accelerator,
            weights=weights,
            tensor_parallel=tensor_parallel,
            engine=engine,
            spares=spares,
            zones=zones,
            spot_share=spot_share,
        )
        book = analyse_cost(
            known,
            question,
            TotalCostInputs(
                egress_dollars_per_gb=egress_price,
                storage_dollars_per_gb=storage_price,
                people=people,
                dollars_per_person=dollars_per_person,
                support_share=support_share,
                power_dollars_per_kwh=power_price,
            ),
            small_model=small_model,
            small_share=small_share,
            budget=None if budget is None else parse_count(budget),
        )
    if json:
        print_json(book)
        return
    pool = book.pool
    typer.echo(
        f"{pool.replicas:,} replicas of {pool.tensor_parallel} x {pool.accelerator} with {pool.weights} weights:"
        f" ${book.total:,.0f} a month"
    )
    for line in book.lines:
        typer.echo(f"  {line.name:13} ${line.dollars:,.0f}")
    typer.echo("Savings, each alone, on the same accelerators:")
    for saving in book.savings:
        typer.echo(f"  ${saving.saved:>12,.0f}  {saving.measure}")
    typer.echo(f"All together: ${book.combined:,.0f} a month")
    if book.verdict:
        typer.echo(book.verdict)


def _load_hardware(path: Path | None) -> Hardware:
    from argosy.twin.hardware import load_hardware

    return load_hardware(path)


def _precisions(weights: list[str] | None) -> list[Any]:
    """Return the types of weights. An unknown one ends the command."""
    from argosy.twin.hardware import WEIGHT_BYTES, CapacityError

    for name in weights or ():
        if name not in WEIGHT_BYTES:
            raise CapacityError(
                f"weights {name!r} are unknown; use one of {', '.join(WEIGHT_BYTES)}"
            )
    return list(weights or ("bf16", "fp8"))


def _build_question(
    model: str,
    *,
    load: tuple[str | None, float, float, str | None, str | None],
    objectives: tuple[list[str] | None, list[str] | None],
    accelerators: list[str] | None,
    weights: list[str] | None,
    tensor_parallel: list[int] | None,
    **values: Any,  # noqa: ANN401 - fields of the question
) -> CapacityQuestion:
    """Return the question of a command's options. Raises CapacityError."""
    from argosy.twin.capacity import CapacityQuestion, daily_rate, parse_objective
    from argosy.twin.hardware import CapacityError

    users, requests_each, peak_factor, per_minute, concurrent = load
    if sum(each is not None for each in (users, per_minute, concurrent)) != 1:
        raise CapacityError("give the load once: --users, --requests-per-minute or --concurrent")
    rate = 0.0
    if users is not None:
        rate = daily_rate(parse_count(users), requests_each, peak_factor)
        values["mean_share"] = 1 / peak_factor
    elif per_minute is not None:
        rate = parse_count(per_minute) / MINUTE_S
    names: tuple[Literal["ttft", "tpot"], ...] = ("ttft", "tpot")
    if accelerators:
        values["accelerators"] = tuple(accelerators)
    return CapacityQuestion(
        model=model,
        peak_requests_s=rate,
        concurrent_requests=0.0 if concurrent is None else parse_count(concurrent),
        objectives=tuple(
            parse_objective(name, text)
            for name, texts in zip(names, objectives, strict=True)
            for text in texts or ()
        ),
        weights=tuple(_precisions(weights)),
        tensor_parallel=tuple(tensor_parallel or ()),
        **values,
    )
