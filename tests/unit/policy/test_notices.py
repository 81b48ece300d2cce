"""Routing, grouping, silences and inhibition of notices, under a virtual clock."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from argosy.policy.alerting import (
    Alert,
    AlertRoute,
    Notice,
    NoticeGroup,
    Silence,
    find_routes,
    update_groups,
)

START = 1_790_000_000.0
RECEIVERS = ["default", "pager", "team"]
ROOT = AlertRoute(receiver="default")


def alert(name: str = "NoReplica", severity: str = "page", **labels: str) -> Alert:
    return Alert(
        labels={"alertname": name, "severity": severity, **labels},
        summary=name,
        description="",
        runbook=name.lower(),
        started_at=START,
    )


class Groups:
    """Groups of one fleet, whose notices a test delivers."""

    def __init__(self, *routes: AlertRoute, root: AlertRoute = ROOT) -> None:
        self.routes = routes
        self.root = root
        self.now = START
        self.alerts: dict[str, Alert] = {}
        self.silences: list[Silence] = []
        self.groups: dict[str, NoticeGroup] = {}

    def fire(self, *alerts: Alert) -> None:
        self.alerts |= {each.fingerprint: each for each in alerts}

    def end(self, *alerts: Alert) -> None:
        self.fire(*(msgspec.structs.replace(each, ended_at=self.now) for each in alerts))

    def silence(self, matchers: dict[str, str], for_s: float) -> None:
        self.silences.append(
            Silence(
                id="s",
                matchers=matchers,
                author="ann",
                reason="",
                created_at=self.now,
                ends_at=self.now + for_s,
            )
        )

    def update(self) -> None:
        def find(labels: Mapping[str, str]) -> object:
            return find_routes(labels, self.root, self.routes, RECEIVERS)

        self.groups = update_groups(
            self.groups,
            self.alerts,
            find,  # type: ignore[arg-type]
            self.silences,
            self.now,
        )

    def run(self, seconds: float) -> list[tuple[str, Notice]]:
        """Deliver what is due within a time, in rounds of 10 s, and return it with its receivers."""
        delivered = []
        end = self.now + seconds
        while self.now <= end:
            self.update()
            for key, group in self.groups.items():
                if group.pending is not None:
                    delivered.append((group.receiver, group.pending))
                    self.groups[key] = group.on_attempt(self.now).on_result(
                        self.now, "", is_final=False
                    )
            self.now += 10.0
        return delivered


def describe(delivered: list[tuple[str, Notice]]) -> list[tuple[str, str, list[str]]]:
    return [
        (receiver, notice.status, sorted(each.labels.get("model", "") for each in notice.alerts))
        for receiver, notice in delivered
    ]


def test_group_is_notified_once_then_of_news_then_again_then_of_its_end() -> None:
    groups = Groups(root=AlertRoute(receiver="default", group_by=("alertname",)))
    first, second = alert(model="a"), alert(model="b")
    groups.fire(first)
    assert describe(groups.run(60)) == [("default", "firing", ["a"])]

    groups.fire(second)
    assert groups.run(200) == []  # waits for the interval of the group
    assert describe(groups.run(60)) == [("default", "firing", ["a", "b"])]

    groups.end(first)
    assert describe(groups.run(400)) == [("default", "firing", ["a", "b"])]  # a has ended
    assert describe(groups.run(4 * 3600 + 20)) == [("default", "firing", ["b"])]

    groups.end(second)
    assert describe(groups.run(3600)) == [("default", "resolved", ["b"])]
    assert groups.groups == {}


def test_alert_that_ends_before_its_group_was_notified_is_not_notified() -> None:
    groups = Groups()
    groups.fire(alert())
    groups.update()
    groups.end(alert())
    assert groups.run(3600) == []


@pytest.mark.parametrize(
    ("labels", "receivers"),
    [
        ({"alertname": "A", "severity": "ticket", "model": "chat-1"}, ["team"]),
        ({"alertname": "A", "severity": "page", "model": "chat-1"}, ["pager", "team"]),
        ({"alertname": "A", "severity": "page", "model": "other"}, ["pager"]),
        ({"alertname": "A", "severity": "ticket", "model": "other"}, ["default"]),
        ({"alertname": "Quiet", "severity": "page"}, ["pager", "default"]),
        ({"alertname": "ReceiverFailing", "receiver": "pager"}, ["default", "team"]),
    ],
)
def test_routes_in_order_until_one_does_not_continue(
    labels: dict[str, str], receivers: list[str]
) -> None:
    routes = (
        AlertRoute(receiver="pager", match={"severity": "page"}, continues=True),
        AlertRoute(receiver="team", match={"model": "chat-*"}),
        AlertRoute(match={"alertname": "Quiet"}),
        AlertRoute(match={"severity": "!ticket"}, receiver=None, continues=False),
    )
    if labels.get("model") == "other" and labels["severity"] == "page":
        receivers = [*receivers, "default"]
    found = find_routes(labels, ROOT, routes, RECEIVERS)
    assert [each.receiver for each in found] == receivers


def test_silence_holds_back_new_notices_and_not_the_end_of_known_alerts() -> None:
    groups = Groups()
    known, new = alert(model="a"), alert(model="b")
    groups.fire(known)
    assert len(groups.run(30)) == 1
    groups.silence({"alertname": "NoReplica"}, 8 * 3600)
    groups.fire(new)
    assert groups.run(5 * 3600) == []  # not repeated either
    groups.end(known)
    assert describe(groups.run(60)) == [("default", "resolved", ["a"])]
    assert describe(groups.run(4 * 3600)) == [("default", "firing", ["b"])]  # the silence is over


@pytest.mark.parametrize(
    ("explaining", "explained"),
    [
        (
            alert(model="a", pool="p"),
            alert("ReplicaNotHealed", "ticket", model="a", replica="p-1-0"),
        ),
        (alert("Burn", model="a"), alert("Burn", "ticket", model="a")),
        (alert("Fast", objective="o"), alert("Slow", "ticket", objective="o")),
        (alert("ObjectiveOutage", objective="o"), alert("BudgetBurnsFast", objective="o")),
        (alert("DiskNearlyFull", folder="/a"), alert("DiskNearlyFull", "ticket", folder="/a")),
        (alert("StoreUnreachable"), alert("AlertSourceFailing", "ticket", source="BudgetAlerts")),
    ],
)
def test_explained_alert_is_notified_only_while_it_is_alone(
    explaining: Alert, explained: Alert
) -> None:
    groups = Groups()
    groups.fire(explaining, explained, alert("Burn", "ticket", model="other"))
    names = [(each.name, each.labels.get("model")) for _, n in groups.run(60) for each in n.alerts]
    assert sorted(names) == sorted(
        [(explaining.name, explaining.labels.get("model")), ("Burn", "other")]
    )
    groups.end(explaining)
    notified = [each for _, notice in groups.run(400) for each in notice.alerts]
    assert [each.name for each in notified if each.is_firing] == [explained.name]
    assert [each.name for each in notified if not each.is_firing] == [explaining.name]


def test_failed_notice_is_retried_later_and_later_and_dropped_in_the_end() -> None:
    groups = Groups()
    groups.fire(alert())
    groups.run(0)
    groups.now += 10
    groups.update()
    (group,) = groups.groups.values()
    now, delays = groups.now, list[float]()
    while group.pending is not None:
        now = group.pending.due_at
        group = group.on_attempt(now).on_result(now, "503", is_final=False)
        if group.pending is not None:
            delays.append(group.pending.due_at - now)
    assert delays[:8] == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]
    assert now - groups.now > 86_400
