"""Incidents: which alerts are one, when they close, when a version is rolled back, and the draft of the report."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from argosy.policy.alerting import Alert, compute_fingerprint
from argosy.policy.detection import PastChange, RankedChange, Slice
from argosy.policy.incidents import (
    MAX_ENTRIES,
    Incident,
    PoolVersions,
    TimelineEntry,
    add_entries,
    judge_rollback,
    open_incident,
    select_causes,
    update_incidents,
    write_postmortem,
)
from argosy.policy.objectives import BudgetImpact

NOW = 1_790_000_000.0
LLAMA = {"model": "llama", "pool": "llama"}


def alert(
    name: str,
    labels: dict[str, str] = LLAMA,
    *,
    severity: str = "page",
    at: float = NOW,
    ended_at: float | None = None,
) -> Alert:
    return Alert(
        labels={**labels, "alertname": name, "severity": severity},
        summary=f"{name} of {labels}",
        description="12 of 40 requests missed.",
        runbook="noreplica",
        started_at=at,
        ended_at=ended_at,
    )


class World:
    """Alerts, and the incidents that follow from them."""

    def __init__(self) -> None:
        self.now = NOW
        self.alerts: dict[str, Alert] = {}
        self.incidents: dict[int, Incident] = {}
        self.scopes: dict[str, dict[str, str]] = {}

    def report(self, *alerts: Alert) -> None:
        for each in alerts:
            self.alerts[compute_fingerprint(each.labels)] = each
        open_ones = [each for each in self.incidents.values() if each.is_open]
        number = max(self.incidents, default=0) + 1
        for changed in update_incidents(open_ones, self.alerts, {}, number, self.now, self.scopes):
            self.incidents[changed.number] = changed


def test_pages_open_incidents_and_alerts_of_their_scope_join() -> None:
    world = World()
    world.report(alert("Slow", severity="ticket"))
    assert not world.incidents
    world.report(alert("Burn"), alert("Burn", {"model": "other", "pool": "other"}))
    assert sorted(world.incidents) == [1, 2]
    first = world.incidents[1]
    assert {each.name for each in first.alerts.values()} == {"Burn", "Slow"}
    assert (first.severity, first.scope, first.opened_by) == ("page", LLAMA, "argosy")
    world.report(
        alert("ReplicaDeviates", {"model": "llama", "replica": "llama-1"}, severity="ticket")
    )
    world.report(alert("NoReplica", {"replica": "llama-1"}))  # shares the replica of a joined alert
    assert sorted(world.incidents) == [1, 2]
    assert len(world.incidents[1].alerts) == 4
    world.report(alert("StoreUnreachable", {}))
    assert sorted(world.incidents) == [1, 2, 3]  # the whole fleet is another scope
    missed = alert("BudgetBurnsFast", {"objective": "all"})
    world.scopes[missed.fingerprint] = {"model": "llama"}
    world.report(missed)
    assert sorted(world.incidents) == [1, 2, 3]  # its excess is at the model of the first
    assert world.incidents[1].alerts[missed.fingerprint].labels["model"] == "llama"


def test_incident_closes_15_minutes_after_the_last_end_and_a_later_page_opens_another() -> None:
    world = World()
    world.report(alert("Burn"))
    world.now += 600
    world.report(alert("Burn", ended_at=world.now))
    assert world.incidents[1].is_open
    assert world.incidents[1].quiet_since == world.now
    world.now += 899
    world.report(alert("Burn", at=world.now))  # again, within 15 minutes
    assert world.incidents[1].is_firing
    world.report(alert("Burn", at=world.now, ended_at=world.now))
    world.now += 900
    world.report()
    closed = world.incidents[1]
    assert not closed.is_open
    texts = [each.text for each in closed.entries]
    assert len([each for each in texts if "Burn fires" in each]) == 2
    assert texts[-1] == "Closed. No alert fires any more."
    world.report()
    world.now += 60
    world.report(alert("Burn", at=world.now))
    assert sorted(world.incidents) == [1, 2]


def test_nothing_changes_without_news_and_a_timeline_is_bounded() -> None:
    world = World()
    world.report(alert("Burn"))
    before = world.incidents[1]
    world.now += 10
    world.report()
    assert world.incidents[1] is before
    entries = [
        TimelineEntry(at=NOW + index, source="event", text="x", reference=f"event/{index}")
        for index in range(2 * MAX_ENTRIES)
    ]
    full = add_entries(add_entries(before, entries[:3]), entries)
    assert len(full.entries) == MAX_ENTRIES
    assert "only in their sources" in full.entries[-1].text
    assert add_entries(full, entries) is full
    assert len({each.reference for each in full.entries[2:-1]}) == MAX_ENTRIES - 3


KINDS = ("replica_phase", "revision_in_force", "retention.set", "price.create", "content.read")


@pytest.mark.parametrize(
    ("alerts", "expected"),
    [
        ([alert("DiskNearlyFull", {})], ["retention.set"]),
        ([alert("StoreUnreachable", {}), alert("Drift", {}, severity="ticket")], []),
        ([alert("BudgetUsed", LLAMA), alert("StoreUnreachable", LLAMA)], ["price.create"]),
        ([alert("Burn"), alert("StoreUnreachable", LLAMA)], [*KINDS[:2], "price.create"]),
    ],
)
def test_only_changes_that_can_cause_the_pages_are_candidates(
    alerts: list[Alert], expected: list[str]
) -> None:
    world = World()
    world.report(*alerts)
    changes = [PastChange(at=NOW, kind=kind, text="") for kind in KINDS]
    assert [each.kind for each in select_causes(world.incidents[1], changes)] == expected


def part(
    dimension: str, value: str, excess: float, requests: float, elsewhere: float = 0.01
) -> Slice:
    return Slice(
        dimension=dimension,
        value=value,
        excess_share=excess,
        request_share=requests,
        share=0.3,
        share_before=0.01,
        share_elsewhere=elsewhere,
    )


BAD_VERSION = PoolVersions(
    pool="llama",
    model="llama",
    rollout="r1",
    candidate="new0123456789",
    changed_at=NOW - 300,
    is_warm=True,
)
NEW_VERSION = part("version", "new0", 1.0, 0.5)


def build_incident(changes: dict[str, Any]) -> Incident:
    world = World()
    world.report(alert("ObjectiveBurn", {"objective": "chat", **LLAMA}))
    return msgspec.structs.replace(world.incidents[1], **changes)


@pytest.mark.parametrize(
    ("case", "obstacle"),
    [
        ({}, ""),
        ({"versions": {"is_warm": False}}, "are gone"),
        ({"versions": {"last_rollback_at": NOW - 3600}}, "last 24 h"),
        ({"pages": [{"model": "other", "pool": "other"}]}, "Pages fire for other too"),
        ({"slices": (NEW_VERSION, part("replica", "llama-1", 0.95, 0.2))}, "llama-1 has 95%"),
        ({"slices": (part("version", "new0", 0.3, 0.5),)}, "only 30%"),
        ({"slices": (part("version", "new0", 0.6, 0.6, 0.29),)}, "other versions are ill too: 29%"),
        ({"slices": (part("version", "old0", 1.0, 1.0),)}, "by version yet"),
        ({"excess": {"llama": 0.7, "other": 0.3}}, "Other models have 30%"),
        ({"alerts": {}}, "No page of an objective"),
    ],
)
def test_rollback_needs_all_conditions(case: dict[str, Any], obstacle: str) -> None:
    versions = msgspec.structs.replace(BAD_VERSION, **case.get("versions", {}))
    changes: dict[str, Any] = {"slices": (NEW_VERSION,)}
    changes |= {name: case[name] for name in ("slices", "alerts") if name in case}
    pages = [{"objective": "chat", **LLAMA}, *case.get("pages", [])]
    excess = case.get("excess", {"llama": 1.0})
    advice = judge_rollback(build_incident(changes), [versions], pages, NOW, excess)
    assert advice is not None
    assert [each for each in advice.obstacles if obstacle in each] == list(advice.obstacles)
    assert bool(advice.obstacles) is bool(obstacle)


def test_no_rollback_without_a_version_change_before_the_onset() -> None:
    pages = [{"objective": "chat", **LLAMA}]
    later = msgspec.structs.replace(BAD_VERSION, changed_at=NOW + 3600)
    other = msgspec.structs.replace(BAD_VERSION, pool="other", model="other")
    assert judge_rollback(build_incident({}), [later, other], pages, NOW) is None


def test_postmortem_has_the_numbers_of_the_record_and_no_markup_of_others() -> None:
    change = PastChange(at=NOW - 300, kind="rollout_state", text="rollout <b>| state")
    shown = build_incident(
        {
            "onset": NOW - 120,
            "changes": (RankedChange(change=change, score=0.7),),
            "slices": (part("version", "new", 1.0, 0.5),),
            "sliced_event": "failed",
            "requests": 4120,
            "failed": 312,
            "tenants": ("acme",),
            "request_nano_dollars": 2_000_000,
            "budgets": (
                BudgetImpact(objective="chat", misses=312, spent=0.61, remaining=-0.4),
                BudgetImpact(objective="new", misses=1),
            ),
            "missing": ("audit log",),
            "cause": "bad weights",
        }
    )
    rollback = TimelineEntry(at=NOW + 60, source="rollback", text="Rolled back llama.")
    text = write_postmortem(add_entries(shown, [rollback]), NOW + 600)
    for expected in (
        "# INC-1: ObjectiveBurn",
        "4,120 requests in its scope, 312 of them failed (7.6%)",
        "acme",
        "- money: $0.62 for the failed requests",
        "- objective chat: 312 misses, 61% of the error budget; -40% are left",
        "- objective new: 1 misses\n",
        "- detection: 2026-09-21 14:13:20, 2 min after the onset",
        "- mitigation: 2026-09-21 14:14:20, 3 min after",
        "- recovery: -",
        "rollout \\<b\\>\\| state",
        "| version | new | 100% | 50% | 30.0% | 1.0% | 1.0% |",
        "not read: audit log",
        "bad weights",
    ):
        assert expected in text, (expected, text)


def test_incident_by_hand_stays_open_until_a_person_closes_it() -> None:
    world = World()
    world.incidents[1] = open_incident(1, "slow", {"model": "llama", "job": "x"}, NOW, "key:1")
    world.now += 86_400
    world.report()
    assert world.incidents[1].is_open
    assert world.incidents[1].scope == {"model": "llama"}
