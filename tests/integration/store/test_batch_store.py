"""Batches: every interleaving of claims ends each line once, and what each tenant may see and store."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.integration.store.conftest import RULES, START
from tests.support.fake_clock import FakeClock

from argosy.store import (
    ENDED_STATUSES,
    Batch,
    BatchDetails,
    BatchLine,
    BatchStatus,
    ClaimedLine,
    ConflictError,
    HolderMonitor,
    ItemOwner,
    LineResult,
    NotFoundError,
    Store,
    UsageRecord,
    open_store,
)

OWNER = ItemOwner("org_a", "proj_a")
WINDOW_S = 100.0
LINES = [BatchLine(number, f"id-{number}", "chat", b"question") for number in range(4)]


def new_batch(batch_id: str = "batch_1", **changes: object) -> Batch:
    values: dict[str, object] = {
        "id": batch_id,
        **OWNER._asdict(),
        "created_at": START,
        "expires_at": START + WINDOW_S,
        "status": "in_progress",
        "details": BatchDetails(path="/v1/chat/completions", models=("chat",)),
    }
    return Batch(**(values | changes))  # type: ignore[arg-type]


def answer(line: ClaimedLine, status_code: int = 200) -> LineResult:
    record = UsageRecord(
        request=f"batch_req_{line.batch}_{line.line}",
        organisation=OWNER.organisation,
        project=OWNER.owner,
        started_at=START,
        ended_at=START,
        status="completed",
        input_tokens=3,
        output_tokens=2,
        nano_dollars=5,
        service_tier="batch",
    )
    return LineResult(line, status_code, b"answer %d" % line.fence, record)


def finalise(store: Store) -> None:
    while (claimed := store.batches.claim_batch("finaliser")) is not None:
        status: BatchStatus = "cancelled" if claimed.status == "cancelling" else "completed"
        assert store.batches.end(claimed, status, keeps_lines=True)


@dataclass
class Holders:
    """Two gateways that claim lines of one batch, and may be slow, stopped or wrong about their claims."""

    store: Store
    clock: FakeClock
    claimed: dict[str, list[ClaimedLine]] = field(default_factory=lambda: {"g1": [], "g2": []})
    answered: set[int] = field(default_factory=set)

    def apply(self, action: str, holder: str) -> None:
        batches, held = self.store.batches, self.claimed[holder]
        if action == "claim":
            held += batches.claim_lines(holder, "batch_1", "chat", 2)
        elif action == "commit" and held:
            line = held[0]  # kept, so that it is committed again
            if batches.commit([answer(line)]):
                assert line.line not in self.answered
                self.answered.add(line.line)
        elif action == "forget" and held:
            held.pop(0)
        elif action == "release" and held:
            batches.release_lines([(held.pop(0), True)])
        elif action == "reconcile":
            batches.release_unknown(holder, held[1:])
        elif action == "lapse":
            batches.release_holder(holder)
        elif action == "cancel":
            try:
                batches.cancel(OWNER, "batch_1")
            except ConflictError:
                assert batches.get(OWNER, "batch_1").status in ENDED_STATUSES
        elif action == "expire":
            self.clock.now += WINDOW_S
        elif action == "finalise":
            finalise(self.store)


ACTIONS = (
    "claim",
    "commit",
    "forget",
    "release",
    "reconcile",
    "lapse",
    "finalise",
    "cancel",
    "expire",
)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    steps=st.lists(st.tuples(st.sampled_from(ACTIONS), st.sampled_from(["g1", "g2"])), max_size=30)
)
def test_every_interleaving_ends_each_line_once(url: str, steps: list[tuple[str, str]]) -> None:
    clock = FakeClock(START)
    store = open_store(url, clock=clock)
    try:
        store.batches.delete_owned(OWNER)
        before = store.ledger.report()[0]
        store.batches.create(new_batch(), LINES)
        holders = Holders(store, clock)
        for step in steps:
            holders.apply(*step)
        batch = store.batches.get(OWNER, "batch_1")
        while batch.num_open:  # gateways that go on come to an end
            for holder in holders.claimed:
                holders.apply("lapse", holder)
            holders.claimed["g1"] = store.batches.claim_lines("g1", "batch_1", "chat", 4)
            for line in holders.claimed["g1"]:
                holders.answered |= {line.line} if store.batches.commit([answer(line)]) else set()
            batch = store.batches.get(OWNER, "batch_1")
        finalise(store)
        batch, results = (
            store.batches.get(OWNER, "batch_1"),
            store.batches.read_results("batch_1", 0),
        )
        assert batch.status in ENDED_STATUSES
        assert [line.line for line in results] == [0, 1, 2, 3]
        assert {line.line for line in results if line.state == "answered"} == holders.answered
        assert batch.completed == len(holders.answered) == batch.output_tokens / 2
        assert batch.closed == 4 - batch.completed
        # The ledger counts a line once, and knows the ids of earlier examples.
        after = store.ledger.report()[0]
        assert after.nano_dollars - before.nano_dollars <= 5 * len(holders.answered)
        assert after.nano_dollars >= 5 * len(holders.answered)
        store.batches.delete(OWNER, "batch_1")
        assert store.stored_bytes.read_use([OWNER.owner])[OWNER.owner].stored_bytes == 0
    finally:
        store.close()


@RULES
def test_batches_belong_to_their_owner(store: Store) -> None:
    store.batches.create(new_batch(), LINES)
    for other in (ItemOwner("org_a", "proj_b"), ItemOwner("org_b", "proj_a"), ItemOwner("", "")):
        for call in (store.batches.get, store.batches.cancel, store.batches.delete):
            with pytest.raises(NotFoundError):
                call(other, "batch_1")
        assert store.batches.list_page(other, "batch_", 10) == ([], False)
    assert store.batches.create(new_batch(), LINES).total == 4  # repeated, so the first one


@RULES
def test_pages_begin_after_a_batch_or_end_before_one(store: Store) -> None:
    for number in range(1, 5):
        store.batches.create(new_batch(f"batch_{number}", created_at=START + number))
    store.batches.create(new_batch("msgbatch_1", created_at=START + 9))

    def list_ids(limit: int, **options: str) -> tuple[list[str], bool]:
        page, has_more = store.batches.list_page(OWNER, "batch_", limit, **options)
        return [batch.id for batch in page], has_more

    assert list_ids(3) == (["batch_4", "batch_3", "batch_2"], True)
    assert list_ids(3, after="batch_2") == (["batch_1"], False)
    assert list_ids(1, before="batch_2") == (["batch_3"], True)


@RULES
def test_a_lost_validation_writes_nothing_more(store: Store) -> None:
    store.batches.create(new_batch(status="validating"))
    first = store.batches.claim_batch("g1")
    assert first is not None
    assert store.batches.claim_batch("g2") is None
    assert store.batches.add_lines(first, LINES[:2])
    assert store.batches.list_holders() == {"g1"}
    store.batches.release_holder("g1")
    second = store.batches.claim_batch("g2")
    assert second is not None
    assert not store.batches.add_lines(first, LINES[2:])
    assert store.batches.clear_lines(second)
    assert store.batches.add_lines(second, LINES)
    assert store.batches.begin(second, ["chat"])
    assert [(batch.total, queued) for batch, queued in store.batches.list_work()] == [
        (4, {"chat": 4})
    ]


@RULES
def test_only_failures_count_as_attempts_of_a_line(store: Store) -> None:
    store.batches.create(new_batch(), LINES)
    for _ in range(3):
        (line,) = store.batches.claim_lines("g1", "batch_1", "chat", 1)
        assert line.attempts == 1
        store.batches.release_holder("g1")  # its gateway was killed
    (line,) = store.batches.claim_lines("g2", "batch_1", "chat", 1)
    store.batches.release_lines([(line, True)])
    (line,) = store.batches.claim_lines("g2", "batch_1", "chat", 1)
    assert line.attempts == 2


def test_a_holder_has_stopped_once_its_heartbeat_stays_the_same() -> None:
    clock = FakeClock(0.0)
    monitor = HolderMonitor(clock, lapse_after_s=45.0)
    assert monitor.find_stopped({"g1", "g2", "g3"}, {"g1": 1.0, "g2": 1.0}) == []
    clock.now += 30.0
    assert monitor.find_stopped({"g1", "g2", "g3"}, {"g1": 1.0, "g2": 2.0}) == []
    clock.now += 20.0
    assert monitor.find_stopped({"g1", "g2", "g3"}, {"g1": 1.0, "g2": 2.0}) == ["g1", "g3"]
