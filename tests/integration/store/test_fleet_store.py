"""Fleets in the store on both databases: revisions with generations, one leader at a time, events of leaders only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from sqlalchemy import Connection, Engine, event
from tests.integration.store.conftest import RULES
from tests.support.fake_clock import FakeClock

from argosy.store import (
    ConflictError,
    DeposedError,
    FleetDocument,
    FleetEvent,
    FleetLease,
    FleetStore,
    NotFoundError,
    PoolGeneration,
    ReplicaLogRun,
    Store,
    StoreError,
    open_store,
)

FLEET = "demo"


def lead(store: Store, holder: str) -> FleetLease:
    lease = store.fleets.acquire_lease(holder, store.fleets.read_lease(FLEET))
    assert lease is not None
    return lease


def test_numbers_revisions_and_generations(store: Store, clock: FakeClock) -> None:
    def apply(
        digests: dict[str, str],
        after: int | None = None,
        rollback_of: int | None = None,
        renewed: Sequence[str] = (),
    ) -> dict[str, PoolGeneration]:
        clock.now += 1
        revision = store.fleets.apply(
            FLEET,
            b'{"a": 1}',
            digests,
            author="ann",
            reason="because",
            after=after,
            rollback_of=rollback_of,
            renewed=renewed,
        )
        assert revision == store.fleets.latest_revision(FLEET)
        return dict(revision.generations)

    assert store.fleets.latest_revision(FLEET) is None
    assert apply({"a": "x", "b": "y"}, after=0) == {
        "a": PoolGeneration(1, "x"),
        "b": PoolGeneration(1, "y"),
    }
    changed = apply({"a": "z", "b": "y"}, after=1)
    assert changed["a"] == PoolGeneration(2, "z"), "changed settings are a new generation"
    assert changed["b"] == PoolGeneration(1, "y")
    assert apply({"b": "y"})["a"] == PoolGeneration(2, "z"), "a removed pool keeps its generation"
    back = apply({"a": "x", "b": "y"}, rollback_of=1)
    assert back["a"] == PoolGeneration(1, "x"), "replicas with these settings may still run"
    assert apply({"a": "w", "c": "x"})["a"] == PoolGeneration(3, "w"), "no number has two versions"
    with pytest.raises(ConflictError, match="Revision 5"):
        apply({}, after=3)
    revisions = store.fleets.list_revisions(FLEET, limit=3)
    assert [revision.number for revision in revisions] == [5, 4, 3]
    assert store.fleets.list_revisions(FLEET, limit=1, before=5) == revisions[1:2]
    assert (revisions[0].author, revisions[0].reason) == ("ann", "because")
    assert revisions[1].rollback_of == 1
    assert revisions[1].applied_at == clock() - 2  # the conflict advanced the clock too
    assert store.fleets.get_revision(FLEET, 5) == revisions[0]
    with pytest.raises(NotFoundError, match="no revision 9"):
        store.fleets.get_revision(FLEET, 9)
    assert store.fleets.latest_revision("other") is None
    renewed = apply({"a": "w", "c": "x"}, renewed=["a"])
    assert renewed == {**revisions[0].generations, "a": PoolGeneration(4, "w")}
    assert apply({"a": "x", "c": "x"})["a"] == PoolGeneration(1, "x")
    assert apply({"a": "w", "c": "x"})["a"] == PoolGeneration(4, "w"), "the latest of its numbers"
    assert apply({"a": "v", "c": "x"})["a"] == PoolGeneration(5, "v")


def test_of_many_candidates_one_leads(store: Store) -> None:
    seen = store.fleets.read_lease(FLEET)
    assert seen.epoch == 0
    with ThreadPoolExecutor(8) as threads:
        leases = list(
            threads.map(lambda name: store.fleets.acquire_lease(str(name), seen), range(8))
        )
    (lease,) = filter(None, leases)
    assert lease.epoch == 1
    assert store.fleets.read_lease(FLEET) == lease


def test_a_renewed_lease_is_not_taken_over(store: Store) -> None:
    first = lead(store, "first")
    renewed = store.fleets.renew_lease(first)
    assert store.fleets.acquire_lease("second", first) is None
    second = store.fleets.acquire_lease("second", renewed)
    assert second is not None
    assert second.epoch == 2
    with pytest.raises(DeposedError, match="stands by"):
        store.fleets.renew_lease(renewed)
    store.fleets.release_lease(renewed)
    assert store.fleets.read_lease(FLEET) == second, "a deposed leader releases nothing"
    store.fleets.release_lease(second)
    assert store.fleets.read_lease(FLEET).holder == ""


@pytest.mark.parametrize("database_kind", ["postgresql"])
def test_leader_stopped_in_a_transaction_is_deposed(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy.store.fleet_store.IDLE_TIMEOUT_S", 0.1)
    events = [FleetEvent(kind="replica_start")] * 3
    writes: list[Callable[[FleetStore, FleetLease], object]] = [
        lambda fleets, lease: fleets.renew_lease(lease),
        lambda fleets, lease: fleets.save_records(lease, {"a": b"1", "b": b"2"}),
        lambda fleets, lease: fleets.append_events(lease, events),
    ]
    for write in writes:
        lease = lead(store, "first")
        with closing(open_store(url)) as stopped:

            @event.listens_for(Engine, "commit", once=True)
            def take_over(_: Connection, lease: FleetLease = lease) -> None:
                assert store.fleets.acquire_lease("second", lease) is not None

            with pytest.raises(
                StoreError, match=r"idle-in-transaction timeout|server closed the connection"
            ):
                write(stopped.fleets, lease)
            with pytest.raises(DeposedError):
                write(stopped.fleets, lease)


def test_document_is_replaced_by_one_of_many(store: Store) -> None:
    fleets = store.fleets
    with ThreadPoolExecutor(8) as threads:
        replaced = list(
            threads.map(
                lambda n: fleets.replace_document(
                    FLEET, "route/chat", FleetDocument(1, b"%d" % n), after=0
                ),
                range(8),
            )
        )
    assert sorted(replaced) == [False] * 7 + [True]
    assert fleets.replace_document(FLEET, "route/chat", FleetDocument(5, b"new"), after=1)
    assert not fleets.replace_document(FLEET, "route/chat", FleetDocument(2, b"old"), after=1)
    assert fleets.replace_document(FLEET, "route_chat", FleetDocument(1, b"other"), after=0)
    assert fleets.read_documents(FLEET, "route/") == {"route/chat": FleetDocument(5, b"new")}
    assert fleets.replace_document(FLEET, "route/chat", None, after=5)
    assert set(fleets.read_documents(FLEET)) == {"route_chat"}
    assert fleets.read_documents("other") == {}


def test_only_the_leader_writes(store: Store, clock: FakeClock) -> None:
    first = lead(store, "first")
    events = [FleetEvent(kind="replica_start", pool="a", replica=f"a-1-{n}") for n in range(3)]
    store.fleets.append_events(first, events)
    clock.now += 1
    second = lead(store, "second")
    store.fleets.save_records(second, {"a": b"1", "b": b"2"})
    store.fleets.save_records(second, {"a": b"3", "b": None, "c": b"4"})
    with pytest.raises(DeposedError):
        store.fleets.append_events(first, events)
    with pytest.raises(DeposedError):
        store.fleets.save_records(first, {"a": None})
    assert store.fleets.read_records(FLEET) == {"a": b"3", "c": b"4"}
    store.fleets.append_events(second, [FleetEvent(kind="replica_stop", outcome="ok")])
    logged = store.fleets.list_events(FLEET)
    assert [event.number for event in logged] == [1, 2, 3, 4]
    assert [event.epoch for event in logged] == [1, 1, 1, 2]
    assert logged[3].at == clock()
    assert store.fleets.list_events(FLEET, after=2) == logged[2:]
    assert store.fleets.list_events(FLEET, limit=1) == logged[3:]
    assert store.fleets.list_events(FLEET, replica="a-1-1") == logged[1:2]
    assert store.fleets.list_events(FLEET, pool="a", kinds=["replica_start"]) == logged[:3]
    assert not store.fleets.list_events(FLEET, pool="a", kinds=["replica_stop"])
    assert store.fleets.list_events(FLEET, kinds=["replica_stop", "x"], outcome="ok") == logged[3:]
    assert store.fleets.list_events(FLEET, since=clock()) == logged[3:]
    assert store.fleets.list_events(FLEET, until=clock(), limit=2) == logged[1:3]
    assert not store.fleets.list_events(FLEET, since=clock() + 1)
    assert not store.fleets.list_events("other", since=0.0)


@RULES
def test_old_events_are_deleted_by_age_and_count(store: Store, clock: FakeClock) -> None:
    lease = lead(store, "first")
    for _ in range(6):
        store.fleets.append_events(lease, [FleetEvent(kind="replica_start")])
        clock.now += 1

    def prune(keep_s: float, max_count: int) -> list[int]:
        before = store.fleets.list_events(FLEET)
        deleted = store.fleets.prune_events(lease, keep_s=keep_s, max_count=max_count)
        after = store.fleets.list_events(FLEET)
        assert store.fleets.list_events(FLEET, since=clock() - 1) == after[-1:]
        assert after == before[deleted:]
        return [event.number for event in after]

    assert prune(60.0, 100) == [1, 2, 3, 4, 5, 6]
    assert prune(4.5, 100) == [3, 4, 5, 6]
    assert prune(60.0, 2) == [5, 6]
    store.fleets.append_events(lease, [FleetEvent(kind="replica_stop")])
    assert prune(0.0, 100) == [7], "numbers go on"
    lead(store, "second")
    with pytest.raises(DeposedError):
        prune(0.0, 1)


@RULES
def test_latest_logs_of_replicas_are_kept(store: Store, clock: FakeClock) -> None:
    lease, logs = lead(store, "first"), store.replica_logs

    def save(replica: str, started_at: float, log: bytes, exited_at: float | None = None) -> None:
        exit_status = None if exited_at is None else -9
        run = ReplicaLogRun(
            started_at=started_at,
            attempt=1,
            exited_at=exited_at,
            exit_status=exit_status,
            read_at=clock(),
        )
        logs.save(lease, replica, run, log)

    for number in range(7):
        save("a-1-0", number + 0.1, b"run %d" % number)
    save("a-1-0", 6.1, b"it fails\0", exited_at=7.5)
    clock.now += 60
    save("a-1-1", 1.0, b"other")
    runs = logs.list_runs(FLEET, "a-1-0")
    assert [run.started_at for run in runs] == [6.1, 5.1, 4.1, 3.1, 2.1]
    assert (runs[0].exited_at, runs[0].exit_status) == (7.5, -9)
    assert logs.read_log(FLEET, "a-1-0", 6.1) == b"it fails\0"
    assert logs.read_log(FLEET, "a-1-0", 1.1) == b""
    assert logs.list_runs("other", "a-1-0") == []
    assert logs.prune(lease, keep_s=61) == 0
    assert logs.prune(lease, keep_s=30) == 5
    assert [len(logs.list_runs(FLEET, name)) for name in ("a-1-0", "a-1-1")] == [0, 1]
    lead(store, "second")
    with pytest.raises(DeposedError):
        save("a-1-1", 2.0, b"")
    with pytest.raises(DeposedError):
        logs.prune(lease, keep_s=0)
