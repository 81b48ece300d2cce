"""Scenarios of lessons: a fleet and requests that load it to a given part, from seconds to days.

Longer scales have longer answers on fewer slots. So a fleet has as much to do, and a run has as many requests.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from argosy.gateway import LessonControl
from argosy.lessons.measurement import SEED, Values
from argosy.twin import (
    Engine,
    Lengths,
    LinearStepCost,
    Plan,
    PoolSettings,
    Scenario,
    SimulatedRequest,
    Tenant,
    Workload,
    make_plan,
)

COST = LinearStepCost(step_s=0.012, token_s=4e-5, context_token_s=2e-8, pair_s=1e-9)
"""Prices like those of a model of 8B on one large GPU."""
BLOCK_TOKENS = 64
MAX_STEP_TOKENS = 2048
SPREAD = 0.6
"""Standard deviation of the logarithm of lengths."""
_MEAN_FACTOR = 1.2
"""Mean of a length divided by its median."""


class _Scale(NamedTuple):
    name: str
    duration_s: float
    prompt: int
    output: int
    slots: int


_SCALES = (
    _Scale("30 seconds", 30.0, 200, 40, 4),
    _Scale("10 minutes", 600.0, 400, 400, 4),
    _Scale("3 hours", 10_800.0, 800, 2400, 2),
    _Scale("a day", 86_400.0, 1600, 9600, 1),
)


def scale_control(minimum: int = 0, value: int = 1) -> LessonControl:
    """Return the control of the time that a lesson covers."""
    return LessonControl(
        name="scale",
        label="Time",
        value=max(minimum, value),
        minimum=minimum,
        maximum=len(_SCALES) - 1,
        choices=tuple(scale.name for scale in _SCALES[minimum:]),
    )


class Setting(NamedTuple):
    """Sizes that lessons need to set faults and lengths."""

    duration_s: float
    prompt: int
    output: int
    slots: int
    service_s: float
    """Time of a request of mean length when all slots are in use."""


def find_setting(values: Values, slots: int | None = None, prompt: int | None = None) -> Setting:
    """Return the sizes of the scale that the reader chose."""
    scale = _SCALES[values["scale"]]
    used_slots, used_prompt = slots or scale.slots, prompt or scale.prompt
    context = used_slots * (used_prompt + scale.output / 2)
    step_s = COST.step_seconds(used_slots, context)
    # the prompts of all slots are computed between the steps
    prefill_s = (
        used_slots * COST.step_seconds(0, 0.0, ((used_prompt, 0),)) - used_slots * COST.step_s
    )
    service_s = _MEAN_FACTOR * (scale.output * step_s + prefill_s)
    return Setting(scale.duration_s, used_prompt, scale.output, used_slots, service_s)


def build_scenario(
    setting: Setting, load_percent: float, replicas: int, load_replicas: int | None = None
) -> Scenario:
    """Return a scenario with even traffic.

    Args:
        setting: Its sizes.
        load_percent: Requests, relative to what `load_replicas` can serve.
        replicas: Replicas of the pool.
        load_replicas: Replicas that `load_percent` is about, by default those of the pool.
    """
    capacity = setting.slots * (load_replicas or replicas) / setting.service_s
    longest = 8 * (setting.prompt + setting.output)
    duration_s = setting.duration_s
    return Scenario(
        duration_s=duration_s,
        pool=PoolSettings(
            replicas=replicas,
            queue_timeout_s=max(20.0, 20.0 * setting.service_s),
            failover_timeout_s=max(30.0, 2.0 * setting.service_s),
            start_s=min(120.0, max(2.0, duration_s / 30)),
            probe_interval_s=min(60.0, max(0.5, duration_s / 1000)),
            control_interval_s=min(20.0, max(2.0, duration_s / 3000)),
        ),
        engine=Engine(
            max_seqs=setting.slots,
            max_step_tokens=MAX_STEP_TOKENS,
            max_prefill_fraction=1.0,
            max_model_len=2 * longest,
            block_size=BLOCK_TOKENS,
            kv_blocks=2 * setting.slots * longest // BLOCK_TOKENS,
            cost=COST,
        ),
        workload=Workload(
            sessions_per_s=load_percent / 100.0 * capacity,
            clients=12,
            zipf=0.5,
            burstiness=1.0,
            bursty_fraction=0.0,
            prompt=Lengths(median=setting.prompt, sigma=SPREAD, maximum=8 * setting.prompt),
            output=Lengths(median=setting.output, sigma=SPREAD, maximum=8 * setting.output),
            more_turns=0.0,
            system_prompts=0,
            leave_fraction=0.0,
        ),
    )


def change_pool(scenario: Scenario, **changes: object) -> Scenario:
    """Return a scenario with other settings of the pool."""
    return replace(scenario, pool=replace(scenario.pool, **changes))


def change_engine(scenario: Scenario, **changes: object) -> Scenario:
    """Return a scenario with other settings of the engine."""
    return replace(scenario, engine=replace(scenario.engine, **changes))


def change_workload(scenario: Scenario, **changes: object) -> Scenario:
    """Return a scenario with other requests."""
    return replace(scenario, workload=replace(scenario.workload, **changes))


def merge_traffic(
    scenarios: dict[str, Scenario],
) -> tuple[tuple[SimulatedRequest, ...], dict[str, range]]:
    """Return the requests of several scenarios, each of a tenant of its own, and the numbers of each tenant."""
    requests: list[SimulatedRequest] = []
    numbers = {}
    for offset, (tenant, scenario) in enumerate(scenarios.items()):
        first = len(requests)
        plan = make_plan(change_workload(scenario, tenants=(Tenant(name=tenant),)), SEED + offset)
        requests += [replace(each, number=first + each.number) for each in plan.requests]
        numbers[tenant] = range(first, len(requests))
    return tuple(requests), numbers


def plan_merged(scenario: Scenario, requests: tuple[SimulatedRequest, ...]) -> Plan:
    """Return a plan with these requests and the faults of a scenario."""
    return Plan(requests, scenario.faults)
