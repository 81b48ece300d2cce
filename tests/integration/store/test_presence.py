"""Records of what is running or signed in, on both databases: heartbeats of gateways, and sessions of the console."""

from __future__ import annotations

from tests.integration.store.conftest import START
from tests.support.fake_clock import FakeClock

from argosy.store import GatewayRecord, Store, open_store
from argosy.store.console_session_store import (
    MAX_SESSIONS_OF_CREDENTIAL,
    SESSION_IDLE_TIMEOUT_S,
    SESSION_LIFETIME_S,
)
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


def test_session_ends_when_nobody_uses_it_or_after_its_lifetime(
    store: Store, clock: FakeClock
) -> None:
    sessions = store.console_sessions
    used, streamed = (sessions.create(key_digest=b"key") for _ in range(2))
    for _ in range(int(SESSION_LIFETIME_S / SESSION_IDLE_TIMEOUT_S) * 2 - 1):
        assert sessions.find(used) is not None
        clock.now += SESSION_IDLE_TIMEOUT_S / 2
        if clock.now - START < SESSION_IDLE_TIMEOUT_S:
            assert sessions.find(streamed, is_use=False) is not None
    assert sessions.find(streamed, is_use=False) is None
    assert sessions.find(used) is not None
    clock.now += SESSION_IDLE_TIMEOUT_S / 2
    assert sessions.find(used) is None
    first = sessions.create(key_digest=b"key")
    others = [sessions.create(key_digest=b"other"), sessions.create(claims=b"{}")]
    for _ in range(MAX_SESSIONS_OF_CREDENTIAL):
        clock.now += 1
        last = sessions.create(key_digest=b"key")
    assert sessions.find(first) is None
    assert None not in [sessions.find(each) for each in [*others, last]]
