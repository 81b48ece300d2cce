"""Contract of versions: this code reads the messages and records of the version before, and ignores later fields.

The folder `tests/fixtures/wire` has a file for each message and record of each version. A file of a released version is
never changed. One of the current version is extended together with its type.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from argosy.deployment import ReplicaRecord, RolloutStatus, ScalingRecord
from argosy.fleet.control.rollout_evidence import RolloutBaseline
from argosy.fleet.launchers.launcher import LaunchSpec
from argosy.fleet.launchers.replica_folder import LaunchRecord
from argosy.gateway import FleetPools, OutcomeQuery, OutcomeReport, PoolsStatus
from argosy.policy.rollout import GateRecord, PoolRollouts, RolloutCommand
from argosy.policy.traffic import PoolRoute
from argosy.protocol import LoadResponse, parse_request_body
from argosy.store import PoolGeneration

FIXTURES = Path(__file__).parents[2] / "fixtures" / "wire"
TYPES: dict[str, Any] = {
    "fleet-pools": FleetPools,
    "gate-record": GateRecord,
    "launch-record": LaunchRecord,
    "launch-spec": LaunchSpec,
    "load-report": LoadResponse,
    "outcome-query": OutcomeQuery,
    "outcome-report": OutcomeReport,
    "pool-generations": dict[str, PoolGeneration],
    "pool-rollouts": PoolRollouts,
    "pool-route": PoolRoute,
    "pools-status": PoolsStatus,
    "replica-record": ReplicaRecord,
    "rollout-baseline": RolloutBaseline,
    "rollout-commands": tuple[RolloutCommand, ...],
    "rollout-status": RolloutStatus,
    "scaling-record": ScalingRecord,
}
MAPPING_KEYS = {"key", "3", "errors", "long_output"}
"""Keys of the mappings in the files. Other objects are structs."""
recorded = pytest.mark.parametrize(
    "path", sorted(FIXTURES.glob("*/*.json")), ids=lambda path: f"{path.parent.name}/{path.stem}"
)


def decode(path: Path, content: bytes) -> Any:  # noqa: ANN401 - any message
    """Decode as the receiver does: gateways take published pools from a later controller."""
    kind = TYPES[path.stem]
    if kind is FleetPools:
        return parse_request_body(FleetPools, content)[0]
    return msgspec.json.decode(content, type=kind)


def find_lost(before: Any, after: Any, path: str = "$") -> list[str]:  # noqa: ANN401 - decoded JSON
    """Return the paths of values that are not the same in `after`."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            lost
            for name, value in before.items()
            for lost in find_lost(value, after.get(name), f"{path}.{name}")
        ]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [
            lost
            for index, (old, new) in enumerate(zip(before, after, strict=True))
            for lost in find_lost(old, new, f"{path}[{index}]")
        ]
    return [] if before == after else [path]


def extend(value: Any) -> Any:  # noqa: ANN401 - decoded JSON
    """Return a JSON value with a later field in each object that is no mapping."""
    if isinstance(value, dict):
        extended = {name: extend(item) for name, item in value.items()}
        is_mapping = not MAPPING_KEYS.isdisjoint(value)
        return extended if is_mapping else extended | {"added_later": {"x": [1]}}
    return [extend(item) for item in value] if isinstance(value, list) else value


@recorded
def test_recorded_values_are_read(path: Path) -> None:
    content = path.read_bytes()
    again = msgspec.json.encode(decode(path, content))
    assert find_lost(msgspec.json.decode(content), msgspec.json.decode(again)) == []


@recorded
def test_fields_of_a_later_version_are_ignored(path: Path) -> None:
    content = path.read_bytes()
    extended = msgspec.json.encode(extend(msgspec.json.decode(content)))
    assert b"added_later" in extended
    assert decode(path, extended) == decode(path, content)


def test_each_type_is_recorded() -> None:
    assert {path.stem for path in FIXTURES.glob("*/*.json")} == TYPES.keys()
