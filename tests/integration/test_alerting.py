"""Alerts in the store: who evaluates them, and what survives a process and an outage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fake_clock import FakeClock
from tests.support.migrated_store import write_migrated_file

from argosy.alerting import AlertLoop, AlertRecords, read_alerts
from argosy.policy.alerting import Alert, AlertCondition
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
        self, store: Store | None, clock: FakeClock, holder: str, *, is_leader: bool = False
    ) -> None:
        self.is_firing: bool | None = False
        self.error: Exception | None = None
        self.changed: list[Alert] = []
        self.records = AlertRecords(
            None if store is None else store.fleets, FLEET, holder, is_leader=is_leader
        )
        self.loop = AlertLoop(
            self.records,
            [self.read],
            on_changed=self.changed.extend,
            clock=clock,
            monotonic=clock,
        )

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


async def test_failing_source_keeps_alerts_and_becomes_one_after_five_minutes() -> None:
    clock = FakeClock(START)
    evaluator = Evaluator(None, clock, "first")
    evaluator.is_firing = True
    await evaluator.loop.evaluate()
    evaluator.error = OSError("no answer")
    for _ in range(60):
        clock.now += 10.0
        await evaluator.loop.evaluate()

    assert [(each.name, each.is_firing) for each in evaluator.changed] == [
        ("NoReplica", True),
        ("AlertSourceFailing", True),
    ]
    assert evaluator.changed[1].started_at == START + 310.0
