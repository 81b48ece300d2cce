"""Registration of running gateways, on both databases."""

from __future__ import annotations

from tests.support.fake_clock import FakeClock

from argosy.store import GatewayRecord, open_store
from argosy.store.gateway_registry import LIVENESS_TIMEOUT_S, RECORD_RETENTION_S

FIRST = GatewayRecord(id="aaaaaaaa", url="http://10.0.0.1:8000", secret="s1")
SECOND = GatewayRecord(id="bbbbbbbb", url="https://10.0.0.2:8000", secret="s2", certificate="pem")


def test_gateways_are_listed_while_their_heartbeats_arrive(url: str, empty_url: str) -> None:
    clock = FakeClock(1_000_000.0)
    store = open_store(url, clock=clock)
    gateways = store.gateways
    store.migrate()

    def listed() -> dict[str, str]:
        return {record.id: record.url for record in gateways.list_running()}

    gateways.record_heartbeat(FIRST)
    gateways.record_heartbeat(SECOND)
    assert listed() == {FIRST.id: FIRST.url, SECOND.id: SECOND.url}
    clock.now += LIVENESS_TIMEOUT_S / 2
    moved = GatewayRecord(id=FIRST.id, url="http://10.0.0.9:8000", secret="s3")
    gateways.record_heartbeat(moved)
    clock.now += LIVENESS_TIMEOUT_S / 2 + 1
    assert listed() == {FIRST.id: moved.url}
    assert {record.secret for record in gateways.list_running()} == {"s3"}
    clock.now += RECORD_RETENTION_S
    gateways.record_heartbeat(SECOND)
    clock.now -= RECORD_RETENTION_S  # a clock that is behind does not see the removed record again
    assert listed() == {SECOND.id: SECOND.url}
    copy = open_store(empty_url, clock=clock)
    copy.migrate()
    store.copy_to(copy)
    assert copy.gateways.list_running() == [], "secrets of processes are not copied"
    copy.close()
    gateways.remove(SECOND.id)
    assert listed() == {}
    store.close()
