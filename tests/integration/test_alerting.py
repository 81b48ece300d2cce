"""Alerts and notices in the store: who evaluates and delivers them, and what survives a process and an outage."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from email import message_from_bytes
from email.policy import default
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest
from structlog.testing import capture_logs
from tests.support.fake_clock import FakeClock
from tests.support.migrated_store import write_migrated_file
from tests.support.services import find_program
from tests.support.steady_load import free_ports
from tests.support.usage_rows import usage_row

from argosy.alerting import AlertLoop, AlertRecords, BudgetAlerts, OrderBook, read_alerts
from argosy.deployment import AlertingConfig
from argosy.policy.alerting import Alert, AlertCondition
from argosy.settings import convert_settings
from argosy.store import Store, StoreError, open_store

START = 1_790_000_000.0
FLEET = "shop"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(write_migrated_file(tmp_path / "store.db"))
    yield opened
    opened.close()


class Evaluator:
    """Loop of one process, whose only source reports what a test sets."""

    def __init__(
        self,
        store: Store | None,
        clock: FakeClock,
        holder: str,
        *,
        is_leader: bool = False,
        config: AlertingConfig | None = None,
    ) -> None:
        self.clock = clock
        self.is_firing: bool | None = False
        self.error: Exception | None = None
        self.changed: list[Alert] = []
        fleets = None if store is None else store.fleets
        self.records = AlertRecords(fleets, FLEET, holder, is_leader=is_leader)
        self.orders = OrderBook(fleets, FLEET, clock)
        self.loop = AlertLoop(
            self.records,
            self.orders,
            [self.read],
            lambda: config or AlertingConfig(),
            on_changed=self.changed.extend,
            clock=clock,
            monotonic=clock,
        )

    async def run(self, seconds: float) -> None:
        """Evaluate and deliver for some time, in steps of 5 s."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now += 5.0
            await self.loop.evaluate()
            await self.loop.deliver()

    async def read(self, now: float) -> list[AlertCondition]:
        del now
        if self.error is not None:
            raise self.error
        return [
            AlertCondition("NoReplica", {}, "page", self.is_firing, "none", "", "noreplica"),
        ]


async def test_only_one_process_evaluates_until_it_stops_or_is_silent(store: Store) -> None:
    clock = FakeClock(START)
    first, second = Evaluator(store, clock, "first"), Evaluator(store, clock, "second")
    first.is_firing = second.is_firing = True
    await first.loop.evaluate()
    await second.loop.evaluate()
    assert (len(first.changed), len(second.changed)) == (1, 0)

    clock.now += 60.0  # longer than it holds them
    await second.loop.evaluate()
    await first.loop.evaluate()
    assert read_alerts(store.fleets, FLEET).holder == "second"

    await second.records.release()
    await first.loop.evaluate()
    assert read_alerts(store.fleets, FLEET).holder == "first"
    assert (len(first.changed), len(second.changed)) == (1, 0)  # the alert has fired all the time

    leader = Evaluator(store, clock, "leader", is_leader=True)
    leader.is_firing = True
    await leader.loop.evaluate()
    assert read_alerts(store.fleets, FLEET).holder == "leader"
    assert not leader.changed


async def test_end_does_not_wait_for_a_store_that_hangs(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator, resumed = Evaluator(store, FakeClock(START), "first"), threading.Event()
    await evaluator.loop.evaluate()
    monkeypatch.setattr(store.fleets, "replace_document", lambda *_, **__: resumed.wait())
    async with asyncio.timeout(30):
        await evaluator.records.release()
    assert not evaluator.records.is_held
    resumed.set()


async def test_evaluates_in_memory_while_the_store_is_gone_and_saves_afterwards(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock(START)
    evaluator = Evaluator(store, clock, "first")
    await evaluator.loop.evaluate()

    def fail(*_: object, **__: object) -> None:
        raise StoreError("gone")

    with monkeypatch.context() as outage:
        outage.setattr(store.fleets, "read_documents", fail)
        outage.setattr(store.fleets, "replace_document", fail)
        evaluator.is_firing = True
        for _ in range(60):
            clock.now += 10.0
            await evaluator.loop.evaluate()
        assert [each.is_firing for each in evaluator.changed] == [True]

    assert not read_alerts(store.fleets, FLEET).alerts
    clock.now += 10.0
    await evaluator.loop.evaluate()
    stored = list(read_alerts(store.fleets, FLEET).alerts.values())
    assert [each.started_at for each in stored] == [START + 10.0]
    assert len(evaluator.changed) == 1


async def test_store_that_hangs_delays_no_notice_and_gets_the_state_afterwards(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy.alerting.alert_records.STORE_TIMEOUT_S", 0.05)
    monkeypatch.setattr("argosy.alerting.alert_loop.STORE_TIMEOUT_S", 0.05)
    resumed, replace, calls = threading.Event(), store.fleets.replace_document, list[str]()

    def hang(*arguments: Any, **options: Any) -> bool:  # noqa: ANN401 - those of the store
        calls.append(arguments[1])
        resumed.wait()
        return replace(*arguments, **options)

    async with Receiver() as receiver:
        evaluator = Evaluator(store, FakeClock(START), "first", config=webhook_config(receiver))
        await evaluator.run(10)
        monkeypatch.setattr(store.fleets, "replace_document", hang)
        evaluator.is_firing = True
        await evaluator.run(60)
        assert receiver.statuses == ["firing"]
        assert calls == ["alerting/state"]  # no further write waits behind it
        resumed.set()
        await evaluator.run(60)
    assert evaluator.records.is_held
    (stored,) = read_alerts(store.fleets, FLEET).alerts.values()
    assert stored.notified.keys() == {"hook"}
    assert receiver.statuses == ["firing"]


async def test_failing_source_keeps_alerts_and_becomes_one_after_five_minutes() -> None:
    clock = FakeClock(START)
    evaluator = Evaluator(None, clock, "first")
    evaluator.is_firing = True
    await evaluator.loop.evaluate()
    evaluator.error = OSError("no answer")
    with capture_logs() as logs:
        for _ in range(60):
            clock.now += 10.0
            await evaluator.loop.evaluate()

    assert [each["event"] for each in logs].count("alert_source_failed") == 1

    assert [(each.name, each.is_firing) for each in evaluator.changed] == [
        ("NoReplica", True),
        ("AlertSourceFailing", True),
    ]
    assert evaluator.changed[1].started_at == START + 310.0


# --- notices -----------------------------------------------------------------------------------------


class Receiver:
    """HTTP and SMTP server on one port, which records what it receives."""

    def __init__(self) -> None:
        self.received: list[tuple[str, dict[str, str], Any]] = []
        """Path, headers and JSON of each request that was accepted."""
        self.mails: list[Any] = []
        self.answers: list[str] = []
        """Status lines of the next answers. Without one it is 200."""
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    @property
    def statuses(self) -> list[str]:
        return [body["status"] for _, _, body in self.received]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        request, *lines = head.splitlines()
        headers = dict(line.lower().split(": ", 1) for line in lines if line)
        body = await reader.readexactly(int(headers["content-length"]))
        answer = self.answers.pop(0) if self.answers else "200 OK"
        if answer.startswith("2"):
            self.received.append((request.split()[1], headers, msgspec.json.decode(body)))
        writer.write(
            f"HTTP/1.1 {answer}\r\ncontent-length: 4\r\nconnection: close\r\n\r\ntext".encode()
        )
        await writer.drain()
        writer.close()

    async def serve_mail(self) -> asyncio.Server:
        """Serve SMTP without encryption at another port, which becomes the receiver's."""
        server = await asyncio.start_server(self._serve_mail, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _serve_mail(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 ready\r\n")
        while line := (await reader.readline()).strip().upper():
            if line == b"DATA":
                writer.write(b"354 go on\r\n")
                data = await reader.readuntil(b"\r\n.\r\n")
                self.mails.append(message_from_bytes(data, policy=default))
            writer.write(b"221 bye\r\n" if line == b"QUIT" else b"250 ok\r\n")
            if line == b"QUIT":
                break
        writer.close()


def configure(**settings: object) -> AlertingConfig:
    return convert_settings(settings, AlertingConfig)


def webhook_config(receiver: Receiver, **settings: object) -> AlertingConfig:
    return configure(
        keep_pages_firing_s=10.0,
        receivers=[{"name": "hook", "webhook": {"url": receiver.url}}],
        **settings,
    )


async def test_webhook_gets_payload_of_alertmanager_with_token_from_the_environment(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK_TOKEN", "s3cret")
    async with Receiver() as receiver:
        config = configure(
            console_url="https://argosy.example/",
            keep_pages_firing_s=10.0,
            receivers=[
                {"name": "hook", "webhook": {"url": receiver.url, "token": {"env": "HOOK_TOKEN"}}}
            ],
        )
        evaluator = Evaluator(store, FakeClock(START), "first", config=config)
        evaluator.is_firing = True
        await evaluator.run(60)
        evaluator.is_firing = False
        await evaluator.run(30)

    (path, headers, fired), (_, _, ended) = receiver.received
    assert (path, headers["authorization"]) == ("/hook", "bearer s3cret")
    labels = {"alertname": "NoReplica", "severity": "page"}
    (alert,) = fired.pop("alerts")
    assert fired == {
        "version": "4",
        "groupKey": fired["groupKey"],
        "truncatedAlerts": 0,
        "status": "firing",
        "receiver": "hook",
        "groupLabels": {"alertname": "NoReplica"},
        "commonLabels": labels,
        "commonAnnotations": alert["annotations"],
        "externalURL": "https://argosy.example",
    }
    assert (alert["labels"], alert["status"]) == (labels, "firing")
    assert alert["endsAt"] == "0001-01-01T00:00:00Z"
    assert ended["groupKey"] == fired["groupKey"]
    assert (ended["status"], ended["alerts"][0]["status"]) == ("resolved", "resolved")
    assert ended["alerts"][0]["endsAt"] > alert["startsAt"]
    (stored,) = read_alerts(store.fleets, FLEET).alerts.values()
    assert stored.notified.keys() == {"hook"}


class KilledError(BaseException):
    """Stands for the end of the process at a step."""


@pytest.mark.parametrize("phase", ["firing", "resolved"])
@pytest.mark.parametrize("step", ["decide", "claim", "send", "mark", "marked"])
async def test_notice_arrives_once_or_twice_and_its_end_last_though_the_process_dies_at_any_step(
    store: Store, monkeypatch: pytest.MonkeyPatch, step: str, phase: str
) -> None:
    """The process dies before the decision is stored, before the claim, the request, the mark, and after it."""
    async with Receiver() as receiver:
        clock, config = FakeClock(START), webhook_config(receiver)
        first = Evaluator(store, clock, "first", config=config)
        first.is_firing = True
        if phase == "resolved":
            await first.run(30)
            assert receiver.statuses == ["firing"]
            first.is_firing = False
        kill_at(first, step, monkeypatch)
        with pytest.raises(KilledError):
            await first.run(300)
        monkeypatch.undo()

        second = Evaluator(store, clock, "second", config=config)
        second.is_firing = phase == "firing"
        await second.run(150)
        second.is_firing = False
        await second.run(150)

    count = {
        "firing": receiver.statuses.count("firing"),
        "resolved": receiver.statuses.count("resolved"),
    }
    assert receiver.statuses == sorted(receiver.statuses)  # the end is last
    assert count == {"firing": 1, "resolved": 1} | ({phase: 2} if step == "mark" else {})


def kill_at(evaluator: Evaluator, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the process die at a step of the next notice."""
    records, sent = evaluator.records, list[str]()
    save, run = records.save, evaluator.loop._notifier._run  # noqa: SLF001 - the steps are inside

    async def save_or_die(now: float) -> bool:
        pending = [each.pending for each in records.state.groups.values() if each.pending]
        is_claimed = any(each.attempts for each in pending)
        if step == "decide" and pending and not is_claimed:
            raise KilledError
        if step == "claim" and is_claimed and not sent:
            raise KilledError
        if step == "mark" and sent:
            raise KilledError
        result = await save(now)
        if step == "marked" and sent:
            raise KilledError
        return result

    async def run_or_die(receiver: str, deliver: Callable[[], Any]) -> object:
        if step == "send":
            raise KilledError
        sent.append(receiver)
        return await run(receiver, deliver)

    monkeypatch.setattr(records, "save", save_or_die)
    monkeypatch.setattr(evaluator.loop._notifier, "_run", run_or_die)  # noqa: SLF001


async def test_receiver_that_fails_is_tried_again_and_becomes_an_alert_at_another(
    store: Store,
) -> None:
    async with Receiver() as bad, Receiver() as good:
        bad.answers = ["503 Unavailable"] * 40
        config = configure(
            receivers=[
                {"name": "bad", "webhook": {"url": bad.url}},
                {"name": "good", "webhook": {"url": good.url}},
            ]
        )
        evaluator = Evaluator(store, FakeClock(START), "first", config=config)
        evaluator.is_firing = True
        await evaluator.run(1200)
        assert not bad.received
        assert [each["commonLabels"]["alertname"] for _, _, each in good.received] == [
            "ReceiverFailing"
        ]
        bad.answers.clear()
        await evaluator.run(400)
        assert bad.statuses == ["firing"]


@pytest.mark.parametrize("answer", ["302 Found", "404 Not Found"])
async def test_permanent_refusal_is_not_repeated(store: Store, answer: str) -> None:
    async with Receiver() as receiver:
        receiver.answers = [answer]
        evaluator = Evaluator(store, FakeClock(START), "first", config=webhook_config(receiver))
        evaluator.is_firing = True
        await evaluator.run(600)
        assert not receiver.received
        assert not receiver.answers
        state = read_alerts(store.fleets, FLEET).receivers["hook"]
        assert state.error.startswith(answer[:3])


async def test_notices_continue_while_the_store_is_gone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Receiver() as receiver:
        evaluator = Evaluator(store, FakeClock(START), "first", config=webhook_config(receiver))
        await evaluator.run(10)

        def fail(*_: object, **__: object) -> None:
            raise StoreError("gone")

        with monkeypatch.context() as outage:
            outage.setattr(store.fleets, "read_documents", fail)
            outage.setattr(store.fleets, "replace_document", fail)
            evaluator.is_firing = True
            await evaluator.run(600)
            assert receiver.statuses == ["firing"]
        evaluator.is_firing = False
        await evaluator.run(60)
        assert receiver.statuses == ["firing", "resolved"]


async def test_slack_pagerduty_mail_alertmanager_and_watchdog_get_their_formats(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Receiver() as receiver, Receiver() as mails:
        server = await mails.serve_mail()
        monkeypatch.setenv("SLACK_URL", f"{receiver.url}/slack")
        monkeypatch.setenv("PAGERDUTY_KEY", "key")
        config = configure(
            keep_pages_firing_s=0.0,
            receivers=[
                {"name": "slack", "slack": {"url": {"env": "SLACK_URL"}}},
                {
                    "name": "duty",
                    "pagerduty": {
                        "routing_key": {"env": "PAGERDUTY_KEY"},
                        "url": f"{receiver.url}/duty",
                    },
                },
                {
                    "name": "mail",
                    "email": {
                        "to": ["ops@example.com"],
                        "from": "argosy@example.com",
                        "host": "127.0.0.1",
                        "port": mails.port,
                        "starttls": False,
                    },
                },
            ],
            routes=[
                {"receiver": "slack", "continue": True},
                {"receiver": "duty", "continue": True},
                {"receiver": "mail"},
            ],
            watchdog={"url": f"{receiver.url}/watchdog"},
        )
        evaluator = Evaluator(store, FakeClock(START), "first", config=config)
        evaluator.is_firing = True
        await evaluator.run(50)
        evaluator.is_firing = False
        await evaluator.run(20)
        server.close()

    by_path: dict[str, list[Any]] = {}
    for path, _, body in receiver.received:
        by_path.setdefault(path.rpartition("/")[2], []).append(body)
    assert [each["text"] for each in by_path["slack"]] == ["[FIRING] none", "[RESOLVED] none"]
    trigger, resolve = by_path["duty"]
    assert (trigger["event_action"], resolve["event_action"]) == ("trigger", "resolve")
    assert trigger["dedup_key"] == resolve["dedup_key"]
    assert trigger["payload"]["severity"] == "critical"
    assert by_path["watchdog"] == [{"alertname": "Watchdog"}] * 2
    fired, ended = mails.mails
    assert (fired["Subject"], ended["Subject"]) == ("[FIRING] none", "[RESOLVED] none")
    assert fired["References"] == ended["References"]
    assert fired["Message-ID"] != ended["Message-ID"]


async def test_silence_and_test_notice_are_orders_in_the_store(store: Store) -> None:
    async with Receiver() as receiver:
        clock, config = FakeClock(START), webhook_config(receiver)
        evaluator = Evaluator(store, clock, "first", config=config)
        other = OrderBook(store.fleets, FLEET, clock)
        silence = other.add_silence(
            {"alertname": "NoReplica"}, 3600, actor="user:ann", reason="planned"
        )
        order = other.add_test("hook", actor="user:ann")
        unknown = other.add_test("nobody", actor="user:ann")
        evaluator.is_firing = True
        await evaluator.run(60)
        assert [body["commonLabels"]["alertname"] for _, _, body in receiver.received] == ["Test"]
        tests = read_alerts(store.fleets, FLEET).tests
        assert tests[order.id].error == ""
        assert "no such receiver" in tests[unknown.id].error

        other.end_silence(silence.id, actor="user:ann", reason="")
        await evaluator.run(60)
        assert receiver.statuses == ["firing", "firing"]
    actions = [(each.actor, each.action) for each in store.audit_log.list_entries()]
    assert ("user:ann", "alert.silence") in actions
    assert ("user:ann", "alert.unsilence") in actions
    assert ("user:ann", "alert.test") in actions


async def test_budgets_are_conditions_at_each_step(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The alert of a step ends when the next one is reached, and all end with the period."""
    monkeypatch.setattr("argosy.alerting.budget_alerts.READ_INTERVAL_S", 0.0)
    organisation = store.accounts.create_organisation("secret name", actor="test")
    owner = {"organisation": organisation.id, "ended_at": START}
    store.limits_and_prices.set_limit(
        "organisation", organisation.id, "nano_dollars", 1000, window="day", actor="test"
    )
    source = BudgetAlerts(store.ledger, store.limits_and_prices)

    async def read_firing(now: float) -> list[AlertCondition]:
        return [each for each in await source.read(now) if each.is_firing]

    reached = []
    for number, cost in enumerate((499, 1, 300, 200)):
        store.ledger.add_records([usage_row(f"r{number}", **owner, nano_dollars=cost)])
        reached.append([each.labels["percent"] for each in await read_firing(START + 9 * 3600)])
    assert reached == [[], ["50"], ["80"], ["100"]]
    (last,) = await read_firing(START + 9 * 3600)
    assert "secret name" not in f"{last}"
    assert "refused" in last.description
    assert await read_firing(START + 24 * 3600) == []


@pytest.mark.exhaustive
async def test_real_alertmanager_takes_groups_and_notifies_pushed_alerts(
    store: Store, tmp_path: Path
) -> None:
    program = find_program("prometheus-alertmanager", "prometheus-alertmanager")
    async with Receiver() as receiver:
        settings = tmp_path / "alertmanager.yml"
        settings.write_text(
            f"""
route: {{receiver: hook, group_by: [alertname], group_wait: 1s, group_interval: 1s}}
receivers: [{{name: hook, webhook_configs: [{{url: "{receiver.url}"}}]}}]
"""
        )
        port = free_ports(1)
        process = await asyncio.create_subprocess_exec(
            program,
            f"--config.file={settings}",
            f"--storage.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--cluster.listen-address=",
        )
        try:
            config = configure(
                keep_pages_firing_s=0.0, alertmanagers=[{"url": f"http://127.0.0.1:{port}"}]
            )
            clock = FakeClock(time.time())
            evaluator = Evaluator(store, clock, "first", config=config)
            for is_firing, status in ((True, "firing"), (False, "resolved")):
                evaluator.is_firing = is_firing
                async with asyncio.timeout(60):
                    while status not in receiver.statuses:
                        clock.now = time.time()
                        await evaluator.loop.evaluate()
                        await evaluator.loop.deliver()
                        await asyncio.sleep(0.5)
        finally:
            process.terminate()
            await process.wait()
    assert receiver.statuses == ["firing", "resolved"]
    alert = receiver.received[0][2]["alerts"][0]
    (stored,) = read_alerts(store.fleets, FLEET).alerts.values()
    assert alert["fingerprint"] == stored.fingerprint
    assert alert["annotations"]["summary"] == "none"
