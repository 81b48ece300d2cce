"""Rollback by a gateway while no controller is heard, also while the store is unreachable."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec
import pytest
from tests.support.migrated_store import open_migrated_store

from argosy.gateway import PublishedVersions
from argosy.gateway.version_comparison import LocalGate
from argosy.policy.rollout import Arm, Comparison, OutcomeAggregator, OutcomeStatus, RequestOutcome
from argosy.policy.traffic import PoolRoute, Variant
from argosy.store import FleetDocument, Store, StoreUnavailableError

FLEET = "demo"
ROUTE = PoolRoute(
    pool="big",
    version=7,
    stable="old",
    rollout="r1",
    variants=(Variant(digest="new", share=0.5),),
)
COMPARISON = Comparison(rollout="r1", candidate="new", step=1, share=0.5, num_gate_starts=2)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = open_migrated_store(f"sqlite:///{tmp_path}/argosy.db")
    write(store, ROUTE)
    yield store
    store.close()


def write(store: Store, route: PoolRoute, after: int = 0) -> None:
    document = FleetDocument(route.version, msgspec.json.encode(route))
    assert store.fleets.replace_document(FLEET, "route/big", document, after=after)


def stored_route(store: Store) -> PoolRoute:
    return msgspec.json.decode(
        store.fleets.read_documents(FLEET)["route/big"].content, type=PoolRoute
    )


class RollbackHarness:
    """Local gate of a gateway that follows `route` and has measured `failures` of 40 candidate requests."""

    def __init__(self, store: Store, failures: int) -> None:
        self.route = ROUTE
        self.is_controller_silent = True
        self.rollbacks: list[str] = []
        self.gate = LocalGate(
            store.fleets,
            FLEET,
            is_controller_silent=lambda: self.is_controller_silent,
            read_routes=lambda: {"big": self.route},
            follow_routes=self.follow,
            on_rolled_back=self.rollbacks.append,
        )
        aggregator = OutcomeAggregator("r1", 1, "gw", COMPARISON.baseline, COMPARISON.rates)
        for arm, failed in ((Arm.STABLE, 0), (Arm.CANDIDATE, failures)):
            for number in range(40):
                status = OutcomeStatus.FAILED if number < failed else OutcomeStatus.COMPLETED
                aggregator.record(RequestOutcome(arm=arm, key=("", ""), status=status, age_s=1.0))
        batch = aggregator.take_batch(1.0, force=True)
        assert batch is not None
        versions = PublishedVersions(model="big", route=ROUTE, comparison=COMPARISON)
        self.gate.on_batch(versions, batch)

    async def follow(self, routes: Collection[PoolRoute]) -> None:
        (self.route,) = routes


async def test_failing_version_is_rolled_back_once_the_controller_is_silent(store: Store) -> None:
    harness = RollbackHarness(store, failures=30)
    harness.is_controller_silent = False
    await harness.gate.check()
    assert harness.route.variants
    harness.is_controller_silent = True
    for _ in range(2):
        await harness.gate.check()
    assert harness.rollbacks == ["big"]
    assert harness.route == stored_route(store)
    assert (harness.route.version, harness.route.variants) == (8, ())
    assert harness.route.rollback is not None
    assert harness.route.rollback.digest == "new"
    assert "errors is worse" in harness.route.rollback.reason


async def test_equal_version_stays(store: Store) -> None:
    harness = RollbackHarness(store, failures=0)
    await harness.gate.check()
    assert (harness.rollbacks, stored_route(store)) == ([], ROUTE)


async def test_rollback_is_followed_without_a_store_and_written_later(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StoreUnavailableError("down")

    harness = RollbackHarness(store, failures=30)
    with monkeypatch.context() as outage:
        outage.setattr(store.fleets, "read_documents", fail)
        await harness.gate.check()
        assert not harness.route.variants
    share_grew = msgspec.structs.replace(
        ROUTE, version=8, variants=(Variant(digest="new", share=0.9),)
    )
    write(store, share_grew, after=7)  # the controller wrote it meanwhile
    await harness.gate.check()
    assert (stored_route(store).version, stored_route(store).variants) == (9, ())


async def test_route_of_another_rollout_is_left_alone(store: Store) -> None:
    harness = RollbackHarness(store, failures=30)
    write(store, msgspec.structs.replace(ROUTE, version=8, rollout="r2"), after=7)
    await harness.gate.check()
    assert stored_route(store).rollout == "r2"
    assert stored_route(store).variants
