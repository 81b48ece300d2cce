"""Sessions of the console: when they end."""

from __future__ import annotations

from tests.integration.store.conftest import START
from tests.support.fake_clock import FakeClock

from argosy.store import Store
from argosy.store.console_session_store import SESSION_IDLE_TIMEOUT_S, SESSION_LIFETIME_S


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
