"""Samples, alerts and incidents on both databases."""

from __future__ import annotations

from tests.integration.store.conftest import ACTOR, START
from tests.support.fake_clock import FakeClock

from argosy.alerting import AlertRecords, IncidentRecords, read_alerts
from argosy.policy.alerting import Alert
from argosy.store import Project, QualitySample, SampledTexts, Store


def test_samples_are_kept_with_consent_only(store: Store, project: Project) -> None:
    def add(name: str) -> bool:
        sample = QualitySample(
            id=name,
            organisation=project.organisation,
            project=project.id,
            model="big",
            score=0.25,
            has_passed=False,
            created_at=START,
        )
        texts = SampledTexts(reason="b\u00f6se", question="q" * 5000, answer="'; --")
        return store.quality.add_sample(sample, texts)

    assert not add("before")
    store.accounts.change_project(project.id, quality="automatic", actor=ACTOR)
    assert add("kept")
    (kept,) = store.quality.list_samples()
    assert (kept.id, kept.score, kept.has_passed) == ("kept", 0.25, False)
    texts = store.quality.read_texts(kept)
    assert (texts.reason, len(texts.question), texts.answer) == ("b\u00f6se", 5000, "'; --")
    (summary,) = store.quality.summarise_samples(START - 1)
    assert (summary.samples, summary.passed) == (1, 0)
    store.accounts.change_project(project.id, quality="off", actor=ACTOR)
    assert not store.quality.list_samples()


async def test_alerts_and_incidents_have_one_writer_at_a_time(
    store: Store, clock: FakeClock
) -> None:
    first, second = (AlertRecords(store.fleets, "shop", name) for name in ("first", "second"))
    assert await first.acquire(clock.now)
    assert not await second.acquire(clock.now)
    alert = Alert(
        labels={"alertname": "NoReplica", "severity": "page"},
        summary="none",
        description="",
        runbook="noreplica",
        started_at=clock.now,
    )
    first.state.alerts[alert.fingerprint] = alert
    assert await first.save(clock.now)
    assert await second.acquire(clock.now + 3600)
    assert second.state.alerts == {alert.fingerprint: alert}
    assert not await first.save(clock.now + 3600)
    assert read_alerts(store.fleets, "shop").holder == "second"

    incidents = IncidentRecords(store.fleets, "shop")
    assert [incidents.open("slow", {"model": "m"}, "key:1", clock.now).number for _ in "ab"] == [
        1,
        2,
    ]
    assert incidents.close(1, "done", "key:1", clock.now).closed_by == "key:1"
    assert [(each.number, each.is_open) for each in incidents.list_all()] == [(2, True), (1, False)]
