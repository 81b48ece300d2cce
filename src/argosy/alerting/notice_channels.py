"""Delivery of notices by HTTP and SMTP, within bounds of time and size. Runs in threads."""

from __future__ import annotations

import smtplib
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from argosy.alerting.messages import MessageBuilder
from argosy.deployment import AlertingConfig, EmailConfig, ReceiverConfig, SecretReference
from argosy.policy.alerting import Alert, Notice, NoticeGroup
from argosy.proxies import direct_mounts

if TYPE_CHECKING:
    from email.message import EmailMessage

TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 500
"""Bytes of an answer that are read, for the message of an error."""
_RETRIED = frozenset({408, 425, 429})


class Delivery(NamedTuple):
    """Result of an attempt."""

    error: str = ""
    """Why it failed, without secrets; empty if it did not."""
    is_final: bool = False
    """Whether another attempt would fail in the same way."""


class NoticeChannels:
    """Sends notices to the receivers of the settings. Calls block, for 10 s at most in each step of the protocol."""

    def __init__(self, config: AlertingConfig) -> None:
        self._receivers = {each.name: each for each in config.receivers}
        self._config = config
        self._messages = MessageBuilder(config.console_url or "", config.runbooks_url or "")

    def send(self, group: NoticeGroup, notice: Notice) -> Delivery:
        """Send a notice to the receiver of its group."""
        receiver = self._receivers.get(group.receiver)
        if receiver is None:
            return Delivery("the settings have no such receiver any more", is_final=True)
        return _report_errors(lambda: self._send(receiver, group, notice))

    def push(self, number: int, alerts: list[Alert], now: float) -> Delivery:
        """Push alerts to one of the Alertmanagers, by its position in the settings."""
        manager = self._config.alertmanagers[number]
        body = [self._messages.build_push(each, now) for each in alerts]
        url = f"{manager.url.rstrip('/')}/api/v2/alerts"
        return _report_errors(lambda: _post(url, body, _read_optional(manager.token)))

    def ping_watchdog(self) -> Delivery:
        """Send the request of the dead man's switch."""
        watchdog = self._config.watchdog
        if watchdog is None:
            return Delivery()
        return _report_errors(lambda: _post(_read(watchdog.url), {"alertname": "Watchdog"}))

    def _send(self, receiver: ReceiverConfig, group: NoticeGroup, notice: Notice) -> Delivery:
        messages = self._messages
        if receiver.webhook is not None:
            token = _read_optional(receiver.webhook.token)
            return _post(_read(receiver.webhook.url), messages.build_webhook(group, notice), token)
        if receiver.slack is not None:
            return _post(_read(receiver.slack.url), messages.build_slack(notice))
        if receiver.pagerduty is not None:
            key = _read(receiver.pagerduty.routing_key)
            return _post(receiver.pagerduty.url, messages.build_pagerduty(group, notice, key))
        assert receiver.email is not None  # noqa: S101 - checked by the settings
        email = receiver.email
        return _send_mail(email, messages.build_mail(group, notice, email.sender, email.to))


def _read(value: str | SecretReference) -> str:
    return value if isinstance(value, str) else value.read()


def _read_optional(reference: SecretReference | None) -> str:
    return "" if reference is None else reference.read()


def _report_errors(deliver: Callable[[], Delivery]) -> Delivery:
    """Return the result of a delivery, also if it raises. Errors name no address, which may be a secret."""
    try:
        return deliver()
    except ValueError as error:  # a secret that is missing
        return Delivery(str(error))
    except smtplib.SMTPResponseException as error:
        text = (
            error.smtp_error
            if isinstance(error.smtp_error, str)
            else error.smtp_error.decode(errors="replace")
        )
        return Delivery(f"the mail server answered {error.smtp_code} {text}"[:MAX_ANSWER_BYTES])
    except (OSError, smtplib.SMTPException) as error:
        return Delivery(f"{type(error).__name__}: {error}"[:MAX_ANSWER_BYTES])


def _post(url: str, body: Any, token: str = "") -> Delivery:  # noqa: ANN401 - JSON
    """Send JSON by one POST request. Redirects are refused, and at most the beginning of the answer is read."""
    import httpx2  # takes long to import

    headers = {"content-type": "application/json"}
    if token:
        headers["authorization"] = f"Bearer {token}"
    try:
        with (
            httpx2.Client(timeout=TIMEOUT_S, mounts=direct_mounts(url)) as client,
            client.stream(
                "POST", url, content=msgspec.json.encode(body), headers=headers
            ) as response,
        ):
            status = response.status_code
            if response.is_success:
                return Delivery()
            answer = next(response.iter_raw(MAX_ANSWER_BYTES), b"").decode(errors="replace")
    except httpx2.HTTPError as error:
        return Delivery(
            f"{type(error).__name__}: no answer within {TIMEOUT_S:.0f} s, or no connection"
        )
    except httpx2.InvalidURL:
        return Delivery("the address is no URL", is_final=True)
    if response.is_redirect:
        return Delivery(
            f"{status}: redirects are not followed; set the final address", is_final=True
        )
    is_final = 400 <= status < 500 and status not in _RETRIED
    return Delivery(f"{status}: {' '.join(answer.split())}", is_final=is_final)


def _send_mail(email: EmailConfig, mail: EmailMessage) -> Delivery:
    with smtplib.SMTP(email.host, email.port, timeout=TIMEOUT_S) as server:
        if email.starttls:
            server.starttls(context=ssl.create_default_context())
        if email.username is not None and email.password is not None:
            server.login(email.username, email.password.read())
        refused = server.send_message(mail)
    return Delivery(f"refused: {', '.join(refused)}", is_final=True) if refused else Delivery()
