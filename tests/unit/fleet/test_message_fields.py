"""Messages and records of a fleet ignore the fields of a later version, so that a fleet is upgraded part by part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec.inspect import StructType, multi_type_info

from argosy.deployment import ReplicaRecord, RolloutStatus, ScalingRecord
from argosy.fleet.control.rollout_evidence import RolloutBaseline
from argosy.fleet.launchers.launcher import LaunchSpec
from argosy.fleet.launchers.replica_folder import LaunchRecord
from argosy.gateway import FleetPools, OutcomeQuery, OutcomeReport, PoolsStatus
from argosy.policy.rollout import GateRecord, PoolRollouts, RolloutCommand
from argosy.policy.traffic import PoolRoute
from argosy.protocol import LoadResponse, parse_request_body
from argosy.store import PoolGeneration

TYPES: list[Any] = [
    *(GateRecord, LaunchRecord, LaunchSpec, LoadResponse, OutcomeQuery, OutcomeReport),
    *(dict[str, PoolGeneration], PoolRollouts, PoolRoute, PoolsStatus, ReplicaRecord),
    *(RolloutBaseline, tuple[RolloutCommand, ...], RolloutStatus, ScalingRecord),
]


def find_structs(value: object, seen: set[type]) -> Iterator[type[msgspec.Struct]]:
    """Yield the structs within a type that msgspec describes."""
    if isinstance(value, StructType) and value.cls not in seen:
        seen.add(value.cls)
        yield value.cls
    elif isinstance(value, StructType):
        return
    parts = value if isinstance(value, tuple) else getattr(value, "__struct_fields__", ())
    for part in parts:
        yield from find_structs(part if isinstance(value, tuple) else getattr(value, part), seen)


def test_structs_of_messages_ignore_unknown_fields() -> None:
    structs = set(find_structs(multi_type_info(TYPES), set()))
    assert {LoadResponse, RolloutCommand, PoolGeneration} <= structs
    for struct in structs:
        if struct.__module__.startswith("argosy.deployment.declaration."):
            continue  # settings, in which an unknown name is most often misspelt
        assert not struct.__struct_config__.forbid_unknown_fields, struct


@pytest.mark.parametrize(
    "later", [{"later": 1}, {"models": [{"name": "m", "replicas": [], "later": 1}]}]
)
def test_published_pools_ignore_unknown_settings(later: dict[str, Any]) -> None:
    pools, _ = parse_request_body(
        FleetPools, msgspec.json.encode({"fleet": "f", "epoch": 1} | later)
    )
    assert pools.epoch == 1
