"""Bodies of notices in the formats of their receivers."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from email.message import EmailMessage
from email.utils import format_datetime
from hashlib import sha256
from typing import Any

from argosy.policy.alerting import Alert, Notice, NoticeGroup

RUNBOOKS_PAGE = "docs/how-to/runbooks.md"
PUSH_AHEAD_S = 240.0
"""Time after which an Alertmanager ends an alert that is no longer pushed."""
MAX_PAGERDUTY_SUMMARY = 1024
MAX_SLACK_TEXT = 2900
NOT_ENDED = "0001-01-01T00:00:00Z"


class MessageBuilder:
    """Builds the bodies of notices.

    Args:
        console_url: Address of the console for links; empty without one.
        runbooks_url: Address of the page with runbooks; empty names the page.
    """

    def __init__(self, console_url: str, runbooks_url: str = "") -> None:
        self._console_url = console_url.rstrip("/")
        self._runbooks_url = runbooks_url or RUNBOOKS_PAGE

    def build_webhook(self, group: NoticeGroup, notice: Notice) -> dict[str, Any]:
        """Return the payload of Alertmanager's webhook, version 4."""
        alerts = [self._describe_alert(each) for each in notice.alerts]
        return {
            "version": "4",
            "groupKey": group.key,
            "truncatedAlerts": notice.omitted,
            "status": notice.status,
            "receiver": group.receiver,
            "groupLabels": group.labels,
            "commonLabels": _find_common([each["labels"] for each in alerts]),
            "commonAnnotations": _find_common([each["annotations"] for each in alerts]),
            "externalURL": self._console_url,
            "alerts": alerts,
        }

    def build_slack(self, notice: Notice) -> dict[str, Any]:
        """Return the message of an incoming webhook of Slack. Texts of alerts cannot form links or mentions."""
        lines = [
            f"*{_escape_slack(each.summary)}*\n{_escape_slack(_describe(each))}\n"
            f"Runbook: {_escape_slack(self._find_runbook(each))}"
            for each in notice.alerts
        ]
        if notice.omitted:
            lines.append(f"{notice.omitted} more")
        title = _escape_slack(build_title(notice))
        text = "\n".join(lines)[:MAX_SLACK_TEXT]
        return {
            "text": title,
            "blocks": [
                {"type": "section", "text": {"type": "mrkdwn", "text": each}}
                for each in (f"*{title}*", text)
            ],
        }

    def build_pagerduty(
        self, group: NoticeGroup, notice: Notice, routing_key: str
    ) -> dict[str, Any]:
        """Return an event of PagerDuty's Events API, version 2."""
        pages = any(each.severity == "page" for each in notice.alerts if each.is_firing)
        first = notice.alerts[0]
        return {
            "routing_key": routing_key,
            "event_action": "trigger" if notice.firing else "resolve",
            "dedup_key": f"argosy/{group.key}",
            "payload": {
                "summary": build_title(notice)[:MAX_PAGERDUTY_SUMMARY],
                "source": first.labels.get("replica") or first.labels.get("model") or "argosy",
                "severity": "critical" if pages else "warning",
                "timestamp": format_time(first.started_at),
                "class": first.name,
                "custom_details": {
                    each.fingerprint: (
                        f"{each.summary}. {_describe(each)} Runbook: {self._find_runbook(each)}"
                    )
                    for each in notice.alerts
                },
            },
            "links": [{"href": self._console_url, "text": "Console"}] if self._console_url else [],
        }

    def build_mail(
        self, group: NoticeGroup, notice: Notice, sender: str, recipients: tuple[str, ...]
    ) -> EmailMessage:
        """Return a mail. All mails of a group are one thread."""
        domain = sender.rpartition("@")[2]
        thread = sha256(f"{group.key}/{group.created_at:.3f}".encode()).hexdigest()[:32]
        number = sha256(notice.id.encode()).hexdigest()[:32]
        mail = EmailMessage()
        mail["Subject"] = _one_line(build_title(notice))
        mail["From"] = sender
        mail["To"] = ", ".join(recipients)
        mail["Date"] = format_datetime(datetime.fromtimestamp(notice.created_at, UTC))
        mail["Message-ID"] = f"<{number}@{domain}>"
        mail["References"] = f"<{thread}@{domain}>"
        mail["In-Reply-To"] = f"<{thread}@{domain}>"
        mail["Auto-Submitted"] = "auto-generated"
        parts = [
            "\n".join(
                (
                    f"{'Fires' if each.is_firing else 'Ended'}: {each.summary}",
                    _describe(each),
                    f"Since {format_time(each.started_at)}",
                    f"Runbook: {self._find_runbook(each)}",
                )
            )
            for each in notice.alerts
        ]
        if notice.omitted:
            parts.append(f"{notice.omitted} more alerts are left out.")
        if self._console_url:
            parts.append(f"Console: {self._console_url}/#/alerts")
        mail.set_content("\n\n".join(parts))
        return mail

    def build_push(self, alert: Alert, now: float) -> dict[str, Any]:
        """Return an alert as `POST /api/v2/alerts` of an Alertmanager takes it."""
        ends_at = now + PUSH_AHEAD_S if alert.ended_at is None else alert.ended_at
        described = self._describe_alert(alert)
        return {
            "labels": described["labels"],
            "annotations": described["annotations"],
            "startsAt": described["startsAt"],
            "endsAt": format_time(ends_at),
            "generatorURL": described["generatorURL"],
        }

    def _find_runbook(self, alert: Alert) -> str:
        return f"{self._runbooks_url}#{alert.runbook}"

    def _describe_alert(self, alert: Alert) -> dict[str, Any]:
        return {
            "status": "firing" if alert.is_firing else "resolved",
            "labels": alert.labels,
            "annotations": {
                "summary": alert.summary,
                "description": alert.description,
                "runbook_url": self._find_runbook(alert),
            },
            "startsAt": format_time(alert.started_at),
            "endsAt": NOT_ENDED if alert.ended_at is None else format_time(alert.ended_at),
            "generatorURL": f"{self._console_url}/#/alerts" if self._console_url else "",
            "fingerprint": alert.fingerprint,
        }


def build_title(notice: Notice) -> str:
    """Return the first line of a notice: its state, and the alert or their number."""
    state = "TEST" if notice.is_test else "FIRING" if notice.firing else "RESOLVED"
    count = len(notice.alerts) + notice.omitted
    first = next((each for each in notice.alerts if each.is_firing), notice.alerts[0])
    more = f" and {count - 1} more" if count > 1 else ""
    return f"[{state}] {first.summary}{more}"


def format_time(at: float) -> str:
    """Return a time as RFC 3339 in UTC."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _describe(alert: Alert) -> str:
    if alert.ended_at is None:
        return alert.description
    return f"It ended after {alert.ended_at - alert.started_at:.0f} s."


def _find_common(dictionaries: list[dict[str, str]]) -> Mapping[str, str]:
    if not dictionaries:
        return {}
    return dict(set(dictionaries[0].items()).intersection(*(each.items() for each in dictionaries)))


def _escape_slack(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _one_line(text: str) -> str:
    return " ".join(text.split())
