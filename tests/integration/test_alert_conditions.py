"""Conditions of alerts about faults that a test plants, and the runbooks of all alerts."""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.support.certificates import Authority
from tests.support.gateway_client import run_gateway_server
from tests.support.migrated_store import open_migrated_store
from tests.support.organisations import AdminGateway, run_admin_gateway
from tests.support.pages import DOCS, ROOT
from typer.testing import CliRunner

from argosy.alerting import AlertState, MachineAlerts, ReceiverState
from argosy.cli.app import app
from argosy.deployment import GatewayConfig, ModelConfig, ReplicaConfig
from argosy.policy.alerting import Alert, AlertCondition
from argosy.store import FleetDocument, GatewayRecord, Store, StoreError

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


async def test_silent_gateway_and_unreachable_store_fire(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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

    monkeypatch.setattr(store.gateways, "list_known", fail)
    for seconds in range(0, 70, 10):
        conditions = await alerts.read(now + seconds)
    assert ("StoreUnreachable", "page") in firing(conditions)
    silent = [each.is_firing for each in conditions if each.name == "GatewaySilent"]
    assert silent == [None]  # no data


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


def test_each_alert_has_a_runbook_and_each_runbook_an_alert() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "src/argosy").rglob("*.py"))
    named = set(re.findall(r'AlertCondition\(\s*name="(\w+)"', sources))
    assert named <= set(SECTIONS)
    unused = [
        name
        for name in SECTIONS
        if f'"{name}"' not in sources and f'"{name.lower()}"' not in sources
    ]
    assert unused == []


def first_command(name: str) -> list[str]:
    """Return the first command of a runbook."""
    text = (DOCS / "how-to/runbooks.md").read_text().split(f"## {name}\n")[1]
    found = re.search(r"(?:```sh\n|^    )(.+)$", text, re.MULTILINE)
    assert found is not None, name
    return found[1].split()


PLANTED = {
    "ReceiverFailing": "connection refused by the receiver",
    "CertificateExpires": "/tls/gateway.pem",
    "AlertSourceFailing": "has reported nothing",
}


@pytest.mark.parametrize("name", PLANTED)
async def test_first_command_of_a_runbook_shows_the_fault_of_the_alert(
    tmp_path: Path, name: str
) -> None:
    async with run_admin_gateway(tmp_path) as gateway:
        save_state(gateway, name)
        key = gateway.root_headers["authorization"].removeprefix("Bearer ")
        url = str(gateway.client.base_url)
        output = await run_command(url, first_command(name), "--api-key", key)
        assert name in output
        assert PLANTED[name] in output


@pytest.mark.parametrize("name", ["NoReplica", "ReplicaNotHealed"])
async def test_first_command_of_a_runbook_shows_the_lost_replica(name: str) -> None:
    dead = ReplicaConfig(url="http://127.0.0.1:1", name="lost")
    config = GatewayConfig(port=0, models=[ModelConfig(name="big", replicas=[dead])])
    async with run_gateway_server(config) as (_, client):
        async with asyncio.timeout(30):  # it is starting until several probes have failed
            while True:
                output = await run_command(str(client.base_url), first_command(name))
                if re.search(r"│ lost +│ (unreachable|ejected) ", output):
                    break


def save_state(gateway: AdminGateway, name: str) -> None:
    """Store an alert as the controller does."""
    now = time.time()
    alert = Alert(
        labels={"alertname": name, "severity": "ticket"},
        summary="Something is wrong",
        description=f"It is this: {PLANTED[name]}.",
        runbook=name.lower(),
        started_at=now,
    )
    receivers = {"pager": ReceiverState(failing_since=now, error=PLANTED["ReceiverFailing"])}
    state = AlertState(alerts={alert.fingerprint: alert}, receivers=receivers, evaluated_at=now)
    document = FleetDocument(1, msgspec.json.encode(state))
    assert gateway.store.fleets.replace_document("demo", "alerting/state", document, after=0)


async def run_command(url: str, words: list[str], *options: str) -> str:
    assert words[0] == "argosy"
    arguments = [*words[1:], "--url", url, *options]
    environment = {"COLUMNS": "300"}
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments, env=environment)
    assert result.exit_code == 0, result.output
    return result.output
