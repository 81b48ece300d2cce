"""Incidents in the store: opened by alerts, filled from events, audit and traffic, and changed by people."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec
import pytest
from tests.support.fake_clock import FakeClock
from tests.support.migrated_store import write_migrated_file
from tests.support.organisations import run_admin_gateway
from tests.support.stored_rollout import NEW, OLD, POOL, StoredRollout
from typer.testing import CliRunner

from argosy.alerting import (
    MAX_RECEIVED,
    AlertLoop,
    AlertRecords,
    IncidentKeeper,
    IncidentRecords,
    OrderBook,
    ReceivedAlert,
    ReceivedAlerts,
    TrafficWatch,
    read_traffic_status,
    receive_alerts,
)
from argosy.cli.app import app
from argosy.deployment import ROLLOUTS_PREFIX, AlertingConfig
from argosy.fleet.control import read_accepted_versions, read_pool_versions, roll_back
from argosy.policy.alerting import AlertCondition
from argosy.policy.detection import AcceptedVersion, CellKey, CellMinute, TrafficCell
from argosy.policy.rollout import CommandKind, RolloutState, Transition
from argosy.store import ConflictError, FleetDocument, FleetEvent, NotFoundError, Store, open_store

START = 1_790_000_100.0
FLEET = "demo"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(write_migrated_file(tmp_path / "store.db"))
    yield opened
    opened.close()


class Leader:
    """Alerts and incidents of one fleet, whose traffic and objective a test sets."""

    def __init__(
        self,
        store: Store,
        *,
        follows_rollouts: bool = False,
        config: AlertingConfig | None = None,
    ) -> None:
        self.clock = FakeClock(START)
        self.is_missing = False
        self.minutes: list[CellMinute] = []
        self.versions = dict.fromkeys(("a", "b", "slow"), "v")
        """Version of each replica."""
        self.buckets = {"a": 40, "b": 40, "slow": 60}
        """Bucket of each replica's times to the first token."""
        self.failing = {"a", "b", "slow"}
        """Replicas with the failed requests."""
        self.alerts = AlertRecords(store.fleets, FLEET, "leader", is_leader=True)
        self.watch = TrafficWatch(
            self._read_cells, store.fleets, FLEET, lambda: config or AlertingConfig()
        )
        self.records = IncidentRecords(store.fleets, FLEET)
        self.loop = AlertLoop(
            self.alerts,
            OrderBook(store.fleets, FLEET, self.clock),
            [self._read_objective, self.watch.read, ReceivedAlerts(store.fleets, FLEET).read],
            AlertingConfig,
            clock=self.clock,
            monotonic=self.clock,
        )
        self.keeper = IncidentKeeper(
            self.alerts,
            store,
            FLEET,
            self.watch,
            list_serving=lambda: {"a", "slow"},
            events=(store.fleets, FLEET),
            read_versions=partial(read_pool_versions, store.fleets, FLEET)
            if follows_rollouts
            else tuple,
            roll_back=partial(roll_back, store.fleets, FLEET),
            clock=self.clock,
        )

    async def _read_cells(self) -> list[CellMinute]:
        minutes, self.minutes = self.minutes, []
        return minutes

    async def _read_objective(self, now: float) -> list[AlertCondition]:
        del now
        labels = {"model": POOL, "pool": POOL, "objective": "chat"}
        summary = "The objective chat is missed"
        return [AlertCondition("Burn", labels, "page", self.is_missing, summary, "", "burn")]

    async def run(self, seconds: float, *, failed: int = 0) -> None:
        """Run for some time in which the replica `slow` answers late, and `failed` requests of each minute fail."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            if self.clock.now % 60 < 30:
                start = int(self.clock.now // 60) * 60 - 120
                cells = [
                    cell
                    for replica, bucket in self.buckets.items()
                    for cell in build_cells(
                        replica,
                        bucket,
                        failed if replica in self.failing else 0,
                        self.versions[replica],
                    )
                ]
                self.minutes = [CellMinute(start, cells)]
            await self.loop.evaluate()
            await self.keeper.update()
            self.clock.now += 30.0


def build_cells(
    replica: str, bucket: int, failed: int, version: str
) -> list[tuple[CellKey, TrafficCell]]:
    def cell() -> TrafficCell:
        histograms = {"ttft": {bucket: 15, bucket + 1: 15}}
        return TrafficCell(30 + failed, failed=failed, answered=30, histograms=histograms)

    return [
        (CellKey(POOL, version, replica), cell()),
        (CellKey(POOL, tenant="acme" if replica == "a" else "beta"), cell()),
    ]


async def test_page_becomes_an_incident_with_evidence_and_closes_after_the_end(
    store: Store,
) -> None:
    leader = Leader(store)
    lease = store.fleets.acquire_lease("leader", store.fleets.read_lease(FLEET))
    assert lease is not None
    changed = FleetEvent(kind="replica_phase", pool=POOL, replica="a", outcome="ready")
    store.fleets.append_events(lease, [changed])
    event_at = store.fleets.list_events(FLEET)[0].at
    leader.clock.now = (event_at // 300 + 1) * 300 + 200  # within a step of the counts
    leader.is_missing = True
    await leader.run(120, failed=5)
    (incident,) = leader.records.list_all()
    assert (incident.title, incident.is_firing) == ("The objective chat is missed", True)
    assert incident.changes[0].change.text == "replica phase: a: ready"
    assert {each.source for each in incident.entries} == {"argosy", "alert", "event"}
    assert len({(each.at, each.text) for each in incident.entries}) == len(incident.entries)
    assert incident.requests == 7 * incident.failed > 0
    assert incident.tenants == ("acme", "beta")
    assert incident.request_nano_dollars == 0  # the ledger has none
    assert not leader.watch.is_learning

    commented = leader.records.comment(1, "disk", "key:1", leader.clock.now, is_cause=True)
    assert (commented.cause, commented.cause_by) == ("disk", "key:1")
    leader.is_missing = False
    await leader.run(1800)
    closed = leader.records.get(1)
    assert (closed.is_open, closed.closed_by, closed.cause) == (False, "argosy", "disk")
    assert leader.watch.is_learning
    with pytest.raises(ConflictError, match="closed already"):
        leader.records.close(1, "", "key:1", leader.clock.now)
    with pytest.raises(NotFoundError):
        leader.records.get(2)


async def test_slow_replica_is_a_ticket_within_minutes_and_ends_with_the_fault(
    store: Store,
) -> None:
    leader = Leader(store)
    await leader.run(900)
    alerts = [each for each in leader.alerts.state.alerts.values() if each.is_firing]
    assert [(each.name, each.labels["replica"]) for each in alerts] == [("ReplicaDeviates", "slow")]
    assert "of the requests had a slow first token" in alerts[0].description
    assert not leader.records.list_all()  # a ticket opens none
    assert read_traffic_status(store.fleets, FLEET).learning == [POOL]

    opened = leader.records.open("slow answers", {"model": POOL}, "key:1", leader.clock.now)
    await leader.run(60)
    found = leader.records.get(opened.number)
    assert {each.name for each in found.alerts.values()} == {"ReplicaDeviates"}
    assert "replica a" in found.healthy
    assert "replica b" not in found.healthy  # it is gone


async def test_slow_replica_opens_an_incident_where_it_is_declared_as_a_page(store: Store) -> None:
    leader = Leader(store, config=AlertingConfig(page_for=("ReplicaDeviates",)))
    await leader.run(900)
    (incident,) = leader.records.list_all()
    assert (incident.scope["replica"], incident.is_firing) == ("slow", True)
    assert incident.onset < incident.opened_at


@pytest.mark.parametrize("decoy", ["", "page of another model", "outage of both versions"])
async def test_bad_version_is_rolled_back_unless_something_else_is_wrong(
    tmp_path: Path, decoy: str
) -> None:
    store = open_store(write_migrated_file(tmp_path / "store.db"))
    world = StoredRollout(store.fleets)
    (versions,) = read_pool_versions(store.fleets, FLEET)
    assert (versions.pool, versions.candidate, versions.is_warm) == (POOL, NEW, True)
    leader = Leader(store, follows_rollouts=True)
    leader.clock.now = (versions.changed_at // 300 + 1) * 300 + 100  # counts of a whole step follow
    leader.is_missing = True
    leader.buckets = dict.fromkeys(leader.buckets, 40)
    leader.versions |= {"a": NEW[:12], "b": OLD[:12], "slow": NEW[:12]}
    leader.failing = {"a", "slow"} if decoy != "outage of both versions" else {"a", "b", "slow"}
    if decoy == "page of another model":
        labels = {"alertname": "NodeDown", "severity": "critical", "model": "other"}
        receive_alerts(store.fleets, FLEET, [ReceivedAlert(labels=labels)], leader.clock.now)
    await leader.run(30)
    advice = next(each.rollback for each in leader.records.list_all() if each.rollback)
    assert "No excess is known by version yet" in advice.obstacles[-1]
    await leader.run(210, failed=20)
    advice = next(each.rollback for each in leader.records.list_all() if each.rollback)
    commands = [each.kind for each in world.report.commands]
    if decoy:
        assert {
            "page of another model": "Pages fire for other too",
            "outage of both versions": "The other versions are ill too",
        }[decoy] in advice.obstacles[0]
        assert not commands
    else:
        assert advice.is_done
        assert commands == [CommandKind.ABORT]
        entries = [each.text for each in leader.records.get(1).entries if each.source == "rollback"]
        assert len(entries) == 1
        assert entries[0].startswith(f"Rolled back {POOL}.")
    store.close()


async def test_change_of_the_fleet_does_not_explain_a_full_disk(store: Store) -> None:
    leader = Leader(store)
    lease = store.fleets.acquire_lease("leader", store.fleets.read_lease(FLEET))
    assert lease is not None
    changed = FleetEvent(kind="replica_phase", pool=POOL, replica="a", outcome="ready")
    store.fleets.append_events(lease, [changed])
    leader.clock.now = store.fleets.list_events(FLEET)[0].at + 60
    labels = {"alertname": "DiskNearlyFull", "severity": "critical", "folder": "/x"}
    receive_alerts(store.fleets, FLEET, [ReceivedAlert(labels=labels)], leader.clock.now)
    await leader.run(60)
    (incident,) = leader.records.list_all()
    assert not incident.changes
    assert any("replica phase" in each.text for each in incident.entries)


async def test_alerts_of_other_programs_fire_until_their_end_and_are_bounded(store: Store) -> None:
    leader = Leader(store)
    now = leader.clock.now

    def receive(name: str, ends_at: float | None = None, number: int = 0) -> None:
        end = None if ends_at is None else datetime.fromtimestamp(ends_at, UTC)
        labels = {"alertname": name, "severity": "critical", "number": str(number)}
        annotations = {"summary": "GPU fell off the bus"}
        received = ReceivedAlert(labels=labels, annotations=annotations, ends_at=end)
        receive_alerts(store.fleets, FLEET, [received], now)

    receive("Xid", datetime(1, 1, 1, tzinfo=UTC).timestamp())
    receive("Xid", now - 10, number=1)
    await leader.run(30)
    (alert,) = leader.alerts.state.alerts.values()
    assert (alert.severity, alert.summary) == ("page", "GPU fell off the bus")
    assert leader.records.get(1).alerts
    await leader.run(700)
    firing = {each.name for each in leader.alerts.state.alerts.values() if each.is_firing}
    assert "Xid" not in firing
    with pytest.raises(ValueError, match="alertname"):
        receive_alerts(store.fleets, FLEET, [ReceivedAlert(labels={"a": "b"})], now)
    many = [ReceivedAlert(labels={"alertname": "x", "n": str(n)}) for n in range(MAX_RECEIVED + 1)]
    with pytest.raises(ConflictError, match="fire already"):
        receive_alerts(store.fleets, FLEET, many, now)


@pytest.mark.parametrize(
    ("state", "is_forced", "is_accepted"),
    [
        (RolloutState.STEP, False, False),
        (RolloutState.SOAKING, False, True),
        (RolloutState.SOAKING, True, False),
        (RolloutState.DONE, False, True),
        (RolloutState.ROLLING_BACK, False, False),
    ],
)
def test_version_is_accepted_when_all_users_get_it_unless_by_force(
    store: Store, state: RolloutState, is_forced: bool, is_accepted: bool
) -> None:
    known = StoredRollout(store.fleets).report.rollouts
    assert known.current is not None
    passed = Transition(at=START, state=state, step=5, reason="")
    current = msgspec.structs.replace(
        known.current, state=state, is_forced=is_forced, transitions=(passed,)
    )
    rollouts = msgspec.structs.replace(known, version=known.version + 1, current=current)
    document = FleetDocument(rollouts.version, msgspec.json.encode(rollouts))
    name = ROLLOUTS_PREFIX + POOL
    assert store.fleets.replace_document(FLEET, name, document, after=known.version)
    accepted = read_accepted_versions(store.fleets, FLEET)
    assert accepted == ([AcceptedVersion(model=POOL, version=NEW, at=START)] if is_accepted else [])


async def test_operator_follows_an_incident_from_the_command_line(tmp_path: Path) -> None:
    async with run_admin_gateway(tmp_path) as gateway:
        url, key = str(gateway.client.base_url), gateway.root_headers["authorization"][7:]

        async def run(*arguments: str, status: int = 0) -> str:
            options = ["--url", url, "--api-key", key]
            result = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, *options])
            assert result.exit_code == status, result.output
            return result.output

        assert "INC-1 is open" in await run("incidents", "open", "slow", "--model", "llama")
        assert "INC-1" in await run("incidents", "list", "--open")
        await run("incidents", "comment", "INC-1", "full disk", "--cause")
        shown = await run("incidents", "show", "1")
        steps = ("1 Detect", "2 Correlate", "3 Isolate", "4 Root cause", "5 Fix and prevent")
        assert [step for step in steps if step in shown] == list(steps)
        assert "full disk" in shown
        await run("incidents", "close", "1", "--reason", "done")
        assert "No incidents" in await run("incidents", "list", "--open")
        assert "# INC-1: slow" in await run("incidents", "postmortem", "1")
        assert "seven days" in await run("drift")
        await run("incidents", "show", "7", status=2)
        body = b'[{"labels": {"alertname": "Xid"}, "endsAt": "0001-01-01T00:00:00Z", "new": 1}]'
        headers = gateway.root_headers | {"content-type": "application/json"}
        answer = await gateway.client.post("/api/v2/alerts", content=body, headers=headers)
        assert answer.json() == {"status": "success"}
