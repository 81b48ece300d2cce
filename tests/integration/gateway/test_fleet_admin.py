"""Endpoints of the admin API for a declared fleet, whose controller decides when the test says so."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from tests.support.organisations import AdminGateway
from tests.support.stored_rollout import DECLARATION, NEW, OLD, POOL, StoredRollout
from tests.support.usage_rows import usage_row
from typer.testing import CliRunner

from argosy.cli.app import app
from argosy.gateway.admin import list_endpoints
from argosy.store import DECISION, FleetStore

ROLLOUT = {"pool": POOL, "rollout": "chat-1"}
DECISIONS: dict[str, dict[str, Any]] = {
    "/admin/fleet/rollout/pause": ROLLOUT,
    "/admin/fleet/rollout/resume": ROLLOUT | {"force": True},
    "/admin/fleet/rollout/promote": ROLLOUT | {"force": True},
    "/admin/fleet/rollout/abort": ROLLOUT,
    "/admin/fleet/scale": {"pool": POOL, "replicas": 1},
    "/admin/fleet/rollback": {"revision": 1},
    "/admin/fleet/apply": {
        "declaration": DECLARATION.decode().replace('"replicas": 2', '"replicas": 1'),
        "after": 4,
    },
    "/admin/replicas/cordon": {"replica": "a"},
    "/admin/replicas/drain": {"replica": "a"},
    "/admin/replicas/undrain": {"replica": "a"},
    "/admin/replicas/weight": {"replica": "a", "weight": 0.5},
    "/admin/incidents/close": {"incident": 1},
}
"""An example of each request with a reason, in an order in which all are possible once an incident is open."""


class FleetClient:
    """Calls the endpoints as the administrator of the whole gateway."""

    def __init__(self, gateway: AdminGateway) -> None:
        self._gateway = gateway

    async def get(self, path: str = "", **parameters: int) -> dict[str, Any]:
        response = await self._gateway.client.get(
            f"/admin/fleet{path}", params=parameters, headers=self._gateway.root_headers
        )
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body

    async def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:  # noqa: ANN401 - JSON
        response = await self._gateway.client.post(
            f"/admin/fleet{path}", json=body, headers=self._gateway.root_headers
        )
        return response.status_code, response.json()

    async def read_rollout(self) -> dict[str, Any]:
        rollout: dict[str, Any] = (await self.get())["pools"][0]["rollout"]
        return rollout


@pytest.fixture
def fleet(admin_gateway: AdminGateway) -> FleetClient:
    return FleetClient(admin_gateway)


@pytest.fixture
def stored(admin_gateway: AdminGateway) -> StoredRollout:
    return StoredRollout(admin_gateway.store.fleets)


async def test_rollout_shows_its_evidence_and_follows_commands(
    admin_gateway: AdminGateway, fleet: FleetClient, stored: StoredRollout
) -> None:
    stored.measure()
    stored.decide_once()
    shown = await fleet.get()
    assert (shown["fleet"], shown["has_leader"]) == ("demo", True)
    assert [(each["name"], each["phase"]) for each in shown["replicas"]] == [("chat-1-0", "ready")]
    rollout = await fleet.read_rollout()
    current, shown_status = rollout["rollouts"]["current"], rollout["status"]
    assert (current["state"], current["step"]) == ("step", 0)
    assert shown_status["result"] == "inconclusive"
    gate = current["plan"]["gate"]
    assert (gate["max_false_rollbacks"], gate["max_false_promotions"]) == (0.01, 0.05)
    assert {"metric": "ttft", "has_passed": False}.items() <= next(
        each for each in shown_status["metrics"] if each["metric"] == "ttft"
    ).items()
    assert (current["stable"], current["candidate"]) == (OLD, NEW)
    assert current["plan"]["steps"][0] == {"share": 0.1, "is_shadow": True}

    seen = {"pool": POOL, "rollout": current["id"]}
    status, _ = await fleet.post("/rollout/pause", **seen, reason="lunch")
    assert status == 200
    assert (await fleet.read_rollout())["commands"][0]["by"].startswith("key:")
    stored.decide_once()
    assert (await fleet.read_rollout())["summary"].startswith("paused: lunch")
    status, answer = await fleet.post("/rollout/promote", **seen, force=True)
    assert (status, "reason" in answer["error"]["message"]) == (400, True)
    status, answer = await fleet.post("/rollout/abort", **seen | {"rollout": "chat-0"})
    assert (status, answer["error"]["code"]) == (409, "conflict")
    stored.release()  # an abort needs no controller
    status, _ = await fleet.post("/rollout/abort", **seen, reason="wrong answers")
    assert status == 200
    assert stored.report.route is not None
    assert stored.report.route.share_of(OLD) == 1
    assert not (await fleet.get())["has_leader"]
    entries = admin_gateway.store.audit_log.list_entries(action_prefix="rollout.")
    assert [(each.action, each.subject, each.details["reason"]) for each in entries] == [
        ("rollout.abort", "demo/chat", "wrong answers"),
        ("rollout.pause", "demo/chat", "lunch"),
    ]


def apply(store: FleetStore, declaration: bytes) -> None:
    store.apply("demo", declaration, {POOL: NEW}, author="ann", reason="because")


async def test_history_shows_differences_and_is_put_in_force_again(
    admin_gateway: AdminGateway, fleet: FleetClient, stored: StoredRollout
) -> None:
    store = stored.store
    latest = store.latest_revision("demo")
    assert latest is not None
    password = b'"store": {"url": "postgresql://ann:hunter2@db/argosy"},'
    apply(store, latest.declaration.replace(b'"gateways"', password + b'"gateways"'))
    apply(store, b'{"pools": [{"a": 1}]}')
    status, answer = await fleet.post("/scale", pool=POOL, replicas=4)
    assert (status, answer["error"]["code"]) == (400, "invalid_value")  # an invalid declaration
    apply(store, latest.declaration)
    status, answer = await fleet.post("/scale", pool=POOL, replicas=4, reason="a launch")
    assert (status, answer) == (200, {"fleet": "demo", "revision": 6})
    assert (await fleet.post("/scale", pool=POOL, replicas=4))[1]["revision"] == 6
    assert (await fleet.get())["pools"][0]["declared"] == 4
    for body in ({"pool": "other", "replicas": 1}, {"pool": POOL, "replicas": None}):
        assert (await fleet.post("/scale", **body))[0] == 400

    page = await fleet.get("/revisions", limit=4)
    numbers = [each["revision"] for each in page["data"]]
    assert (numbers, page["has_more"]) == ([6, 5, 4, 3], True)
    newest, _, broken, with_password = page["data"]
    assert newest["author"].startswith("key:")
    (change,) = newest["changes"]
    shown = {name: change[name] for name in ("path", "old", "new", "effect", "count")}
    assert shown == {
        "path": "pools[chat].replicas",
        "old": 2,
        "new": 4,
        "effect": "replicas started",
        "count": 2,
    }
    assert "revision 4" in broken["problem"]
    assert "revision 3: line 4: store.url: it contains a password." in with_password["problem"]
    assert "hunter2" not in str(page)
    older = await fleet.get("/revisions", before=3)
    assert [each["revision"] for each in older["data"]] == [2, 1]

    plan = await fleet.get("/plan", revision=1)
    assert [(each["old"], each["new"]) for each in plan["changes"]] == [(4, 2)]
    assert plan["lines"][0] == "~ pools[chat].replicas: 4 -> 2   (2 replicas stopped)"
    status, _ = await fleet.post("/rollback", revision=1, after=5)
    assert status == 409  # another revision was applied meanwhile
    status, answer = await fleet.post("/rollback", revision=1, after=6, reason="enough")
    assert (status, answer["revision"]) == (200, 7)
    assert (await fleet.post("/rollback", revision=1))[0] == 409  # nothing would change
    actions = [each.action for each in admin_gateway.store.audit_log.list_entries(limit=2)]
    assert actions == ["fleet.rollback", "pool.scale"]


async def test_declaration_is_planned_and_applied_as_on_the_command_line(
    admin_gateway: AdminGateway, fleet: FleetClient, stored: StoredRollout, tmp_path: Path
) -> None:
    read = await fleet.get("/declaration")
    assert (read["revision"], "replicas: 2" in read["declaration"]) == (2, True)
    edited = read["declaration"].replace("replicas: 2", "replicas: 3\n  options: {max_seqs: 4}")
    _, plan = await fleet.post("/plan", declaration=edited)
    file = tmp_path / "fleet.yaml"
    file.write_text(edited)
    command = ["plan", str(file), "--store", admin_gateway.store_url]
    printed = await asyncio.to_thread(CliRunner().invoke, app, command)
    assert printed.stdout.splitlines() == plan["lines"]
    assert plan["lines"][0] == "+ pools[chat].options.max_seqs: 4   (2 replicas rolled out)"
    assert "The pool chat gets a rollout by" in plan["lines"][2]

    change = {"declaration": edited, "reason": "more"}
    stored.store.apply("demo", DECLARATION, {POOL: NEW}, author="another operator", after=2)
    status, answer = await fleet.post("/apply", **change, after=plan["revision"])
    assert (status, answer["error"]["code"]) == (409, "conflict")
    status, answer = await fleet.post("/apply", **change, after=3)
    assert (status, answer["revision"]) == (200, 4)
    status, answer = await fleet.post("/apply", **change, after=4)
    assert (status, "Nothing changes" in answer["error"]["message"]) == (409, True)
    assert (await fleet.get("/declaration", revision=1))["declaration"] == read["declaration"]
    entry, *_ = admin_gateway.store.audit_log.list_entries(action_prefix="fleet.apply")
    assert entry.subject == "demo"
    assert entry.details == {
        "changes": ["pools[chat].options.max_seqs", "pools[chat].replicas"],
        "count": 2,
        "reason": "more",
    }


async def test_change_is_simulated_in_a_process_of_its_own(
    admin_gateway: AdminGateway,
    fleet: FleetClient,
    stored: StoredRollout,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    del stored
    monkeypatch.setattr("os.nice", lambda _: None)  # the machine of a test may be busy
    admin_gateway.client.timeout = 120.0
    now = time.time()
    admin_gateway.store.ledger.add_records(
        [
            usage_row(
                f"r{at}",
                model="chat",
                started_at=now - 600 + at,
                ended_at=now - 590 + at,
                input_tokens=200,
                output_tokens=40,
            )
            for at in range(30)
        ]
    )
    variation = {"pool": POOL, "replicas": 1, "max_seqs": 1, "routing": "round-robin"}
    status, forecast = await fleet.post("/forecast", variation=variation, seeds=1)
    assert status == 200, forecast
    assert forecast["pools"][0]["traffic"] == "ledger"
    assert "rises from" in forecast["sentence"]
    changed = await fleet.get("/declaration")
    declaration = changed["declaration"].replace("replicas: 2", "replicas: 2\n  spares: 1")
    for body, problem in (
        ({"declaration": declaration}, "the twin does not simulate pools[chat].spares"),
        ({"declaration": "pools: ["}, "the declaration: while parsing"),
        ({"variation": {"pool": "other"}}, "there is no pool 'other'"),
        ({}, "Give either"),
    ):
        status, answer = await fleet.post("/forecast", **body)
        assert (status, problem in answer["error"]["message"]) == (400, True), answer


@pytest.mark.parametrize(
    ("declaration", "problem"),
    [
        ("pools: [", "the declaration: while parsing"),
        ("pool: {}", "the declaration: line 1: Object contains unknown field `pool`"),
        ("models: !!python/object:os.system {}", "line 1"),
        (f"models: [{{name: a}}]\ngateways: {'9' * 5000}", "line 2"),
        ("a: &a [1]\nb: &b [*a, *a]\nmodels: &c [*b, *c]", "contains itself"),
        ("models: [{name: chat, source: ./m}]", "line 1: models[0].source: it is relative"),
        ("models: [{name: chat}]\nfleet: other", "line 2: fleet: it decides what the machines"),
    ],
)
async def test_hostile_declaration_is_refused_by_line_or_setting(
    fleet: FleetClient, stored: StoredRollout, declaration: str, problem: str
) -> None:
    del stored
    for path, more in (("/plan", {}), ("/apply", {"after": 2})):
        status, answer = await fleet.post(path, declaration=declaration, **more)
        assert (status, problem in answer["error"]["message"]) == (400, True), answer


async def test_every_decision_is_recorded_with_author_force_and_reason(
    admin_gateway: AdminGateway, stored: StoredRollout
) -> None:
    paths = {
        each.path
        for each in list_endpoints()
        if isinstance(each.body_type, type) and "reason" in get_type_hints(each.body_type)
    }
    # Only a native replica sleeps, and flags are declared: `test_residency` and `test_feature_flags` have them.
    others = {"/admin/replicas/sleep", "/admin/replicas/wake", "/admin/flags/{id}"}
    others.add("/admin/alerts/silences")  # of a gateway without a fleet: test_alerting has them
    assert paths == {*DECISIONS, *others}
    store = admin_gateway.store
    chat = store.fleets.read_records("demo")["replica/chat-1-0"]
    store.fleets.save_records(stored.lease, {"replica/a": chat})
    opened = await admin_gateway.client.post(
        "/admin/incidents", json={"title": "slow"}, headers=admin_gateway.root_headers
    )
    assert opened.status_code == 200, opened.text
    for number, (path, body) in enumerate(DECISIONS.items()):
        reason = f"reason {number}"
        response = await admin_gateway.client.post(
            path, json=body | {"reason": reason}, headers=admin_gateway.root_headers
        )
        assert response.status_code == 200, (path, response.text)
        entry = store.audit_log.list_entries(limit=1)[0]
        event = store.fleets.list_events("demo", kinds=[DECISION], limit=1)[0]
        assert path.endswith(entry.action.partition(".")[2])
        changed = entry.details["reason"]
        assert (changed[-1] if isinstance(changed, list) else changed) == reason
        assert entry.actor.startswith("key:")
        forced = " by force" if body.get("force") else ""
        assert event.reason == f"{entry.action}{forced} by {entry.actor}: {reason}"
        assert entry.details.get("force", False) == bool(forced)
