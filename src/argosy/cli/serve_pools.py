"""Declaration of `argosy serve`: a pool for each group of replicas of its model, and one for each embedding model."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from argosy.deployment import (
    EngineKind,
    FleetConfig,
    FleetModelConfig,
    PoolConfig,
    validate_fleet,
)
from argosy.fleet import VISIBLE_DEVICES_VARIABLE, ReplicaGroup

START_TIMEOUT_S = 120.0
MODEL_POOL = "replica"
EMBEDDING_POOL = "embedding"
ADDED_POOL = "model"
GATEWAY_OPTIONS = frozenset({"host", "model", "port", "revision", "served_model_name", "uds"})
"""Options of `argosy serve` that its replicas do not have, or not as they are."""
MODEL_OPTIONS = frozenset({"draft_model", "task"})
"""Options that only the first model has, as they fit no other."""
EMBEDDING_OPTIONS = frozenset(
    {
        "drain_deadline",
        "label",
        "log_level",
        "pack_cache",
        "request_timeout",
        "threads",
        "unknown_fields",
        "vllm_metrics",
        "zone",
    }
)
"""Options that also apply to embedding models. All others have their defaults."""


class ServedModel(NamedTuple):
    """A model of `argosy serve`."""

    names: tuple[str, ...]
    """Its public name, and further names."""
    source: str
    """Path of its weights."""


class ServePool(NamedTuple):
    """Replicas of one model that are started alike."""

    model: ServedModel
    engine: EngineKind
    config: PoolConfig


def plan_pools(
    model: ServedModel,
    embedding_models: Sequence[ServedModel],
    groups: Sequence[ReplicaGroup],
    drain_deadline_s: float,
    options: Mapping[str, Any],
    environment: Mapping[str, str],
    *,
    added_models: Sequence[ServedModel] = (),
) -> list[ServePool]:
    """Return the pools of a model by its groups of replicas, and one for each other model.

    `options` are those on the command line, by name, and `environment` has variables of all replicas. Added models have
    the same options, and embedding models run on the CPU.
    """

    def plan(
        name: str,
        model: ServedModel,
        options: Mapping[str, Any],
        **settings: Any,  # noqa: ANN401 - those of a pool
    ) -> ServePool:
        document = {
            "model": model.source,
            "served_model_name": model.names,
            "log_name": "{name}",
            **options,
        }
        program = (sys.executable, "-P", "-m", "argosy.cli", "replica", "--uds", "{socket}")
        command = (*program, "--options", msgspec.json.encode(document).decode())
        return ServePool(
            model=model,
            engine=EngineKind(command=command, kind="argosy", ready_path="/ready"),
            config=PoolConfig(
                name=name,
                model=model.names[0],
                engine=name,
                drain_deadline_s=drain_deadline_s,
                start_timeout_s=START_TIMEOUT_S,
                warm_up=False,  # a replica warms up before it is ready, and the gateway does not wait
                **settings,
            ),
        )

    shared = {name: value for name, value in options.items() if name not in GATEWAY_OPTIONS}
    num_others = len(embedding_models) + len(added_models)
    pools = [
        plan(
            MODEL_POOL if len(groups) == 1 else f"{MODEL_POOL}-{number}",
            model,
            shared | {"colocated_replicas": group.colocated_replicas + len(added_models)},
            replicas=group.num_replicas,
            accelerators=group.accelerators,
            environment={**environment}
            if group.shared_gpu is None
            else {**environment, VISIBLE_DEVICES_VARIABLE: group.shared_gpu},
        )
        for number, group in enumerate(groups)
    ]
    colocated = sum(group.num_replicas for group in groups) + num_others - 1
    pools += [
        plan(
            f"{ADDED_POOL}-{number}",
            added_model,
            {name: value for name, value in shared.items() if name not in MODEL_OPTIONS}
            | {"colocated_replicas": colocated},
            replicas=1,
            environment={**environment},
        )
        for number, added_model in enumerate(added_models)
    ]
    shared = {name: value for name, value in options.items() if name in EMBEDDING_OPTIONS}
    return pools + [
        plan(
            f"{EMBEDDING_POOL}-{number}",
            embedding_model,
            shared | {"device": "cpu", "colocated_replicas": colocated},
            replicas=1,
            environment={**environment},
        )
        for number, embedding_model in enumerate(embedding_models)
    ]


def declare_fleet(pools: Sequence[ServePool]) -> FleetConfig:
    """Return the declaration of pools. Their gateway is not the controller's.

    Raises:
        ValueError: A setting is invalid; the message says what to change.
    """
    config = FleetConfig(
        models=[
            FleetModelConfig(name=model.names[0], aliases=model.names[1:], source=model.source)
            for model in dict.fromkeys(pool.model for pool in pools)
        ],
        engines={pool.config.name: pool.engine for pool in pools},
        pools=tuple(pool.config for pool in pools),
        gateways=0,
    )
    validate_fleet(config)
    return config
