"""Routes from alerts to receivers, silences, and alerts that explain others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from argosy.policy.alerting.alert import Alert

LabelName = Annotated[
    str, Meta(max_length=100, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$(?!\n)", examples=["model"])
]
ReceiverName = Annotated[
    str, Meta(max_length=40, pattern=r"^[a-z0-9][a-z0-9-]*$(?!\n)", examples=["on-call"])
]
LabelPattern = Annotated[str, Meta(max_length=300, examples=["chat", "chat-*", "!ticket"])]
"""Value of a label. `*` at its end stands for any text, and `!` at its beginning excludes what follows."""
Matchers = dict[LabelName, LabelPattern]
RECEIVER_FAILING = "ReceiverFailing"


class AlertRoute(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Alerts that are notified in the same way."""

    receiver: ReceiverName | None = None
    """Name of the receiver. None takes that of `alerting.route`, which none means without notices."""
    match: Matchers = {}
    """Labels that an alert must have. All must match."""
    continues: bool = msgspec.field(name="continue", default=False)
    """Whether the routes that follow are tried too."""
    group_by: Annotated[tuple[LabelName, ...], Meta(max_length=20)] | None = None
    """Labels whose values alerts of one notice share. None takes those of `alerting.route`."""
    group_wait_s: Annotated[float, Meta(ge=0, le=3600)] | None = None
    """How long the first notice of a group waits for further alerts."""
    group_interval_s: Annotated[float, Meta(ge=1, le=86_400)] | None = None
    """Least time between two notices of a group, for alerts that start or end in between."""
    repeat_interval_s: Annotated[float, Meta(ge=60, le=2_592_000)] | None = None
    """Time after which a notice is repeated while its alerts fire."""


DEFAULT_ROUTE = AlertRoute(
    group_by=("alertname", "model", "pool"),
    group_wait_s=5.0,
    group_interval_s=300.0,
    repeat_interval_s=14_400.0,
)


class ResolvedRoute(msgspec.Struct, frozen=True):
    """A route with all that it inherits."""

    receiver: str
    group_by: tuple[str, ...]
    group_wait_s: float
    group_interval_s: float
    repeat_interval_s: float


class Silence(msgspec.Struct, frozen=True, kw_only=True):
    """Time in which matching alerts are not notified. Times are seconds since the epoch."""

    id: str
    matchers: Matchers
    author: str
    reason: str
    created_at: float
    ends_at: float


class Inhibition(NamedTuple):
    """Alerts that others explain, so that they are not notified while these fire."""

    source: Mapping[str, str]
    target: Mapping[str, str]
    equal: tuple[str, ...]
    """Labels that both must have with the same value."""


INHIBITIONS = (
    Inhibition({"alertname": "NoReplica"}, {"alertname": "!NoReplica"}, ("model",)),
    Inhibition({"severity": "page"}, {"severity": "ticket"}, ("alertname", "model")),
    Inhibition({"severity": "page"}, {"severity": "ticket"}, ("objective",)),
    Inhibition({"severity": "page"}, {"severity": "ticket"}, ("alertname", "folder")),
    Inhibition({"alertname": "StoreUnreachable"}, {"alertname": "AlertSourceFailing"}, ()),
    Inhibition({"alertname": "ObjectiveOutage"}, {"alertname": "!ObjectiveOutage"}, ("objective",)),
)


def matches(labels: Mapping[str, str], matchers: Mapping[str, str]) -> bool:
    """Return whether labels match all patterns (see `LabelPattern`). A label that is missing is empty."""
    return all(_matches(labels.get(name, ""), pattern) for name, pattern in matchers.items())


def _matches(value: str, pattern: str) -> bool:
    if pattern.startswith("!"):
        return not _matches(value, pattern[1:])
    return value.startswith(pattern[:-1]) if pattern.endswith("*") else value == pattern


def find_routes(
    labels: Mapping[str, str],
    root: AlertRoute,
    routes: Sequence[AlertRoute],
    receivers: Iterable[str],
) -> list[ResolvedRoute]:
    """Return the routes of an alert, in order. The alert about a failing receiver goes to all others.

    Args:
        labels: Labels of the alert.
        root: What routes inherit, and the route of alerts that no other one matches.
        routes: Further routes. The first that matches decides, unless it continues.
        receivers: Names of all receivers.
    """
    found: list[ResolvedRoute] = []
    if labels.get("alertname") == RECEIVER_FAILING:
        others = [name for name in receivers if name != labels.get("receiver")]
        return [_resolve(AlertRoute(receiver=name), root) for name in others]
    for route in routes:
        if matches(labels, route.match):
            found.append(_resolve(route, root))
            if not route.continues:
                break
    else:
        found = found or [_resolve(root, root)]
    return [each for each in found if each.receiver]


def _resolve(route: AlertRoute, root: AlertRoute) -> ResolvedRoute:
    inherited = [
        next(
            value
            for value in (getattr(each, name) for each in (route, root, DEFAULT_ROUTE))
            if value is not None
        )
        for name in ("group_by", "group_wait_s", "group_interval_s", "repeat_interval_s")
    ]
    return ResolvedRoute(route.receiver or root.receiver or "", *inherited)


def find_silence(
    labels: Mapping[str, str], silences: Iterable[Silence], now: float
) -> Silence | None:
    """Return a silence in force that matches labels; None if there is none."""
    return next(
        (each for each in silences if now < each.ends_at and matches(labels, each.matchers)), None
    )


def index_inhibitors(
    firing: Iterable[Alert], inhibitions: Sequence[Inhibition] = INHIBITIONS
) -> Callable[[Mapping[str, str]], Alert | None]:
    """Return a function that finds, for the labels of an alert, one that fires and explains it."""
    index: dict[tuple[object, ...], Alert] = {}
    for alert in firing:
        for number, rule in enumerate(inhibitions):
            if matches(alert.labels, rule.source):
                index.setdefault((number, *map(alert.labels.get, rule.equal)), alert)

    def find(labels: Mapping[str, str]) -> Alert | None:
        for number, rule in enumerate(inhibitions):
            if matches(labels, rule.target) and labels.keys() >= set(rule.equal):
                found = index.get((number, *map(labels.get, rule.equal)))
                if found is not None:
                    return found
        return None

    return find
