"""Lifetime of what the store keeps: tables are bounded or kept on purpose, and erasure leaves no trace of a project."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa
from tests.integration.store.conftest import ACTOR, RULES, START
from tests.support.fake_clock import FakeClock
from tests.support.usage_rows import usage_row

from argosy.store import (
    ItemOwner,
    Organisation,
    Project,
    QualitySample,
    RetentionRule,
    SampledTexts,
    Store,
    StoredResponse,
    StoreError,
    UsageFilter,
    sqlite_path,
)

CANARY = "canary-7f3a"
DAY = 86_400.0
BOUNDED_BY_TIME = {
    "conversations": "store.keep_responses_days after the last use",
    "blob_removals": "a day, until a gateway has deleted the blob",
    "files": "their expiry, or until they are deleted, within stored_bytes",
    "uploads": "an hour",
    "batches": "30 days after their creation, once they have ended",
    "batch_lines": "with their batch, or until its files are written",
    "items": "with their response or conversation",
    "responses": "store.keep_responses_days after the last use",
    "console_sessions": "their lifetime, at the next sign-in",
    "gateways": "a day after the last heartbeat",
    "usage": "store.keep_usage_days, then sums by day",
    "objective_hours": "the longest window of the objectives",
    "fleet_events": "controller.keep_events_days and max_events",
    "replica_logs": "controller.keep_events_days, 5 runs of a replica and 500 of a fleet",
}
BOUNDED_BY_NUMBER = {
    "state": "one row",
    "secrets": "one row for each kind of secret",
    "stored_bytes": "one row for each project",
    "quality_runs": "the latest runs of each set",
    "quality_samples": "the latest of each project, for 30 days",
    "retention": "one row for each project and kind",
    "fleet_leases": "one row for each fleet",
    "fleet_revisions": "the last 1,000 of a fleet",
    "fleet_records": "rows of replicas that exist",
    "fleet_documents": "one row for each kind of document",
}
KEPT = {
    "audit": "the hash chain has no gaps",
    "usage_days": "sums of the ledger",
    "hardware_days": "sums of the cost of hardware",
    "cold_parts": "one row for each organisation, day and 20,000 requests of the archive of usage",
    **dict.fromkeys(
        (
            *("organisations", "projects", "users", "keys", "limits", "prices", "flags"),
            *("replica_settings", "adapters", "prompts", "quality_sets"),
        ),
        "accounts that people create, up to a number for each organisation",
    ),
}


def open_engine(url: str) -> sa.Engine:
    return sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))


def test_each_table_is_bounded_or_kept_on_purpose(store: Store, url: str) -> None:
    """A new table needs a line here, and a look at `Erasure` if it has content of a project."""
    described = [*BOUNDED_BY_TIME, *BOUNDED_BY_NUMBER, *KEPT]
    assert store.load_snapshot().version == 1
    assert sorted(described) == sorted(set(read_tables(url)) - {"alembic_version"})


def test_erased_project_leaves_only_sums_and_audit(
    store: Store, organisation: Organisation, url: str, clock: FakeClock
) -> None:
    accounts = store.accounts
    project = accounts.create_project(
        organisation.id, CANARY, flags=(CANARY,), quality="automatic", actor=ACTOR
    )
    texts = SampledTexts(reason="", question=CANARY, answer=CANARY)
    assert store.quality.add_sample(quality_sample(project, CANARY, START), texts)
    other = accounts.create_project(organisation.id, "other", actor=ACTOR)
    user = accounts.create_user(
        organisation.id, f"{CANARY}@example.com", project=project.id, actor=ACTOR
    )
    key = accounts.create_key(project.id, CANARY, user=user.id, flags=(CANARY,), actor=ACTOR)[0]
    store.console_sessions.create(key_digest=accounts.list_keys()[0].digest)
    store.limits_and_prices.set_limit(
        "project", project.id, "requests", 5, window="day", model=CANARY, actor=ACTOR
    )
    store.prompts.add_version(
        CANARY, f'{{"template": "{CANARY}"}}', project=project.id, actor=ACTOR
    )
    store.adapters.add_version(
        CANARY, CANARY, f"sha256:{'1' * 64}", project=project.id, actor=ACTOR
    )
    for owner in (project, other):
        text = CANARY if owner is project else "kept"
        item_owner = ItemOwner(organisation.id, owner.id)
        store.conversations.create(item_owner, {"a": text}, [{"id": "m", "content": text}], DAY)
        response = StoredResponse(
            id=f"resp_{owner.id}", status="completed", body={"output": text}, input=[{"id": text}]
        )
        store.responses.create(item_owner, response, DAY)
    fields = {
        "organisation": organisation.id,
        "project": project.id,
        "key": key.id,
        "user": user.id,
    }
    store.ledger.add_records(
        [
            usage_row(f"r{number}", **fields, asked=CANARY, ended_at=START - number * 1000)
            for number in range(9)
        ]
    )
    store.ledger.add_records([usage_row("old", **fields, asked=CANARY, ended_at=START - 40 * DAY)])
    store.ledger.roll_up(START - 30 * DAY)
    of_project = UsageFilter(project=project.id)
    before = store.ledger.report(["day", "model"], of_project)
    erased = store.erasure.erase_project(project, actor=ACTOR)
    assert (erased.responses, erased.conversations, erased.keys, erased.sessions) == (1, 1, 1, 1)
    assert (erased.limits, erased.adapters, erased.prompts, erased.users) == (1, 1, 1, 1)
    assert erased.samples == 1
    assert erased.remaining_requests == 4
    assert store.ledger.add_records([usage_row("r0", **fields)]) == 0, "it counts once"
    clock.now += DAY
    again = store.erasure.erase_project(project, actor=ACTOR)
    assert (again.keys, again.remaining_requests) == (0, 0)
    assert store.ledger.report(["day", "model"], of_project) == before
    assert store.ledger.report(["key", "user", "asked"], of_project)[0].requests == 10
    assert store.load_snapshot().requires_keys
    assert find_text(url, CANARY) == {"audit", "users"}
    assert {"responses", "conversations"} <= find_text(url, "kept")
    store.close()
    path = sqlite_path(url)
    if path is not None:
        engine = open_engine(url)
        with engine.begin() as connection:
            for trigger in ("audit_no_update", "audit_no_delete"):
                connection.execute(sa.text(f"DROP TRIGGER {trigger}"))
            connection.execute(sa.text("PRAGMA secure_delete=ON"))
            connection.execute(sa.text("DELETE FROM audit"))
            connection.execute(sa.text("DELETE FROM users"))
        engine.dispose()
        files = Path(path).parent.glob(f"{Path(path).name}*")
        assert [each.name for each in files if CANARY.encode() in each.read_bytes()] == []


def quality_sample(project: Project, name: str, created_at: float) -> QualitySample:
    return QualitySample(
        id=name,
        organisation=project.organisation,
        project=project.id,
        model="big",
        score=0.0,
        has_passed=False,
        created_at=created_at,
    )


def test_samples_need_consent_and_end_with_it(
    store: Store, organisation: Organisation, url: str, clock: FakeClock
) -> None:
    add, change = store.quality.add_sample, store.accounts.change_project
    texts = SampledTexts(reason="", question=CANARY, answer="")
    project = store.accounts.create_project(organisation.id, "sampled", actor=ACTOR)
    first = quality_sample(project, "first", START)
    judged = msgspec.structs.replace(quality_sample(project, "judged", START + 1), judge="judge")
    assert not add(first, texts)
    change(project.id, quality="automatic", actor=ACTOR)
    assert add(first, texts)
    assert not add(judged, texts)
    change(project.id, quality="judged", actor=ACTOR)
    assert add(judged, texts)
    assert store.quality.list_samples() == [first, judged]
    assert [each.passed for each in store.quality.summarise_samples(START)] == [0, 0]
    change(project.id, quality="off", actor=ACTOR)
    assert store.quality.list_samples() == []
    assert find_text(url, CANARY) == set()
    change(project.id, quality="automatic", actor=ACTOR)
    assert add(first, texts)
    rule = RetentionRule(project=project.id, kind="samples", keep_days=3)
    store.retention.set_rule(rule, actor=ACTOR)
    clock.now += 4 * DAY
    assert store.retention.delete_expired() == 1


def find_text(url: str, text: str) -> set[str]:
    """Return the tables that have a text in any column."""
    tables = read_tables(url).items()
    return {name for name, cells in tables if any(text.encode() in cell for cell in cells)}


def read_tables(url: str) -> dict[str, list[bytes]]:
    """Return all cells of each table."""
    engine = open_engine(url)
    metadata = sa.MetaData()
    with engine.connect() as connection:
        metadata.reflect(connection)
        cells = {
            name: [_encode(cell) for row in connection.execute(sa.select(table)) for cell in row]
            for name, table in metadata.tables.items()
        }
    engine.dispose()
    return cells


def _encode(value: object) -> bytes:
    return bytes(value) if isinstance(value, bytes | memoryview) else str(value).encode()


@RULES
def test_reads_of_content_are_audited_once_in_ten_minutes(
    store: Store, organisation: Organisation, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(subject: str, actor: str) -> None:
        details = {"kind": "explanation"}
        store.content_access.record_read(
            subject, organisation=organisation.id, details=details, actor=actor
        )

    before = store.load_snapshot()
    for delay_s in (0, 599, 2):
        clock.now += delay_s
        read("req_1", "key:a")
    read("req_1", "key:b")
    read("req_2", "key:b")
    own = store.audit_log.for_organisation(organisation.id)
    entries = own.list_entries(action_prefix="content.read")
    assert [(each.subject, each.actor) for each in reversed(entries)] == [
        ("req_1", "key:a"),
        ("req_1", "key:a"),
        ("req_1", "key:b"),
        ("req_2", "key:b"),
    ]
    assert store.audit_log.verify().broken is None
    assert store.load_snapshot().organisations == before.organisations

    def fail(*_: object, **__: object) -> None:
        raise StoreError("The disk is full.")

    monkeypatch.setattr("argosy.store.content_access.begin_transaction", fail)
    with pytest.raises(StoreError):
        read("req_3", "key:a")


def test_retention_of_a_project_shortens_that_of_others(
    store: Store, project: Project, clock: FakeClock
) -> None:
    """Only what is older than its days goes, of that project alone, and its sums stay."""
    other = store.accounts.create_project(project.organisation, "other", actor=ACTOR)
    for kind, days in (("usage", 2), ("responses", 5)):
        rule = RetentionRule(project=project.id, kind=kind, keep_days=days)  # type: ignore[arg-type]
        store.retention.set_rule(rule, actor=ACTOR)
    with pytest.raises(ValueError, match="number of days"):
        store.retention.set_rule(
            RetentionRule(project=project.id, kind="usage", keep_days=0), actor=ACTOR
        )
    owners = [ItemOwner(project.organisation, each.id) for each in (project, other)]
    for day in range(8):
        for owner in owners:
            name = f"{owner.owner}-{day}"
            response = StoredResponse(id=f"resp_{name}", status="completed", body={})
            store.responses.create(owner, response, 30 * DAY)
            store.conversations.create(owner, {}, [], 30 * DAY)
            row = usage_row(name, project=owner.owner, ended_at=clock.now)
            store.ledger.add_records([row])
        clock.now += DAY

    def count_requests(owner: ItemOwner) -> int:
        return sum(map(len, store.ledger.iter_records(UsageFilter(project=owner.owner))))

    sums = store.ledger.report(["project", "day"])
    use = store.stored_bytes.read_totals()
    assert store.retention.delete_expired() == 6 + 2 * 3
    assert store.retention.delete_expired() == 0
    assert store.ledger.report(["project", "day"]) == sums
    assert [count_requests(owner) for owner in owners] == [2, 8]
    left = store.stored_bytes.read_totals()
    assert left[owners[1]] == use[owners[1]]
    assert left[owners[0]] * 8 == use[owners[0]] * 5
    store.retention.remove_rule(project.id, "usage", actor=ACTOR)
    assert [rule.kind for rule in store.retention.list_rules()] == ["responses"]
