"""Scenario of a run, as its YAML file declares it: a pool, its engines, the requests, and what goes wrong when."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from argosy.engine.scheduling import (
    BatchingPolicy,
    ContinuousBatching,
    SchedulerLimits,
    StaticBatching,
)
from argosy.policy import RoutingPolicyName
from argosy.policy.rollout import RolloutPlan, RolloutStep
from argosy.settings import SettingsDocument, convert_settings, dump_yaml, load_yaml
from argosy.twin.hardware import ReplicaHardware
from argosy.twin.linear_cost import LinearStepCost
from argosy.twin.step_cost import StepCost
from argosy.twin.workload import Fraction, Positive, SimulatedRequest, Workload

FaultKind = Literal[
    "kill",
    "slow",
    "stale_metrics",
    "cut",
    "zone",
    "region",
    "spot_reclaim",
    "cache_corruption",
    "rollout",
    "bad_rollout",
    "clock_skew",
]
Seconds = Annotated[float, Meta(ge=0, le=31_536_000)]


DEFAULT_PLAN = RolloutPlan(
    steps=(RolloutStep(share=0.25), RolloutStep(share=0.5)),
    start_timeout_s=120.0,
    min_step_s=15.0,
    max_step_s=300.0,
    soak_s=30.0,
)
"""Plan with short steps."""


class Engine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engine of each replica."""

    max_seqs: Annotated[int, Meta(ge=1, le=4096)] = 16
    max_step_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] = 512
    max_model_len: Annotated[int, Meta(ge=1, le=10_000_000)] = 16_384
    block_size: Annotated[int, Meta(ge=1, le=1024)] = 16
    kv_blocks: Annotated[int, Meta(ge=1, le=10_000_000)] = 4096
    host_blocks: Annotated[int, Meta(ge=0, le=10_000_000)] = 0
    """Blocks in host memory, to which evicted ones move. Their transfer takes no time."""
    max_prefill_fraction: Fraction = 0.5
    watermark: Fraction = 0.01
    prefix_cache: bool = True
    batching: Literal["continuous", "static"] = "continuous"
    """`static` forms a batch only when the one before has ended, to compare with."""
    ridge_tokens: Annotated[int, Meta(ge=1)] = 30
    cost: LinearStepCost = LinearStepCost()
    cost_samples: tuple[LinearStepCost, ...] = ()
    """Other prices that are as likely, from which a run computes its intervals. `argosy twin fit` writes them."""
    request_s: Annotated[float, Meta(ge=0, le=60)] = 0.0003
    """Time of a request outside the engine: network, gateway, tokenizer."""
    hardware: ReplicaHardware | None = None
    """Accelerators whose model prices the steps, in place of `cost`."""

    def build_cost(self) -> StepCost:
        """Return the price of the steps. Raises ValueError if the hardware is unknown."""
        return self.cost if self.hardware is None else self.hardware.build_cost()

    def build_policy(self) -> BatchingPolicy:
        """Return the policy by which sequences join the batch."""
        return StaticBatching() if self.batching == "static" else ContinuousBatching()

    def build_limits(self) -> SchedulerLimits:
        """Return the limits of the scheduler."""
        return SchedulerLimits(
            max_seqs=self.max_seqs,
            max_step_tokens=self.max_step_tokens,
            block_size=self.block_size,
            num_blocks=self.kv_blocks,
            host_blocks=self.host_blocks,
            max_prefill_fraction=self.max_prefill_fraction,
            watermark=self.watermark,
            prefix_cache=self.prefix_cache,
            ridge_tokens=self.ridge_tokens,
            max_model_len=self.max_model_len,
        )


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pool of replicas. With `max_replicas`, the autoscaler decides how many there are."""

    replicas: Annotated[int, Meta(ge=1, le=10_000)] = 2
    max_replicas: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    min_replicas: Annotated[int, Meta(ge=1, le=10_000)] = 1
    routing_policy: RoutingPolicyName = "least-cost"
    hedge_after_s: Positive | None = None
    gives_way: bool = True
    """Whether streams pause for requests that have waited long."""
    queue_timeout_s: Positive = 60.0
    failover_timeout_s: Positive = 30.0
    start_s: Positive = 30.0
    """Time from the start of a replica until it serves."""
    probe_interval_s: Annotated[float, Meta(ge=0.5, le=60)] = 0.5
    """Shortest time between two health checks of a replica. More than the production's makes runs faster."""
    control_interval_s: Annotated[float, Meta(ge=2, le=60)] = 2.0
    """Time between two observations of the controller. More than the production's makes runs faster."""
    zones: Annotated[int, Meta(ge=1, le=100)] = 3
    """Zones over which the replicas are spread."""
    regions: Annotated[int, Meta(ge=1, le=100)] = 1
    """Regions over which the zones are spread."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that goes wrong."""

    kind: FaultKind
    at_s: Seconds
    replica: Annotated[int, Meta(ge=0)] = 0
    """Number of the running replica, of the zone or of the region, counted around."""
    duration_s: Seconds = 20.0
    factor: Positive = 5.0
    """How many times as long steps take, or by how many seconds the clock is ahead."""
    fails_to_start: bool = False
    """Whether the replicas of a bad version exit at their start. Otherwise its steps take longer."""


class RandomFaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Faults that are drawn from the seed."""

    per_minute: Annotated[float, Meta(ge=0, le=600)] = 0.0
    kinds: tuple[FaultKind, ...] = get_args(FaultKind)


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scenario. A file that a failing seed was shrunk to names its requests and faults one by one."""

    duration_s: Annotated[float, Meta(gt=0, le=31_536_000)] = 600.0
    """Time in which requests arrive. The run ends when all have ended."""
    fidelity: Literal["exact", "macro", "fluid"] = "macro"
    pool: PoolSettings = PoolSettings()
    engine: Engine = Engine()
    workload: Workload = Workload()
    requests: tuple[SimulatedRequest, ...] | None = None
    """Requests, which replace those of the workload."""
    rollout: RolloutPlan = DEFAULT_PLAN
    """Plan of the rollouts that faults begin."""
    faults: tuple[Fault, ...] = ()
    random_faults: RandomFaults = RandomFaults()
    objectives: str = ""
    """Latency objectives in ms, such as `ttft:2000,tpot:60`."""

    @property
    def digest(self) -> str:
        """Digest of all settings."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=8).hexdigest()


def change_scenario(scenario: Scenario, changes: Sequence[str]) -> Scenario:
    """Return a scenario with some settings changed, each by `SETTING=VALUE`, such as `pool.replicas=8`.

    Raises:
        ValueError: A setting does not exist, or a value is invalid.
    """
    values: dict[str, Any] = msgspec.to_builtins(scenario)
    for change in changes:
        path, is_given, text = change.partition("=")
        *parents, name = path.split(".")
        target: Any = values
        for parent in parents:
            target = target.get(parent) if isinstance(target, dict) else None
        if not is_given or not isinstance(target, dict):
            raise ValueError(f"{change!r} is no change of a setting: write pool.replicas=8")
        target[name] = load_yaml(text.encode())
    return convert_settings(values, Scenario)


def read_scenario(paths: Sequence[Path]) -> Scenario:
    """Read the files of a scenario, of which each overrides those before it.

    Raises:
        ValueError: A file cannot be read, or a setting is invalid. The message names file, line and setting.
    """
    return SettingsDocument.read(paths).decode(Scenario)


def write_scenario(path: Path, scenario: Scenario, comment: str) -> None:
    """Write a scenario as a file that `read_scenario` reads."""
    lines = "".join(f"# {line}\n" for line in comment.splitlines())
    path.write_text(lines + dump_yaml(msgspec.to_builtins(scenario)), encoding="utf-8")
