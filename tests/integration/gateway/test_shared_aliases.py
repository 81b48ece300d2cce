"""Limits of aliases that move while several gateways share them."""

from __future__ import annotations

import msgspec
from tests.integration.gateway.test_shared_limits import gateways
from tests.support.limit_harness import directory, limit, refusal, request
from tests.support.services import running_redis

from argosy.gateway.pool.pool import Pool


async def test_a_limit_has_none_of_what_the_model_before_used() -> None:
    limited = limit("requests", 2, "hour", model="big")
    moved = msgspec.structs.replace(limited, model="large")
    with running_redis() as server:
        async with gateways(server, limited, count=2) as stages:
            small = [await refusal(stage, request()) is None for stage in stages * 2]
            for stage in stages:
                stage.apply_snapshot(directory(moved))
            journeys = [request() for _ in range(4)]
            for context in journeys:
                context.pool = Pool("large", [])
            large = [
                await refusal(stage, context) is None
                for stage, context in zip(stages * 2, journeys, strict=True)
            ]
    assert (sum(small), sum(large)) == (2, 2)
