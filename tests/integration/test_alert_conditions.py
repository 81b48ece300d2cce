"""Conditions of alerts about faults that a test plants, and the runbooks of all alerts."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from tests.support.certificates import Authority
from tests.support.gateway_client import run_gateway_server
from tests.support.migrated_store import open_migrated_store
from tests.support.organisations import OBJECTIVES, AdminGateway, run_admin_gateway
from tests.support.pages import DOCS, ROOT
from tests.support.stored_rollout import StoredRollout
from tests.support.usage_rows import usage_row
from typer.testing import CliRunner

from argosy.alerting import (
    AlertState,
    IncidentRecords,
    MachineAlerts,
    ReceiverState,
    TrafficStatus,
)
from argosy.cli.app import app
from argosy.deployment import (
    GATEWAY_POOL,
    REPLICA_PREFIX,
    FleetControl,
    GatewayConfig,
    ModelConfig,
    ReplicaConfig,
    ReplicaRecord,
)
from argosy.policy.alerting import RECEIVER_FAILING, Alert, AlertCondition
from argosy.policy.detection import StreamStatus
from argosy.policy.objectives import HOUR_S, SLOT_S, HourCounts
from argosy.policy.reconciliation import ReplicaPhase
from argosy.policy.rollout import CommandKind, VersionStatus
from argosy.store import FleetDocument, GatewayRecord, ObjectiveHour, Store, StoreError

START = 1_790_000_000.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_migrated_store(f"sqlite:///{tmp_path / 'conditions.db'}")
    yield opened
    opened.close()


def firing(conditions: list[AlertCondition]) -> list[tuple[str, str]]:
    return sorted((each.name, each.severity) for each in conditions if each.is_firing)


@pytest.mark.parametrize(
    ("free_bytes", "expected"),
    [
        (50 << 30, []),
        (4 << 30, [("DiskNearlyFull", "ticket")]),
        (100 << 20, [("DiskNearlyFull", "page"), ("DiskNearlyFull", "ticket")]),
    ],
)
async def test_disk_that_is_nearly_full_fires(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free_bytes: int,
    expected: list[tuple[str, str]],
) -> None:
    total = 200 << 30
    usage = type(shutil.disk_usage(tmp_path))(total, total - free_bytes, free_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    alerts = MachineAlerts(None, tmp_path / "not" / "yet", lambda: None)
    assert firing(await alerts.read(START)) == expected


async def test_certificate_fires_before_it_expires(tmp_path: Path) -> None:
    certificate = Path(Authority(tmp_path).pair("gateway").certificate)
    alerts = MachineAlerts(None, tmp_path, lambda: certificate)
    conditions = await alerts.read(time.time())
    (described,) = {each.description for each in conditions if each.name == "CertificateExpires"}
    days = float(re.findall(r"for ([\d.]+) days", described)[0])
    for left, expected in ((days - 1, ["page", "ticket"]), (days - 10, ["ticket"])):
        if days > left + 0.5 > 0:
            found = firing(await alerts.read(time.time() + left * 86_400))
            assert [
                severity for name, severity in found if name == "CertificateExpires"
            ] == expected


async def test_silent_gateway_and_unreachable_store_fire(store: Store, tmp_path: Path) -> None:
    now = time.time()
    record = GatewayRecord(id="g1", url="http://10.0.0.1:8000", secret="s")
    store.gateways.record_heartbeat(record)
    alerts = MachineAlerts(store.gateways, tmp_path, lambda: None)
    assert ("GatewaySilent", "ticket") not in firing(await alerts.read(now))
    assert ("GatewaySilent", "ticket") in firing(await alerts.read(now + 90))
    assert ("GatewaySilent", "ticket") not in firing(await alerts.read(now + 7200))
    await alerts.read(now + 90)

    def fail() -> None:
        raise StoreError("gone")

    outage = pytest.MonkeyPatch()
    outage.setattr(store.gateways, "list_known", fail)
    for seconds in range(0, 70, 10):
        conditions = await alerts.read(now + seconds)
    assert ("StoreUnreachable", "page") in firing(conditions)
    silent = [each.is_firing for each in conditions if each.name == "GatewaySilent"]
    assert silent == [None]  # no data
    outage.undo()
    soon, later = [await alerts.read(now + 60 + seconds) for seconds in (5, 90)]
    assert ("GatewaySilent", "ticket") not in firing(soon)  # it could not report until now
    assert ("GatewaySilent", "ticket") in firing(later)


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.1", []), ("10.0.0.1", ["http://10.0.0.1:1"])]
)
async def test_gateway_that_only_its_machine_reaches_is_replaced_by_the_next(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, expected: list[str]
) -> None:
    """`argosy serve` has another port for other gateways after each start."""
    now = time.time()
    known = [
        GatewayRecord(id=str(port), url=f"http://{host}:{port}", secret="s", seen_at=now - age_s)
        for port, age_s in ((1, 90), (2, 0))
    ]
    monkeypatch.setattr(store.gateways, "list_known", lambda: known)
    conditions = await MachineAlerts(store.gateways, tmp_path, lambda: None).read(now)
    silent = [each for each in conditions if each.name == "GatewaySilent" and each.is_firing]
    assert [each.labels["gateway"] for each in silent] == expected


# --- runbooks ------------------------------------------------------------------------------------

SECTIONS = re.findall(r"^## (\w+)$", (DOCS / "how-to/runbooks.md").read_text(), re.MULTILINE)


def test_each_alert_has_a_runbook_and_each_runbook_an_alert_and_a_test() -> None:
    named = {
        name
        for path in (ROOT / "src/argosy").rglob("*.py")
        if "AlertCondition(" in (text := path.read_text())
        for name in re.findall(r'"((?:[A-Z][a-z]+){2,})"', text)
    }
    assert {*named, RECEIVER_FAILING, "ReceivedAlert"} == set(SECTIONS)
    assert {*SHOWN, "NoReplica", "ReplicaNotHealed", "DiskNearlyFull"} == set(SECTIONS)


def first_command(name: str) -> list[str]:
    """Return the first command of a runbook."""
    text = (DOCS / "how-to/runbooks.md").read_text().split(f"## {name}\n")[1]
    found = re.search(r"(?:```sh\n|^    )(.+)$", text, re.MULTILINE)
    assert found is not None, name
    return found[1].split()


SHOWN = {
    "AlertSourceFailing": "has reported nothing",
    "BackupFailing": "no space left at the target",
    "BackupNotVerified": "never restored",
    "BudgetBurnsFast": r"answers .* 50 of 100",
    "BudgetBurnsSlowly": r"answers .* 50 of 100",
    "BudgetUsed": r"search .* 1,300 .* 130%",
    "CertificateExpires": "/tls/gateway.pem",
    "GatewayDown": r"gateway-1-0 .* failed .* exit code 137",
    "GatewaySilent": "http://10.0.0.1:8000",
    "ObjectiveOutage": r"answers .* 50 of 100",
    "ReceivedAlert": "Xid 79 of gpu 3",
    "ReceiverFailing": "connection refused by the receiver",
    "ReplicaDeviates": "40.0% of the requests failed",
    "RolloutWaits": "(?i)the rollout of chat .*paused",
    "StoreUnreachable": "cannot be (opened|used|reached)|not a database|unable to open",
    "TrafficDrift": r"had a long prompt .* 41\.0%",
    # These two are planted when all others were shown.
    "ObjectivesUnknown": "g-silent|has not reported",
    "RolloutRolledBack": "exit code 1 at its start",
}
"""Pattern of the planted fault in the output of the first command of each runbook."""


async def test_first_command_of_each_runbook_shows_the_fault_of_its_alert(tmp_path: Path) -> None:
    async with run_admin_gateway(tmp_path) as gateway:
        world = plant_faults(gateway, time.time())
        key = gateway.root_headers["authorization"].removeprefix("Bearer ")
        remote = ("--url", str(gateway.client.base_url), "--api-key", key)
        broken = tmp_path / "broken.db"
        broken.write_text("no database" * 999)
        not_shown = {}
        for name, expected in SHOWN.items():
            words = first_command(name)
            if name == "RolloutRolledBack":
                command_rollout(world, CommandKind.RESUME)
                world.candidate = VersionStatus(existing=1, failure="exit code 1 at its start")
                world.decide_once()
                world.decide_once()
            if name == "ObjectivesUnknown":
                write_counts(gateway, "", (1, 0))
            options = ("--store", gateway.store_url) if words[1] == "usage" else remote
            if name == "StoreUnreachable":
                options = ("--fleet", "demo", "--store", f"sqlite:///{broken}")
            output = await run_command(words, options, may_fail=name == "StoreUnreachable")
            if not re.search(expected, output):
                not_shown[name] = output
        assert not not_shown, "\n".join(not_shown.values())


def test_first_command_of_the_runbook_of_a_full_disk_shows_the_space(tmp_path: Path) -> None:
    folder = tmp_path / ".local/state/argosy"
    folder.mkdir(parents=True)
    command = " ".join(first_command("DiskNearlyFull"))
    environment = os.environ | {"HOME": str(tmp_path), "LC_ALL": "C"}
    result = subprocess.run(  # noqa: S602 - a command of the documentation
        command, shell=True, check=True, capture_output=True, text=True, env=environment
    )
    assert re.search(r"Avail Use%.*\n.* \d+% /", result.stdout)


@pytest.mark.parametrize("name", ["NoReplica", "ReplicaNotHealed"])
async def test_first_command_of_a_runbook_shows_the_lost_replica(name: str) -> None:
    dead = ReplicaConfig(url="http://127.0.0.1:1", name="lost")
    config = GatewayConfig(port=0, models=[ModelConfig(name="big", replicas=[dead])])
    async with run_gateway_server(config) as (_, client):
        async with asyncio.timeout(30):  # it is starting until several probes have failed
            while True:
                output = await run_command(first_command(name), ("--url", str(client.base_url)))
                if re.search(r"│ lost +│ (unreachable|ejected) ", output):
                    break


def command_rollout(world: StoredRollout, kind: CommandKind) -> None:
    current = world.report.rollouts.current
    assert current is not None
    FleetControl("demo", world.store).command_rollout(
        "chat", kind, rollout=current.id, reason="", force=False, actor="test"
    )
    world.decide_once()


def plant_faults(gateway: AdminGateway, now: float) -> StoredRollout:
    """Write to the store what controllers, gateways and people leave there of each fault."""
    store, fleets = gateway.store, gateway.store.fleets
    alerts = [
        Alert(
            labels={"alertname": name, "severity": "ticket"},
            summary="Something is wrong",
            description=f"It is this: {SHOWN[name]}.",
            runbook=name.lower(),
            started_at=now,
        )
        for name in SHOWN
        if first_command(name)[1] == "alerts"
    ]
    receivers = {"pager": ReceiverState(failing_since=now, error=SHOWN["ReceiverFailing"])}
    state = AlertState(
        alerts={each.fingerprint: each for each in alerts}, receivers=receivers, evaluated_at=now
    )
    drifted = StreamStatus(
        model="big",
        tenant="",
        event="long_prompt",
        description="had a long prompt",
        share=0.41,
        low=0.35,
        high=0.47,
        expected=0.1,
        requests=900,
    )
    documents = {"alerting/state": state, "traffic/status": TrafficStatus(streams=[drifted])}
    for name, content in documents.items():
        document = FleetDocument(1, msgspec.json.encode(content))
        assert fleets.replace_document("demo", name, document, after=0)
    IncidentRecords(fleets, "demo").open("Xid 79 of gpu 3", {}, "alertmanager", now)

    world = StoredRollout(fleets)
    command_rollout(world, CommandKind.PAUSE)
    down = ReplicaRecord(
        name="gateway-1-0",
        pool=GATEWAY_POOL,
        generation=1,
        ordinal=0,
        launcher="local",
        phase=ReplicaPhase.FAILED,
        reason="exit code 137",
    )
    fleets.save_records(world.lease, {REPLICA_PREFIX + down.name: msgspec.json.encode(down)})

    project = store.accounts.create_project(
        gateway.create_organisation("acme"), "search", actor="test"
    )
    store.limits_and_prices.set_limit(
        "project", project.id, "tokens", 1000, window="month", actor="test"
    )
    row = usage_row("r1", project=project.id, input_tokens=1000, output_tokens=300, ended_at=now)
    store.ledger.add_records([row])

    (objective,) = OBJECTIVES.build_objectives()
    write_counts(gateway, objective.id, (100, 50))
    return world


def write_counts(gateway: AdminGateway, objective: str, counts: tuple[int, int]) -> None:
    """Write requests and misses of an objective, or a report that is the last of its gateway, two minutes ago."""
    at = int(time.time()) - 120
    hour = at // HOUR_S * HOUR_S
    slots = HourCounts(((at - hour) // SLOT_S,), counts[:1], counts[1:])
    row = ObjectiveHour(hour=hour, objective=objective, gateway="g-silent", counts=slots)
    gateway.store.objective_hours.write("demo", [row])


async def run_command(words: list[str], options: Sequence[str], *, may_fail: bool = False) -> str:
    assert words[0] == "argosy"
    environment = {"COLUMNS": "300"}
    arguments = [*words[1:], *options]
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments, env=environment)
    assert may_fail or result.exit_code == 0, result.output
    return result.output
