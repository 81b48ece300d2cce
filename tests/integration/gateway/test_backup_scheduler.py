"""Scheduled backups and drills, and the alerts about them."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from tests.support.gateway_client import run_gateway_server
from tests.support.migrated_store import open_migrated_store
from tests.support.waiting import until

from argosy.alerting import judge_backups
from argosy.backup import BackupCommand, BackupStatus, BackupTarget, DrillResult, read_status
from argosy.deployment import BackupConfig, GatewayConfig, ModelConfig, ReplicaConfig
from argosy.store import StoreConfig

NOW = 1_790_000_000.0
DAY_S = 86_400.0


def drilled(days_ago: float, problem: str = "") -> DrillResult:
    at = NOW - days_ago * DAY_S
    return DrillResult(at=at, backup_id="b", problem=problem, restore_s=2.0, backup_age_s=5.0)


NEW = BackupStatus().with_backup(NOW - 100)
OLD = BackupStatus().with_backup(NOW - 30 * DAY_S).with_backup(NOW - 100)
FAILED = drilled(1, "damaged")


@pytest.mark.parametrize(
    ("status", "due"),
    [
        (BackupStatus(), "create"),
        (BackupStatus().with_holder("other", NOW - 60), None),
        (BackupStatus().with_holder("dead", NOW - 600), "create"),
        (BackupStatus().with_failure("disk", NOW - 60), None),
        (BackupStatus().with_failure("disk", NOW - 1000), "create"),
        (NEW, "drill"),
        (NEW.with_drill(drilled(6)), None),
        (NEW.with_drill(drilled(8)), "drill"),
        (BackupStatus().with_backup(NOW - 3600).with_drill(drilled(0.1)), "create"),
    ],
)
def test_one_gateway_runs_what_is_due(status: BackupStatus, due: BackupCommand | None) -> None:
    assert status.find_due(3600.0, 7 * DAY_S, NOW) == due


@pytest.mark.parametrize(
    ("status", "firing"),
    [
        (BackupStatus(), []),
        (BackupStatus().with_failure("disk", NOW - 4000), ["BackupFailing"]),
        (NEW.with_failure("disk", NOW - 60), []),
        (NEW, []),
        (OLD, ["BackupNotVerified"]),
        (OLD.with_drill(drilled(10)), []),
        (OLD.with_drill(drilled(15)), ["BackupNotVerified"]),
        (OLD.with_drill(drilled(4)).with_drill(FAILED).with_drill(FAILED), []),
        (NEW.with_drill(FAILED).with_drill(FAILED).with_drill(FAILED), ["BackupNotVerified"]),
    ],
)
def test_alerts_follow_from_failures(status: BackupStatus, firing: list[str]) -> None:
    assert [each.name for each in judge_backups(status, NOW) if each.is_firing] == firing


def has_drilled(status: BackupStatus) -> bool:
    return bool(status.drills) and not status.holder


async def test_two_gateways_make_one_backup_and_one_drill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("ARGOSY_MODELS", str(tmp_path / "models"))
    url = f"sqlite:///{tmp_path}/argosy.db"
    config = GatewayConfig(
        port=0,
        models=[ModelConfig(name="m", replicas=[ReplicaConfig(url="http://127.0.0.1:1")])],
        store=StoreConfig(url=url),
        backup=BackupConfig(target=str(tmp_path / "backups"), prompt=None),
    )
    with contextlib.closing(open_migrated_store(url)) as store:
        async with (
            asyncio.timeout(240),
            run_gateway_server(config) as (_, first),
            run_gateway_server(config) as (_, second),
        ):
            await until(lambda: has_drilled(read_status(store.fleets)), 0.1)
            figures = [(await each.get("/metrics")).text for each in (first, second)]
        (drill,) = read_status(store.fleets).drills
    assert BackupTarget(str(tmp_path / "backups")).list_ids() == [drill.backup_id]
    assert (drill.problem, drill.restore_s > 0, drill.backup_age_s > 0) == ("", True, True)
    assert any("argosy_backup_drill_passed 1.0" in each for each in figures)
