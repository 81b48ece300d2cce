"""Cost book: what a plan costs in a month with all that is beside the accelerators, and what measures would save."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from argosy.twin.capacity.planner import PlannedPool, plan_capacity
from argosy.twin.capacity.question import HOURS_OF_A_MONTH, CapacityQuestion
from argosy.twin.hardware import WEIGHT_BYTES, CapacityError, Hardware, load_shape

BYTES_PER_TOKEN = 250
"""Bytes that a streamed token takes on the network, with its event and its share of TLS."""
MAX_SHARE = 0.95
MIN_SAVING = 0.005


class TotalCostInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Prices beside the accelerators'. All are for a month unless their name has another time."""

    egress_dollars_per_gb: float = 0.08
    storage_dollars_per_gb: float = 0.08
    """For each gigabyte of weights beside each replica."""
    people: float = 1.0
    """Persons who run the fleet."""
    dollars_per_person: float = 15_000.0
    support_share: float = 0.03
    """Support, as a share of the cost of the accelerators."""
    power_dollars_per_kwh: float = 0.0
    """Price of power. 0 where the price of an accelerator includes it, as in a cloud."""
    pue: float = 1.3
    """Power of the site divided by that of its computers (PUE)."""

    def check(self) -> None:
        """Raise CapacityError if a price is negative."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not 0 <= value < 1e9:
                raise CapacityError(
                    f"{name} is {value:g}; nothing has a negative price, so give 0 or more"
                )


class CostLine(msgspec.Struct, frozen=True):
    """A part of the monthly cost."""

    name: str
    dollars: float


class Saving(msgspec.Struct, frozen=True):
    """A measure, and the monthly cost of the accelerators with it alone."""

    measure: str
    dollars: float
    saved: float


class CostBook(msgspec.Struct, frozen=True, kw_only=True):
    """Monthly cost of the cheapest pool of a plan, and how it can fall."""

    pool: PlannedPool
    lines: tuple[CostLine, ...]
    total: float
    savings: tuple[Saving, ...]
    """Measures by what each saves alone, on the same accelerators."""
    combined: float
    """Total with all measures at once."""
    verdict: str
    """Whether a budget is met, and by which measures. Empty without a budget."""


def analyse_cost(
    hardware: Hardware,
    question: CapacityQuestion,
    inputs: TotalCostInputs,
    *,
    small_model: str | None = None,
    small_share: float = 0.4,
    budget: float | None = None,
) -> CostBook:
    """Return the monthly cost of the cheapest way to serve a load, and what measures save.

    Args:
        hardware: Accelerators with their prices.
        question: The load.
        inputs: Prices beside the accelerators'.
        small_model: Smaller model that could answer a part of the requests.
        small_share: Share of the requests that it could answer.
        budget: Dollars per month that shall suffice.

    Raises:
        CapacityError: The question is impossible, or a price is negative.
    """
    inputs.check()
    if budget is not None and budget <= 0:
        raise CapacityError(f"the budget is {budget:g} dollars; give one above 0")
    if not 0 <= small_share <= MAX_SHARE:
        raise CapacityError(
            f"the share of the small model is {small_share:g}; give 0 to {MAX_SHARE}"
        )
    pool = plan_capacity(hardware, question).pools[0]
    fixed = msgspec.structs.replace(
        question,
        accelerators=(pool.accelerator,),
        weights=(pool.weights,),
        tensor_parallel=(pool.tensor_parallel,),
    )
    lines = _cost_lines(question, pool, inputs)
    total = sum(line.dollars for line in lines)
    measures = _measures(hardware, fixed, small_model, small_share)
    savings, together = _find_savings(hardware, fixed, pool, measures)
    lowest = total - pool.dollars_per_month + together
    return CostBook(
        pool=pool,
        lines=lines,
        total=total,
        savings=tuple(savings),
        combined=lowest,
        verdict="" if budget is None else _judge(budget, total, lowest, savings),
    )


def _find_savings(
    hardware: Hardware,
    question: CapacityQuestion,
    pool: PlannedPool,
    measures: Mapping[str, _Change],
) -> tuple[list[Saving], float]:
    """Return the measures that save at least 0.5 % of the accelerators, and their cost with all of them."""
    savings = []
    together: _Mix | CapacityQuestion = question
    for measure, change in measures.items():
        try:
            dollars = _price(hardware, change(question))
        except CapacityError:
            continue
        saved = pool.dollars_per_month - dollars
        if saved > MIN_SAVING * pool.dollars_per_month:
            savings.append(Saving(measure, dollars, saved))
            together = change(together)
    savings.sort(key=lambda each: -each.saved)
    return savings, _price(hardware, together) if savings else pool.dollars_per_month


def _cost_lines(
    question: CapacityQuestion, pool: PlannedPool, inputs: TotalCostInputs
) -> tuple[CostLine, ...]:
    tokens = pool.dollars_per_month / pool.dollars_per_million_output_tokens * 1e6
    weights_gb = load_shape(question.model).weight_bytes(pool.weights) / 1e9
    power = pool.kilowatts * inputs.pue * HOURS_OF_A_MONTH * inputs.power_dollars_per_kwh
    return (
        CostLine("accelerators", pool.dollars_per_month),
        CostLine("power", power),
        CostLine("egress", tokens * BYTES_PER_TOKEN / 1e9 * inputs.egress_dollars_per_gb),
        CostLine("storage", weights_gb * pool.replicas * inputs.storage_dollars_per_gb),
        CostLine("support", pool.dollars_per_month * inputs.support_share),
        CostLine("people", inputs.people * inputs.dollars_per_person),
    )


class _Mix(msgspec.Struct, frozen=True):
    """A question, its share of the cost that demand leaves, and a second question beside it."""

    question: CapacityQuestion
    follows_demand: bool = False
    beside: CapacityQuestion | None = None


def _price(hardware: Hardware, mix: _Mix | CapacityQuestion) -> float:
    """Return the dollars per month of the accelerators for a mix."""
    if isinstance(mix, CapacityQuestion):
        mix = _Mix(mix)
    total = 0.0
    for question in (mix.question, mix.beside):
        if question is None:
            continue
        pool = plan_capacity(hardware, question).pools[0]
        share = 1.0
        if mix.follows_demand:
            mean = max(1.0, pool.load_replicas * min(1.0, question.mean_share * SCALING_MARGIN))
            share = (mean + pool.replicas - pool.load_replicas) / pool.replicas
        total += pool.dollars_per_month * share
    return total


SCALING_MARGIN = 1.25
"""Replicas that an autoscaler keeps, by those that the demand needs at the moment."""
_Change = Callable[[_Mix | CapacityQuestion], _Mix]


def _measures(
    hardware: Hardware, question: CapacityQuestion, small_model: str | None, small_share: float
) -> dict[str, _Change]:
    """Return the measures that a load leaves, as changes of the question."""
    peaks = hardware.accelerators[question.accelerators[0]].tflops
    measures: dict[str, _Change] = {}
    current = question.weights[0]
    for weights in ("fp8", "fp4"):
        if weights in peaks and WEIGHT_BYTES[weights] < WEIGHT_BYTES[current]:
            measures[f"weights in {weights}"] = _changed(weights=(weights,))
    if question.prefix_hits < 0.6:
        hits = min(0.9, question.prefix_hits + 0.3)
        measures[f"prefix cache hits of {hits:.0%} of the prompts' tokens"] = _changed(
            prefix_hits=hits
        )
    if question.spot_share < 0.5:
        measures["half of the replicas on spot capacity"] = _changed(spot_share=0.5)
    measures["a response cache that answers 10 %"] = _scaled(0.9)
    measures["20 % of the requests as batches outside the peak"] = _scaled(0.8)
    measures["replicas that follow the demand of the day"] = lambda mix: msgspec.structs.replace(
        _to_mix(mix), follows_demand=True
    )
    if small_model is not None:
        measures[f"{small_share:.0%} of the requests to {small_model}"] = _routed(
            small_model, small_share
        )
    return measures


def _to_mix(mix: _Mix | CapacityQuestion) -> _Mix:
    return _Mix(mix) if isinstance(mix, CapacityQuestion) else mix


def _changed(**changes: object) -> _Change:
    def change(mix: _Mix | CapacityQuestion) -> _Mix:
        mix = _to_mix(mix)
        return msgspec.structs.replace(
            mix, question=msgspec.structs.replace(mix.question, **changes)
        )

    return change


def _scaled(factor: float) -> _Change:
    def change(mix: _Mix | CapacityQuestion) -> _Mix:
        mix = _to_mix(mix)
        return msgspec.structs.replace(mix, question=_with_load(mix.question, factor))

    return change


def _routed(small_model: str, share: float) -> _Change:
    def change(mix: _Mix | CapacityQuestion) -> _Mix:
        mix = _to_mix(mix)
        beside = msgspec.structs.replace(
            _with_load(mix.question, share), model=small_model, tensor_parallel=()
        )
        return msgspec.structs.replace(
            mix, question=_with_load(mix.question, 1 - share), beside=beside
        )

    return change


def _with_load(question: CapacityQuestion, factor: float) -> CapacityQuestion:
    return msgspec.structs.replace(
        question,
        peak_requests_s=question.peak_requests_s * factor,
        concurrent_requests=question.concurrent_requests * factor,
    )


def _judge(budget: float, total: float, lowest: float, savings: list[Saving]) -> str:
    """Return whether a budget is met, and the bound if it is not."""
    if total <= budget:
        return f"${total:,.0f} a month is within the budget of ${budget:,.0f}."
    if lowest > budget:
        return (
            f"No: all measures together cost ${lowest:,.0f} a month, above the budget of ${budget:,.0f}. The bound is"
            " the accelerators that the peak needs; lower the peak, the lengths or the objectives."
        )
    names = "; ".join(f"{each.measure} (saves ${each.saved:,.0f} alone)" for each in savings)
    return f"Yes: ${total:,.0f} a month falls to ${lowest:,.0f}, below the budget of ${budget:,.0f}, with: {names}."
