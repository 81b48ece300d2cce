"""Pools of the versions of a model, as the controller publishes them and routes follow one another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.support.waiting import until

from argosy.deployment import GatewayConfig, ModelConfig, ReplicaConfig
from argosy.gateway import ModelStartup, PublishedVersions
from argosy.gateway.model_registry import ModelEntries, ModelRegistry, build_model_entries
from argosy.gateway.pool import Pool, resolve_host
from argosy.gateway.series_collector import SeriesCollector
from argosy.policy.traffic import PoolRoute, Variant
from argosy.series import compute_metrics, read_series, scope_kind

ROUTES: dict[str, PoolRoute] = {
    "step": PoolRoute(
        pool="p", version=2, stable="old", variants=(Variant(digest="new", share=0.25),)
    ),
    "promoted": PoolRoute(pool="p", version=4, stable="new"),
}
ROUTES["rolled back"] = ROUTES["step"].roll_back("errors", 0.0)


class Fleet:
    """Registry of one model, with what its controller publishes."""

    def __init__(self) -> None:
        self.registry = ModelRegistry(self.build_entries(None, {"": 1}), (), resolve_host)

    def build_entries(self, route: PoolRoute | None, counts: dict[str, int]) -> list[ModelEntries]:
        replicas = {
            digest: [
                ReplicaConfig(name=f"{digest}-{number}", url="http://127.0.0.1:9", kind="openai")
                for number in range(count)
            ]
            for digest, count in counts.items()
        }
        stable = replicas.pop("" if route is None else route.stable)
        config = GatewayConfig(models=[ModelConfig(name="m", aliases=("alias",), replicas=stable)])
        published = (
            [] if route is None else [PublishedVersions(model="m", route=route, replicas=replicas)]
        )
        return build_model_entries(config, published)

    def publish(self, route: PoolRoute | None, **counts: int) -> None:
        entries = self.build_entries(route, counts or {"": 1})
        self.registry.apply_config(entries, ())

    @property
    def stable(self) -> Pool:
        (pool,) = self.registry.router.pools
        return pool

    def describe(self) -> dict[str, tuple[list[str], str, bool]]:
        """Return the replicas of each version, the version that takes over, and whether it is withdrawn."""
        return {
            pool.version: (
                sorted(pool.replicas),
                "" if pool.takeover is None else pool.takeover.version,  # type: ignore[attr-defined]
                pool.is_withdrawn,
            )
            for pool in self.registry.router.all_pools
        }


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    fleet = Fleet()
    yield fleet
    await fleet.registry.close()


async def test_version_keeps_its_pool_from_its_first_replica_to_its_last(fleet: Fleet) -> None:
    first = fleet.stable
    old = ROUTES["step"]
    fleet.publish(ROUTES["step"], old=1, new=2)
    assert fleet.stable is first, "the model had no route before"
    assert fleet.describe() == {
        "old": (["old-0"], "", False),
        "new": (["new-0", "new-1"], "old", False),
    }
    assert fleet.registry.routes == {"m": old}
    (new,) = [pool for pool in fleet.registry.router.all_pools if pool is not first]
    assert not fleet.registry.follow_routes([old])
    assert fleet.registry.follow_routes([ROUTES["promoted"]]), "before the controller publishes it"
    assert fleet.stable is new
    assert fleet.describe() == {
        "old": (["old-0"], "new", True),
        "new": (["new-0", "new-1"], "", False),
    }
    fleet.publish(ROUTES["promoted"], new=3)
    assert fleet.describe() == {"new": (["new-0", "new-1", "new-2"], "", False)}
    assert not first.replicas
    assert first.takeover is new, "requests that still wait there move"
    fleet.publish(None)
    assert fleet.stable is new, "rollouts are no more declared"
    assert fleet.describe() == {"": (["-0"], "", False)}


async def test_replicas_are_pending_until_their_first_probe(fleet: Fleet) -> None:
    """Requests wait for them instead of being refused."""
    fleet.publish(ROUTES["step"], old=1, new=1)
    pools = fleet.registry.router.all_pools
    assert [pool.has_pending_replicas() for pool in pools] == [True, True]
    await until(lambda: not any(pool.has_pending_replicas() for pool in pools))


async def test_later_route_stays_in_force_when_an_earlier_one_is_published(fleet: Fleet) -> None:
    fleet.publish(ROUTES["step"], old=1, new=1)
    fleet.registry.follow_routes(
        [ROUTES["rolled back"], PoolRoute(pool="q", version=9, stable="x")]
    )
    assert fleet.describe()["new"] == (["new-0"], "old", True)
    fleet.publish(ROUTES["step"], old=2, new=1)
    assert fleet.registry.routes["m"] is ROUTES["rolled back"]
    assert fleet.describe() == {
        "old": (["old-0", "old-1"], "", False),
        "new": (["new-0"], "old", True),
    }


async def test_version_without_known_replicas_is_served_by_the_published_stable_one(
    fleet: Fleet,
) -> None:
    fleet.publish(ROUTES["step"], old=1)
    assert fleet.registry.follow_routes([ROUTES["promoted"]])
    assert fleet.stable.version == "old"


async def test_start_goes_on_at_the_version_that_becomes_the_stable_one(fleet: Fleet) -> None:
    fleet.publish(ROUTES["step"], old=1, new=1)
    old, new = fleet.registry.router.all_pools
    startup = ModelStartup(state="starting", expected_s=40.0)
    fleet.registry.apply_startups({"m": startup})
    states_at_move: list[bool] = []
    old.set_capacity_listener(lambda: states_at_move.append(new.is_starting))
    fleet.registry.follow_routes([ROUTES["promoted"]])
    assert states_at_move == [True], "requests that wait at the earlier one move and go on waiting"
    assert (old.startup, new.startup) == (None, startup)
    assert not old.is_starting
    fleet.registry.apply_startups({})
    assert not new.is_starting


async def test_series_count_the_replicas_of_all_versions(fleet: Fleet) -> None:
    fleet.publish(ROUTES["step"], old=1, new=1)
    for number, replica in enumerate(fleet.registry.replicas, start=1):
        replica.load.in_flight = number
    collector = SeriesCollector(GatewayConfig(port=0), fleet.registry.router)
    task = asyncio.create_task(collector.run(dict, dict, dict))
    recorder = collector.recorder
    await until(lambda: recorder.last_second > 0)
    task.cancel()
    await collector.close()
    running = {"fleet": 3.0, "model:m": 3.0, "replica:old-0": 1.0, "replica:new-0": 2.0}
    for scope, expected in running.items():
        frame = read_series(recorder, scope, recorder.last_second - 1, 1, 2, ())
        values = compute_metrics(scope_kind(scope), ["running"], frame)["running"]
        assert expected in values, scope
