"""What requests that generate nothing hold of limits, in one gateway and in several; a limit that is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs
from tests.integration.gateway.limit_world import CALLER, limit, refusal, request
from tests.integration.gateway.test_limits import Clock, in_force
from tests.integration.gateway.test_shared_limits import gateways
from tests.services import RedisServer, running_redis

from argosy.protocol import ApiError


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


async def test_what_generates_nothing_holds_a_place_while_it_lasts_and_counts_if_it_succeeds(
    clock: Clock,
) -> None:
    limits = in_force(clock, limit("concurrency", 1), limit("requests", 2))

    async def passes() -> str:
        try:
            async with limits.passing(CALLER, "big", []):
                pass
        except ApiError as error:
            return error.message
        return ""

    with pytest.raises(RuntimeError):
        async with limits.passing(CALLER, "big", []):
            raise RuntimeError
    async with limits.passing(CALLER, "big", []):
        assert "at a time" in await passes()
    assert await passes() == ""
    assert "2 requests per minute" in await passes()


async def test_what_generates_nothing_asks_for_its_room_too(server: RedisServer) -> None:
    async with gateways(server, limit("requests", 2, "hour"), count=1) as [stage]:
        for _ in range(2):
            async with stage.passing(CALLER, "big", []):
                pass
        with pytest.raises(ApiError, match="2 requests per hour"):
            async with stage.passing(CALLER, "big", []):
                pass


async def test_a_limit_that_cannot_be_counted_takes_none_of_the_others_out_of_force(
    clock: Clock,
) -> None:
    """It has no window, or one that a newer gateway knows."""
    strange = limit("tokens", 5, None), limit("tokens", 5, "fortnight")  # type: ignore[arg-type]
    with capture_logs() as logs:
        limits = in_force(clock, *strange, limit("requests", 1))
    told = [(line["event"], line["limit"]) for line in logs]
    assert told == [("limit_not_in_force", each.id) for each in strange]
    assert await refusal(limits, request()) is None
    assert await refusal(limits, request()) is not None
