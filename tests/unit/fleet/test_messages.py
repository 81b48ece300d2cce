"""Reports and records between parts of a fleet: what gateways report counts once, and later fields are ignored."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import httpx2
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.inspect import StructType, multi_type_info
from tests.support.load_reports import load_report

from argosy.deployment import ReplicaRecord, RolloutStatus, ScalingRecord
from argosy.fleet.control.fleet_autoscaler import DemandReader
from argosy.fleet.control.replica_monitor import CheckPaths, ReplicaMonitor
from argosy.fleet.control.rollout_evidence import RolloutBaseline
from argosy.fleet.launchers import LaunchedReplica, LaunchState
from argosy.fleet.launchers.launcher import LaunchSpec
from argosy.fleet.launchers.replica_folder import LaunchRecord
from argosy.gateway import (
    DemandReport,
    FleetPools,
    ModelDemand,
    OutcomeQuery,
    OutcomeReport,
    PoolsStatus,
)
from argosy.policy.rollout import GateRecord, PoolRollouts, RolloutCommand
from argosy.policy.traffic import PoolRoute
from argosy.protocol import LoadResponse, parse_request_body
from argosy.store import PoolGeneration

NUM_SECONDS = 30


def report(second: int, offset: int) -> DemandReport:
    """Return the report of a gateway at which n + offset tokens arrive in second n, and half of them are served."""
    arrived = [float(n + offset) for n in range(second - NUM_SECONDS + 1, second + 1)]
    model = ModelDemand(
        model="chat",
        arrived=arrived,
        served=[tokens / 2 for tokens in arrived],
        queued_requests=1,
        queue_age_s=float(offset),
    )
    return DemandReport(second=second, models=[model])


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(-1, 1)), max_size=12))
def test_each_second_of_each_gateway_is_read_once(rounds: list[tuple[int, int]]) -> None:
    reader, second, other = DemandReader(), 100, 1000
    gateways = {"a": report(second, 0), "b": report(other, 7)}
    demand = reader.read(gateways)["chat"]
    assert demand.arrived == [n + n + 907.0 for n in range(96, 101)], "the last five seconds"
    assert (demand.queued_requests, demand.queue_age_s) == (2, 7.0)
    expected = 101
    for elapsed, lag in rounds:
        second += elapsed
        other = max(other, second + lag + 900)
        gateways = {"a": report(second, 0), "b": report(other, 7)}
        demand = reader.read(gateways)["chat"]
        assert demand.arrived == [
            n + n + 907.0 for n in range(expected, expected + len(demand.arrived))
        ]
        assert demand.served_tokens == sum(demand.arrived) / 2
        expected += len(demand.arrived)
    assert expected >= second, "no more than the lag is left unread"


def test_gateway_without_a_past_adds_no_seconds() -> None:
    reader = DemandReader()
    reader.read({"a": report(100, 0)})
    young = DemandReport(second=0, models=[ModelDemand(model="chat", arrived=[], served=[])])
    assert reader.read({"a": report(105, 0), "b": young})["chat"].arrived == []
    assert len(reader.read({"a": report(105, 0)})["chat"].arrived) == 5


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


async def test_old_exit_of_an_engine_core_is_not_news_after_a_damaged_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    healthy, exited = (msgspec.json.encode(load_report(core_exits=exits)) for exits in (0, 1))
    loads = iter([healthy, exited, b"{", exited])
    times, is_over = itertools.count(1.0), asyncio.Event()

    def answer(request: httpx2.Request) -> httpx2.Response:
        load = next(loads, None) if request.url.path == "/load" else b""
        if load is None:
            is_over.set()
        return httpx2.Response(200, content=load or exited)

    def open_client(*_: object) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url="http://a", transport=httpx2.MockTransport(answer))

    monkeypatch.setattr("argosy.fleet.control.replica_monitor.open_replica_client", open_client)
    monkeypatch.setattr("argosy.fleet.control.replica_monitor.CHECK_INTERVAL_S", 0.0)
    replica = LaunchedReplica(
        name="a-1-0", pool="a", generation=1, ordinal=0, state=LaunchState.RUNNING, url="http://a"
    )
    monitor = ReplicaMonitor(lambda: next(times), asyncio.Event())
    monitor.watch([replica], lambda _replica: CheckPaths())
    await is_over.wait()
    reading = monitor.reading(replica)
    await monitor.close()
    assert (reading.core_exits, reading.core_exited_at) == (1, 2.0)
