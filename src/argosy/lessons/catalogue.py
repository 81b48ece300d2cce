"""The lessons: for each its controls, the variants that it compares, and the sentence of what to look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from argosy.gateway import Lesson, LessonControl, LessonRun
from argosy.lessons.challenges import CHALLENGES, CONTROLS, build_challenge, list_goals
from argosy.lessons.error_budget import run_error_budget
from argosy.lessons.measurement import Values, Variant, run_variants
from argosy.lessons.speculation import run_speculation
from argosy.lessons.traffic import (
    BLOCK_TOKENS,
    build_scenario,
    change_engine,
    change_pool,
    change_workload,
    find_setting,
    merge_traffic,
    plan_merged,
    scale_control,
)
from argosy.policy.rollout import RolloutPlan, RolloutStep
from argosy.twin import Fault, Lengths, Tenant

Build = Callable[[Values], list[Variant]]


def slider(
    name: str, label: str, value: int, minimum: int, maximum: int, *, unit: str = "", step: int = 1
) -> LessonControl:
    """Return a control that is a slider."""
    return LessonControl(
        name=name, label=label, value=value, minimum=minimum, maximum=maximum, unit=unit, step=step
    )


def load_control(value: int, maximum: int = 120) -> LessonControl:
    """Return the control of the load."""
    return slider("load", "Requests", value, 30, maximum, unit="% of capacity", step=10)


def _compare_batching(values: Values) -> list[Variant]:
    setting = find_setting(values, slots=values["slots"])
    scenario = build_scenario(setting, values["load"], 1)
    spread = Lengths(median=setting.output, sigma=values["spread"] / 10, maximum=8 * setting.output)
    scenario = change_workload(scenario, output=spread)
    return [
        Variant("static batches", change_engine(scenario, batching="static")),
        Variant("continuous batching", scenario),
    ]


def _compare_prefix_sharing(values: Values) -> list[Variant]:
    setting = find_setting(values)
    shared = values["shared"] * setting.prompt
    scenario = build_scenario(setting, values["load"], 1)
    sequence = 2 * (setting.prompt + setting.output) + shared
    blocks = values["memory"] * sequence // BLOCK_TOKENS
    scenario = change_workload(
        scenario,
        system_prompts=values["prompts"],
        system_prompt=Lengths(median=shared, maximum=shared),
        prompt=Lengths(median=setting.prompt / 2, maximum=setting.prompt),
        output=Lengths(median=setting.output / 2, sigma=0.3, maximum=setting.output),
    )
    longest = shared + setting.prompt + setting.output
    scenario = change_engine(
        scenario, kv_blocks=max(blocks, longest // BLOCK_TOKENS + 2), max_model_len=longest + 1
    )
    return [
        Variant("no sharing", change_engine(scenario, prefix_cache=False)),
        Variant("shared prefixes", scenario),
    ]


def _compare_chunks(values: Values) -> list[Variant]:
    setting = find_setting(values, prompt=values["prompt"])
    scenario = change_workload(
        build_scenario(setting, values["load"], 1),
        prompt=Lengths(median=setting.prompt, sigma=1.2, maximum=32 * setting.prompt),
    )
    scenario = change_engine(scenario, max_model_len=33 * setting.prompt + 8 * setting.output)
    limits = scenario.engine
    blocks = max(limits.kv_blocks, setting.slots * limits.max_model_len // BLOCK_TOKENS)
    scenario = change_engine(scenario, kv_blocks=blocks)
    return [
        Variant("whole prompts", change_engine(scenario, max_step_tokens=limits.max_model_len)),
        Variant("chunks", change_engine(scenario, max_step_tokens=values["chunk"])),
    ]


def _compare_fairness(values: Values) -> list[Variant]:
    setting = find_setting(values)
    base = build_scenario(setting, 100, 2)
    rate = base.workload.sessions_per_s
    requests, numbers = merge_traffic(
        {
            "app": change_workload(base, sessions_per_s=rate * values["app"] / 100),
            "flood": change_workload(base, sessions_per_s=rate * values["flood"] / 100),
        }
    )
    fair = change_workload(
        base, tenants=(Tenant(name="app", weight=float(values["weight"])), Tenant(name="flood"))
    )
    one_queue = change_workload(base, tenants=(Tenant(name="all"),))
    as_one = tuple(replace(each, tenant="all") for each in requests)
    return [
        Variant("order of arrival", one_queue, plan_merged(base, as_one), numbers["app"]),
        Variant("fair shares", fair, plan_merged(base, requests), numbers["app"]),
    ]


def _compare_balancers(values: Values) -> list[Variant]:
    setting = find_setting(values)
    scenario = build_scenario(setting, values["load"], values["replicas"])
    fault = Fault(kind="slow", at_s=0.0, duration_s=setting.duration_s, factor=values["slow"])
    scenario = replace(scenario, faults=(fault,) if values["slow"] > 1 else ())
    return [
        Variant(name, change_pool(scenario, routing_policy=name))
        for name in ("round-robin", "power-of-two", "latency", "least-cost")
    ]


def _compare_hashing(values: Values) -> list[Variant]:
    setting = find_setting(values)
    replicas, prefixes = values["replicas"], values["prefixes"]
    shared = 4 * setting.prompt
    scenario = change_workload(
        build_scenario(setting, values["load"], replicas),
        system_prompts=prefixes,
        system_prompt=Lengths(median=shared, maximum=shared),
        clients=4 * prefixes,
    )
    kept = values["memory"] * prefixes * shared // 100
    running = setting.slots * 2 * (shared + setting.prompt + setting.output)
    scenario = change_engine(scenario, kv_blocks=(kept + running) // BLOCK_TOKENS + 64)
    limits = scenario.engine
    longest = min(limits.max_model_len + shared, limits.kv_blocks * BLOCK_TOKENS)
    scenario = change_engine(scenario, max_model_len=longest)
    fault = Fault(kind="kill", at_s=setting.duration_s / 2, replica=1)
    scenario = replace(scenario, faults=(fault,))
    return [
        Variant("round robin", change_pool(scenario, routing_policy="round-robin")),
        Variant("consistent hashing", change_pool(scenario, routing_policy="hash")),
    ]


def _compare_scaling(values: Values) -> list[Variant]:
    setting = find_setting(values, slots=4)
    most = values["most"]
    scenario = change_workload(
        build_scenario(setting, values["load"] / 1.46, most),
        diurnal=True,
        day_s=setting.duration_s,
        start_hour=0.0,
    )
    scenario = change_pool(scenario, start_s=values["start"] * setting.duration_s / 1000)
    scaled = change_pool(
        scenario, replicas=max(1, most // 2), min_replicas=values["least"], max_replicas=most
    )
    return [Variant("replicas for the peak", scenario), Variant("autoscaler", scaled)]


def _compare_rollouts(values: Values) -> list[Variant]:
    setting = find_setting(values)
    scenario = build_scenario(setting, values["load"], 4)
    duration_s = setting.duration_s
    fault = Fault(kind="bad_rollout", at_s=duration_s / 5, factor=values["regression"] / 10)
    share = values["share"] / 100
    step_s = duration_s / 20
    plan = RolloutPlan(
        steps=(RolloutStep(share=share), RolloutStep(share=max(share, 0.5))),
        start_timeout_s=duration_s,
        min_step_s=step_s,
        max_step_s=duration_s,
        soak_s=step_s,
    )
    at_once = RolloutPlan(
        steps=(),
        start_timeout_s=duration_s,
        min_step_s=step_s,
        max_step_s=duration_s,
        soak_s=step_s,
    )
    scenario = replace(scenario, faults=(fault,))
    return [
        Variant("all users at once", replace(scenario, rollout=at_once)),
        Variant("steps with a gate", replace(scenario, rollout=plan)),
    ]


def _compare_regions(values: Values) -> list[Variant]:
    setting = find_setting(values)
    regions = values["regions"]
    needed = 2 * regions
    spare = -(-needed // (regions - 1))
    scenario = build_scenario(setting, values["load"], needed)
    outage_s = setting.duration_s * values["outage"] / 100
    fault = Fault(kind="region", at_s=setting.duration_s / 3, duration_s=outage_s)
    scenario = replace(change_pool(scenario, zones=regions, regions=regions), faults=(fault,))
    enough = -(-(needed + spare) // regions) * regions
    return [
        Variant("replicas for the load", scenario),
        Variant("replicas for one region less", change_pool(scenario, replicas=enough)),
    ]


def _compare_spot(values: Values) -> list[Variant]:
    setting = find_setting(values)
    replicas = values["replicas"]
    spot = replicas * values["share"] // 100
    price = 2.0
    scenario = build_scenario(setting, values["load"], replicas)
    number = values["reclaims"]
    faults = tuple(
        Fault(
            kind="spot_reclaim",
            at_s=round(setting.duration_s * (index + 0.5) / number, 3),
            replica=index % max(1, spot),
            duration_s=20.0,
        )
        for index in range(number if spot else 0)
    )
    mixed = price * (1 - values["share"] * (100 - values["price"]) / 10_000)
    return [
        Variant("on demand", scenario, dollars_per_hour=price),
        Variant("a spot mix", replace(scenario, faults=faults), dollars_per_hour=mixed),
    ]


class _TwinLesson(NamedTuple):
    lesson: Lesson
    build: Build
    plots: tuple[str, ...]
    figure: str
    """Figure that the finding compares, which the last variant has the better of."""

    def run(self, values: Values) -> LessonRun:
        """Run the variants."""
        return run_variants(
            self.lesson.id, values, self.build(values), plots=self.plots, figure=self.figure
        )


_TWIN_LESSONS = (
    _TwinLesson(
        Lesson(
            id="batching",
            title="Batching",
            question="Why does a server not wait until a batch is complete?",
            look="With static batches, requests wait although slots are empty: a batch ends with its longest answer.",
            setting="batching: continuous is the default, and max_seqs is the number of slots.",
            page="reference/fleet-file.md",
            controls=(
                scale_control(),
                load_control(60, 90),
                slider("slots", "Slots", 8, 2, 16),
                slider("spread", "Spread of the lengths", 8, 0, 15),
            ),
        ),
        _compare_batching,
        ("waiting", "ttft"),
        "ttft_p95",
    ),
    _TwinLesson(
        Lesson(
            id="kv-cache",
            title="KV cache",
            question="How do requests of different lengths share one KV cache?",
            look="Prompts that begin alike share blocks, so that the same memory holds more requests and fewer wait.",
            setting="kv_memory sets the size of the KV cache of a replica, and prefix_cache: false turns sharing off.",
            page="explanation/routing-and-kv-cache.md",
            controls=(
                scale_control(),
                load_control(70),
                slider("memory", "KV cache", 3, 2, 12, unit="requests"),
                slider("shared", "Shared prefix", 8, 1, 16, unit="prompts long"),
                slider("prompts", "Different prefixes", 1, 1, 8),
            ),
        ),
        _compare_prefix_sharing,
        ("kv", "ttft"),
        "ttft_p95",
    ),
    _TwinLesson(
        Lesson(
            id="chunked-prefill",
            title="Chunked prefill",
            question="A long prompt arrives while others receive their answers. Who waits?",
            look="In chunks, a long prompt does not stop the tokens of others: their slowest time per token falls.",
            setting="max_step_tokens is the largest number of tokens of a step, and so of a chunk.",
            page="reference/engine-options.md",
            controls=(
                scale_control(value=0),
                load_control(60, 90),
                slider("chunk", "Chunk", 512, 128, 2048, unit="tokens", step=128),
                slider("prompt", "Prompts, median", 1500, 500, 4000, unit="tokens", step=500),
            ),
        ),
        _compare_chunks,
        ("tpot", "ttft"),
        "tpot_p99",
    ),
    _TwinLesson(
        Lesson(
            id="fairness",
            title="Fairness",
            question="One tenant sends far more than the others. Who is served next?",
            look="With fair shares the app hardly waits; in order of arrival it waits behind the flood.",
            setting="A project has a tier and a weight. Projects of one tier share tokens by weight.",
            page="explanation/queueing-and-fairness.md",
            controls=(
                scale_control(),
                slider("app", "The app sends", 30, 10, 50, unit="% of capacity", step=10),
                slider("flood", "The flood sends", 110, 50, 300, unit="% of capacity", step=10),
                slider("weight", "Weight of the app", 1, 1, 10),
            ),
        ),
        _compare_fairness,
        ("ttft", "waiting"),
        "ttft_p95",
    ),
    _TwinLesson(
        Lesson(
            id="load-balancers",
            title="Load balancers",
            question="One replica is slower than the others. Which policy notices?",
            look="Round robin sends the slow replica as much as the others, and its requests make the slowest 5 %.",
            setting="models[].routing names the policy. least-cost is the default.",
            page="explanation/routing-and-kv-cache.md",
            controls=(
                scale_control(),
                load_control(60, 90),
                slider("replicas", "Replicas", 4, 2, 8),
                slider("slow", "One replica takes", 4, 1, 10, unit="times as long"),
            ),
        ),
        _compare_balancers,
        ("ttft", "waiting"),
        "ttft_p95",
    ),
    _TwinLesson(
        Lesson(
            id="consistent-hashing",
            title="Consistent hashing",
            question="Many conversations share a few prefixes. Which replica has them cached?",
            look="Hashing sends a prefix to one replica, and after the loss of a replica only its prefixes move.",
            setting="routing: hash hashes the prefix with a bound of the load; least-cost weighs cache against load.",
            page="explanation/routing-and-kv-cache.md",
            controls=(
                scale_control(),
                load_control(50, 90),
                slider("replicas", "Replicas", 4, 2, 8),
                slider("prefixes", "Prefixes", 24, 4, 64, step=4),
                slider("memory", "A replica keeps", 20, 5, 100, unit="% of them", step=5),
            ),
        ),
        _compare_hashing,
        ("cached", "ttft"),
        "cached",
    ),
    _TwinLesson(
        Lesson(
            id="autoscaling",
            title="Autoscaling",
            question="Traffic follows the day. How many replicas are needed when?",
            look="Replicas follow the requests with a delay: the cost falls, and mornings show what a late start does.",
            setting="min_replicas, max_replicas and autoscaling: {mode: on} of a pool.",
            page="explanation/autoscaling.md",
            controls=(
                scale_control(2, 2),
                load_control(40, 90),
                slider("most", "Most replicas", 4, 2, 8),
                slider("least", "Fewest replicas", 1, 1, 2),
                slider("start", "A start takes", 2, 1, 20, unit="‰ of the time"),
            ),
        ),
        _compare_scaling,
        ("replicas", "ttft"),
        "cost",
    ),
    _TwinLesson(
        Lesson(
            id="rollout",
            title="Rollout",
            question="A new version is slower. How many users notice?",
            look="The gate compares both versions on few users, and rolls back before the others get the slow one.",
            setting="rollout: {} of a pool takes steps of 10, 25 and 50 % of the users with a gate at each.",
            page="explanation/rollouts.md",
            controls=(
                scale_control(1),
                load_control(50, 80),
                slider("regression", "Steps take", 30, 15, 60, unit="tenths as long", step=5),
                slider("share", "First step", 10, 5, 50, unit="% of the users", step=5),
            ),
        ),
        _compare_rollouts,
        ("tpot", "replicas"),
        "slow",
    ),
    _TwinLesson(
        Lesson(
            id="region-failure",
            title="Loss of a region",
            question="All replicas of a region are gone. What do the others need?",
            look="Streams go on elsewhere without losing a token; only with headroom do new requests not wait.",
            setting="zones of a pool spread its replicas; spares are warm ones for a loss.",
            page="explanation/failover-and-resume.md",
            controls=(
                scale_control(),
                load_control(80, 100),
                slider("regions", "Regions", 3, 2, 5),
                slider("outage", "It returns after", 25, 5, 50, unit="% of the time", step=5),
            ),
        ),
        _compare_regions,
        ("ttft", "replicas"),
        "ttft_p95",
    ),
    _TwinLesson(
        Lesson(
            id="spot",
            title="Spot mix",
            question="Some replicas are cheap, and may be taken away. What does that cost the users?",
            look="Streams of reclaimed replicas resume elsewhere, so the price falls and no request fails.",
            setting="A pool on reclaimable machines beside one on demand; streams resume between both.",
            page="how-to/costs.md",
            controls=(
                scale_control(),
                load_control(60, 90),
                slider("replicas", "Replicas", 6, 2, 10),
                slider("share", "Spot replicas", 50, 0, 100, unit="%", step=10),
                slider("price", "Spot price", 30, 10, 90, unit="% of the other", step=10),
                slider("reclaims", "Reclaimed", 6, 1, 20, unit="times"),
            ),
        ),
        _compare_spot,
        ("replicas", "ttft"),
        "cost",
    ),
)

_SPECULATION = Lesson(
    id="speculation",
    title="Speculation",
    question="Drafts of the next tokens are verified in one step. When is that faster?",
    look="A fixed number of drafts loses once the batch fills the processor; the policy drafts less, and loses little.",
    setting="speculation chooses the drafters, and the gain that is measured decides how many tokens are drafted.",
    page="explanation/speculative-decoding.md",
    controls=(
        slider("acceptance", "Drafts that are right", 70, 10, 95, unit="%", step=5),
        slider("drafts", "Fixed number of drafts", 4, 1, 12),
        LessonControl(
            name="hardware",
            label="Hardware",
            value=0,
            minimum=0,
            maximum=1,
            choices=("two cores of a CPU", "a large GPU"),
        ),
    ),
)
_ERROR_BUDGET = Lesson(
    id="error-budget",
    title="Error budget",
    question="Some requests miss their objective. When should a person be woken up?",
    look="A short hard fault and a long mild one spend the same budget, but only the hard one pages at once.",
    setting="objectives.slos declares targets; a budget that burns fast is an alert.",
    page="how-to/objectives.md",
    controls=(
        scale_control(2, 2),
        load_control(50, 80),
        slider("target", "Requests that must be good", 95, 80, 99, unit="%"),
        slider("fault", "The mild fault lasts", 50, 10, 60, unit="% of the time", step=10),
    ),
)
_DASHBOARD = Lesson(
    id="dashboard",
    title="The whole dashboard",
    question="You run the fleet. Can you meet all four challenges?",
    look="Each challenge has goals below; change what costs least until all of them are met.",
    setting="All controls are settings of a fleet file. argosy twin plan shows what they do to your own traffic.",
    page="how-to/twin.md",
    controls=(
        LessonControl(
            name="challenge",
            label="Challenge",
            value=0,
            minimum=0,
            maximum=len(CHALLENGES) - 1,
            choices=tuple(each.name for each in CHALLENGES),
        ),
        scale_control(0, 1),
        *CONTROLS,
    ),
)


def _run_dashboard(values: Values) -> LessonRun:
    start = {control.name: control.value for control in CONTROLS}
    variants = [
        build_challenge("the first fleet", {**values, **start}),
        build_challenge("your fleet", values),
    ]
    challenge = CHALLENGES[values["challenge"]]
    return run_variants(
        _DASHBOARD.id,
        values,
        variants,
        plots=("ttft", "replicas", "tokens", "failed"),
        figure=challenge.figure,
        goals=partial(list_goals, challenge, values),
    )


_RUNS: Mapping[str, tuple[Lesson, Callable[[Values], LessonRun]]] = {
    each.lesson.id: (each.lesson, each.run) for each in _TWIN_LESSONS
} | {
    _SPECULATION.id: (_SPECULATION, run_speculation),
    _ERROR_BUDGET.id: (_ERROR_BUDGET, partial(run_error_budget, _ERROR_BUDGET.id)),
    _DASHBOARD.id: (_DASHBOARD, _run_dashboard),
}
_ORDER = (
    *("batching", "kv-cache", "chunked-prefill", "speculation", "fairness", "load-balancers"),
    *("consistent-hashing", "autoscaling", "rollout", "error-budget", "region-failure", "spot"),
    "dashboard",
)
LESSONS = tuple(_RUNS[name][0] for name in _ORDER)
"""All lessons, in the order of the console."""


def run_lesson(name: str, values: Values) -> LessonRun:
    """Run a lesson with the values of all its controls."""
    return _RUNS[name][1](values)
