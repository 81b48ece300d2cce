"""Pools of replicas of `argosy serve`, first as launch specifications and later as a declaration.

The replicas start by their launch specifications, before the slow imports of declarations and of the gateway. The
controller, which the same pools are declared to, finds them running.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from argosy.cli.serve_settings import format_options
from argosy.deployment import LaunchResources
from argosy.engine import ReplicaServerConfig
from argosy.fleet import VISIBLE_DEVICES_VARIABLE, ReplicaGroup
from argosy.fleet.launchers import LaunchSpec
from argosy.policy.reconciliation import replica_name

if TYPE_CHECKING:
    from argosy.deployment import FleetConfig

FIRST_GENERATION = 1
START_TIMEOUT_S = 120.0
MODEL_POOL = "replica"
EMBEDDING_POOL = "embedding"
EMBEDDING_OPTIONS = frozenset(
    {"label", "pack_cache", "request_timeout", "threads", "unknown_fields", "vllm_metrics", "zone"}
)
"""Options that also apply to embedding models. All others have their defaults."""


class ServedModel(NamedTuple):
    """A model of `argosy serve`."""

    names: tuple[str, ...]
    """Its public name, and further names."""
    source: str
    """Path of its weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServePool:
    """Replicas of one model that are started alike."""

    name: str
    model: ServedModel
    num_replicas: int
    options: Mapping[str, Any]
    """Options of `argosy replica`, besides those of every pool."""
    drain_deadline_s: float
    environment: Mapping[str, str] = field(default_factory=dict)
    accelerators: int = 0

    @property
    def command(self) -> tuple[str, ...]:
        """Command line, in which the launcher replaces `{name}` and `{socket}`."""
        options = {
            "served_model_name": self.model.names,
            "uds": "{socket}",
            "drain_deadline": self.drain_deadline_s,
            "log_name": "{name}",
            **self.options,
        }
        program = (sys.executable, "-P", "-m", "argosy.cli", "replica", self.model.source)
        return (*program, *format_options(options))

    def launch_specs(self) -> Iterator[LaunchSpec]:
        """Yield the specifications that the controller derives from the declaration too."""
        for ordinal in range(self.num_replicas):
            yield LaunchSpec(
                name=replica_name(self.name, FIRST_GENERATION, ordinal),
                pool=self.name,
                generation=FIRST_GENERATION,
                ordinal=ordinal,
                command=self.command,
                environment=self.environment,
                resources=LaunchResources(accelerators=self.accelerators),
                drain_deadline_s=self.drain_deadline_s,
            )


def plan_pools(
    model: ServedModel,
    embedding_models: Sequence[ServedModel],
    groups: Sequence[ReplicaGroup],
    server: ReplicaServerConfig,
    options: Mapping[str, Any],
    environment: Mapping[str, str],
) -> list[ServePool]:
    """Return the pools of a model by its groups of replicas, and one for each embedding model, which runs on the CPU.

    Args:
        model: The model.
        embedding_models: Embedding models beside it.
        groups: Groups of replicas of the model.
        server: Settings of the command line.
        options: Options of `argosy replica` on the command line, by name.
        environment: Variables of all replicas.
    """
    common = {"log_level": server.log_level}
    pools = [
        ServePool(
            name=MODEL_POOL if len(groups) == 1 else f"{MODEL_POOL}-{number}",
            model=model,
            num_replicas=group.num_replicas,
            options={**options, **common, "colocated_replicas": group.colocated_replicas},
            drain_deadline_s=server.drain_deadline_s,
            environment=environment
            if group.shared_gpu is None
            else {**environment, VISIBLE_DEVICES_VARIABLE: group.shared_gpu},
            accelerators=group.accelerators,
        )
        for number, group in enumerate(groups)
    ]
    colocated = sum(group.num_replicas for group in groups) + len(embedding_models) - 1
    embedding_options = {
        name: value for name, value in options.items() if name in EMBEDDING_OPTIONS
    }
    return pools + [
        ServePool(
            name=f"{EMBEDDING_POOL}-{number}",
            model=embedding_model,
            num_replicas=1,
            options={
                **embedding_options,
                **common,
                "device": "cpu",
                "colocated_replicas": colocated,
            },
            drain_deadline_s=server.drain_deadline_s,
            environment=environment,
        )
        for number, embedding_model in enumerate(embedding_models)
    ]


def declare_fleet(pools: Sequence[ServePool]) -> FleetConfig:
    """Return the declaration of pools. Their gateway is not the controller's.

    Raises:
        ValueError: A setting is invalid; the message says what to change.
    """
    from argosy.deployment import (
        EngineKind,
        FleetConfig,
        FleetModelConfig,
        PoolConfig,
        validate_fleet,
    )

    config = FleetConfig(
        models=[
            FleetModelConfig(name=model.names[0], aliases=model.names[1:], source=model.source)
            for model in dict.fromkeys(pool.model for pool in pools)
        ],
        engines={
            pool.name: EngineKind(command=pool.command, kind="argosy", ready_path="/ready")
            for pool in pools
        },
        pools=tuple(
            PoolConfig(
                name=pool.name,
                model=pool.model.names[0],
                engine=pool.name,
                environment=dict(pool.environment),
                accelerators=pool.accelerators,
                replicas=pool.num_replicas,
                drain_deadline_s=pool.drain_deadline_s,
                start_timeout_s=START_TIMEOUT_S,
                warm_up=False,  # a replica warms up before it is ready, and the gateway does not wait
            )
            for pool in pools
        ),
        gateways=0,
    )
    validate_fleet(config)
    return config
