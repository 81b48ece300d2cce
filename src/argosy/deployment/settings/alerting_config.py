"""Settings of notices about alerts: receivers, routes, an existing Alertmanager, and a dead man's switch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from argosy.deployment.settings.secret_reference import SecretReference
from argosy.policy.alerting import (
    AlertRoute,
    AlertTiming,
    ReceiverName,
    ResolvedRoute,
    find_routes,
)
from argosy.settings import SettingError, SettingPath

Url = Annotated[
    str,
    Meta(max_length=2000, pattern=r"^https?://[^\s@]+$(?!\n)", examples=["https://a.example/b"]),
]
EmailAddress = Annotated[
    str, Meta(max_length=254, pattern=r"^[^\s<>@]+@[^\s<>@]+$(?!\n)", examples=["ops@example.com"])
]


WATCHDOG = "watchdog"
"""Name of the dead man's switch among the receivers."""


class WebhookConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A receiver of Alertmanager's webhooks, version 4."""

    url: Url | SecretReference
    """Address. If it contains a secret, give a reference."""
    token: SecretReference | None = None
    """Bearer token."""


class SlackConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An incoming webhook of Slack, or of a server that understands the same, such as Mattermost."""

    url: SecretReference
    """Address of the webhook, which is a secret."""


class PagerDutyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A service of PagerDuty, by version 2 of its Events API."""

    routing_key: SecretReference
    """Integration key of the service."""
    url: Url = "https://events.pagerduty.com/v2/enqueue"
    """Address of the API."""


class EmailConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mail by an SMTP server."""

    to: Annotated[tuple[EmailAddress, ...], Meta(min_length=1, max_length=20)]
    """Addresses of the recipients."""
    sender: EmailAddress = msgspec.field(name="from")
    """Address of the sender."""
    host: Annotated[str, Meta(min_length=1, max_length=253, examples=["smtp.example.com"])]
    """Mail server."""
    port: Annotated[int, Meta(ge=1, le=65_535)] = 587
    """Port of the mail server."""
    starttls: bool = True
    """Encrypt the connection, and send nothing if the server cannot."""
    username: Annotated[str, Meta(min_length=1, max_length=254)] | None = None
    """Account at the mail server. None signs in nowhere."""
    password: SecretReference | None = None
    """Password of the account."""


class ReceiverConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where notices go. It has exactly one of `webhook`, `slack`, `pagerduty` and `email`."""

    name: ReceiverName
    """Name for routes and commands."""
    webhook: WebhookConfig | None = None
    slack: SlackConfig | None = None
    pagerduty: PagerDutyConfig | None = None
    email: EmailConfig | None = None


class AlertmanagerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An Alertmanager that gets all alerts, and routes, groups, silences and notifies by itself."""

    url: Url
    """Address before `/api/v2/alerts`."""
    token: SecretReference | None = None
    """Bearer token."""


class WatchdogConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A dead man's switch: a service that notifies people when this request no longer arrives."""

    url: Url | SecretReference
    """Address that gets a POST request. If it contains a secret, give a reference."""
    interval_s: Annotated[float, Meta(ge=10, le=86_400)] = 60.0
    """Time between two requests."""


class AlertingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Alerts, and who is notified of them."""

    keep_pages_firing_s: Annotated[float, Meta(ge=0, le=86_400)] = 300.0
    """How long the condition of an alert of severity `page` must be over before the alert ends."""
    keep_tickets_firing_s: Annotated[float, Meta(ge=0, le=86_400)] = 1800.0
    """The same for severity `ticket`."""
    console_url: Url | None = None
    """Address of the console, for links in notices."""
    runbooks_url: Url | None = None
    """Address at which you publish `docs/how-to/runbooks.md`, for links in notices. Without it they name the page."""
    receivers: Annotated[tuple[ReceiverConfig, ...], Meta(max_length=50)] = ()
    """Where notices go."""
    route: AlertRoute = AlertRoute()
    """Values that routes inherit, and the route of alerts that no other one matches. Without a receiver it has that of
    the first of `receivers`."""
    routes: Annotated[tuple[AlertRoute, ...], Meta(max_length=100)] = ()
    """Further routes. The first that matches an alert decides, unless it has `continue`."""
    alertmanagers: Annotated[tuple[AlertmanagerConfig, ...], Meta(max_length=10)] = ()
    """Alertmanagers that get all alerts in place of `receivers`, for example the members of a cluster."""
    watchdog: WatchdogConfig | None = None
    """A dead man's switch. None has none."""
    page_for: tuple[Literal["TrafficDrift", "ReplicaDeviates"], ...] = ()
    """Alerts about changes of the traffic that are pages, and so open incidents. By default they are tickets."""

    @property
    def timing(self) -> AlertTiming:
        """When alerts end."""
        return AlertTiming(self.keep_pages_firing_s, self.keep_tickets_firing_s)

    @property
    def root(self) -> AlertRoute:
        """The route of alerts that no other one matches, with its receiver."""
        if self.route.receiver is not None or not self.receivers:
            return self.route
        return msgspec.structs.replace(self.route, receiver=self.receivers[0].name)

    @property
    def targets(self) -> list[str]:
        """Names of all that is sent something: receivers, Alertmanagers by address, and the watchdog."""
        named = [each.name for each in self.receivers] + [each.url for each in self.alertmanagers]
        return named + ([WATCHDOG] if self.watchdog is not None else [])

    def find_routes(self, labels: Mapping[str, str]) -> list[ResolvedRoute]:
        """Return the routes of an alert with these labels. With an Alertmanager there are none."""
        names = [each.name for each in self.receivers]
        return find_routes(labels, self.root, self.routes, names)

    @property
    def secrets(self) -> Iterator[SecretReference]:
        """References to all secrets."""
        return _find_references(self)


def _find_references(value: object) -> Iterator[SecretReference]:
    if isinstance(value, SecretReference):
        yield value
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _find_references(getattr(value, name))
    elif isinstance(value, tuple):
        for each in value:
            yield from _find_references(each)


def find_alerting_problems(config: AlertingConfig) -> Iterator[SettingError]:
    """Yield an error for each contradiction of the settings."""
    path: SettingPath = ("alerting",)
    names = {WATCHDOG}
    for index, receiver in enumerate(config.receivers):
        here: SettingPath = (*path, "receivers", index)
        kinds = receiver.webhook, receiver.slack, receiver.pagerduty, receiver.email
        if sum(each is not None for each in kinds) != 1:
            yield SettingError.at(
                here, "a receiver has one of webhook, slack, pagerduty and email. Correct it."
            )
        if receiver.name in names:
            yield SettingError.at(
                here, f"another receiver has the name {receiver.name}. Rename one."
            )
        names.add(receiver.name)
        if receiver.email is not None:
            yield from _find_email_problems(receiver.email, (*here, "email"))
    routes = {("route",): config.route} | {
        ("routes", index): route for index, route in enumerate(config.routes)
    }
    for place, route in routes.items():
        if route.receiver is not None and route.receiver not in names:
            problem = f"no receiver has the name {route.receiver!r}. Add it to alerting.receivers."
            yield SettingError.at((*path, *place, "receiver"), problem)
    if config.alertmanagers and config.receivers:
        problem = (
            "an Alertmanager notifies by itself. Remove alerting.receivers, or the Alertmanager."
        )
        yield SettingError.at((*path, "alertmanagers"), problem)
    for reference in config.secrets:
        if (reference.env is None) == (reference.file is None):
            yield SettingError.at(path, "a secret has either `env` or `file`. Correct it.")


def _find_email_problems(email: EmailConfig, path: SettingPath) -> Iterator[SettingError]:
    if (email.username is None) != (email.password is None):
        yield SettingError.at(path, "username and password go together. Add the other one.")
    if email.password is not None and not email.starttls:
        yield SettingError.at(path, "a password is only sent with starttls. Turn it on.")
