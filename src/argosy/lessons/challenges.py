"""The four challenges of the dashboard: traffic, and goals that a fleet has to meet with it."""

from __future__ import annotations

from typing import Literal, NamedTuple

from msgspec.structs import replace

from argosy.gateway import LessonControl, LessonGoal
from argosy.lessons.measurement import Observation, Values, Variant, show_value
from argosy.lessons.traffic import (
    build_scenario,
    change_engine,
    change_pool,
    change_workload,
    find_setting,
    merge_traffic,
    plan_merged,
)
from argosy.twin import Lengths, Tenant

ROUTINGS = ("round-robin", "least-cost", "hash")
DOLLARS_PER_HOUR = 2.0
SPOT_DOLLARS_PER_HOUR = 0.6
LOAD_REPLICAS = 4
"""Replicas that the even traffic of a challenge is sized for."""
MIN_TTFT_S = 0.08
"""Shortest time to the first token that a challenge asks for."""
TENANT = "app"


class Challenge(NamedTuple):
    """A challenge: how its traffic differs, and its goals relative to the time of a request."""

    name: str
    figure: str
    load_percent: float
    """Even traffic, relative to `LOAD_REPLICAS` replicas with the slots of the scale."""
    spike: float
    """Further traffic in the middle tenth of the time, relative to the even one."""
    shared: bool
    """Whether prompts begin with one of a few long prefixes."""
    ttft: float
    """Highest 95th percentile of TTFT, in times of a request of mean length."""
    replicas: float
    """Highest cost, in replicas on demand over the whole time."""
    tokens: float
    """Fewest output tokens per second, relative to what `LOAD_REPLICAS` replicas make."""


CHALLENGES = (
    Challenge("cost", "cost", 45.0, 0.0, shared=False, ttft=0.5, replicas=2.6, tokens=0.3),
    Challenge("latency", "ttft_p95", 60.0, 0.0, shared=True, ttft=0.05, replicas=8.0, tokens=0.3),
    Challenge("spike", "ttft_p95", 40.0, 4.0, shared=False, ttft=1.5, replicas=7.0, tokens=0.3),
    Challenge("throughput", "tokens", 150.0, 0.0, shared=False, ttft=6.0, replicas=4.2, tokens=1.1),
)
CONTROLS = (
    LessonControl(name="replicas", label="Replicas", value=4, minimum=1, maximum=10),
    LessonControl(
        name="most",
        label="Autoscaler",
        value=0,
        minimum=0,
        maximum=2,
        choices=("off", "up to 6 replicas", "up to 10 replicas"),
    ),
    LessonControl(
        name="slots", label="Slots of a replica", value=1, minimum=1, maximum=6, unit="times"
    ),
    LessonControl(name="routing", label="Routing", value=0, minimum=0, maximum=2, choices=ROUTINGS),
    LessonControl(
        name="cache", label="Prefix cache", value=0, minimum=0, maximum=1, choices=("off", "on")
    ),
    LessonControl(
        name="spot", label="Spot replicas", value=0, minimum=0, maximum=80, step=20, unit="%"
    ),
)


def build_challenge(label: str, values: Values) -> Variant:
    """Return the fleet of some values with the traffic of its challenge."""
    challenge = CHALLENGES[values["challenge"]]
    setting = find_setting(values)
    replicas = values["replicas"]
    scenario = build_scenario(setting, challenge.load_percent, replicas, LOAD_REPLICAS)
    if challenge.shared:
        shared = 8 * setting.prompt
        scenario = change_workload(
            scenario,
            system_prompts=8,
            system_prompt=Lengths(median=shared, maximum=shared),
            clients=32,
        )
        scenario = change_engine(scenario, max_model_len=scenario.engine.max_model_len + shared)
    traffic = {TENANT: scenario}
    requests, _ = merge_traffic(traffic)
    if challenge.spike:
        rate = scenario.workload.sessions_per_s * challenge.spike
        burst = change_workload(
            replace(scenario, duration_s=setting.duration_s / 10), sessions_per_s=rate
        )
        start_s = 0.45 * setting.duration_s
        extra, _ = merge_traffic({"burst": burst})
        requests += tuple(
            replace(
                each,
                number=len(requests) + each.number,
                at_s=(each.at_s or 0.0) + start_s,
                tenant=TENANT,
            )
            for each in extra
        )
    blocks = max(scenario.engine.kv_blocks, -(-scenario.engine.max_model_len // 64))
    scenario = change_engine(
        scenario,
        max_seqs=values["slots"] * setting.slots,
        kv_blocks=values["slots"] * blocks,
        prefix_cache=bool(values["cache"]),
    )
    most = (None, 6, 10)[values["most"]]
    scenario = change_pool(
        scenario,
        routing_policy=ROUTINGS[values["routing"]],
        max_replicas=None if most is None else max(most, replicas),
        min_replicas=1,
    )
    scenario = change_workload(scenario, tenants=(Tenant(name=TENANT),))
    spot = values["spot"] / 100
    price = (1 - spot) * DOLLARS_PER_HOUR + spot * SPOT_DOLLARS_PER_HOUR
    return Variant(label, scenario, plan_merged(scenario, requests), dollars_per_hour=price)


def list_goals(challenge: Challenge, values: Values, seen: Observation) -> tuple[LessonGoal, ...]:
    """Return the goals of a challenge, and which of them a run meets."""
    setting = find_setting(values)
    ttft = seen.percentile("ttft", "p95")
    cost = seen.replica_hours * seen.variant.dollars_per_hour
    hours = seen.run.simulation.elapsed_s / 3600
    made = sum(row.output_tokens for row in seen.completed) / seen.run.simulation.elapsed_s
    failed = sum(row.outcome == "error" for row in seen.rows)
    limit_ms = 1000 * max(MIN_TTFT_S, challenge.ttft * setting.service_s)
    limit_cost = challenge.replicas * DOLLARS_PER_HOUR * hours
    rate = LOAD_REPLICAS * setting.slots * setting.output * 1.2 / setting.service_s
    least = challenge.tokens * rate
    kinds: tuple[tuple[str, float, Literal["$", "ms", "tokens/s", ""], bool], ...] = (
        ("95 % of first tokens within", limit_ms, "ms", ttft is not None and ttft <= limit_ms),
        ("cost at most", limit_cost, "$", cost <= limit_cost),
        ("output at least", least, "tokens/s", made >= least),
        ("failed requests:", 0.0, "", not failed),
    )
    return tuple(
        LessonGoal(f"{text} {show_value(value, unit)}", is_met)
        for text, value, unit, is_met in kinds
    )
