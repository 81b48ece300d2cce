"""Demand at several gateways: each second counts once, whenever the gateways are read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from argosy.fleet.control.fleet_autoscaler import DemandReader
from argosy.gateway import DemandReport, ModelDemand

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
