"""A fleet of scripted replicas for each test, whose controllers run in the test's process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.controlled_fleet import Fleet


@pytest.fixture
async def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    """Provide a fleet whose controllers look at it often."""
    for name in (
        "replica_monitor.CHECK_INTERVAL_S",
        "leader_term.OBSERVATION_INTERVAL_S",
        "gateway_publisher.POLL_INTERVAL_S",
        "rollout_evidence.POLL_INTERVAL_S",
        "hardware_meter.SAVE_INTERVAL_S",
        "fleet_autoscaler.DECISION_INTERVAL_S",
    ):
        monkeypatch.setattr(f"argosy.fleet.control.{name}", 0.05)
    fleet = Fleet(tmp_path)
    yield fleet
    await fleet.close()
